"""run_baseline.sh and run_distributed.sh as they are, submitted to a real Slurm of two virtual nodes and without it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm_cluster
import torch
from test_baseline import losses, record
from tiny import ROOT, SAMPLE, minilm_tokenizer, save_network

sys.path.insert(0, str(ROOT / "slurm"))
import check_node

SCRIPTS = ("run_baseline.sh", "run_distributed.sh")
# --device cpu: the cluster's GPUs exist in its books only.
SMALL = ["--max-train-examples", "30", "--max-dev-examples", "16", "--batch-size", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def cluster():
    slurm_cluster.require()
    with slurm_cluster.running_cluster() as cluster:
        cluster.environment["VENV"] = sys.prefix
        yield cluster


def plain():
    """The environment of a machine where nobody speaks of Slurm."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | {"VENV": sys.prefix}


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Arguments of a short training on the bundled sample, with a small random BERT."""
    model = tmp_path_factory.mktemp("small")
    save_network(model, hidden_dropout_prob=0.1)
    minilm_tokenizer().save_pretrained(model)
    files = ["--train-file", str(SAMPLE / "train.json"), "--dev-file", str(SAMPLE / "dev.json"), "--model", str(model)]
    return [*files, *SMALL, "--cache-dir", str(tmp_path_factory.mktemp("cache")), "--learning-rate", "1e-3"]


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def submitted(cluster, options, runs_dir):
    """{name: Job} of one training by each script, all in the queue at once.

    Each has a trap on its way: the baseline's environment is not exported, DDP's is that of a shell inside another
    job's step, and another process holds FSDP's port.
    """
    arguments = [*options, "--runs-dir", str(runs_dir), "--epochs", "1", "--dropout", "0"]
    jobs = {
        "baseline": cluster.submit("--export=VENV", "run_baseline.sh", *arguments, cwd=ROOT),
        "ddp": cluster.submit("run_distributed.sh", *arguments, cwd=ROOT, environment={"SLURM_STEP_ID": "0"}),
        "fsdp": cluster.submit("--hold", "--cpus-per-task=2", "run_distributed.sh", "fsdp", *arguments, cwd=ROOT),
    }
    with socket.socket() as holder:
        holder.bind(("", job_port(jobs["fsdp"])))
        holder.listen()
        cluster.call("scontrol", "release", str(jobs["fsdp"].number))
        for job in jobs.values():
            job.wait(seconds=180)
    return jobs


def job_port(job):
    first, last = check_node.port_range()
    return first + job.number % (last - first + 1)


def workers(job):
    """{rank: process id} of a job's training processes."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(
                item.split("=", 1) for item in (entry / "environ").read_text().split("\0") if "=" in item
            )
            command = (entry / "cmdline").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if environment.get("SLURM_JOB_ID") == str(job.number) and "RANK" in environment and "distributed_" in command:
            found[int(environment["RANK"])] = int(entry.name)
    return found


@pytest.mark.parametrize("name", ["baseline", "ddp", "fsdp"])
def test_a_submitted_training_completes(submitted, runs_dir, name):
    job = submitted[name]
    shown = job.show()
    assert shown["JobState"] == "COMPLETED", job.log()
    assert shown["NumNodes"] == ("1" if name == "baseline" else "2")
    run = record(runs_dir / str(job.number))
    assert run["status"] == "finished" and run["strategy"].startswith(name) and run["job_id"] == str(job.number)
    assert run["world_size"] == (1 if name == "baseline" else 4) == len(run["hosts"])
    assert run["attempts"][0]["steps"] == 4
    if name != "baseline":  # ranks in the order of Slurm's nodes
        assert [(rank["node"], rank["local_rank"]) for rank in run["ranks"]] == [
            ("n1", 0), ("n1", 1), ("n2", 0), ("n2", 1),
        ]  # fmt: skip
    predictions = json.loads((runs_dir / str(job.number) / "predictions.json").read_text())
    assert len(predictions) == 16 and sum(bool(text) for text in predictions.values()) > 8


