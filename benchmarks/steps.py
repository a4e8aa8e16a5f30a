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
import gc
import itertools
import json
import os
import re
import statistics
import time
from typing import NamedTuple

import torch

import baseline
from benchmarks.workload import add_workload, build_network, load_windows
from common import errors
from common.args import positive, whole
from common.data.packing import pack_steps, prefetch, with_token_ids
from common.data.plan import largest_batch, plan_epoch
from common.data.windows import trainable_windows
from common.errors import UserError
from common.model.attention import register_attention
from common.model.fused.gradients import keep_gradient_buffers
from common.model.precision import HALF, compile_layers, compute_in
from common.model.span import SpanModel, encoder_layers, flops_per_token, parameter_groups, span_loss, use_attention
from common.run import distributed, world
from common.run.devices import PeakMemory, device_name, synchronize
from common.run.environment import git_state
from common.run.graphs import WARMUP, StepGraphs
from common.run.profiler import device_kernels, shares_table, time_shares
from common.run.seeds import quiet_warnings, seed_dropout
from common.run.settings import choose_kernels

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
        "--reduce", nargs="+", choices=distributed.HOOKS, default=["rows"], help="as the scripts have it"
    )
    parser.add_argument("--bucket-mb", nargs="+", type=positive, default=[BUCKET_MB], help="size of DDP's buckets")
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
    reduce: str | None = "rows"  # how gradients travel; under FSDP the type alone
    bucket_mb: int | None = BUCKET_MB  # DDP's


def choices(args):
    """The Choices that were asked for, each once."""
    found = {}
    for size, strategy, reduce, megabytes in itertools.product(
        args.batch_size, args.strategy, args.reduce, args.bucket_mb
    ):
        if strategy.startswith("fsdp"):
            reduce = "bf16" if "bf16" in reduce else "fp32"
        one = Choice(strategy, size, reduce, megabytes)
        if strategy != "ddp":
            one = one._replace(bucket_mb=None)
        if strategy == "baseline":
            one = one._replace(reduce=None)
        found[one] = None
    return list(found)


def wrap(choice, model, precision, device):
    """(the script whose train_step it is, the model wrapped as that script wraps it)."""
    if choice.strategy == "baseline":
        return baseline, model
    if choice.strategy == "ddp":
        import distributed_ddp

        trained = distributed_ddp.DistributedDataParallel(
            model, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=choice.bucket_mb
        )
        trained.register_comm_hook(model, distributed.HOOKS[choice.reduce])
        return distributed_ddp, trained
    import distributed_fsdp

    shard = choice.strategy.removeprefix("fsdp-")
    mesh = distributed.sharding_mesh(shard, device)
    weights, gradients = HALF.get(precision), HALF.get(choice.reduce, torch.float32)
    policy = distributed_fsdp.MixedPrecisionPolicy(weights, gradients, cast_forward_inputs=False)
    distributed_fsdp.fully_shard(model.network.qa_outputs, mesh=mesh)
    for unit in (*encoder_layers(model), model):
        distributed_fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=shard != "zero2")
    return distributed_fsdp, model


