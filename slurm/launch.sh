# shellcheck shell=bash
# What run_baseline.sh and run_distributed.sh share: the checks before a start, and the start. They set `project` (this
# project's folder), `script` (their own name) and `arguments` (what was given to them), then source this file.
# shellcheck disable=SC2154
: "${project:?}" "${script:?}"

# Where the work is to be spread with srun: in a batch job, known by this script being a copy elsewhere, and in the shell
# of salloc, be it on the login node or, as step 4294967290, on the first node. Inside any other step (srun --pty bash)
# nothing is left to start steps with: this node is used like a plain machine.
in_slurm=false
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    if [[ ${SLURM_STEP_ID:-4294967290} == 4294967290 || $project != "$(cd "$(dirname "$0")" && pwd)" ]]; then
        in_slurm=true
    fi
fi

# stop WHAT [COMMAND]: end the job with one line, and the command that does it right.
stop() {
    printf 'error: %s\n' "$1${2:+; do: $2}" >&2
    exit 2
}

# quoted WORD...: the words as a shell takes them, in quotes only where they need them.
quoted() {
    local word line=""
    for word in "$@"; do
        [[ $word =~ ^[[:alnum:]_./:=,@%+-]+$ ]] || word=${word@Q}
        line+=" $word"
    done
    printf '%s' "${line:1}"
}

# again [NAME=VALUE...] [--OPTION...] [-- ARGUMENT...]: the command that started this job, with these settings before
# and after sbatch, and these arguments added. What the environment does not tell, such as --time, is left out.
again() {
    local -a before=() after=() start=(bash)
    local name
    for name in VENV MODULES CACHE_DIR MIN_CACHE_GB NPROC; do
        [[ -z ${!name:-} || " $*" == *" $name="* ]] || before+=("$name=${!name}")
    done
    while (($# > 0)) && [[ $1 != -- ]]; do
        if [[ $1 == --* ]]; then after+=("$1"); else before+=("$1"); fi
        shift
    done
    if $in_slurm; then
        start=(sbatch ${SLURM_JOB_ACCOUNT:+"--account=$SLURM_JOB_ACCOUNT"}
            ${SLURM_JOB_PARTITION:+"--partition=$SLURM_JOB_PARTITION"} --nodes="$SLURM_JOB_NUM_NODES"
            ${gpus_asked:+"--gpus-per-node=$gpus_asked"}
            ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} "${after[@]}")
    fi
    quoted "${before[@]}" "${start[@]}" "$script" "${arguments[@]}" "${@:2}"
}

# option NAME DEFAULT: the value that the arguments give to --NAME, the last one if there are several.
option() {
    local value=$2 i
    for ((i = 0; i < ${#arguments[@]}; i++)); do
        case ${arguments[i]} in
            "--$1") value=${arguments[i + 1]:-$value} ;;
            "--$1="*) value=${arguments[i]#*=} ;;
        esac
    done
    printf '%s' "$value"
}

# Load the modules that MODULES names, if any.
load_modules() {
    [[ -n ${MODULES:-} ]] || return 0
    local file
    local -a modules
    read -ra modules <<<"$MODULES"
    set +eu # module systems are not written for these
    if ! command -v module >/dev/null; then
        for file in /etc/profile.d/{modules,lmod,z00_lmod}.sh; do
            # shellcheck disable=SC1090
            [[ -r $file ]] && source "$file"
        done
    fi
    command -v module >/dev/null || stop "MODULES=$MODULES: this host has no module command" "$(again MODULES=)"
    module load "${modules[@]}" || stop "MODULES=$MODULES: cannot be loaded; 'module avail' lists what there is" \
        "$(again MODULES=)"
    set -eu
}

# Set python to that of VENV.
find_python() {
    python=${VENV:-$project/.venv}/bin/python
    [[ -x $python ]] || stop "no Python at $python; run 'make install' on the login node, or name an environment" \
        "$(again VENV=/path/to/environment)"
}

# Set nodes, cpus (for each node's task) and on_each_node (the command's beginning that starts one task on each node).
read_allocation() {
    nodes=1 on_each_node=()
    cpus=$(nproc) # within what this process may use
    $in_slurm || return 0
    nodes=$SLURM_JOB_NUM_NODES
    cpus=${SLURM_CPUS_PER_TASK:-}
    if [[ -z $cpus ]]; then # such as 8(x2),4: the smallest
        cpus=$(tr ',' '\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | head -n 1)
    fi
    if [[ ! ${SLURM_TASKS_PER_NODE:-1} =~ ^1(\(x[0-9]+\))?$ && -n ${SLURM_NTASKS:-} ]]; then
        stop "$SLURM_TASKS_PER_NODE tasks on the nodes, but one a node starts all that run there" \
            "$(again --ntasks="$nodes" --ntasks-per-node=1)"
    fi
    # srun takes its options from the environment. Since 22.05 it does not take over the job's --cpus-per-task; after
    # sbatch --export=NONE it would start the ranks without the variables that are set here; and where --gres=gpu:4 on
    # the command line overruled --gpus-per-node=2, it would still ask for two. Without it, it takes all that there are.
    export SRUN_CPUS_PER_TASK=$cpus SLURM_EXPORT_ENV=ALL
    unset SLURM_GPUS_PER_NODE
    on_each_node=(srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1)
}

# check_nodes [OPTION...]: set gpus (on each node), and port if --job-id ID is among the options, from what the nodes say
# of themselves; print it.
# shellcheck disable=SC2034
check_nodes() {
    local report verdict number text first=""
    [[ $device == cpu ]] && set -- "$@" --cpu
    report=$("${on_each_node[@]}" "$python" "$project/slurm/check_node.py" --cache-dir "$cache_dir" \
        --min-free-gb "${MIN_CACHE_GB:-1}" "$@" </dev/null) ||
        stop "slurm/check_node.py failed on a node, as shown above; is $python the same on all of them?"
    gpus="" port=""
    while IFS=$'\t' read -r verdict number text; do
        case $verdict in
            no-space) stop "$text" "$(again -- --cache-dir /path/with/space)" ;;
            no-cuda) stop "$text; or use the CPU" "$(again -- --device cpu)" ;;
            no-grant) stop "$text" "$(again --gpus-per-node="$number")" ;;
            no-port) stop "$text; submit again for another port" "$(again)" ;;
            port)
                port=$number
                [[ -z $text ]] || printf 'warning: %s\n' "$text"
                ;;
            ok)
                printf '%s\n' "$text"
                gpus=${gpus:-$number} first=${first:-${text%%[: ]*}}
                ((number == gpus)) || stop "$first has $gpus GPUs for this job, ${text%%[: ]*} has $number" \
                    "$(again --gpus-per-node=$((number < gpus ? number : gpus)))"
                ;;
        esac
    done <<<"$report"
    [[ -n $gpus ]] || stop "slurm/check_node.py said nothing of any node"
}

