"""Training steps alone, at steady state: windows a second for strategies and batch sizes, on real windows.

    python -m benchmarks.steps --batch-size 8 32 192
    torchrun --standalone --nproc-per-node=4 -m benchmarks.steps --strategy ddp fsdp-zero2 --batch-size 384

The step is the scripts' own `train_step`; weights are random, since speed does not depend on them. Every setting is
measured --repeats times, one setting after the other, and a line of JSON gives median, least and most.
"""

import argparse
import collections
import functools
import gc
import itertools
import json
import os
import re
import statistics
import time

import torch

import baseline
from benchmarks.workload import add_workload, build_network, load_windows
from common import distributed, errors, runtime
from common.args import positive, whole
from common.batches import largest_batch, pack_steps, plan_epoch, prefetch
from common.errors import UserError
from common.features import trainable_windows
from common.fused_layer import keep_gradient_buffers
from common.graphs import WARMUP, StepGraphs
from common.model import (
    SpanModel,
    compile_layers,
    compute_in,
    encoder_layers,
    flops_per_token,
    parameter_groups,
    register_attention,
    span_loss,
    use_attention,
)
from common.profiler import device_kernels, shares, shares_table

STRATEGIES = ("baseline", "ddp", "fsdp-zero2", "fsdp-zero3")
PROFILED = 20  # steps in a profile: of fewer, one has more tokens than the next


def build_parser():
    parser = errors.Parser(prog="python -m benchmarks.steps", description=__doc__.split("\n")[0])
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=["baseline"])
    parser.add_argument("--batch-size", nargs="+", type=positive, default=[8, 32, 192], help="global")
    add_workload(parser)
    parser.add_argument("--precision", choices=["auto", "fp32", "tf32", "bf16", "fp16"], default="auto")
    parser.add_argument("--attention", choices=["auto", "fused", "flash", "sdpa"], default="auto")
    parser.add_argument("--reduce", choices=["fp32", "bf16"], default="fp32", help="type in which gradients travel")
    parser.add_argument("--bucket-mb", type=positive, default=25, help="size of DDP's buckets of gradients")
    parser.add_argument("--steps", type=positive, default=50, help="timed steps")
    parser.add_argument("--warmup", type=whole, default=60, help="steps before the first timing")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction)
    parser.add_argument(
        "--profile", action="store_true", help=f"print the shares and the largest kernels of {PROFILED} steps"
    )
    parser.set_defaults(attention_dropout=0.0, deterministic=False, eval_tokens=None)
    return parser


def whole_batches(features, batch_size):
    """Global batches of one epoch after the other, without the smaller one at an epoch's end."""
    windows = trainable_windows(features)
    if batch_size > len(windows):
        raise UserError(f"--batch-size {batch_size} is more than the {len(windows)} windows there are")
    for epoch in itertools.count():
        yield from (batch for batch in plan_epoch(windows, batch_size, 0, epoch) if len(batch) == batch_size)


class Setting:
    """One strategy at one batch size, ready to step."""

    def __init__(self, strategy, batch_size, args, features, device, rank, world_size):
        self.features, self.device = features, device
        network = build_network(args.shape, attn_implementation="packed", attention_probs_dropout_prob=0.0)
        self.model = model = SpanModel(network, "sdpa").to(device)
        use_attention(model, args.attention)
        self.flops = flops_per_token(model, features.lengths)
        compute_in(model, runtime.HALF.get(args.precision))
        if args.compile:
            compile_layers(model)
        train_step, trained = baseline.train_step, model
        if strategy == "ddp":
            import distributed_ddp

            train_step = distributed_ddp.train_step
            trained = distributed_ddp.DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=args.bucket_mb
            )
            trained.register_comm_hook(None, distributed.SUMS[args.reduce])
        elif strategy.startswith("fsdp-"):
            import distributed_fsdp

            train_step, shard = distributed_fsdp.train_step, strategy.removeprefix("fsdp-")
            mesh = distributed.sharding_mesh(shard, device)
            weights, gradients = runtime.HALF.get(args.precision), runtime.HALF.get(args.reduce, torch.float32)
            policy = distributed_fsdp.MixedPrecisionPolicy(weights, gradients, cast_forward_inputs=False)
            for unit in (*encoder_layers(model), model):
                distributed_fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=shard != "zero2")
        optimizer = torch.optim.AdamW(
            parameter_groups(model, 0.01), lr=torch.tensor(5e-5, device=device), fused=True, capturable=True
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, runtime.linear_schedule(10000, 0.1))
        scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
        step = functools.partial(train_step, trained, optimizer, scaler, 1.0, device, world_size)
        self.scheduler, self.done = scheduler, 0
        self.plan = whole_batches(features, batch_size)
        largest = largest_batch(features, plan_epoch(trainable_windows(features), batch_size, 0, 0))
        plan = itertools.chain([largest], whole_batches(features, batch_size))
        steps = pack_steps(features, plan, rank, world_size, 1, None, fixed_shapes=args.cuda_graphs)
        first = next(steps)
        if strategy == "ddp":
            for batch in 2 * [share.to(device) for share in first]:
                optimizer.zero_grad()
                (0 * span_loss(*trained(batch), batch)).backward()
            keep_gradient_buffers(model)
            optimizer.zero_grad()
        self.run_step = StepGraphs(step, device, args.cuda_graphs, (first, batch_size))
        self.micro_batches = prefetch(steps, device)

    def step(self):
        """One optimizer step as the scripts' loops do it; returns its tokens."""
        windows = next(self.plan)
        runtime.seed_dropout(0, self.done, 0)
        self.run_step(next(self.micro_batches), len(windows))
        self.scheduler.get_last_lr()
        self.scheduler.step()
        self.done += 1
        return int(self.features.lengths[windows].sum())

    def run(self, steps):
        """(seconds, tokens) of so many steps; waits for the device before and after."""
        tokens = 0
        runtime.synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(steps):
            tokens += self.step()
        runtime.synchronize(self.device)
        return time.perf_counter() - begin, tokens