def test_the_log_tells_what_ran_where(submitted):
    for name, threads in (("baseline", 4), ("ddp", 4), ("fsdp", 1)):
        log = submitted[name].log()
        assert re.search(
            r"^n1 \(host \S+\): no GPU wanted \([12] granted\), .*Python 3.*torch 2.*CUDA.*driver", log, re.M
        )
        assert f"threads per rank: {threads}\n" in log and re.search(r"^command: srun ", log, re.M)
    assert re.search(r"^n2 \(host", submitted["ddp"].log(), re.M)
    assert "ddp: 4 ranks, 2 on each node" in submitted["ddp"].log()
    assert "fsdp: 4 ranks, 2 on each node" in submitted["fsdp"].log()


def test_all_strategies_give_one_result(submitted, runs_dir):
    folders = {name: runs_dir / str(job.number) for name, job in submitted.items()}
    curve = losses(folders["baseline"])
    nbest = json.loads((folders["baseline"] / "nbest.json").read_text())
    assert len(curve) == 4 and curve[0] > 3
    for name in ("ddp", "fsdp"):
        assert losses(folders[name]) == pytest.approx(curve, rel=1e-5), name
        assert record(folders[name])["epochs"][0]["f1"] == record(folders["baseline"])["epochs"][0]["f1"]
        other = json.loads((folders[name] / "nbest.json").read_text())
        assert {key: [entry["text"] for entry in entries] for key, entries in other.items()} == {
            key: [entry["text"] for entry in entries] for key, entries in nbest.items()
        }


def test_a_held_port_is_reported_and_another_taken(submitted):
    port = job_port(submitted["fsdp"])
    log = submitted["fsdp"].log()
    assert f"port {port}, this job's, is held by another process: taking {port + 1}" in log
    assert f":{port + 1} " in re.search(r"^command: .*", log, re.M).group()


def test_two_jobs_at_once_and_a_killed_rank_ends_its_own_alone(cluster, options, runs_dir):
    arguments = [*options, "--runs-dir", str(runs_dir), "--epochs", "1000"]
    resources = ["--gpus-per-node=1", "--cpus-per-task=1"]
    jobs = [cluster.submit(*resources, "run_distributed.sh", "ddp", *arguments, cwd=ROOT) for _ in range(2)]
    for job in jobs:
        job.wait_for(r"epoch 1: ")
    assert [job.show()["JobState"] for job in jobs] == ["RUNNING", "RUNNING"]
    ports = {re.search(r"--rdzv-endpoint=\S+:(\d+)", job.log()).group(1) for job in jobs}
    assert len(ports) == 2

    victim = workers(jobs[0])[1]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    assert jobs[0].wait(seconds=60) == "FAILED" and time.monotonic() - killed < 60
    assert f"Signal 9 (SIGKILL) received by PID {victim}" in jobs[0].log()
    assert not workers(jobs[0])
    seen = jobs[1].log().count("epoch ")
    jobs[1].wait_for(r"(?s)" + "epoch .*" * (seen + 1))  # the other one goes on
    cluster.call("scancel", str(jobs[1].number))
    assert jobs[1].wait() == "CANCELLED"
    assert not workers(jobs[1])


def test_a_rank_that_fails_before_the_others_meet_it_ends_the_job_with_its_error(cluster, options, runs_dir, tmp_path):
    # Python imports this by itself at its start, in every process of the job; the fault is planted in one rank.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def hook(event, arguments):\n"
        "    if event == 'import' and arguments[0] == 'common.scoring.evaluation':\n"
        "        raise RuntimeError('planted in rank 1')\n"
        "if os.environ.get('RANK') == '1':\n"
        "    sys.addaudithook(hook)\n"
    )
    arguments = [*options, "--runs-dir", str(runs_dir), "--epochs", "1"]
    job = cluster.submit(
        "--gpus-per-node=1", "run_distributed.sh", *arguments, cwd=ROOT, environment={"PYTHONPATH": str(tmp_path)}
    )
    error = "RuntimeError: planted in rank 1"
    job.wait_for(error)
    assert job.wait() == "FAILED" and not workers(job)  # rank 0 would wait for half an hour


def finish_requeued(job, seconds=240):
    """Wait until a job has ended that goes back into the queue; there Slurm would let it wait for two minutes."""
    deadline = time.monotonic() + seconds
    while (state := job.wait("PENDING", *slurm_cluster.ENDED, seconds=deadline - time.monotonic())) == "PENDING":
        slurm_cluster.hurry(job)
    return state


def without_times(run):
    """What a run gave, apart from how long it took."""
    names = ("train_loss", "dev_loss", "f1", "exact", "best")
    return [{name: epoch[name] for name in names} for epoch in run["epochs"]]


