#!/bin/bash
# Fine-tune on the GPUs of one or more nodes, one rank a GPU, started by torchrun:
#
#   sbatch run_distributed.sh                     DistributedDataParallel
#   sbatch run_distributed.sh fsdp --epochs 2     FSDP; what follows the strategy goes to the script as it is
#   bash run_distributed.sh ddp --device cpu      without Slurm: on this machine, a rank for each GPU, two on the CPU
#
# Submit in the project's folder. Nothing here needs editing: what stands on sbatch's command line comes first, as in
#   sbatch --account=A --partition=P --nodes=4 --gpus-per-node=h100:8 --cpus-per-task=64 run_distributed.sh fsdp
# and all numbers are taken from the allocation. Variables, all optional:
#   VENV          the Python environment                         default: .venv in the project
#   MODULES       modules to load, as "cuda/12.6 python/3.12"    default: none
#   CACHE_DIR     where tokenised data is kept                   default: cache in the project
#   MIN_CACHE_GB  stop if less space than this is free there     default: 1
#   NPROC         ranks on each node                             default: its GPUs; 2 where there are none
#
#SBATCH --job-name=squad
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail

script=run_distributed.sh arguments=("$@")
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

# The strategy.
case ${1:-} in
    ddp | fsdp) strategy=$1 options=("${arguments[@]:1}") ;;
    "" | -*) strategy=ddp options=("${arguments[@]}") ;;
    *)
        arguments[0]=ddp
        stop "'$1' is neither a strategy (ddp, fsdp) nor an option" "$(again)"
        ;;
esac

# The rendezvous: on the first host, by its name or, where that means nothing to the network, by the address under which
# Slurm itself reaches the node. There is no third choice: with localhost each node would wait for itself.
if $in_slurm; then
    host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    address=$host
    if ! getent ahosts "$address" >/dev/null; then
        address=$(scontrol show node "$host" --oneliner | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
        getent ahosts "${address:-?}" >/dev/null ||
            stop "the first host, $host, has no address that this network knows" "$(again --exclude="$host")"
    fi
fi

check_nodes --job-id "${SLURM_JOB_ID:-0}"

# The ranks and their threads.
ranks=${NPROC:-$((gpus > 0 ? gpus : 2))}
if ((ranks > gpus && gpus > 0)) && [[ $device != cpu ]]; then
    stop "NPROC=$ranks ranks on a node with $gpus GPUs" "$(again NPROC="$gpus")"
fi
export OMP_NUM_THREADS=$((cpus > ranks ? cpus / ranks : 1)) # torchrun would set 1
echo "$strategy: $((nodes * ranks)) ranks, $ranks on each node"

torchrun=("$python" -m torch.distributed.run --nproc-per-node="$ranks")
program=("$project/distributed_$strategy.py" ${CACHE_DIR:+--cache-dir "$CACHE_DIR"} "${options[@]}" "${resume[@]}")
if $in_slurm; then
    # Static, not c10d: ranks follow the order of Slurm's nodes and not that of their names, the first host is the one
    # that Slurm says and not whoever takes the address for its own, ranks meet at this address and port too, and a port
    # lost to another process is an error at once and not a stranger to wait for.
    torchrun+=(--nnodes="$nodes" --rdzv-backend=static --rdzv-endpoint="$address:$port" --rdzv-id="$SLURM_JOB_ID")
    # The only thing that differs between the nodes is their number, which each has in its own environment.
    # shellcheck disable=SC2016
    run "${on_each_node[@]}" bash -c 'PET_NODE_RANK=$SLURM_NODEID exec "$@"' torchrun "${torchrun[@]}" "${program[@]}"
else
    run "${torchrun[@]}" --standalone "${program[@]}"
fi
