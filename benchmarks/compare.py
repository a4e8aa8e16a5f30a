"""This project beside the usual ways to train the same: windows a second on the same windows, model and card.

    python -m benchmarks.compare                                    # SQuAD v1.1, BERT-base's shape, one GPU and all
    python -m benchmarks.compare --shape tiny --steps 3 --warmup 2 --repeats 1 --ranks 1 2        # small, for a CPU

Each way runs in a process of its own (one a rank), and all ways take turns in each of --repeats rounds. A way's number
is a rank's windows in a batch. Every way leaves a run record, NAME.json, in --out; rounds are added to the records that
are there already. On a CPU all is fp32 and uncompiled, gloo joins the ranks, and the ways that need GPUs say so.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.workload import add_workload, load_windows, network_folder
from common import errors
from common.args import positive, whole
from common.errors import UserError
from common.record import SCHEMA, environment, write_json

LIMIT = 900  # seconds until a measurement is given up


@dataclass(frozen=True)
class Way:
    """One way to train: a module of benchmarks.peers with its options.

    batch_size: windows of each rank. precision: on GPUs. ranks: "one", "many" or "any". needs: a package beyond
    requirements.txt. gpus_from: the number of ranks from which it runs on GPUs only.
    """

    name: str
    module: str
    batch_size: int
    precision: str = "auto"
    pad_to: int | None = None
    options: tuple = ()
    ranks: str = "any"
    needs: str | None = None
    gpus_from: int | None = None


WAYS = [
    Way("this-project-8", "this_project", 8),
    Way("this-project-8-fp32", "this_project", 8, "fp32", ranks="one"),
    Way("this-project-8-fsdp", "this_project", 8, options=("--strategy", "fsdp-zero2"), ranks="many"),
    Way("this-project-32", "this_project", 32),
    Way("this-project-32-fsdp", "this_project", 32, options=("--strategy", "fsdp-zero2"), ranks="many"),
    # Hugging Face Trainer: run_qa's defaults; the same without padding to 384; tuned in three ways
    Way("hf-trainer-8", "hf_trainer", 8, "fp32", 384, needs="accelerate"),
    Way("hf-trainer-8-dynamic", "hf_trainer", 8, "fp32", needs="accelerate"),
    Way("hf-trainer-32", "hf_trainer", 32, "bf16", 384, needs="accelerate"),
    Way("hf-trainer-32-compiled", "hf_trainer", 32, "bf16", 384, ("--compile",), needs="accelerate"),
    Way("hf-trainer-32-grouped", "hf_trainer", 32, "bf16", options=("--group-by-length",), needs="accelerate"),
    # the course reports: their loop, and what they brought it to several GPUs with
    Way("course-loop-8-fp32", "course_loop", 8, "fp32", 512, ranks="one"),
    Way("course-loop-8-tf32", "course_loop", 8, "tf32", 512, ranks="one"),
    Way("lightning-ddp-8", "lightning_trainer", 8, "tf32", 512, needs="lightning"),
    Way(
        "lightning-fsdp-8", "lightning_trainer", 8, "tf32", 512, ("--strategy", "fsdp"), needs="lightning", gpus_from=1
    ),
    Way("lightning-ddp-32", "lightning_trainer", 32, "bf16", 384, needs="lightning"),
    Way("data-parallel-8", "data_parallel", 8, "tf32", 512, gpus_from=2),
    Way("deepspeed-zero2-8", "deepspeed_zero2", 8, "tf32", 512, needs="deepspeed"),
    Way("accelerate-32", "accelerate_loop", 32, "bf16", needs="accelerate"),
]


def build_parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_workload(parser)
    names = [way.name for way in WAYS]
    parser.add_argument("--ways", nargs="+", choices=names, metavar="WAY", help=f"default: all; {', '.join(names)}")
    parser.add_argument("--ranks", nargs="+", type=positive, help="default: 1 and, if there are more, all GPUs")
    parser.add_argument("--warmup", type=positive, default=20, help="steps before the timing")
    parser.add_argument("--steps", type=positive, default=50, help="timed steps")
    parser.add_argument("--repeats", type=whole, default=3, help="rounds; 0 shows the records that are in --out")
    parser.add_argument("--attention-dropout", type=float, help="of the peers; default: the model's own")
    parser.add_argument("--out", help="folder of the records; default: runs/compare-TIME")
    return parser


def chosen_ways(args, on_cuda):
    """[(Way, ranks)] to measure: what was asked for, and this project at the same sizes to compare it with.

    Ways that differ on GPUs alone are measured once on a CPU, under the first one's name.
    """
    asked = [way for way in WAYS if not args.ways or way.name in args.ways]
    ours = {f"this-project-{way.batch_size}" for way in asked}
    pairs = {}
    for ranks in sorted(set(args.ranks)):
        for way in WAYS:
            fits = way.ranks in ("any", "one" if ranks == 1 else "many")
            if fits and (way in asked or way.name in ours):
                pairs.setdefault(tuple(command(way, ranks, args, on_cuda, seed=0)), (way, ranks))
    return list(pairs.values())


def obstacle(way, ranks, on_cuda):
    """What keeps a way from running here, or None."""
    if way.needs and importlib.util.find_spec(way.needs) is None:
        return f"{way.needs} is not installed: `pip install -r requirements-bench.txt`"
    if way.gpus_from and ranks >= way.gpus_from and not on_cuda:
        return "runs on GPUs only"
    return None


def command(way, ranks, args, on_cuda, seed):
    """The command line of one measurement."""
    start = [sys.executable]
    if (ranks > 1 and way.module != "data_parallel") or way.module == "deepspeed_zero2":  # which looks for MPI else
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    options = [option for option in way.options if on_cuda or option != "--compile"]
    if way.module == "this_project" and ranks > 1 and "--strategy" not in options:
        options += ["--strategy", "ddp"]
    options += ["--device", "cuda" if on_cuda else "cpu", "--precision", way.precision if on_cuda else "fp32"]
    options += ["--batch-size", way.batch_size * ranks, "--seed", seed]
    options += ["--pad-to", way.pad_to] if way.pad_to else []
    for name in ("shape", "train_file", "tokenizer", "cache_dir", "warmup", "steps", "attention_dropout"):
        of_peers = name == "attention_dropout" and way.module == "this_project"
        if getattr(args, name) is not None and not of_peers:
            options += [f"--{name.replace('_', '-')}", getattr(args, name)]
    return [*start, "-m", f"benchmarks.peers.{way.module}", *map(str, options)]


def measure(line, ranks, on_cuda, log):
    """The record that the command `line` prints, or one of status "failed", and its stderr in the file `log`."""
    environ = os.environ | {"HF_HUB_OFFLINE": "1"}
    if on_cuda:  # some ways use every GPU they see
        visible = environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:ranks])
    with open(log, "w+") as complaints:
        process = subprocess.Popen(
            line, env=environ, stdout=subprocess.PIPE, stderr=complaints, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return failure(f"no result after {LIMIT} s, see {log}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # and the ranks that it started
                process.wait()
        complaints.seek(0)
        text = complaints.read()
    records = [one for one in output.splitlines() if one.startswith('{"schema"')]
    if process.returncode == 0 and records:
        log.unlink()
        return json.loads(records[-1])
    why = re.search(r"^(?:\[rank\d+\]: *)?((?:[\w.]*(?:Error|Exception): \S|error: ).*)", text, flags=re.M)
    return failure(f"{why[1][:300] if why else f'exit status {process.returncode}'}, see {log}")


def failure(error):
    return {"schema": SCHEMA, "status": "failed", "started": time.time(), **environment(), "epochs": [], "error": error}


def add_round(record, new):
    """The record of a way after one more measurement. record: before it, None at first. new: what `measure` gave.

    Its windows_per_second is the median over the rounds that finished, its peak_memory_bytes their largest.
    """
    keys = ("status", "started", "windows_per_second", "seconds", "peak_memory_bytes", "error")
    rounds = [*(record["rounds"] if record else []), {key: new[key] for key in keys if key in new}]
    finished = [one for one in rounds if one["status"] == "finished"]
    base = record if new["status"] == "failed" and finished else new
    medians = {}
    if finished:
        medians["windows_per_second"] = statistics.median(one["windows_per_second"] for one in finished)
        memory = zip(*(one["peak_memory_bytes"] for one in finished), strict=True)
        medians["peak_memory_bytes"] = [max(of_rank) for of_rank in memory]
    return base | medians | {"rounds": rounds}


def same_setting(record, new):
    """Whether two records of a way differ in their seed and their times alone."""

    def setting(one):
        arguments = {key: value for key, value in one["arguments"].items() if key != "seed"}
        return [arguments, *(one[key] for key in ("versions", "data", "gpus", "device", "git_commit"))]

    return "arguments" not in record or "arguments" not in new or setting(record) == setting(new)


def read_records(folder):
    """{file name: record} of a folder that --out names; empty if there is none."""
    records = {}
    for path in sorted(Path(folder).glob("*.json")):
        try:
            records[path.stem] = json.loads(path.read_text())
        except (OSError, ValueError):
            records[path.stem] = None
        if not isinstance(records[path.stem], dict) or not {"way", "ranks", "rounds"} <= records[path.stem].keys():
            raise UserError(f"{path}: not a record of benchmarks.compare; name another --out")
    return records


def table(records):
    """The records of a folder as lines of a Markdown table. records: {name: record}, see `add_round`."""
    rows = [("way", "ranks", "batch", "precision", "padded to", "windows/s", "least", "most", "ours ÷ it", "GB a rank")]
    order = [way.name for way in WAYS]
    notes = []
    for record in sorted(records.values(), key=lambda one: (one["ranks"], order.index(one["way"]))):
        speeds = [one["windows_per_second"] for one in record["rounds"] if one["status"] == "finished"]
        failures = [one["error"] for one in record["rounds"] if one["status"] == "failed"]
        name, ranks = record["way"], record["ranks"]
        if failures:
            notes.append(f"{name}, {ranks} ranks: {failures[-1]} ({len(failures)} of {len(record['rounds'])} rounds)")
        if not speeds:
            continue
        arguments, median = record["arguments"], statistics.median(speeds)
        ours = records.get(f"this-project-{arguments['batch_size'] // ranks}-x{ranks}", {}).get("windows_per_second")
        rows.append(
            (
                name,
                str(ranks),
                str(arguments["batch_size"]),
                record["precision"],
                "-" if record["attention"] != "padded" else str(arguments["pad_to"] or "longest"),
                *(f"{speed:,.{0 if median >= 100 else 1}f}" for speed in (median, min(speeds), max(speeds))),
                f"{ours / median:.2f}" if ours else "-",
                f"{max(record['peak_memory_bytes']) / 1e9:.2f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([*lines, *(["", "Not measured:", *notes] if notes else [])])


def main():
    args = build_parser().parse_args()
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    on_cuda = args.device == "cuda" or (args.device == "auto" and gpus > 0)
    if on_cuda and max(args.ranks or [1]) > gpus:
        raise UserError(f"--ranks {max(args.ranks or [1])}: {gpus} GPUs are visible")
    args.ranks = args.ranks or sorted({1, gpus or 1})
    out = Path(args.out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}")
    records = read_records(out)
    status = 0
    if args.repeats:
        network_folder(args.shape)
        load_windows(args)  # once: the ways find them in the cache
        out.mkdir(parents=True, exist_ok=True)
    for number in range(1, args.repeats + 1):
        for way, ranks in chosen_ways(args, on_cuda):
            name = f"{way.name}-x{ranks}"
            before, hindrance = records.get(name), obstacle(way, ranks, on_cuda)
            line = command(way, ranks, args, on_cuda, seed=len(before["rounds"]) if before else 0)
            new = failure(hindrance) if hindrance else measure(line, ranks, on_cuda, out / f"{name}.log")
            if before and not same_setting(before, new):
                raise UserError(f"{out / name}.json: of other settings, versions or hardware; name another --out")
            records[name] = add_round(before, new) | {"way": way.name, "ranks": ranks}
            write_json(out / f"{name}.json", records[name], indent=1)
            told = new.get("error") or f"{new['windows_per_second']:,.1f} windows/s"
            print(f"round {number}/{args.repeats}  {name}: {told}", flush=True)
            status |= new["status"] == "failed" and not hindrance
    if not records:
        raise UserError(f"{out}: no records there")
    print(table(records))
    print(f"records: {out}")
    return int(status)


if __name__ == "__main__":
    errors.run(main)
