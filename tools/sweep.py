"""A measurement campaign in one command: strategies × GPUs × precisions × repeats, then the report.

    python -m tools.sweep --strategies baseline ddp fsdp-zero2 --gpus 1 2 4 --repeats 3 -- --epochs 2 --batch-size 96

prints the sbatch lines; --submit submits them, and the report to follow; --local runs one after the other on this
machine. What follows -- goes to every run. The same command again does what is left: finished runs are skipped, those
in the queue are waited for, and one that was stopped or killed goes on from its newest checkpoint.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, errors
from common.args import build_parser, classes, few, positive
from common.errors import UserError
from common.run.lock import process_begun
from common.run.settings import check_combinations
from tools.report.page import report

STRATEGIES = {  # script and what else it is given
    "baseline": ["run_baseline.sh"],
    "ddp": ["run_distributed.sh", "ddp"],
    "ddp-zero1": ["run_distributed.sh", "ddp", "--zero1"],
    "fsdp-zero2": ["run_distributed.sh", "fsdp", "--shard", "zero2"],
    "fsdp-zero3": ["run_distributed.sh", "fsdp", "--shard", "zero3"],
    "fsdp-hsdp": ["run_distributed.sh", "fsdp", "--shard", "hsdp"],
}
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
TO_DO = ("new", "begun")
OWN = {"seed", "precision", "runs_dir", "run_name"}  # a campaign sets these itself


@dataclass
class Job:
    """One run: its name in the runs folder, the command without folder and name, nodes, and GPUs on each.

    number: of its job in Slurm's queue, if it has one there.
    """

    name: str
    command: list
    nodes: int
    gpus: int
    state: str = "new"  # or "begun", "finished", "queued or running"
    number: str | None = None

    def words(self, runs_dir):
        """The script with all its arguments."""
        going_on = ["--resume"] if self.state == "begun" else []
        return [*self.command, "--runs-dir", runs_dir, "--run-name", self.name, *going_on]


def layout(text):
    """(nodes, GPUs on each) from "4" or "2x4"."""
    match = re.fullmatch(r"(?:([1-9]\d{0,3})x)?([1-9]\d{0,3})", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of GPUs nor nodes x GPUs, like 2x4")
    return int(match[1] or 1), int(match[2])


def words_of(text):
    """The words of a text as a shell splits it."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of options: {str(error).lower()}") from None


def plan(args):
    """The Jobs of a campaign. Repeats are the outer loop, so that a drift of the machine meets all settings alike."""
    jobs = {}
    for seed in range(args.repeats):
        for precision in args.precisions:
            for strategy in args.strategies:
                for nodes, gpus in [(1, 1)] if strategy == "baseline" else args.gpus:
                    name, options = f"{strategy}-{nodes}x{gpus}-{precision}", ["--precision", precision]
                    if args.batch_per_gpu:
                        name += f"-weak{args.batch_per_gpu}"
                        options += ["--batch-size", str(args.batch_per_gpu * nodes * gpus)]
                    command = [*STRATEGIES[strategy], *options, "--seed", str(seed), *args.arguments]
                    jobs[f"{name}-seed{seed}"] = Job(f"{name}-seed{seed}", command, nodes, gpus)
    return list(jobs.values())


def check_arguments(args):
    """The arguments as a run parses them; UserError for what no run would take, before the first of many finds out."""
    own = OWN | {name for name, kind in classes().items() if kind == "mode"}  # its runs are trainings
    own |= {"batch_size"} if args.batch_per_gpu else set()
    for word in args.arguments:
        if word.split("=")[0].removeprefix("--").replace("-", "_") in own:
            raise UserError(f"{word}: a campaign decides this itself; `python -m tools.sweep --help` says how")
    parser = build_parser("")
    parser.prog = "baseline.py"
    if "baseline" not in args.strategies:
        parser.prog = "distributed_ddp.py"
        fsdp = any(strategy.startswith("fsdp") for strategy in args.strategies)
        parser.add_argument("--reduce", choices=["fp32", "bf16", *([] if fsdp else ["rows", "rows-bf16"])])
    parsed = parser.parse_args(args.arguments)
    check_combinations(parsed)
    return parsed


def queue_name(job, runs_dir):
    """What a Job is called in Slurm's queue: campaigns in several folders have runs of one name."""
    return f"{job.name}-{hashlib.sha256(os.fsencode(os.path.realpath(runs_dir))).hexdigest()[:8]}"


