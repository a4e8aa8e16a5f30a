"""Where the seconds of a command go, from its start to the first optimizer step and to F1.

    python -m benchmarks.start --repeats 3 -- --epochs 1 --batch-size 64
    python -m benchmarks.start --other OLD_TREE -- --epochs 1          # another tree in turn with this one

What follows -- goes to baseline.py. Each round runs `python -c "import torch, transformers, pandas"`, which no run can
do without, then the command in this tree and in the other one. The first round is not counted: it fills the caches.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, errors
from common.args import positive
from common.errors import Parser, UserError

IMPORTS = [sys.executable, "-c", "import torch, transformers, pandas"]


def timed(command, tree):
    """Seconds that a command takes in this folder; UserError with its last lines if it fails."""
    environ = os.environ | {"PYTHONPATH": str(tree)}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=tree, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(command)} ended with status {done.returncode}: {done.stdout[-300:]}")
    return time.perf_counter() - began


def run(tree, arguments):
    """{part: seconds} of one run of baseline.py in this tree: the parts of its start, first step, first F1, whole."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--runs-dir", folder, "--run-name", "run", *arguments]
        whole = timed([sys.executable, "baseline.py", *words], tree)
        record = json.loads((Path(folder) / "run" / "run.json").read_text())
    seconds, epoch = record["seconds"], record["epochs"][0]
    to_f1 = seconds["first_step"] + epoch["train_seconds"] + epoch["evaluation_seconds"]
    return (seconds.get("start") or {}) | {
        "to the first step": seconds["first_step"],
        "to the first F1, about": to_f1,
        "whole command": whole,
    }


def table(rounds, trees):
    """The lines of a Markdown table: median, minimum and maximum of each part, in seconds and times the imports."""
    imports = statistics.median(one["imports alone"] for one in rounds)
    lines = ["| part | seconds | min–max | × imports |", "| --- | --- | --- | --- |"]

    def add(name, values):
        middle = statistics.median(values)
        lines.append(f"| {name} | {middle:.2f} | {min(values):.2f}–{max(values):.2f} | {middle / imports:.2f} |")

    add("`import torch, transformers, pandas` alone", [one["imports alone"] for one in rounds])
    for tree in trees:
        for part in rounds[0][tree]:
            add(part if tree == ROOT else f"{part}, {tree.name}", [one[tree][part] for one in rounds])
    return lines


def main():
    parser = Parser(
        prog="python -m benchmarks.start", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=positive, default=3, help="rounds that count (default: 3)")
    parser.add_argument("--other", type=Path, metavar="TREE", help="another checkout of this project")
    parser.add_argument("--out", type=Path, help="a JSON file for all rounds")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="of baseline.py")
    args = parser.parse_args()
    trees = [ROOT, *([args.other.resolve()] if args.other else [])]
    rounds = []
    for number in range(args.repeats + 1):
        one = {"imports alone": timed(IMPORTS, ROOT)}
        one |= {tree: run(tree, args.arguments) for tree in trees}
        if number:
            rounds.append(one)
    print(*table(rounds, trees), sep="\n")
    if args.out:
        args.out.write_text(json.dumps([{str(key): value for key, value in one.items()} for one in rounds], indent=1))


if __name__ == "__main__":
    errors.run(main)
