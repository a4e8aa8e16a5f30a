"""Training steps alone, at steady state: windows a second for strategies and batch sizes, on real windows.

    python -m benchmarks.steps --batch-size 8 32 192
    torchrun --standalone --nproc-per-node=4 -m benchmarks.steps --strategy ddp fsdp-zero2 --batch-size 384
    torchrun --standalone --nproc-per-node=2 -m benchmarks.steps --strategy ddp --bucket-mb 10 25 50 --in-turn

The step is the scripts' own `train_step`; weights are random, since speed does not depend on them. Every setting is
measured --repeats times, and a line of JSON gives median, least and most. Settings come one after the other, or with
--in-turn all in each repeat, on the same windows, which shows differences of a part of a percent.
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
import types
from typing import NamedTuple

import torch

import baseline
from benchmarks.workload import add_workload, build_network, load_windows
from common import errors
from common.args import positive, whole
from common.data.packing import pack_steps, prefetch
from common.data.plan import largest_batch, plan_epoch
from common.data.windows import trainable_windows
from common.errors import UserError
from common.model.attention import register_attention
from common.model.fused.gradients import keep_gradient_buffers
from common.model.precision import HALF, compile_layers, compute_in
from common.model.span import SpanModel, encoder_layers, flops_per_token, parameter_groups, span_loss, use_attention
from common.run.devices import choose_device, device_name, peak_memory, synchronize
from common.run.distributed import SUMS, finish, gather, read_ranks, sharding_mesh, start
from common.run.environment import git_state
from common.run.graphs import WARMUP, StepGraphs
from common.run.profiler import device_kernels, shares, shares_table
from common.run.progress import linear_schedule, printer
from common.run.seeds import quiet_warnings, seed_dropout
from common.run.settings import resolve_hardware

STRATEGIES = ("baseline", "ddp", "fsdp-zero2", "fsdp-zero3")
BUCKET_MB = 25  # as distributed_ddp.py has it
PROFILED = 20  # steps in a profile: of fewer, one has more tokens than the next


def build_parser():
    parser = errors.Parser(prog="python -m benchmarks.steps", description=__doc__.split("\n")[0])
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=["baseline"])
    parser.add_argument("--batch-size", nargs="+", type=positive, default=[8, 32, 192], help="global")
    add_workload(parser)
    parser.add_argument("--precision", choices=["auto", "fp32", "tf32", "bf16", "fp16"], default="auto")
    parser.add_argument("--attention", choices=["auto", "fused", "flash", "sdpa"], default="auto")
    parser.add_argument(
        "--reduce", nargs="+", choices=["fp32", "bf16"], default=["fp32"], help="type in which gradients travel"
    )
    parser.add_argument("--bucket-mb", nargs="+", type=positive, default=[BUCKET_MB], help="size of DDP's buckets")
    parser.add_argument(
        "--rows", nargs="+", choices=["met", "all"], default=["met"], help="of the word embeddings' gradient, DDP sends"
    )
    parser.add_argument("--steps", type=positive, default=50, help="timed steps")
    parser.add_argument("--warmup", type=whole, default=60, help="steps before the first timing")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--in-turn", action="store_true", help="keep all settings there and let them take turns")
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


class Choice(NamedTuple):
    """What to measure; None where a strategy has no such thing."""

    strategy: str
    batch_size: int  # global
    reduce: str | None = "fp32"  # type in which gradients travel
    bucket_mb: int | None = BUCKET_MB  # DDP's
    rows: str | None = "met"  # of the word embeddings' gradient that DDP sends


def choices(args):
    """The Choices that were asked for, each once."""
    asked = itertools.product(args.batch_size, args.strategy, args.reduce, args.bucket_mb, args.rows)
    return list(
        dict.fromkeys(
            Choice(
                strategy,
                size,
                None if strategy == "baseline" else reduce,
                *(own if strategy == "ddp" else (None, None)),
            )
            for size, strategy, reduce, *own in asked
        )
    )


class Setting:
    """A Choice, ready to step."""

    def __init__(self, choice, args, features, device, rank, world_size):
        strategy, batch_size, reduce, bucket_mb, rows = choice
        self.lengths, self.device, self.rank = features.lengths, device, rank
        network = build_network(args.shape, attn_implementation="packed", attention_probs_dropout_prob=0.0)
        self.model = model = SpanModel(network, "sdpa").to(device)
        use_attention(model, args.attention)
        self.flops = flops_per_token(model, features.lengths)
        compute_in(model, HALF.get(args.precision))
        if args.compile:
            compile_layers(model)
        train_step, trained = baseline.train_step, model
        if strategy == "ddp":
            import distributed_ddp

            train_step = distributed_ddp.train_step
            trained = distributed_ddp.DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
            )
            state = model if rows == "met" else types.SimpleNamespace(words=None)
            trained.register_comm_hook(state, SUMS[reduce])
        elif strategy.startswith("fsdp-"):
            import distributed_fsdp

            train_step, shard = distributed_fsdp.train_step, strategy.removeprefix("fsdp-")
            mesh = sharding_mesh(shard, device)
            weights, gradients = HALF.get(args.precision), HALF.get(reduce, torch.float32)
            policy = distributed_fsdp.MixedPrecisionPolicy(weights, gradients, cast_forward_inputs=False)
            for unit in (*encoder_layers(model), model):
                distributed_fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=shard != "zero2")
        optimizer = torch.optim.AdamW(
            parameter_groups(model, 0.01), lr=torch.tensor(5e-5, device=device), fused=True, capturable=True
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, linear_schedule(10000, 0.1))
        scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
        step = functools.partial(train_step, trained, optimizer, scaler, 1.0, device, world_size)
        self.scheduler, self.done = scheduler, 0
        self.plan = whole_batches(features, batch_size)
        largest = largest_batch(features, plan_epoch(trainable_windows(features), batch_size, 0, 0))
        plan = itertools.chain([largest], whole_batches(features, batch_size))
        steps = pack_steps(features, plan, rank, world_size, 1, None, fixed_shapes=args.cuda_graphs)
        first = next(steps)
        for batch in 2 * [share.to(device) for share in first]:
            optimizer.zero_grad()
            (0 * span_loss(*trained(batch), batch)).backward()
        if strategy == "ddp":
            keep_gradient_buffers(model)
        optimizer.zero_grad()
        self.run_step = StepGraphs(step, device, args.cuda_graphs, (first, batch_size))
        self.micro_batches = prefetch(steps, device)

    def step(self):
        """One optimizer step as the scripts' loops do it; returns its tokens."""
        windows = next(self.plan)
        seed_dropout(0, self.done, self.rank)
        self.run_step(next(self.micro_batches), len(windows))
        self.scheduler.get_last_lr()
        self.scheduler.step()
        self.done += 1
        return int(self.lengths[windows].sum())

    def run(self, steps):
        """(seconds, tokens) of so many steps; waits for the device before and after."""
        tokens = 0
        synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(steps):
            tokens += self.step()
        synchronize(self.device)
        return time.perf_counter() - begin, tokens


