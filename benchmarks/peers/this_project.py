"""This project: the steps of baseline.py, distributed_ddp.py and distributed_fsdp.py on packed batches.

python -m benchmarks.peers.this_project --batch-size 32
"""

import argparse

from benchmarks.peers.harness import Bench, build_parser
from benchmarks.steps import Setting
from common import errors, runtime
from common.model import register_attention


def main():
    parser = build_parser(__doc__)
    parser.add_argument("--strategy", default="baseline", help="baseline, ddp, fsdp-zero2, fsdp-zero3")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    parser.set_defaults(precision="auto", attention="auto", attention_dropout=0.0)
    parser.set_defaults(deterministic=False, cuda_graphs=None, eval_tokens=None, repeats=1)
    args = parser.parse_args()
    bench = Bench(args, args.strategy)
    device = bench.device = runtime.choose_device(args.device, bench.local_rank)
    runtime.quiet_warnings()
    runtime.resolve_hardware(args, device)
    register_attention()
    if bench.world_size > 1:
        from common import distributed

        distributed.start(device)
    if args.cuda_graphs:
        args.warmup *= 5  # a step becomes a graph when its shape recurs: making the graphs is warm-up
    setting = Setting(args.strategy, args.batch_size, args, bench.features, device, bench.rank, bench.world_size)
    bench.takes(setting.model.network)
    while True:
        setting.step()
        if bench.step():
            break
    bench.report(args.attention)
    if bench.world_size > 1:
        del setting
        distributed.finish()


if __name__ == "__main__":
    errors.run(main)