def same_as_alone(ours, theirs, attempts):
    """A run folder finished in so many attempts, with the results of a run that was left alone."""
    run = record(ours)
    assert len(run["attempts"]) == attempts and run["status"] == "finished"
    assert without_times(run) == without_times(record(theirs)) and losses(ours) == losses(theirs)
    assert (ours / "predictions.json").read_text() == (theirs / "predictions.json").read_text()


# Slurm looks at time limits each half minute: the signal comes within 31 s after the start.
@pytest.mark.parametrize(
    "script, limit, epochs",
    [("run_distributed.sh", ["--time=30", "--signal=B:USR1@29"], 250), ("run_baseline.sh", [], 40)],
    ids=["time limit", "pre-emption"],
)
def test_a_job_that_is_stopped_goes_on_after_its_requeue(cluster, options, runs_dir, script, limit, epochs):
    """By its time limit, and by a job of higher priority; the results are those of a job left alone."""
    arguments = [*options, "--runs-dir", str(runs_dir), "--epochs", str(epochs)]
    resources = ["--gpus-per-node=1", "--cpus-per-task=1", "--nodes=1"]
    environment = {"NPROC": "1"} if limit else {}
    alone = cluster.submit(*resources, script, *arguments, cwd=ROOT, environment=environment)
    if not limit:
        alone.wait(seconds=240)
    job = cluster.submit(*resources, *limit, script, *arguments, cwd=ROOT, environment=environment)
    job.wait_for(r"epoch 2: ")
    if limit:  # so that it is near now
        hours, minutes, _ = map(int, job.show()["RunTime"].split(":"))
        cluster.call("scontrol", "update", f"JobId={job.number}", f"TimeLimit={60 * hours + minutes + 1}")
    else:  # Slurm sends SIGTERM to the ranks, and nothing to the batch script
        cluster.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 1", cwd=ROOT)
    job.wait_for(r"back into the queue: job \d+ goes on from \S+/step-\d+")
    if limit:
        cluster.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")  # once is enough
    assert finish_requeued(job) == alone.wait(seconds=240) == "COMPLETED", job.log()
    log, folders = job.log(), [runs_dir / str(one.number) for one in (job, alone)]
    assert (
        ("asked to stop" in log) == bool(limit) and "stopped as asked, at step" in log and log.count("run folder:") == 1
    )
    same_as_alone(*folders, attempts=log.count("stopped as asked") + 1)
    assert not (folders[0] / "stop").exists() and not (folders[0] / "lock").exists()


def test_a_job_that_does_not_stop_when_asked_is_requeued_all_the_same(cluster, options, runs_dir, tmp_path):
    """A rank that hangs, for whose end the script has no time to wait: what came after the last checkpoint is lost."""
    fake = tmp_path / "sleep"  # the script's patience is over in 3 s
    fake.write_text('#!/bin/bash\n[[ $1 != 150 ]] || set -- 3\nexec /bin/sleep "$@"\n')
    fake.chmod(0o755)
    arguments = [*options, "--runs-dir", str(runs_dir), "--epochs", "12", "--save-epochs", "1"]
    resources = ["--gpus-per-node=1", "--cpus-per-task=1", "--nodes=1"]
    path = f"{tmp_path}:{cluster.environment['PATH']}"
    job = cluster.submit(*resources, "run_distributed.sh", *arguments, cwd=ROOT, environment={"PATH": path})
    job.wait_for(r"epoch 2: ")
    os.kill(workers(job)[0], signal.SIGSTOP)
    cluster.call("scancel", "--batch", "--signal=USR1", str(job.number))
    job.wait_for(r"back into the queue: job \d+ goes on from \S+/step-\d+")
    assert finish_requeued(job) == "COMPLETED", job.log()
    assert "asked to stop" in job.log() and "stopped as asked" not in job.log()
    assert re.search(r"start 2 of job (?s:.*)resuming from \S+/step-\d+", job.log())
    run = record(runs_dir / str(job.number))
    assert run["status"] == "finished" and len(run["attempts"]) == 2 and len(run["epochs"]) == 12