def queue():
    """{number: name} of this user's jobs in Slurm's queue; None where no Slurm answers."""
    if not shutil.which("squeue"):
        return None
    done = subprocess.run(["squeue", "--me", "--noheader", "--format=%A %j"], capture_output=True, text=True)
    if done.returncode:
        return None
    return {number: name for number, _, name in (line.partition(" ") for line in done.stdout.splitlines())}


def first_line(text):
    return (text.strip().splitlines() or ["no reason given"])[0]


def read_json(path):
    """A JSON object from a file; {} where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_alive(lock, queued):
    """Whether the run that a lock names may still be at work. queued: see `queue`."""
    if not os.path.exists(lock):
        return False
    holder = read_json(lock)
    if holder.get("job_id"):
        return queued is None or str(holder["job_id"]) in queued
    if holder.get("host") != socket.gethostname():
        return True
    return process_begun(holder.get("pid")) == holder.get("begun")


def find_state(job, runs_dir, queued):
    """Set a Job's state from its folder and the queue."""
    folder = Path(runs_dir) / job.name
    record = read_json(folder / "run.json")
    name, holder = queue_name(job, runs_dir), str(read_json(folder / "lock").get("job_id"))
    job.number = next((number for number, one in (queued or {}).items() if one == name or number == holder), None)
    if job.number or is_alive(folder / "lock", queued):
        job.state = "queued or running"
    elif record.get("status") == "finished":
        job.state = "finished"
    elif os.path.exists(folder / "run.json") or os.path.exists(folder / "lock"):
        job.state = "begun"
    ran = record.get("command") if isinstance(record.get("command"), list) else None
    given = [word for word in job.command[1:] if word not in ("ddp", "fsdp")]
    if ran:
        ran = ran[: max(i for i, word in enumerate(["--run-name", *ran]) if word == "--run-name") + 1]  # not --resume
        if ran[-4 - len(given) : -4] != given:
            was = shlex.join(map(str, ran))
            raise UserError(f"{folder}: a run of another campaign ({was}); name another --runs-dir for this one")


def environment(job, device):
    """Variables for the sbatch scripts: this Python, if it is not their default, and ranks where no GPU says it.

    device: as the runs' --device says.
    """
    variables = {}
    if Path(sys.prefix) != ROOT / ".venv" and (Path(sys.prefix) / "bin" / "python").exists():
        variables["VENV"] = sys.prefix
    if job.command[0] != "run_baseline.sh" and device == "cpu":
        variables["NPROC"] = str(job.gpus)
    return variables


def sbatch(job, args):
    """(variables, words) that submit a Job; the user's options come last and win."""
    name = queue_name(job, args.runs_dir)
    gpus = 0 if args.device == "cpu" else job.gpus  # Slurm refuses to grant what a cluster has not
    words = ["sbatch", f"--job-name={name}", f"--nodes={job.nodes}", f"--gpus-per-node={gpus}"]
    words.append(f"--cpus-per-task={4 * job.gpus}")  # as the scripts ask for: a rank has as many in each job
    return environment(job, args.device), [*words, *args.sbatch, *job.words(args.runs_dir)]


def report_command(args):
    return ["-m", "tools.report", args.runs_dir, "--out", args.out]


def show(jobs, args):
    """Print the campaign as sbatch lines."""
    for job in jobs:
        if job.state in TO_DO:
            variables, words = sbatch(job, args)
            print(" ".join([f"{name}={shlex.quote(value)}" for name, value in variables.items()] + [shlex.join(words)]))
        else:
            print(f"# {job.state}: {job.name}")
    print(f"# when all have ended: python {shlex.join(report_command(args))}")


def call_sbatch(words, variables):
    """Submit one job; returns its number."""
    words = [words[0], "--parsable", *words[1:]]
    done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{first_line(done.stderr)}; nothing after this was submitted: {shlex.join(words)}")
    return done.stdout.strip().split(";")[0]


