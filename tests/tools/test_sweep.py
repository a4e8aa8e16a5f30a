"""tools.sweep: the lines it prints, what it skips and tries again, local runs, and a campaign on the virtual Slurm."""

import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest
import slurm_cluster
from tiny import ROOT, SAMPLE, minilm_tokenizer, save_network

from common.errors import UserError
from common.run.lock import process_begun
from tools import sweep

SMALL = shlex.split("--max-train-examples 12 --max-dev-examples 8 --batch-size 8 --device cpu --epochs 1")


@pytest.fixture
def call(monkeypatch, capsys):
    """A function that calls tools.sweep in this process and returns what it prints; no Slurm is in the way."""
    monkeypatch.setattr(sweep, "queue", lambda: None)
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sweep", *map(str, arguments)])
        sweep.main()
        return capsys.readouterr().out

    return run


def test_the_lines_that_it_prints(call, tmp_path):
    arguments = shlex.split("--strategies baseline ddp-zero1 fsdp-zero3 --gpus 1 2x4 --precisions bf16 tf32")
    arguments += ["--repeats", 2, "--sbatch=--account=A --time=60", "--runs-dir", tmp_path / "r"]
    lines = call(*arguments, "--", "--epochs", "2", "--train-file", "a b.json", "--dev-fraction", "0.1").splitlines()
    assert len(lines) == 2 * 2 * 5 + 1  # repeats, precisions; baseline on one GPU, two strategies on one and eight
    extra = f"--epochs 2 --train-file 'a b.json' --dev-fraction 0.1 --runs-dir {tmp_path / 'r'} --run-name"
    digest = hashlib.sha256(str(tmp_path / "r").encode()).hexdigest()[:8]
    assert lines[0] == (
        f"sbatch --job-name=baseline-1x1-bf16-seed0-{digest} --nodes=1 --gpus-per-node=1 --cpus-per-task=4 "
        "--account=A --time=60 "
        f"run_baseline.sh --precision bf16 --seed 0 {extra} baseline-1x1-bf16-seed0"
    )
    assert lines[2] == (
        f"sbatch --job-name=ddp-zero1-2x4-bf16-seed0-{digest} --nodes=2 --gpus-per-node=4 --cpus-per-task=16 "
        "--account=A --time=60 "
        f"run_distributed.sh ddp --zero1 --precision bf16 --seed 0 {extra} ddp-zero1-2x4-bf16-seed0"
    )
    assert lines[19].startswith(f"sbatch --job-name=fsdp-zero3-2x4-tf32-seed1-{digest} ")
    assert (
        lines[20] == f"# when all have ended: python -m tools.report {tmp_path / 'r'} --out {tmp_path / 'r' / 'report'}"
    )


def test_weak_scaling_gives_each_gpu_the_same(call, tmp_path):
    lines = call("--gpus", 1, 4, "2x4", "--repeats", 1, "--batch-per-gpu", 24, "--runs-dir", tmp_path).splitlines()
    sizes = [re.search(r"job-name=(\S+)-seed0-\w+ .*--batch-size (\d+) ", line).groups() for line in lines[:-1]]
    assert sizes[0] == ("baseline-1x1-auto-weak24", "24")
    assert sizes[1:4] == [("ddp-1x1-auto-weak24", "24"), ("ddp-1x4-auto-weak24", "96"), ("ddp-2x4-auto-weak24", "192")]


@pytest.mark.parametrize("device", [["--device", "cpu"], ["--device=cpu"], ["--device", "cuda", "--device=cpu"]])
def test_a_node_without_gpus_is_told_its_ranks(call, tmp_path, device):
    arguments = ["--strategies", "baseline", "ddp", "--gpus", 3, "--repeats", 1, "--runs-dir", tmp_path, "--"]
    baseline, ddp, _ = call(*arguments, *device).splitlines()
    assert ddp.startswith("NPROC=3 sbatch ") and baseline.startswith("sbatch ")
    assert "--gpus-per-node=0" in ddp and "--gpus-per-node=0" in baseline
    _, ddp, _ = call(*arguments, "--cache-dir", "cpu", "--device=cuda").splitlines()
    assert ddp.startswith("sbatch ") and "--gpus-per-node=3" in ddp


