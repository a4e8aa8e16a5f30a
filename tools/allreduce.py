"""Measure the all-reduce of one full gradient: what the network between the ranks gives, apart from any training.

    torchrun --standalone --nproc-per-node=4 -m tools.allreduce
    srun … torchrun … -m tools.allreduce --shape bert-large

Beside each measurement stands what a ring predicts from its bandwidth: every rank sends and receives 2 (N - 1) / N of
the message, in 2 (N - 1) steps. 'bus' is that traffic over the time, which compares across numbers of ranks; the
bandwidth is the largest message's, the latency of a step the smallest's.
"""

import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from common import errors
from common.args import positive
from common.run.devices import synchronize
from common.run.distributed import World
from common.run.environment import environment
from common.run.record import write_json

# (parameters, width) of the published models with a span head (no pooler), as transformers has them.
SHAPES = {"minilm": (22_566_146, 384), "bert-base": (108_893_186, 768), "bert-large": (334_094_338, 1024)}
VOCABULARY = 30522
SMALL = 1 << 12  # bytes of a message that takes nothing but latency


def build_parser():
    parser = errors.Parser(prog="python -m tools.allreduce", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="bert-base", help="whose gradient")
    parser.add_argument("--megabytes", type=positive, nargs="+", help="these messages and a small one instead, in MB")
    parser.add_argument("--types", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--repeats", type=positive, default=20, help="timed all-reduces of each message")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--output", help="also write the results here, as JSON")
    return parser


def messages(parameters, width, megabytes=None):
    """Sizes to measure, in bytes of fp32, the least first, which tells the latency.

    The gradient whole, its word embeddings, a bucket of DDP's, a small one; or those asked for.
    """
    asked = [10**6 * size for size in megabytes or ()]
    return sorted({SMALL, *(asked or (4 * parameters, 4 * VOCABULARY * width, 25 << 20, 1 << 20))})


def paths(rank, world_size):
    """{name: (group, its ranks' number, whether this rank is in it)}: all ranks, those of a node, one of each node."""
    a_node = int(os.environ["LOCAL_WORLD_SIZE"])
    found = {"all ranks": (None, world_size, True)}
    if 1 < a_node < world_size:
        nodes = [list(range(first, first + a_node)) for first in range(0, world_size, a_node)]
        groups = [dist.new_group(ranks) for ranks in nodes]  # all ranks take part in making each
        between = dist.new_group([ranks[0] for ranks in nodes])
        found["within a node"] = (groups[rank // a_node], a_node, True)
        found["between nodes"] = (between, len(nodes), rank % a_node == 0)  # the first of each, alone on the network
    return found


def ring_seconds(size, ranks, bandwidth, latency):
    """The time a ring takes for `size` bytes: traffic over bytes/s, plus a latency (seconds) for each step."""
    return 2 * (ranks - 1) / ranks * size / bandwidth + 2 * (ranks - 1) * latency


def measure(size, dtype, device, repeats, group, member):
    """Seconds of each of `repeats` all-reduces of `size` bytes in a group, the slowest rank's; all ranks take part."""
    tensor = torch.ones(max(1, size // dtype.itemsize), dtype=dtype, device=device)
    seconds = []
    for repeat in range(repeats + 5):
        dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        if member:
            dist.all_reduce(tensor, group=group)
        synchronize(device)
        took = torch.tensor((time.perf_counter() - begin) * member, device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        tensor.fill_(1)
        if repeat >= 5:
            seconds.append(took.item())
    return seconds


def main():
    args = build_parser().parse_args()
    world = World(args.device)
    if world.size < 2:
        raise errors.UserError("an all-reduce needs two ranks at least: torchrun --nproc-per-node=2")
    world.connect()
    sizes = messages(*SHAPES[args.shape], args.megabytes)
    rows = []
    for path, (group, ranks, member) in paths(world.rank, world.size).items():
        for name in args.types:
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
            own = [size * dtype.itemsize // 4 for size in sizes]  # as many numbers
            timed = [(size, measure(size, dtype, world.device, args.repeats, group, member)) for size in own]
            traffic = 2 * (ranks - 1) / ranks
            bandwidth = traffic * timed[-1][0] / statistics.median(timed[-1][1])
            latency = statistics.median(timed[0][1]) / (2 * (ranks - 1))
            for size, seconds in timed:
                median = statistics.median(seconds)
                rows.append(
                    {
                        "path": path,
                        "ranks": ranks,
                        "type": name,
                        "bytes": size,
                        "milliseconds": [1000 * value for value in (median, min(seconds), max(seconds))],
                        "bus_gb_per_second": traffic * size / median / 1e9,
                        "ring_milliseconds": 1000 * ring_seconds(size, ranks, bandwidth, latency),
                    }
                )
    world.log(f"\n{'path':15}{'type':6}{'MB':>10}{'ms':>10}{'least':>10}{'most':>10}{'bus GB/s':>10}{'ring, ms':>10}")
    for row in rows:
        times = "".join(f"{value:10.3f}" for value in row["milliseconds"])
        bus, ring = row["bus_gb_per_second"], row["ring_milliseconds"]
        world.log(f"{row['path']:15}{row['type']:6}{row['bytes'] / 1e6:10.3f}{times}{bus:10.2f}{ring:10.3f}")
    if args.output and world.rank == 0:
        record = {**environment(), "world_size": world.size, "ranks": world.places, "all_reduce": rows}
        write_json(Path(args.output), record, indent=1)
    return 0


if __name__ == "__main__":
    errors.run(main, World.finish)
