"""Kills runs at random moments until they have finished nevertheless, then compares them with runs left alone.

    python -m tests.chaos --kills 50 --out /tmp/kills.json

A rank is killed with SIGKILL: in start-up, training, evaluation, or while a checkpoint or results are written. The run
is started again, with --resume or by a requeue under a Slurm of two virtual nodes, and killed again elsewhere. Weights,
predictions and curves must be those of the undisturbed run to the bit. tests/run/test_chaos.py is the short form.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import short_runs
import slurm_cluster
from tiny import ROOT

PHASES = ("start-up", "training", "evaluation", "checkpoint", "results")
WAYS = {  # name: (script, ranks, options, under Slurm)
    "baseline": ("baseline.py", 1, [], False),
    "ddp 2": ("distributed_ddp.py", 2, [], False),
    "fsdp 4": ("distributed_fsdp.py", 4, [], False),
    "slurm ddp 2": ("ddp", 2, [], True),
    "ddp 4": ("distributed_ddp.py", 4, ["--zero1"], False),
    "fsdp 2": ("distributed_fsdp.py", 2, ["--shard", "zero3"], False),
    "slurm fsdp 2": ("fsdp", 2, [], True),
}
OPTIONS = ["--save-steps", "3", "--epochs", "2"]

# What each rank runs first. Functions of the project are replaced by ones that note where the run is, and a thread has
# the process killed from outside, at no tidy place between two lines of Python. plan: rank, phase, after (seconds in
# that phase), report (a file that gets the kill). Without a phase it leaves the time spent in each behind.
KILLER = """
import atexit, importlib, json, os, subprocess, sys, threading, time

WHERE = {  # module, function: phase; the first that is running counts
    ("common.run.checkpoint", "write"): "checkpoint",
    ("common.run.run", "write_epoch"): "results",
    ("common.run.record", "write_text"): "results",
    ("common.run.graphs", "StepGraphs.__call__"): "training",
    ("common.run.run", "Run.log_step"): "training",
    ("common.run.run", "evaluate"): "evaluation",
}

def watch(plan, rank):
    spent, running, started = {}, dict.fromkeys(WHERE.values(), 0), []
    helper = subprocess.Popen(["sh", "-c", f"read now && kill -9 {os.getpid()}"],
                              stdin=subprocess.PIPE, text=True)

    def told(function, phase):
        def call(*arguments, **named):
            running[phase] += 1
            try:
                return function(*arguments, **named)
            finally:
                running[phase] -= 1
        return call

    def replace(module, name, phase):
        *owners, name = name.split(".")
        for owner in owners:
            module = getattr(module, owner)
        setattr(module, name, told(getattr(module, name), phase))

    def where():
        run = sys.modules.get("common.run.run")
        if waiting and hasattr(run, "Run"):  # imported, and with it all others
            while waiting:
                (module, name), phase = waiting.popitem()
                replace(importlib.import_module(module), name, phase)
        phase = next((phase for phase in running if running[phase]), None)
        if phase == "training":
            started.append(1)
        return phase or ("between" if started else "start-up")

    waiting = dict(WHERE)
    where()

    def look():
        last = time.monotonic()
        while True:
            time.sleep(0.001)
            phase = where()
            now = time.monotonic()
            spent[phase], last = spent.get(phase, 0) + now - last, now
            if phase == plan.get("phase") and spent[phase] >= plan["after"]:
                with open(plan["report"], "w") as file:
                    json.dump({"phase": phase, "rank": rank, "seconds": spent[phase]}, file)
                print("now", file=helper.stdin, flush=True)
                time.sleep(10)

    if plan.get("phase") is None:
        if rank == 0:
            atexit.register(lambda: open(plan["report"], "w").write(json.dumps(spent)))
    elif rank != plan["rank"]:
        return helper.stdin.close()
    threading.Thread(target=look, daemon=True).start()
"""

# Python imports this by itself at its start, in every process of a run.
SITE = f"""
import os, sys
scripts = ("baseline.py", "distributed_ddp.py", "distributed_fsdp.py")
if "CHAOS" in os.environ and any(word.endswith(scripts) for word in sys.orig_argv[1:4]):  # not in torchrun itself
    exec({KILLER!r})
    watch(json.load(open(os.environ["CHAOS"])), int(os.environ.get("RANK", 0)))