def steady_runs(setting, steps, repeats):
    """`repeats` timings of so many steps in which no graph was made, which takes as long as several steps; and True.

    A shape that is rare may turn up at any time: after three times as many runs the last ones are taken as they are,
    and it is False. All ranks make their graphs at the same steps, and so agree.
    """
    steady, all_runs = [], []
    while len(steady) < repeats and len(all_runs) < 3 * repeats:
        graphs = len(setting.run_step.graphs)
        all_runs.append(setting.run(steps))
        if len(setting.run_step.graphs) == graphs:
            steady.append(all_runs[-1])
    return (steady, True) if len(steady) == repeats else (all_runs[-repeats:], False)


def largest_kernels(kernels, steps, rows=28):
    """The kernels that took longest, as lines: ms and calls a step, name."""
    sums = collections.defaultdict(list)
    for name, begin, end in kernels:
        sums[name].append(end - begin)
    lines = [f"{'ms':>8} {'calls':>6}  a step"]
    for name, spans in sorted(sums.items(), key=lambda item: -sum(item[1]))[:rows]:
        short = re.sub(r"void |at::native::|\(anonymous namespace\)::|pytorch_flash::", "", name)
        lines.append(f"{sum(spans) / 1000 / steps:8.3f} {len(spans) / steps:6.1f}  {short[:90]}")
    return "\n".join(lines)


def main():
    args = build_parser().parse_args()
    rank, local_rank, world_size = 0, 0, 1
    distributed_run = "RANK" in os.environ
    if distributed_run:
        rank, local_rank, world_size = distributed.read_ranks()
        if world_size > 1 and "baseline" in args.strategy:
            raise UserError("--strategy baseline is a single process: start it without torchrun")
    elif set(args.strategy) != {"baseline"}:
        raise UserError("--strategy ddp and fsdp-… need torchrun: `torchrun --standalone … -m benchmarks.steps …`")
    device = runtime.choose_device(args.device, local_rank)
    runtime.quiet_warnings()
    runtime.resolve_hardware(args, device)
    if args.cuda_graphs:
        args.warmup = max(args.warmup, 2 * WARMUP)  # so that most shapes have their graph
    register_attention()
    log = runtime.printer(rank)
    features = load_windows(args, log, builds=local_rank == 0)[-1]
    if distributed_run:
        distributed.start(device)
    for batch_size in args.batch_size:
        for strategy in args.strategy:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            setting = Setting(strategy, batch_size, args, features, device, rank, world_size)
            setting.run(args.warmup)
            warm = time.perf_counter() - begin
            timings, steady = steady_runs(setting, args.steps, args.repeats)
            speeds = [batch_size * args.steps / seconds for seconds, _ in timings]
            rates = [tokens * setting.flops / seconds / 1e12 for seconds, tokens in timings]
            kernels, parts = [], None
            if args.profile:
                with torch.profiler.profile() as profiler:
                    setting.run(PROFILED)
                kernels = device_kernels(profiler)
                parts = shares(kernels) if kernels else None
            log(
                json.dumps(
                    {
                        "device": runtime.device_name(device),
                        "shape": args.shape,
                        "strategy": strategy,
                        "ranks": world_size,
                        "attention": setting.model.attention,
                        "precision": args.precision,
                        "batch_size": batch_size,
                        "reduce": args.reduce,
                        "bucket_mb": args.bucket_mb,
                        "windows_per_second": [round(f(speeds)) for f in (statistics.median, min, max)],
                        "ms_a_step": round(1000 * batch_size / statistics.median(speeds), 2),
                        "useful_tflops": round(statistics.median(rates), 1),
                        "peak_memory_gb": round(runtime.peak_memory(device) / 1e9, 2),
                        "warmup_s": round(warm, 1),
                        "graphs": len(setting.run_step.graphs),
                        "steady": steady,
                        "parameters": sum(p.numel() for p in setting.model.parameters()),
                        "ms_of": parts and {kind: round(value / 1000 / PROFILED, 3) for kind, value in parts.items()},
                    }
                )
            )
            if kernels:
                log(shares_table(parts, PROFILED))
                log(largest_kernels(kernels, PROFILED))
            del setting
            gc.collect()
            torch.cuda.empty_cache()
    if distributed_run:
        distributed.finish()


if __name__ == "__main__":
    errors.run(main)