def submit(jobs, args, queued):
    """Submit what is new, and the report to run when all of the campaign's jobs have ended."""
    if queued is None:
        raise UserError("--submit: no Slurm answers here; without it the lines are printed, --local runs them")
    numbers = [job.number for job in jobs if job.number]
    for job in jobs:
        if job.state in TO_DO:
            variables, words = sbatch(job, args)
            numbers.append(call_sbatch(words, variables))
            print(f"job {numbers[-1]}: {job.name}", flush=True)
        else:
            print(f"{job.state}: {job.name}")
    if not numbers:
        return report_now(jobs, args)
    words = [
        "sbatch",
        "--job-name=report",
        "--nodes=1",
        "--time=00:15:00",
        f"--dependency=afterany:{':'.join(numbers)}",
    ]
    words += [*args.sbatch, f"--wrap={shlex.join([sys.executable, *report_command(args)])}"]
    print(f"job {call_sbatch(words, {})}: the report, when all have ended")
    names = ", ".join(job.name for job in jobs if job.state == "queued or running" and not job.number)
    if names:
        errors.tell(f"warning: the report will not wait for runs that another start does without Slurm: {names}")


def report_now(jobs, args, failed=()):
    """The report; UserError for what it lacks: runs that failed here (their logs), and those of another start."""
    away = [job for job in jobs if job.state == "queued or running"]
    for job in away:  # so they were as this began, which may be hours ago
        find_state(job, args.runs_dir, queue())
    report([args.runs_dir], out=args.out)
    lacks = [f"failed or stopped: see {', '.join(failed)}"] if failed else []
    names = ", ".join(job.name for job in away if job.state != "finished")
    lacks += [f"queued, running or stopped elsewhere: {names}"] if names else []
    if lacks:
        raise UserError(f"the report is not whole, and the same command goes on later: {'; '.join(lacks)}")


def run_here(jobs, args):
    """Run what is new one after the other, each with its output in a file beside its folder; then the report."""
    if any(job.nodes > 1 for job in jobs):
        raise UserError("--local runs on this machine alone: no nodes x GPUs with more than one node")
    Path(args.runs_dir).mkdir(parents=True, exist_ok=True)
    failed = []
    for i, job in enumerate(jobs, 1):
        print(f"[{i}/{len(jobs)}] {job.name}: ", end="", flush=True)
        if job.state not in TO_DO:
            print(job.state)
            continue
        log, clock = Path(args.runs_dir) / f"{job.name}.log", time.monotonic()
        variables = environment(job, args.device) | {"NPROC": str(job.gpus)}
        script, *words = job.words(args.runs_dir)
        with open(log, "wb") as output:
            done = subprocess.run(
                ["bash", str(ROOT / script), *words], env=os.environ | variables, stdout=output, stderr=output
            )
        end = "failed" if done.returncode else read_json(Path(args.runs_dir) / job.name / "run.json").get("status")
        print(f"{end} in {time.monotonic() - clock:.0f} s", flush=True)
        if end != "finished":
            failed.append(str(log))
    report_now(jobs, args, failed)


def main():
    parser = errors.Parser(prog="python -m tools.sweep", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--strategies", nargs="+", choices=STRATEGIES, default=["baseline", "ddp", "fsdp-zero2"], help="what to compare"
    )
    parser.add_argument(
        "--gpus", nargs="+", type=layout, default=[(1, 2)], metavar="N", help="GPUs of a node, or nodes x GPUs like 2x4"
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["auto"], help="default: auto")
    parser.add_argument("--repeats", type=few, default=3, help="runs of a setting, seeds 0, 1, … (default: 3)")
    parser.add_argument(
        "--batch-per-gpu", type=positive, metavar="N", help="weak scaling: a global batch of N for each GPU"
    )
    parser.add_argument("--runs-dir", default="runs/sweep", help="where run folders are made (default: runs/sweep)")
    parser.add_argument("--out", help="where the report goes (default: RUNS_DIR/report)")
    parser.add_argument(
        "--sbatch", type=words_of, default=[], metavar="OPTIONS", help='of every job: --sbatch="--account=A"'
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--submit", action="store_true", help="submit the jobs and the report to Slurm")
    how.add_argument("--local", action="store_true", help="run on this machine, one after the other")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="for the training scripts, after --")
    args = parser.parse_args()
    args.out = args.out or str(Path(args.runs_dir) / "report")  # not one place for all campaigns
    args.device = check_arguments(args).device
    jobs = plan(args)
    queued = queue()
    for job in jobs:
        find_state(job, args.runs_dir, queued)
    if args.submit:
        submit(jobs, args, queued)
    elif args.local:
        run_here(jobs, args)
    else:
        show(jobs, args)


if __name__ == "__main__":
    errors.run(main)
