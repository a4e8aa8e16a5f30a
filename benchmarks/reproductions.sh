#!/bin/bash
# The experiments of docs/reproductions.md on one machine with the model and the data that are there.
#
#   bash benchmarks/reproductions.sh OUT GPUS [REPORT…]
#
# writes the records to OUT/report-N/, models and predictions to a temporary folder. GPUS is 1, 2 (for report 4 alone) or
# 4, REPORT any of 1 2 4 (default: all); report 5 is the first run of report 1, report 3 is those of report 2 in fp32 and
# one of 5 epochs. A run that fails is passed over, and the exit status is 1 then. The environment names what to use:
#   MODEL    a model folder                                  default: bert-base-uncased if it is here, else MiniLM
#   SQUAD    the folder of train-v1.1, dev-v1.1, dev-v2.0    default: data/squad
#   PYTHON   the interpreter                                 default: python
# Speed-ups are of runs on one machine: there, call it with 1 and then with 2 or 4.
# With MiniLM report 1 takes a minute on one GPU, report 2 two and report 4 ten; report 4 seven on two (H100, H200).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
out=${1:?OUT} gpus=${2:?GPUS}
shift 2
if (($# == 0)); then
    [[ $gpus == 2 ]] || set -- 1 2
    set -- "$@" 4
fi
for report in "$@"; do
    [[ $report-$gpus == [124]-[14] || $report-$gpus == 4-2 ]] && continue
    echo "error: nothing to run of report $report on $gpus GPUs: GPUS is 1, 2 or 4, REPORT 1, 2 or 4, on 2 GPUs 4 alone" >&2
    exit 2
done
python=${PYTHON:-python} squad=${SQUAD:-data/squad} work=$(mktemp -d) failed=0
mkdir -p "$out"

# start REPORT NAME RANKS SCRIPT ARGUMENT...: one run; its record goes to OUT/report-REPORT/NAME.json.
start() {
    local report=$1 name=$2 ranks=$3 command
    shift 3
    command=("$python")
    ((ranks == 0)) || command+=(-m torch.distributed.run --standalone --nproc-per-node="$ranks")
    echo "== report $report: $name"
    "${command[@]}" "$@" ${MODEL:+--model "$MODEL"} --cache-dir "$work/cache" --runs-dir "$work/$report" \
        --run-name "$name" || {
        failed=1
        return
    }
    mkdir -p "$out/report-$report"
    cp "$work/$report/$name/run.json" "$out/report-$report/$name.json"
}

small=(--train-file "$squad/dev-v2.0.json" --max-train-examples 2000 --first-answer-only --dev-fraction 0.2
    --split-by question --epochs 10 --score-train 400)
v1=(--train-file "$squad/train-v1.1.json" --dev-file "$squad/dev-v1.1.json")
large=("${v1[@]}" --max-train-examples 20000 --max-dev-examples 2000 --epochs 2) # of report 2, cut for time
medium=("${v1[@]}" --max-train-examples 10000 --max-dev-examples 500 --epochs 4 --learning-rate 3e-5)

for report in "$@"; do
    for precision in fp32 tf32; do
        [[ $report == 4 ]] && continue
        case $report-$gpus in
            1-1) start 1 baseline-$precision 0 baseline.py "${small[@]}" --batch-size 16 --precision $precision ;;
            1-4)
                start 1 ddp-$precision 4 distributed_ddp.py "${small[@]}" --batch-size 64 --precision $precision
                start 1 fsdp-$precision 4 distributed_fsdp.py --shard zero3 "${small[@]}" --batch-size 64 \
                    --precision $precision
                ;;
            2-1) start 2 baseline-$precision 0 baseline.py "${large[@]}" --batch-size 8 --precision $precision ;;
            2-4)
                start 2 ddp-$precision 4 distributed_ddp.py "${large[@]}" --batch-size 32 --precision $precision
                start 2 ddp-zero1-$precision 4 distributed_ddp.py --zero1 "${large[@]}" --batch-size 32 \
                    --precision $precision
                start 2 fsdp-zero3-$precision 4 distributed_fsdp.py --shard zero3 "${large[@]}" --batch-size 32 \
                    --precision $precision
                start 2 fsdp-zero2-$precision 4 distributed_fsdp.py --shard zero2 "${large[@]}" --batch-size 32 \
                    --precision $precision
                [[ $precision == tf32 ]] ||
                    start 3 ddp-5-epochs 4 distributed_ddp.py "${large[@]}" --batch-size 32 --precision fp32 --epochs 5
                ;;
        esac
    done
    [[ $report == 4 ]] || continue
    for seed in 0 1 2 3 4; do
        same=(--precision fp32 --seed "$seed")
        if [[ $gpus == 1 ]]; then
            start 4 baseline-$seed 0 baseline.py "${medium[@]}" --batch-size 4 "${same[@]}"
            start 4 ddp-1-$seed 1 distributed_ddp.py "${medium[@]}" --batch-size 4 "${same[@]}"
        else
            for ranks in 2 4; do
                ((ranks <= gpus)) || continue
                start 4 ddp-$ranks-$seed $ranks distributed_ddp.py "${medium[@]}" --batch-size $((4 * ranks)) "${same[@]}"
                start 4 fsdp-$ranks-$seed $ranks distributed_fsdp.py --shard zero3 "${medium[@]}" \
                    --batch-size $((4 * ranks)) "${same[@]}"
            done
        fi
    done
done
mkdir -p "$out/report-3" "$out/report-5"
cp "$out"/report-1/baseline-fp32.json "$out/report-5/" 2>/dev/null
cp "$out"/report-2/*-fp32.json "$out/report-3/" 2>/dev/null
rmdir "$out"/report-* 2>/dev/null
((failed)) && echo "error: not all runs ended well, see above; their records are missing" >&2
echo "records: $out/report-*; copy them to benchmarks/records/reproductions, then python -m benchmarks.reproductions --write"
exit $failed