class Setting:
    """A Choice, ready to step."""

    def __init__(self, choice, args, features, world):
        self.lengths, self.world = features.lengths, world
        network = build_network(args.shape, attn_implementation="packed", attention_probs_dropout_prob=0.0)
        self.model = model = SpanModel(network, "sdpa").to(world.device)
        use_attention(model, args.attention)
        self.flops = flops_per_token(model, features.lengths)
        compute_in(model, HALF.get(args.precision))
        if args.compile:
            compile_layers(model)
        script, trained = wrap(choice, model, args.precision, world.device)
        rate = torch.tensor(5e-5, device=world.device)
        optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=rate, fused=True, capturable=True)
        self.scheduler, self.done = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)), 0
        scaler = torch.amp.GradScaler(world.device.type, enabled=args.precision == "fp16")
        size, trainable = choice.batch_size, trainable_windows(features)
        self.plan = whole_batches(features, size)
        largest = largest_batch(features, plan_epoch(trainable, size, 0, 0))
        plan = itertools.chain([largest], whole_batches(features, size))
        plan, same = itertools.tee(plan)
        steps = pack_steps(features, plan, world.rank, world.size, 1, None, fixed_shapes=args.cuda_graphs)
        if choice.strategy == "ddp" and choice.reduce.startswith("rows"):
            steps = with_token_ids(steps, features, same, args.cuda_graphs)
        first = next(steps)
        for batch in 2 * [batch.to(world.device) for batch in first]:
            optimizer.zero_grad()
            (0 * span_loss(*trained(batch), batch)).backward()
        if choice.strategy == "ddp":
            keep_gradient_buffers(model)
        optimizer.zero_grad()
        fixed = (trained, optimizer, scaler, 1.0)
        self.run_step = StepGraphs(script.train_step, fixed, world.device, args.cuda_graphs, (first, size))
        self.micro_batches = prefetch(steps, world.device)

    def step(self):
        """One optimizer step as the scripts' loops do it; returns its tokens."""
        windows = next(self.plan)
        seed_dropout(0, self.done, self.world.rank)
        self.run_step.step(next(self.micro_batches), len(windows))  # its __call__ advises an option of the scripts
        self.scheduler.get_last_lr()
        self.scheduler.step()
        self.done += 1
        return int(self.lengths[windows].sum())

    def run(self, steps):
        """(seconds, tokens) of so many steps; waits for the device before and after."""
        tokens = 0
        synchronize(self.world.device)
        begin = time.perf_counter()
        for _ in range(steps):
            tokens += self.step()
        synchronize(self.world.device)
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
    ranks = int(os.environ.get("WORLD_SIZE", 0))
    if ranks > 1 and "baseline" in args.strategy:
        raise UserError("--strategy baseline is a single process: start it without torchrun")
    if not ranks and set(args.strategy) != {"baseline"}:
        raise UserError("--strategy ddp and fsdp-… need torchrun: `torchrun --standalone … -m benchmarks.steps …`")
    here = (distributed.World if ranks else world.World)(args.device)
    quiet_warnings()
    choose_kernels(args, here.device)
    if args.cuda_graphs:
        args.warmup = max(args.warmup, 2 * WARMUP)  # so that most shapes have their graph
    register_attention()
    features = load_windows(args, here.log, builds=here.local_rank == 0)[-1]
    here.connect()
    commit, dirty = git_state()
    for together in [choices(args)] if args.in_turn else [[choice] for choice in choices(args)]:
        memory = PeakMemory(here.device)
        settings, warm = [], []
        for choice in together:
            begin = time.perf_counter()
            settings.append(Setting(choice, args, features, here))
            settings[-1].run(args.warmup)
            warm.append(time.perf_counter() - begin)
        rounds, steady = steady_runs(settings, args.steps, args.repeats)
        memory = here.gather(memory.read())
        for number, (strategy, batch_size, reduce, bucket_mb) in enumerate(together):
            setting, timings = settings[number], [timed[number] for timed in rounds]
            speeds = [batch_size * args.steps / seconds for seconds, _ in timings]
            rates = [tokens * setting.flops / seconds / 1e12 for seconds, tokens in timings]
            line = {
                "git_commit": commit,
                "git_dirty": dirty,
                "torch": torch.__version__,
                "device": device_name(here.device),
                "shape": args.shape,
                "strategy": strategy,
                "ranks": here.size,
                "attention": setting.model.attention,
                "precision": args.precision,
                "batch_size": batch_size,
                "reduce": reduce,
                "bucket_mb": bucket_mb,
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
                parts = time_shares(kernels) if kernels else None
            line["ms_of"] = parts and {kind: round(value / 1000 / PROFILED, 3) for kind, value in parts.items()}
            here.log(json.dumps(line))
            if kernels:
                here.log(shares_table(parts, PROFILED))
                here.log(largest_kernels(kernels, PROFILED))
        del settings, setting
        gc.collect()
        torch.cuda.empty_cache()
    here.finish()


def run():
    try:
        main()
    except torch.OutOfMemoryError:
        raise UserError("out of memory: measure a smaller --batch-size, or on more GPUs") from None


if __name__ == "__main__":
    errors.run(run)