# Print a command and run it: the whole of the work, with everything above it done. A batch job is signalled some minutes
# before its time is over, or when it is pre-empted (--signal=B:USR1@180). The request to stop then lies in the run's
# folder, because the signal itself would kill torchrun and leave the ranks behind; when the run has saved and ended, the
# job goes back into the queue, and its next start goes on from there.
run() {
    printf 'threads per rank: %s\ncommand: %s\n' "$OMP_NUM_THREADS" "$(quoted "$@")"
    if ! $in_batch; then
        "$@"
        return
    fi
    local saved saved_before work="" status=0 patience=""
    saved_before=$(newest_checkpoint)
    if ! $asked; then # else it came during the checks
        rm -f "$run_folder/stop" # of an earlier start
        "$@" &
        work=$!
    fi
    # A signal interrupts wait; only then is the process still there.
    while [[ -n $work ]]; do
        wait "$work" && status=0 || status=$?
        kill -0 "$work" 2>/dev/null || break
        if $asked && [[ -z $patience ]]; then # rather lose steps than the requeue
            (sleep 150 && kill_steps) &
            patience=$!
        fi
    done
    [[ -z $work ]] || { wait "$work" && status=0 || status=$?; }
    [[ -z $patience ]] || kill "$patience" 2>/dev/null || true
    $asked || preempted || exit "$status"
    if grep -qs '^ "status": "\(finished\|failed\)"' "$run_folder/run.json"; then
        exit "$status"
    fi
    saved=$(newest_checkpoint)
    if [[ $saved_before != "$saved" ]]; then
        rm -f "$run_folder/stalled"
    elif [[ -e $run_folder/stalled ]]; then
        rm "$run_folder/stalled"
        stop "two starts got no further than ${saved:-the beginning}" "$(again --time=MORE)"
    else
        touch "$run_folder/stalled"
    fi
    echo "back into the queue: job $SLURM_JOB_ID goes on from ${saved:-the beginning}"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # the requeue ends this script; were it to end by itself, the job might count as done
}

# Kill all that srun started, and not this script, which a signal to the whole job would end before the requeue.
kill_steps() {
    local step
    for step in $(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i); do
        [[ $step != *.[0-9]* ]] || scancel --signal=KILL "$step" # others are called .batch and .extern
    done
}

# Whether Slurm has pre-empted this start of the job. In the grace time it sends SIGTERM to the ranks and, unless
# PreemptParameters=send_user_signal is set, nothing to this script; and a job that ends within it is not requeued.
preempted() {
    [[ $(scontrol show job "$SLURM_JOB_ID" --oneliner) == *" PreemptTime="[0-9]* ]]
}

newest_checkpoint() {
    find "$run_folder/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1 || true
}

# A batch job is told to stop by a file in the run's folder, for which the run looks every few seconds. A start after a
# requeue goes on from the newest checkpoint there.
in_batch=false asked=false resume=()
if $in_slurm && [[ $project != "$(cd "$(dirname "$0")" && pwd)" ]]; then
    in_batch=true
    run_folder=$(option runs-dir runs)/$(option run-name "$SLURM_JOB_ID")
    trap 'asked=true; mkdir -p "$run_folder" && touch "$run_folder/stop"; echo "asked to stop: $run_folder/stop"' USR1
    if ((${SLURM_RESTART_COUNT:-0} > 0)); then
        # shellcheck disable=SC2034
        [[ -z $(newest_checkpoint) && -n $(option resume "") ]] || resume=(--resume auto)
        printf '\nstart %s of job %s\n' "$((SLURM_RESTART_COUNT + 1))" "$SLURM_JOB_ID"
    fi
fi

# The GPUs on each node: as they were asked for (h100:2), unless another option (--gres) overruled that.
gpus_asked=${SLURM_GPUS_PER_NODE:-}
if [[ -n ${SLURM_GPUS_ON_NODE:-} && ${gpus_asked##*:} != "$SLURM_GPUS_ON_NODE" ]]; then
    gpus_asked=$SLURM_GPUS_ON_NODE
fi
load_modules
find_python
device=$(option device auto)
cache_dir=$(option cache-dir "${CACHE_DIR:-$project/cache}")
export HF_HUB_OFFLINE=1 # nothing is downloaded while GPUs wait: python -m tools.fetch does it before, on a login node
read_allocation
