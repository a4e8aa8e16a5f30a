#!/bin/bash
# Fine-tune on one GPU, without torchrun: what the distributed runs are compared with.
#
#   sbatch run_baseline.sh --epochs 2     all arguments go to baseline.py as they are
#   bash run_baseline.sh --device cpu     without Slurm
#
# Submit in the project's folder. Nothing here needs editing: what stands on sbatch's command line comes first, as in
#   sbatch --account=A --partition=P --gpus-per-node=h100:1 --cpus-per-task=16 run_baseline.sh
# VENV, MODULES, CACHE_DIR and MIN_CACHE_GB: see run_distributed.sh.
#
#SBATCH --job-name=squad
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail

script=run_baseline.sh arguments=("$@")
project=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -r $project/slurm/launch.sh ]]; then # sbatch runs a copy of this file, from a folder of its own
    project=${SLURM_SUBMIT_DIR:-$project}
fi
if [[ ! -r $project/slurm/launch.sh ]]; then
    echo "error: $project is not the project; do: cd /path/to/the/project && sbatch $script $*" >&2
    exit 2
fi
# shellcheck source=slurm/launch.sh
source "$project/slurm/launch.sh"

if ((nodes > 1)); then
    stop "run_baseline.sh uses one GPU of one node, and the allocation has more nodes" "$(SLURM_JOB_NUM_NODES=1 again)"
fi
check_nodes
export OMP_NUM_THREADS=$cpus
run "${on_each_node[@]}" "$python" "$project/baseline.py" ${CACHE_DIR:+--cache-dir "$CACHE_DIR"} "${arguments[@]}" \
    "${resume[@]}"