def lose_node(cluster, job, node, rank):
    """Let a node vanish as by a power cut: its daemon, and all that runs the job's `rank` there, die at once."""
    daemon = next(one for one in cluster.daemons if one.poll() is None and one.args[-2:] == ["-N", node])
    process, chain = workers(job)[rank], []
    while "slurmstepd" not in Path(f"/proc/{process}/comm").read_text():
        chain.append(process)
        process = int(re.search(r"PPid:\t(\d+)", Path(f"/proc/{process}/status").read_text()).group(1))
    for victim in (daemon.pid, process, *reversed(chain)):
        os.kill(victim, signal.SIGKILL)
    daemon.wait()
    cluster.daemons.remove(daemon)
    # What slurmctld finds out by itself once the node has been silent for SlurmdTimeout, five minutes by default.
    cluster.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")


def test_a_job_that_loses_a_node_goes_on_after_its_requeue(cluster, options, runs_dir):
    """From its newest checkpoint, by Slurm's own requeue; the results are those of a job left alone."""
    arguments = [*options, "--runs-dir", str(runs_dir), "--epochs", "20", "--save-epochs", "1"]
    resources = ["--gpus-per-node=1", "--cpus-per-task=1", "--nodes=2"]
    alone = cluster.submit(*resources, "run_distributed.sh", *arguments, cwd=ROOT)
    assert alone.wait(seconds=240) == "COMPLETED", alone.log()
    job = cluster.submit(*resources, "run_distributed.sh", *arguments, cwd=ROOT)
    job.wait_for(r"epoch 3: ")
    lose_node(cluster, job, "n2", rank=1)
    job.wait("PENDING")
    cluster.start_daemon("slurmd", "-D", "-N", "n2")
    cluster.wait_until("the nodes are idle", cluster.idle)
    assert finish_requeued(job) == "COMPLETED", job.log()
    assert re.search(r"start 2 of job (?s:.*)resuming from \S+/step-\d+", job.log())
    same_as_alone(*(runs_dir / str(one.number) for one in (job, alone)), attempts=2)


def wrong_settings():
    """(name, sbatch options, script, arguments, environment, what the one line says, what the right command has)."""
    cpu = ["--device", "cpu"]
    dist, base = "run_distributed.sh", "run_baseline.sh"
    yield (
        "tasks",
        ["--ntasks-per-node=2"],
        dist,
        cpu,
        {},
        r"2\(x2\) tasks",
        "sbatch .*--ntasks-per-node=1 .*--device cpu",
    )
    yield "baseline-tasks", ["--ntasks-per-node=2"], base, cpu, {}, "2 tasks", "sbatch .*--ntasks-per-node=1"
    yield "baseline-nodes", ["--nodes=2"], base, cpu, {}, "more nodes", "sbatch .*--nodes=1 "
    yield "venv", [], dist, cpu, {"VENV": "/no/such"}, "no Python at /no/such/bin/python", r"VENV=/path\S+ sbatch"
    yield "strategy", [], dist, ["dpp", "--epochs", "2"], {}, "'dpp' is neither", f"sbatch .*{dist} ddp --epochs 2$"
    yield "cuda", [], dist, ["fsdp"], {}, "granted 2 GPUs, torch .* sees 0", f"sbatch .*{dist} fsdp --device cpu$"
    yield "space", [], base, cpu, {"MIN_CACHE_GB": "1e9"}, "GB free, the cache needs", "sbatch .*--cache-dir /path"
    yield "modules", [], base, cpu, {"MODULES": "no/such"}, "MODULES=no/such: .*", "MODULES= sbatch"


@pytest.mark.parametrize("case", [pytest.param(case[1:], id=case[0]) for case in wrong_settings()])
def test_a_wrong_setting_stops_at_once_with_the_right_command(cluster, case):
    sbatch, script, arguments, environment, message, command = case
    if "sees 0" in message and torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    job = cluster.submit(*sbatch, script, *arguments, cwd=ROOT, environment=environment)
    assert job.wait() == "FAILED"
    lines = job.log().splitlines()
    assert job.show()["ExitCode"] == "2:0" and re.search(f"^error: .*{message}.*; do: .*{command}", lines[0]), lines
    assert not [line for line in lines[1:] if "srun" not in line]