def test_ranks_on_the_cpu_and_another_python_are_said(call, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", [])
    jobs = [sweep.Job("x", ["run_distributed.sh", "ddp"], 1, 2), sweep.Job("y", ["run_baseline.sh"], 1, 1)]
    assert sweep.environment(jobs[0], "cpu")["NPROC"] == "2"
    assert "NPROC" not in sweep.environment(jobs[1], "cpu")
    assert "NPROC" not in sweep.environment(jobs[0], "auto")  # a rank for each GPU that is granted
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert sweep.environment(jobs[1], "auto") == {"VENV": str(tmp_path)}


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--", "--epchs", "2"], "unrecognized arguments: --epchs 2"),
        (["--", "--seed", "3"], "--seed: a campaign decides this itself"),
        (["--local", "--", "--dry-run"], "--dry-run: a campaign decides this itself"),
        (["--local", "--", "--evaluate-only", "x"], "--evaluate-only: a campaign decides this itself"),
        (["--local", "--", "--evaluate-only=x"], "--evaluate-only=x: a campaign decides this itself"),
        (["--", "--precision=bf16"], "--precision=bf16: a campaign decides this itself"),
        (["--batch-per-gpu", "8", "--", "--batch-size", "8"], "--batch-size: a campaign decides this itself"),
        (["--", "--train-file", "x.json"], "--train-file needs --dev-file"),
        (['--sbatch=--account="x'], "argument --sbatch: '--account=\"x' is no list of options: no closing quotation"),
        (["--sbatch=--account=x\\"], "is no list of options: no escaped character"),
        (["--submit"], "--submit: no Slurm answers here"),
        (["--local", "--gpus", "2x2"], "--local runs on this machine alone"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(call, arguments, said, tmp_path):
    with pytest.raises(UserError, match=re.escape(said)):
        call("--runs-dir", tmp_path / "r", *arguments)
    assert not (tmp_path / "r").exists()


def test_gradients_in_bf16_are_for_campaigns_without_a_baseline(call, tmp_path):
    with pytest.raises(UserError, match="unrecognized arguments: --reduce bf16"):
        call("--runs-dir", tmp_path / "r", "--", "--reduce", "bf16")
    printed = call("--runs-dir", tmp_path / "r", "--strategies", "ddp", "fsdp-zero2", "--", "--reduce", "bf16")
    assert printed.count("--reduce bf16") == 2 * 3  # repeats


def test_a_layout_that_is_none_is_a_usage_error(call):
    for text in ("0", "2x", "x2", "two", "1x2x3"):
        with pytest.raises(UserError, match=f"'{text}' is neither a number of GPUs nor nodes x GPUs"):
            call("--gpus", text)


def leave(folder, status=None, lock=None, command=None):
    """A run folder as a run left it."""
    folder.mkdir(parents=True)
    if status:
        (folder / "run.json").write_text(json.dumps({"status": status, "command": command}))
    if lock:
        (folder / "lock").write_text(json.dumps(lock))


def test_what_is_left_to_do(call, monkeypatch, tmp_path):
    def command(seed, *more):
        return ["baseline.py", "--precision", "bf16", "--seed", seed, *more, "--runs-dir", "r", "--run-name", "n"]

    name, here, dead = "baseline-1x1-bf16-seed{}", socket.gethostname(), 2**22 + 1  # above any process's number
    leave(tmp_path / name.format(0), "finished", command=command("0"))
    leave(tmp_path / name.format(1), "failed", command=command("1"))
    alive = {"host": here, "pid": os.getpid(), "begun": process_begun(os.getpid())}
    leave(tmp_path / name.format(2), "running", alive, command("2"))
    leave(tmp_path / name.format(3), "running", {"host": here, "pid": dead, "begun": 1}, command("3"))  # killed
    leave(tmp_path / name.format(4), "finished", command=[*command("4"), "--resume"])
    leave(tmp_path / name.format(5), None, {"host": here, "pid": dead, "begun": 1})  # killed before it wrote anything
    leave(tmp_path / name.format(6), "running", {"host": "elsewhere", "pid": 1, "job_id": "77"}, command("6"))
    arguments = ["--strategies", "baseline", "--precisions", "bf16", "--repeats", 8, "--runs-dir", tmp_path]

    def states():
        lines = call(*arguments).splitlines()[:-1]
        return [line[2:] if line[0] == "#" else re.search(r"--run-name (.+)$", line).group(1) for line in lines]

    todo = [
        "finished: baseline-1x1-bf16-seed0",
        "baseline-1x1-bf16-seed1 --resume",
        "queued or running: baseline-1x1-bf16-seed2",
        "baseline-1x1-bf16-seed3 --resume",
        "finished: baseline-1x1-bf16-seed4",
        "baseline-1x1-bf16-seed5 --resume",
        "queued or running: baseline-1x1-bf16-seed6",  # job 77 cannot be asked after
        "baseline-1x1-bf16-seed7",
    ]
    assert states() == todo
    seventh = sweep.queue_name(sweep.Job("baseline-1x1-bf16-seed7", [], 1, 1), tmp_path)
    monkeypatch.setattr(sweep, "queue", lambda: {"78": seventh, "79": "other job", "80": "baseline-1x1-bf16-seed1"})
    todo[6:] = ["baseline-1x1-bf16-seed6 --resume", "queued or running: baseline-1x1-bf16-seed7"]  # 77 is gone
    assert states() == todo
    with pytest.raises(UserError, match=r"seed0: a run of another campaign .*name another --runs-dir"):
        call(*arguments, "--", "--epochs", "5")


@pytest.mark.parametrize("how", ["--local", "--submit"])
def test_a_report_without_runs_that_still_run_is_no_success(call, monkeypatch, tmp_path, how):
    """Another start is at it, which no queue knows: the report is made and what it lacks is told."""
    name, lock = "baseline-1x1-auto-seed0", {"host": "elsewhere", "pid": 1, "begun": 1}
    leave(tmp_path / name, None, lock)
    monkeypatch.setattr(sweep, "queue", dict)
    made = []
    monkeypatch.setattr(sweep, "report", lambda runs, out: made.append(runs))
    arguments = ["--strategies", "baseline", "--repeats", 1, "--runs-dir", tmp_path, how]
    with pytest.raises(UserError, match=f"^the report is not whole.*: queued, running or stopped elsewhere: {name}$"):
        call(*arguments)
    assert made == [[str(tmp_path)]]


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """A folder of programs that play Slurm: squeue prints its file queue, sbatch puts jobs there, from number 1."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "queue").touch()
    programs = {
        "squeue": 'cat "$(dirname "$0")/queue"\n',
        "sbatch": 'queue=$(dirname "$0")/queue number=$(($(wc -l <"$queue") + 1))\n'
        'for word; do case $word in --job-name=*) echo "$number ${word#*=}" >>"$queue" ;; esac; done\n'
        'echo "$*" >"$queue.last"\necho $number\n',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_a_submitted_report_that_does_not_wait_for_a_run_says_so(monkeypatch, capsys, slurm, tmp_path):
    name, lock = "baseline-1x1-auto-seed0", {"host": "elsewhere", "pid": 1, "begun": 1}
    leave(tmp_path / "r" / name, None, lock)
    arguments = ["--strategies", "baseline", "--repeats", "2", "--runs-dir", str(tmp_path / "r"), "--submit"]
    monkeypatch.setattr(sys, "argv", ["sweep", *arguments])
    sweep.main()
    printed = capsys.readouterr()
    assert printed.out.startswith(f"queued or running: {name}\njob 1: baseline-1x1-auto-seed1\njob 2: the report")
    assert re.fullmatch(f"warning: the report will not wait for .*: {name}\n", printed.err)


def test_campaigns_in_other_folders_do_not_count_as_queued(monkeypatch, capsys, slurm, tmp_path):
    """Their runs have the same names; a link to the folder, or a relative path, is the same campaign."""

    def submit(folder):
        monkeypatch.setattr(sys, "argv", ["sweep", *arguments, "--runs-dir", str(folder)])
        sweep.main()
        return capsys.readouterr().out.splitlines()[:-1]

    arguments = ["--strategies", "baseline", "ddp", "--gpus", "2x2", "--repeats", "1", "--submit"]
    names = ("baseline-1x1-auto-seed0", "ddp-2x2-auto-seed0")
    (slurm / "queue").write_text("1 baseline-1x1-auto-seed0\n2 ddp-2x2-auto-seed0\n3 \n")
    for folder, first in (("a", 4), ("b", 7)):
        assert submit(tmp_path / folder) == [f"job {first + i}: {name}" for i, name in enumerate(names)]
        assert f"--dependency=afterany:{first}:{first + 1} " in (slurm / "queue.last").read_text()
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "link", tmp_path / "a"):
        assert submit(folder) == [f"queued or running: {name}" for name in names]
        assert "--dependency=afterany:4:5 " in (slurm / "queue.last").read_text()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Arguments of a very short training of a small random BERT."""
    model = tmp_path_factory.mktemp("small")
    save_network(model)
    minilm_tokenizer().save_pretrained(model)
    files = ["--train-file", str(SAMPLE / "train.json"), "--dev-file", str(SAMPLE / "dev.json"), "--model", str(model)]
    return [*files, *SMALL, "--cache-dir", str(tmp_path_factory.mktemp("cache"))]


def sweep_command(folder, *arguments):
    return [
        sys.executable,
        "-m",
        "tools.sweep",
        "--runs-dir",
        str(folder / "runs"),
        "--strategies",
        "baseline",
        "ddp",
        *arguments,
    ]


def test_a_local_campaign_goes_on_where_it_stopped(small, tmp_path):
    command = sweep_command(tmp_path, "--gpus", "2", "--repeats", "1", "--local", "--", *small)
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 240}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    # The second run's place is taken by a file, so that it fails, and the report is made without it.
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "ddp-1x2-auto-seed0").touch()
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.match(r"\[1/2\] baseline-1x1-auto-seed0: finished in .*\n\[2/2\] ddp-1x2-auto-seed0: failed", done.stdout)
    assert re.search(
        r"^error: the report is not whole, .*: failed or stopped: see .*/ddp-1x2-auto-seed0.log$", done.stderr
    )
    assert "runs: 1, finished: 1" in done.stdout and (tmp_path / "runs" / "report" / "report.html").is_file()

    (tmp_path / "runs" / "ddp-1x2-auto-seed0").unlink()
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"\[1/2\] baseline-1x1-auto-seed0: finished\n\[2/2\] ddp-1x2-auto-seed0: finished in", done.stdout)
    assert "runs: 2, finished: 2" in done.stdout and not done.stderr  # no file of the first report is taken for a run
    assert re.search(r"ddp × 2 +2 +baseline × 1 +training", done.stdout)