"""


class Plain:
    """Runs of one way as plain processes under torchrun."""

    def __init__(self, way, setting, name):
        self.script, self.ranks, options, _ = WAYS[way]
        self.arguments = [*setting[1], *options, *OPTIONS, "--run-name", name]

    def start(self, environment, again):
        """One start, until it ends; whether the run has finished, and its output."""
        command = [sys.executable]
        if self.ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        command += [self.script, *self.arguments, *(["--resume"] if again else [])]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
        )
        return done.returncode == 0, done.stdout


class Slurm:
    """Runs of one way as a job that goes back into the queue."""

    cluster = None  # of all

    def __init__(self, way, setting, name):
        strategy, self.ranks, options, _ = WAYS[way]
        self.words = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", "run_distributed.sh", strategy]
        self.words += [*setting[1], *options, *OPTIONS, "--run-name", name]

    def start(self, environment, again):
        if again:
            self.call("scontrol", "requeue", str(self.job.number))
            slurm_cluster.hurry(self.job)
        else:
            chaos = {name: environment[name] for name in ("CHAOS", "PYTHONPATH", "HF_HUB_OFFLINE")}
            chaos |= {"NPROC": str(self.ranks // 2), "VENV": sys.prefix}
            self.job = self.cluster.submit(*self.words, cwd=ROOT, environment=chaos)
        return self.job.wait(seconds=300) == "COMPLETED", self.job.log()

    def call(self, *command):
        """A Slurm command; again for a while if it is refused, since a job takes its time to be over."""
        for _ in range(20):
            done = subprocess.run(command, env=self.cluster.environment, capture_output=True, text=True)
            if done.returncode == 0:
                return
            time.sleep(0.5)
        raise AssertionError(f"{command}: {done.stderr}")


def place_hook(folder):
    """The environment for runs that `plan.json` in this folder says where to kill."""
    (folder / "hook").mkdir(exist_ok=True)
    (folder / "hook" / "sitecustomize.py").write_text(SITE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    paths = {"PYTHONPATH": str(folder / "hook"), "CHAOS": str(folder / "plan.json")}
    return environment | paths | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def one_start(runner, folder, environment, plan, again):
    """Start once with this plan: (whether it finished, output, the kill or what the plan's report says, or None)."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan | {"report": str(report)}))
    finished, output = runner.start(environment, again)
    return finished, output, json.loads(report.read_text()) if report.exists() else None


def draw(phase, spent, ranks, dice):
    """A plan: a moment of this phase, evenly over the time that an undisturbed run spends in it.

    A start that goes on from a checkpoint has less before it, so that late moments may never come.
    """
    share = 1.0 if phase == "start-up" else 0.5
    rank = 0 if phase in ("checkpoint", "results") else dice.randrange(ranks)  # which alone writes
    return {"phase": phase, "rank": rank, "after": dice.uniform(0, share * spent.get(phase, 0.0))}


def chain(way, setting, environment, spent, phases, name, dice):
    """Kill one run once in each of these phases, let it finish and compare; the kills, each with how it ended."""
    folder = setting[0]
    runner = (Slurm if WAYS[way][3] else Plain)(way, setting, name)
    kills, again, finished = [], False, False
    for phase in phases:
        finished, output, kill = one_start(runner, folder, environment, draw(phase, spent, runner.ranks, dice), again)
        if kill and not finished:
            torn = [path.name for path in (folder / name / "checkpoints").glob(".step-*.tmp")]
            kills.append({"way": way, "run": name} | kill | {"torn": bool(torn) and kill["phase"] == "checkpoint"})
            print(f"  killed: {kills[-1]}", flush=True)
        elif not finished:
            raise AssertionError(f"{way}: failed by itself:\n{output[-4000:]}")
        again = True
        if finished:
            break
    if not finished:
        finished, output, _ = one_start(runner, folder, environment, {"phase": "none", "rank": -1}, True)
        assert finished, f"{way}: did not finish:\n{output[-4000:]}"
    whole = short_runs.results(setting, f"whole-{way}".replace(" ", "-"))
    equal = short_runs.equal(short_runs.results(setting, name), whole)
    print(f"{way}: {len(kills)} kills, then {'equal' if equal else 'DIFFERENT'}", flush=True)
    return [kill | {"equal": equal} for kill in kills]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="how many at least (default: 50)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--out", help="a JSON file for the list of kills")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    setting, environment = short_runs.prepare(folder), place_hook(folder)
    dice, kills, spent, clock = random.Random(args.seed), [], {}, time.monotonic()
    try:
        if any(WAYS[way][3] for way in args.ways):
            context = slurm_cluster.running_cluster()
            Slurm.cluster = context.__enter__()
        round_number = 0
        while len(kills) < args.kills:
            for way in args.ways:
                runner = Slurm if WAYS[way][3] else Plain
                if way not in spent:
                    name = f"whole-{way}".replace(" ", "-")
                    plan = {"phase": None}
                    finished, output, spent[way] = one_start(
                        runner(way, setting, name), folder, environment, plan, False
                    )
                    assert finished, output
                    print(f"{way}, undisturbed: {spent[way]}", flush=True)
                phases = list(PHASES)
                dice.shuffle(phases)
                name = f"{way}-{round_number}".replace(" ", "-")
                kills += chain(way, setting, environment, spent[way], phases, name, dice)
                if args.out:
                    Path(args.out).write_text(json.dumps(kills, indent=1) + "\n")
                if len(kills) >= args.kills:
                    break
            round_number += 1
    finally:
        if Slurm.cluster:
            context.__exit__(None, None, None)
        shutil.rmtree(folder, ignore_errors=True)
    count = {phase: sum(kill["phase"] == phase for kill in kills) for phase in PHASES}
    equal = sum(kill["equal"] for kill in kills)
    torn = sum(kill["torn"] for kill in kills)
    print(f"{len(kills)} kills in {(time.monotonic() - clock) / 60:.0f} minutes: {count}, half-written: {torn}")
    print(f"equal to the undisturbed run: {equal} of {len(kills)}")
    return int(equal != len(kills))


if __name__ == "__main__":
    sys.exit(main())