def test_a_first_host_without_an_address_stops_the_job(cluster, tmp_path):
    # A scontrol that knows no address, before the real one on the job's path.
    fake = tmp_path / "scontrol"
    fake.write_text(
        '#!/bin/bash\n/usr/bin/env PATH="${PATH#*:}" scontrol "$@" | sed "s/NodeAddr=[^ ]*/NodeAddr=no.invalid/"\n'
    )
    fake.chmod(0o755)
    path = f"{tmp_path}:{cluster.environment['PATH']}"
    job = cluster.submit("run_distributed.sh", "--device", "cpu", cwd=ROOT, environment={"PATH": path})
    assert job.wait() == "FAILED"
    assert re.fullmatch(r"error: the first host, n1, has no address .*; do: .*sbatch .*--exclude=n1 .*\n", job.log())


def test_uneven_gpus_stop_the_job_and_salloc_works_like_sbatch(cluster):
    command = ["salloc", "--nodes=2", "--gpus=3", "bash", "run_distributed.sh", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, env=cluster.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert re.search(
        r"^error: n[12] has . GPUs for this job, n[12] has .; do: .*sbatch .*--gpus-per-node=1 ", done.stderr, re.M
    )


def test_the_scripts_stop_where_the_project_is_not(cluster, tmp_path):
    for script in SCRIPTS:
        job = cluster.submit(str(ROOT / script), cwd=tmp_path)
        assert job.wait() == "FAILED"
        assert job.log().startswith(f"error: {tmp_path} is not the project; do: cd ") and job.log().count("\n") == 1


@pytest.mark.parametrize("script, strategy", [("run_baseline.sh", []), ("run_distributed.sh", ["ddp"])])
def test_without_slurm(script, strategy, options, tmp_path):
    run = ["--runs-dir", "runs", "--run-name", "here", "--epochs", "1"]
    command = ["bash", str(ROOT / script), *strategy, *options, *run]
    done = subprocess.run(command, cwd=tmp_path, env=plain(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    run = record(tmp_path / "runs" / "here")
    assert run["status"] == "finished" and run["world_size"] == (2 if strategy else 1) and run["nodes"] == 1


def test_without_slurm_errors_name_a_command_without_sbatch():
    command = ["bash", "run_distributed.sh", "fdsp", "--run-name", "a b"]
    done = subprocess.run(command, cwd=ROOT, env=plain(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.endswith(f"; do: VENV={sys.prefix} bash run_distributed.sh ddp --run-name 'a b'\n")


@pytest.mark.parametrize(
    "environment, visible, cpu, verdict, gpus",
    [
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2"}, 2, False, "ok", 2),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2"}, 1, False, "no-cuda", 2),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2"}, 0, True, "ok", 2),
        ({"SLURM_JOB_ID": "7"}, 8, False, "no-grant", 8),
        (
            {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0,1"},
            2,
            False,
            "ok",
            2,
        ),  # a Slurm without gres, a user who knows
        ({"SLURM_JOB_ID": "7"}, 0, False, "ok", 0),
        ({}, 4, False, "ok", 4),
        ({}, 4, True, "ok", 0),
    ],
)
def test_only_granted_gpus_are_taken(monkeypatch, tmp_path, environment, visible, cpu, verdict, gpus):
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Some Card")
    result = check_node.inspect(tmp_path / "cache", 0.001, cpu)
    assert result[:2] == (verdict, gpus)
    assert ("Some Card" in result[2]) == (verdict == "ok" and gpus > 0 and not cpu)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("32768\t60999\n", (10000, 32767)),
        ("1024 32767", (32768, 65535)),
        ("15000 65000", (10000, 14999)),
        ("1024 65535", (10000, 65535)),  # nothing is left: any port, as long as it is free
    ],
)
def test_ports_lie_outside_the_ephemeral_range(tmp_path, text, expected):
    (tmp_path / "range").write_text(text)
    assert check_node.port_range(tmp_path / "range") == expected


def test_ports_of_neighbouring_jobs_differ_and_held_ones_are_passed_over():
    first, last = check_node.port_range()
    ports = [check_node.choose_port(number, free=lambda port: True)[0] for number in range(last, last + 500)]
    assert len(set(ports)) == 500 and min(ports) >= first and max(ports) <= last
    held = {last, first}
    port, note = check_node.choose_port(last - first, free=lambda port: port not in held)
    assert port == first + 1 and f"port {last}" in note
    assert check_node.choose_port(1, free=lambda port: False)[0] is None
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not check_node.is_free(server.getsockname()[1])