def steady_runs(settings, steps, repeats):
    """`repeats` rounds, in each of which every setting is timed over so many steps; and True.

    In none of them a graph was made, which takes as long as several steps. A shape that is rare may turn up at any
    time: after three times as many rounds the last ones are taken as they are, and it is False. All ranks make their
    graphs at the same steps, and so agree.
    """

    def graphs():
        return [len(setting.run_step.graphs) for setting in settings]

    steady, rounds = [], []
    while len(steady) < repeats and len(rounds) < 3 * repeats:
        before = graphs()
        rounds.append([setting.run(steps) for setting in settings])
        if graphs() == before:
            steady.append(rounds[-1])
    return (steady, True) if len(steady) == repeats else (rounds[-repeats:], False)


def profile(setting):
    """The kernels of PROFILED steps as `device_kernels` gives them; [] on a CPU."""
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=1, active=1)) as profiler:
        setting.run(2)  # beginning to trace takes each rank a time of its own, for which the others would wait
        profiler.step()
        setting.run(PROFILED)
    return device_kernels(profiler)


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
        rank, local_rank, world_size = read_ranks()
        if world_size > 1 and "baseline" in args.strategy:
            raise UserError("--strategy baseline is a single process: start it without torchrun")
    elif set(args.strategy) != {"baseline"}:
        raise UserError("--strategy ddp and fsdp-… need torchrun: `torchrun --standalone … -m benchmarks.steps …`")
    device = choose_device(args.device, local_rank)
    quiet_warnings()
    resolve_hardware(args, device)
    if args.cuda_graphs:
        args.warmup = max(args.warmup, 2 * WARMUP)  # so that most shapes have their graph
    register_attention()
    log = printer(rank)
    features = load_windows(args, log, builds=local_rank == 0)[-1]
    if distributed_run:
        start(device)
    commit, dirty = git_state()
    for together in [choices(args)] if args.in_turn else [[choice] for choice in choices(args)]:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        settings, warm = [], []
        for choice in together:
            begin = time.perf_counter()
            settings.append(Setting(choice, args, features, device, rank, world_size))
            settings[-1].run(args.warmup)
            warm.append(time.perf_counter() - begin)
        rounds, steady = steady_runs(settings, args.steps, args.repeats)
        memory = peak_memory(device)
        memory = gather(memory) if distributed_run else [memory]
        for number, (strategy, batch_size, reduce, bucket_mb, rows) in enumerate(together):
            setting, timings = settings[number], [timed[number] for timed in rounds]
            speeds = [batch_size * args.steps / seconds for seconds, _ in timings]
            rates = [tokens * setting.flops / seconds / 1e12 for seconds, tokens in timings]
            line = {
                "git_commit": commit,
                "git_dirty": dirty,
                "torch": torch.__version__,
                "device": device_name(device),
                "shape": args.shape,
                "strategy": strategy,
                "ranks": world_size,
                "attention": setting.model.attention,
                "precision": args.precision,
                "batch_size": batch_size,
                "reduce": reduce,
                "bucket_mb": bucket_mb,
                "rows": rows,
                "windows_per_second": [round(f(speeds)) for f in (statistics.median, min, max)],
                "ms_a_step": round(1000 * batch_size / statistics.median(speeds), 2),
                "useful_tflops": round(statistics.median(rates), 1),
                "peak_memory_gb": round(max(memory) / 1e9, 2),  # in turn: of all settings together
                "peak_memory_gb_by_rank": [round(one / 1e9, 2) for one in memory],
                "warmup_s": round(warm[number], 1),
                "graphs": len(setting.run_step.graphs),
                "steady": steady,
                "parameters": sum(p.numel() for p in setting.model.parameters()),
            }
            if args.in_turn:  # of each round's seconds to those of the first setting
                ratios = [timed[number][0] / timed[0][0] for timed in rounds]
                line["time_to_first"] = [round(f(ratios), 4) for f in (statistics.median, min, max)]
            kernels, parts = [], None
            if args.profile:
                kernels = profile(setting)
                parts = shares(kernels) if kernels else None
            line["ms_of"] = parts and {kind: round(value / 1000 / PROFILED, 3) for kind, value in parts.items()}
            log(json.dumps(line))
            if kernels:
                log(shares_table(parts, PROFILED))
                log(largest_kernels(kernels, PROFILED))
        del settings, setting
        gc.collect()
        torch.cuda.empty_cache()
    if distributed_run:
        finish()


if __name__ == "__main__":
    errors.run(main)
