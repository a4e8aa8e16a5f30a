"""Whole runs for `benchmarks.compare`, and the seconds in which two ways reach equal F1."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT

KEPT = (
    "host",
    "processor",
    "ranks",
    "versions",
    "git_commit",
    "git_dirty",
    "model",
    "precision",
    "attention",
    "compile",
)
RECIPE = ("batch_size", "learning_rate", "warmup", "weight_decay", "epochs", "seed", "attention_dropout")


def machine(record):
    """Where a way was measured: host, processor, cards, and versions of torch and CUDA. Ratios need all of them alike.

    The one process of data-parallel names the same cards as the ranks of others. Older records name none.
    """
    cards = {one.get("uuid") for one in record.get("ranks", [])} - {None}
    versions = [record.get("versions", {}).get(name) for name in ("torch", "cuda")]
    return record.get("host"), record.get("processor"), sorted(cards), versions


def has_whole_run(way, ranks):
    """Whether a command trains this way from start to F1: baseline.py, or benchmarks.quality, which pads to 384."""
    return ranks == 1 and (way.ours or (way.module == "hf_trainer" and way.pad_to == 384))


def command(way, args, folder):
    """The command line of a whole run. args: of benchmarks.compare."""
    program = ["baseline.py"] if way.ours else ["-m", "benchmarks.quality"]
    options = {"device": args.device, "cache-dir": args.cache_dir, "runs-dir": folder, "run-name": "run"}
    options |= {"batch-size": way.batch_size, "precision": way.precision if args.device == "cuda" else "fp32"}
    if args.train_file:
        options["train-file"] = args.train_file
    if way.dropout == "matched":
        options["attention-dropout"] = 0
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    if not way.ours:
        compiled = way.options.get("compile") and args.device == "cuda"
        words.append("--compile" if compiled else "--no-compile")
    return [sys.executable, *program, *words, *args.arguments]


def train_whole(way, args):
    """Train a way from start to F1: what its run record says, each epoch with its F1 and the seconds until then.

    The clock starts with the command and an epoch ends when its F1 is printed. A failed run gives {"error": …}.
    """
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as complaints:
        began, ends = time.perf_counter(), []
        with subprocess.Popen(
            command(way, args, folder), stdout=subprocess.PIPE, stderr=complaints, text=True, env=environ
        ) as process:
            for line in process.stdout:
                if re.match(r"epoch \d+: ", line):
                    ends.append(time.perf_counter() - began)
        if process.returncode:
            complaints.seek(0)
            return {"error": (complaints.read().strip().splitlines() or ["no message"])[-1][:300]}
        run = json.loads((Path(folder) / "run" / "run.json").read_text())
    epochs = [
        {"epoch": one["epoch"], "f1": one["f1"], "seconds": seconds}
        for one, seconds in zip(run["epochs"], ends, strict=True)
    ]
    kept = {name: run[name] for name in KEPT if name in run}
    kept |= {"arguments": {name: run["arguments"][name] for name in RECIPE}, "data": run["data"]["name"]}
    return kept | {"epochs": epochs}


def equal_f1(record, ours):
    """Seconds of a way and of this project to equal F1, "116 (ours 15)"; "–" without whole runs of one machine.

    Equal F1 is the smaller one of the two last epochs'. The seconds run from the start of the command to the end of the
    first epoch whose F1 reaches it.
    """
    runs = [(one or {}).get("whole_run", {}) for one in (record, ours)]
    if record is ours or not all(run.get("epochs") for run in runs):
        return "–"
    here = machine(record)
    if any(machine(run) != here or any(run[name] != runs[0][name] for name in ("model", "data")) for run in runs):
        return "–"
    target = min(run["epochs"][-1]["f1"] for run in runs)
    theirs, own = (next(one["seconds"] for one in run["epochs"] if one["f1"] >= target) for run in runs)
    return f"{theirs:.0f} (ours {own:.0f})"