def test_a_campaign_on_a_virtual_cluster_without_gpus(small, tmp_path):
    slurm_cluster.require()
    command = sweep_command(tmp_path, "--gpus", "2x1", "--repeats", "1", "--submit", "--sbatch=--cpus-per-task=2")
    command += ["--", *small]
    with slurm_cluster.running_cluster(gpus=False) as cluster:
        output = cluster.folder / "output"
        cluster.environment["SBATCH_OUTPUT"] = f"{output}/%j.txt"
        submitted = cluster.call(*command, cwd=ROOT)
        numbers = dict(reversed(pair) for pair in re.findall(r"^job (\d+): (\S+)", submitted, re.M))
        assert list(numbers) == ["baseline-1x1-auto-seed0", "ddp-2x1-auto-seed0", "the"]
        jobs = [slurm_cluster.Job(cluster, int(one), output / f"{one}.txt") for one in numbers.values()]
        # The same runs in another folder are others.
        other = cluster.call(
            *command[: command.index("--")],
            "--runs-dir",
            str(tmp_path / "other"),
            "--sbatch=--hold",
            "--",
            *small,
            cwd=ROOT,
        )
        assert len(re.findall(r"^job \d+: (?!the report)", other, re.M)) == 2, other
        cluster.call("scancel", *re.findall(r"^job (\d+):", other, re.M))
        # At once again: what is in the queue is not submitted twice.
        again = cluster.call(*command, cwd=ROOT)
        assert len(re.findall("^(?:queued or running|finished): ", again, re.M)) == 2, again
        numbers = re.findall(r"^job (\d+): (.*)", again, re.M)
        assert len(numbers) == 1 and numbers[0][1].startswith("the report"), again
        # Its report is waited for too: it would otherwise write the folder while this test removes it.
        jobs.append(slurm_cluster.Job(cluster, int(numbers[0][0]), output / f"{numbers[0][0]}.txt"))
        for job in jobs:
            assert job.wait(seconds=240) == "COMPLETED", job.log()
        assert jobs[1].show()["NumNodes"] == "2"
        assert "runs: 2, finished: 2" in jobs[2].log()
        assert re.search(r"ddp × 2 on 2 nodes +2 +baseline × 1 +training", jobs[2].log())
        assert (tmp_path / "runs" / "report" / "report.html").is_file()
        cluster_name = json.loads((tmp_path / "runs" / "ddp-2x1-auto-seed0" / "run.json").read_text())["cluster"]
        assert cluster_name == "test"

        shutil.rmtree(tmp_path / "runs" / "report")
        last = cluster.call(*command, cwd=ROOT)
        assert last.startswith("finished: baseline-1x1-auto-seed0\nfinished: ddp-2x1-auto-seed0\n")
        assert "job " not in last and (tmp_path / "runs" / "report" / "report.html").is_file()

        refused = [*command[: command.index("--")], "--sbatch=--partition=none", "--runs-dir", str(tmp_path / "x")]
        refused += ["--", "--device", "cpu"]
        done = subprocess.run(refused, cwd=ROOT, env=cluster.environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert "invalid partition" in done.stderr and "nothing after this was submitted: sbatch" in done.stderr
