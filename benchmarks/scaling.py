"""The scaling study: one, two and four GPUs of one host, strong and weak, as one command.

    python -m benchmarks.scaling results.json --weak 96 --strong 384

Strong: the global batch stays the same. Weak: the windows per GPU do. The two are never mixed: each speed-up is against
one GPU at the same global batch (strong), or at the same windows per GPU (weak). Every setting is a torchrun of
`benchmarks.steps`, which says how a figure comes about and takes all further options. Exposed communication is rank
0's, from that command's profile, beside what a ring at `--bandwidth` would take for the gradient if nothing hid it.
"""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import steps
from common import errors
from common.args import above_zero, positive
from common.run.environment import environment
from common.run.record import write_json
from tools.allreduce import ring_seconds

STRATEGIES = ("ddp", "fsdp-zero2", "fsdp-zero3")


def build_parser():
    parser = errors.Parser(prog="python -m benchmarks.scaling", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("output", help="JSON with all figures; also prints the tables")
    parser.add_argument("--gpus", type=positive, nargs="+", default=[1, 2, 4])
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--weak", type=positive, nargs="*", default=[96], help="windows per GPU")
    parser.add_argument("--strong", type=positive, nargs="*", default=[384], help="windows in the global batch")
    parser.add_argument(
        "--bandwidth", type=above_zero, help="GB/s of a ring's link, from tools.allreduce: adds its prediction"
    )
    return parser


def plan(gpus, strategies, weak, strong):
    """What to measure, as (ranks, strategy, global batch), each once; one rank is the baseline."""
    wanted = [(ranks, size * ranks) for size in weak for ranks in gpus]
    wanted += [(ranks, size) for size in strong for ranks in gpus]
    return sorted(
        {(ranks, name, size) for ranks, size in wanted for name in (strategies if ranks > 1 else ["baseline"])}
    )


def measure(ranks, strategies, sizes, options):
    """The JSON lines that `benchmarks.steps` prints on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    if ranks == 1:
        command = [sys.executable, "-m"]
    command += ["benchmarks.steps", "--strategy", *strategies, "--batch-size", *map(str, sizes), "--profile", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise errors.UserError(f"{' '.join(command)} ended with status {done.returncode}, as shown above")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def rows(results, weak, strong, bandwidth=None):
    """The table's rows: one for each measurement of each kind of scaling, with speed-up, efficiency, communication."""
    alone = {r["batch_size"]: r["windows_per_second"][0] for r in results if r["ranks"] == 1}
    found = []
    kinds = [("weak", size) for size in weak] + [("strong", size) for size in strong]
    for kind, size in kinds:
        for r in results:
            if r["batch_size"] != (size * r["ranks"] if kind == "weak" else size) or size not in alone:
                continue
            speedup = r["windows_per_second"][0] / alone[size]
            shares = r["ms_of"] or {}
            row = {
                "scaling": f"{kind}, {size} {'per GPU' if kind == 'weak' else 'in all'}",
                "gpus": r["ranks"],
                "strategy": r["strategy"],
                "windows/s": r["windows_per_second"][0],
                "least": r["windows_per_second"][1],
                "most": r["windows_per_second"][2],
                "speed-up": speedup,
                "efficiency": speedup / r["ranks"],
                "ms a step": r["ms_a_step"],
                "comm. hidden, ms": shares.get("communication, hidden"),
                "exposed, ms": shares.get("communication, exposed"),
                "peak GB": r["peak_memory_gb"],
            }
            if bandwidth:
                row["ring, ms"] = 1000 * ring_seconds(4 * r["parameters"], r["ranks"], bandwidth * 1e9, 0)
            found.append(row)
    return found


def table(rows):
    """Rows as Markdown; numbers with as many digits as they are good for."""

    def text(name, value):
        if value is None:
            return "–"
        if not isinstance(value, float):
            return f"{value:,}" if isinstance(value, int) else value
        return f"{value:.0%}" if name == "efficiency" else f"{value:.2f}"

    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    return "\n".join(lines + ["| " + " | ".join(text(*item) for item in row.items()) + " |" for row in rows])


def main():
    args, options = build_parser().parse_known_args()  # the rest goes to benchmarks.steps
    if 1 not in args.gpus:
        raise errors.UserError("--gpus: add 1, which the others are compared with")
    further = steps.build_parser().parse_args(options)
    if further.in_turn or max(len(further.reduce), len(further.bucket_mb)) > 1:
        raise errors.UserError("--reduce and --bucket-mb take one value here, --in-turn none: see benchmarks.steps")
    results, wanted = [], plan(args.gpus, args.strategy, args.weak, args.strong)
    for ranks in args.gpus:
        sizes = sorted({size for r, _, size in wanted if r == ranks})
        results += measure(ranks, ["baseline"] if ranks == 1 else args.strategy, sizes, options)
        found = rows(results, args.weak, args.strong, args.bandwidth)
        write_json(Path(args.output), {**environment(), "results": results, "rows": found}, indent=1)  # nothing is lost
    print(table(found))


if __name__ == "__main__":
    errors.run(main)
