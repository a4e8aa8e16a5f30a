"""Runs that are asked to stop, or that meet a fault: nothing is lost, and what is said is one clear line."""

import argparse
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import forking
import pytest
import short_runs
import torch
from short_runs import WAYS, launch, record, results, same, stopped_at, undisturbed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter
from tiny import ROOT, SAMPLE
from torch.utils.tensorboard import SummaryWriter

from common import errors
from common.errors import UserError
from common.run import checkpoint, environment, lock
from common.run import record as records
from common.run.curves import Curves
from common.run.interrupts import StopRequest
from common.run.lock import holder_is_gone, process_begun
from common.run.record import RunFolder
from common.run.state import training_state
from common.run.world import World


def test_a_file_beside_the_code_is_no_change_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.git_state() == (None, None)
    (tmp_path / "code.py").write_text("1\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a"]
    for words in (["init", "-q"], ["add", "code.py"], [*identity, "commit", "-qm", "."]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    (tmp_path / "notes.txt").write_text("The ferry was built in 1932.\n")
    assert environment.git_state()[1] is False
    (tmp_path / "code.py").write_text("2\n")
    assert environment.git_state()[1] is True


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return short_runs.prepare(tmp_path_factory.mktemp("faults"))


# Python for the ranks of a run to begin with. Something happens at a certain call of a method.
AT = """
import os, signal, time
import torch
from common.run.agreement import Agreement
from common.run.run import Run
Agreement.INTERVAL = 0
calls = 0

def at(holder, name, number, ranks, what, first=True):
    function = getattr(holder, name)
    def call(*arguments, **named):
        global calls
        calls += 1
        if calls == number and rank in ranks and first:
            what(*arguments)
        return function(*arguments, **named)
    setattr(holder, name, call)

def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)

def request(run, *_):
    (run.folder.path / "stop").touch()
"""

UNTRAINED = """
from common.run import settings
resolve = settings.resolve
def scoring(parser):
    found = resolve(parser)
    found.score_untrained = True
    return found
settings.resolve = scoring
"""

# SIGTERM once more on the way out, while the record is written and while the ranks wait for each other: as it comes
# when Slurm signals all processes, and torchrun its own.
AGAIN = """
from common.run import distributed, record, world
def again(holder, name):
    function = getattr(holder, name)
    setattr(holder, name, lambda *arguments: (terminate(), function(*arguments))[1])
again(record.RunFolder, "__exit__")
for World in (world.World, distributed.World):
    World.finish = staticmethod(lambda finish=World.finish: (terminate(), finish())[1])
"""

STOPS = {  # where: (what is done there, what is said of the step)
    "SIGTERM to one rank in training": (AGAIN + "at(Run, 'log_step', 5, [1], terminate)", "at step 5;"),
    "a file before the first step": (UNTRAINED + "at(Run, 'after_pass', 1, [0], request)", "at step 0;"),
    "a file in training": ("at(Run, 'log_step', 11, [0], request)", "at step 11;"),
    "a file in evaluation": ("at(Run, 'after_pass', 2, [0], request)", "at step 8;"),
    "SIGTERM to all in evaluation": ("at(Run, 'after_pass', 3, [0, 1, 2], terminate)", "at step 16;"),
}


@pytest.mark.parametrize("where", STOPS)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_exactly(setting, where):
    what, told = STOPS[where]
    way = "zero2" if where.startswith("a file") else "ddp 3"
    name = where.replace(" ", "-")
    output = launch(way, setting, name, before=AT + what)
    assert told in output and "stopped as asked" in output and "Traceback" not in output
    assert record(setting, name)["status"] == "preempted"
    assert not (setting[0] / name / "lock").exists() and not (setting[0] / name / "stop").exists()
    launch(way, setting, name, "--resume")
    assert record(setting, name)["status"] == "finished"
    same(results(setting, name), undisturbed(way, setting))


@pytest.mark.parametrize("way, background", [("baseline", []), ("ddp 3", ["--save-in-background"])])
def test_a_stop_that_cannot_be_saved_says_so(setting, way, background):
    name = f"stopped unsaved {way}".replace(" ", "-")
    (setting[0] / name).mkdir()
    for file in ("stop", "checkpoints"):  # no checkpoint can be written into a file
        (setting[0] / name / file).touch()
    output = launch(way, setting, name, *background, fails=True)
    assert "step-00000001: cannot be written: " in output and "Traceback" not in output
    assert "stopped as asked, but step 1 is not saved" in output and "to resume" not in output
    (setting[0] / name / "checkpoints").unlink()
    assert "this is a new run" in launch(way, setting, name, "--resume")
    same(results(setting, name), undisturbed(way, setting))


def test_a_stop_before_training_leaves_no_seconds_of_it(setting):
    launch("baseline", setting, "asked-at-0", before=AT + UNTRAINED + "at(Run, 'after_pass', 1, [0], request)")
    assert checkpoint.find(setting[0] / "asked-at-0")[1]["train_seconds"] == 0


def test_warming_up_takes_as_many_epochs_as_it_needs(setting):
    """Ten steps are more than an epoch of eight."""
    launch("baseline", setting, "warm", "--save-steps", "3")  # one falls between the second epoch's begin and its end
    run = record(setting, "warm")
    first, second = (epoch["train_seconds"] for epoch in run["epochs"])
    assert first < run["seconds"]["warmup"] < first + second


def test_a_request_during_preparation_is_kept(setting):
    (setting[0] / "asked-early").mkdir()
    (setting[0] / "asked-early" / "stop").touch()
    output = launch("baseline", setting, "asked-early")
    assert "stopped as asked, at step 1;" in output
    launch("baseline", setting, "asked-early", "--resume")
    same(results(setting, "asked-early"), undisturbed("baseline", setting))


def test_sigterm_to_torchrun_saves_in_time(setting):
    arguments = [*setting[1], "--run-name", "terminated", "--epochs", "1000"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "distributed_ddp.py", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            if line.startswith("epoch 2: "):
                break
        run.terminate()
        asked = time.monotonic()
        output = run.stdout.read()
    assert time.monotonic() - asked < 25 and "stopped as asked, at step" in output
    assert record(setting, "terminated")["status"] == "preempted"
    _, state = checkpoint.find(setting[0] / "terminated")
    assert state["step"] == record(setting, "terminated")["attempts"][0]["steps"] >= 16


def test_sigterm_before_training_ends_at_once(setting):
    server = forking.server()
    before = AT + "from common.data import cache; at(cache, 'build', 1, [0], lambda *_: (terminate(), time.sleep(60)))"
    options = [*setting[1], "--cache-dir", setting[0] / "cache-early", "--run-name", "early"]
    status, output = server.run("baseline.py", 1, options, before=before)
    assert status == [128 + signal.SIGTERM] and "ended by SIGTERM" in output and "Traceback" not in output
    assert not list((setting[0] / "cache-early").iterdir())  # no half-made cache is left


def test_sigterm_after_the_last_step_changes_nothing(setting):
    output = launch("ddp 3", setting, "late", before=AT + AGAIN)
    assert "stopped" not in output and record(setting, "late")["status"] == "finished"


def test_an_error_is_written_in_one_piece(monkeypatch):
    pieces = []
    monkeypatch.setattr(sys, "stderr", argparse.Namespace(write=pieces.append, flush=lambda: None))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        errors.run(lambda: errors.Parser(prog="x").error("no\nsuch thing"))
    signal.signal(signal.SIGTERM, before)
    assert pieces == ["error: no\\nsuch thing (`python x --help` explains all options)\n"]


def test_an_error_that_all_ranks_meet_is_told_by_one(setting):
    # torchrun ends the others while they leave the word to rank 0.
    before = AT + "from common import errors\nerrors.time.sleep = terminate"
    status, output = forking.server().run("distributed_ddp.py", 3, [*setting[1], "--epochs", "0"], before=before)
    assert status == [2, -signal.SIGTERM, -signal.SIGTERM]
    assert output.count("\n") == 1 and output.startswith("error: argument --epochs: '0' is not")


WORDS = "from common import errors\nerrors.let_others_speak = lambda: None"  # not that of rank 0 alone


@pytest.mark.parametrize("way", ["ddp 3", "zero2"])
def test_an_error_of_rank_0_alone_gives_no_traceback_on_the_others(setting, way):
    name = f"lone error {way}".replace(" ", "-")
    (setting[0] / name).mkdir()
    (setting[0] / name / "lock").touch()
    output = launch(way, setting, name, fails=True, before=WORDS)
    told = [line for line in output.splitlines() if "error" in line]
    assert any(line.startswith(f"error: {setting[0] / name}: taken by the run") for line in told)
    assert all("another rank has ended" in line for line in told if line.startswith("error on rank"))
    assert len(told) == WAYS[way][1] and "Traceback" not in output


def test_a_request_only_rank_0_looks_for(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(tmp_path / "stop") as first, StopRequest(None) as second:
        assert not first.made() and not second.made()
        (tmp_path / "stop").touch()
        assert first.made() and not second.made()
        os.kill(os.getpid(), signal.SIGTERM)
        assert second.made() and not first.signalled
    signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "stop").exists()


BEATS = """
import atexit
from common.run import interrupts
from common.run.run import Run
beats = 0

def beat(self):
    global beats
    beats += 1

def step(self, *arguments, whole=Run.log_step):
    before = beats
    whole(self, *arguments)
    assert beats > before

interrupts.Watchdog.beat, Run.log_step = beat, step
atexit.register(lambda: print(f"beats: {beats}"))
"""


def test_the_watchdog_hears_of_each_step_and_of_each_pass(setting):
    output = launch("baseline", setting, "beats", "--log-every", "1", before=BEATS)
    assert int(output.split("beats: ")[1]) > 16
    scored = ["--evaluate-only", setting[0] / "beats" / "model", "--dev-file", SAMPLE / "dev.json", "--device", "cpu"]
    scored += ["--eval-tokens", 800, "--max-dev-examples", 40, "--runs-dir", setting[0], "--cache-dir", setting[0]]
    status, output = forking.server().run("baseline.py", 1, scored, before=BEATS)
    assert status == [0] and int(output.split("beats: ")[1]) > 1


def test_a_rank_that_hangs_ends_the_run_with_all_stacks(setting):
    before = AT + "at(Run, 'log_step', 3, [1], lambda *_: time.sleep(100))"
    script, ranks, own = WAYS["zero1"]
    options = [*setting[1], *own, "--run-name", "hanging", "--hang-minutes", "0.2"]
    status, output = forking.server().run(script, ranks, options, before=before, seconds=90)
    assert all(status)
    # Both ranks write at the same moment: each piece is whole.
    told = re.split(r"error: rank (?=\d: no progress for 12 s .*; it stands here:\n)", output)[1:]
    assert sorted(piece[0] for piece in told) == ["0", "1"]
    for piece in told:
        lines = piece.splitlines()[1:]
        main = lines[lines.index("Thread MainThread (innermost call first):") + 1 :]
        assert all(re.fullmatch(r'  File "[^"]+", line \d+ in \S+', line) for line in main[:10])
        assert any(line.endswith((" in train_step", " in read", " in call")) for line in main)
        assert any(line.endswith(" in main") for line in main)
        assert ("in <lambda>" in piece) == (piece[0] == "1")


def test_a_rank_that_holds_the_interpreters_lock_shows_its_stack_too(setting):
    before = AT + "import ctypes; at(Run, 'log_step', 3, [1], lambda *_: ctypes.PyDLL(None).sleep(100))"
    script, ranks, own = WAYS["zero1"]
    options = [*setting[1], *own, "--run-name", "locked", "--hang-minutes", "0.2"]
    status, output = forking.server().run(script, ranks, options, before=before, seconds=90)
    assert all(status)
    waiting, locked = output.split("Timeout (0:00:14.500000)!", 1)
    assert "error: rank 0: no progress for 12 s" in waiting and "in main" in waiting
    assert "error: rank 1" not in output and "in <lambda>" in locked and "in main" in locked


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"  # stands for a full disk


def test_a_full_disk_leaves_the_last_checkpoint(setting):
    name = stopped_at("baseline", setting, 6)
    output = launch("baseline", setting, name, "--resume", "--save-steps", "1", before=LIMIT, fails=True)
    assert "step-00000007: cannot be written: " in output and "the run goes on, free some space" in output
    assert "Traceback" not in output and output.strip().splitlines()[-1].startswith("error: ")
    assert "File too large" in output.strip().splitlines()[-1]  # the model at the epoch's end must be written
    assert record(setting, name)["status"] == "failed" and checkpoint.find(setting[0] / name)[1]["step"] == 6
    launch("baseline", setting, name, "--resume")
    same(results(setting, name), undisturbed("baseline", setting))


def test_going_on_in_another_folder_that_cannot_take_the_results(setting):
    name = stopped_at("baseline", setting, 10)
    output = launch("baseline", setting, "no-room", "--resume", str(setting[0] / name), before=LIMIT, fails=True)
    last = output.strip().splitlines()[-1]
    assert "Traceback" not in output and last.startswith("error: ") and "File too large" in last and name in last


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of `size` bytes in a new folder; skips where this user may not mount one."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


# Before a step of the second epoch somebody else's file takes the last byte of the disk.
FILL = """
def fill(run, *_):
    with open(run.folder.path / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            print("filled:", error.strerror)
"""


def test_on_a_disk_too_small_for_another_checkpoint_the_run_goes_on(setting):
    undisturbed("baseline", setting)
    stopped_at("baseline", setting, 6)
    written = sum(path.stat().st_size for path in (setting[0] / "baseline-to-6").rglob("*") if path.is_file())
    with small_disk(setting[0] / "small", int(1.8 * written)):
        output = launch("baseline", setting, "small", "--save-steps", "3")
        failed = re.findall(r"step-(\d+): cannot be written: .*No space left on device.*; the run goes on", output)
        assert [int(step) for step in failed] == [9, 12, 15]  # two fit, two and a model do not
        assert checkpoint.find(setting[0] / "small")[1]["step"] == 6
        same(results(setting, "small"), undisturbed("baseline", setting))


def test_a_disk_that_fills_up_ends_the_run_with_one_line_and_nothing_is_lost(setting):
    with small_disk(setting[0] / "filled", 128 << 20):
        fills = AT + FILL + "at(Run, 'log_step', 11, [0], fill)"
        output = launch("baseline", setting, "filled", "--save-steps", "5", before=fills, fails=True)
        assert "filled: No space left on device" in output and "Traceback" not in output
        last = output.strip().splitlines()[-1]
        assert last.startswith("error: ") and "No space left on device" in last
        assert checkpoint.find(setting[0] / "filled")[1]["step"] == 10
        (setting[0] / "filled" / "filler").unlink()
        launch("baseline", setting, "filled", "--resume")
        same(results(setting, "filled"), undisturbed("baseline", setting))


def test_saving_in_the_background_gives_the_same(setting):
    options = ["--save-in-background", "--save-steps", "3"]
    launch("zero1", setting, "background", *options)
    same(results(setting, "background"), undisturbed("zero1", setting))
    checkpoints = sorted((setting[0] / "background" / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step-00000012", "step-00000015"]
    launch("zero1", setting, "after-background", "--resume", str(checkpoints[0]))
    same(results(setting, "after-background"), undisturbed("zero1", setting))


def test_saving_by_minutes(setting):
    launch("baseline", setting, "minutes", "--save-minutes", "0.0001", before=AT)
    steps = sorted(path.name for path in (setting[0] / "minutes" / "checkpoints").iterdir())
    assert steps == ["step-00000015", "step-00000016"]
    same(results(setting, "minutes"), undisturbed("baseline", setting))


MEMORY = """
from common.model.span import SpanModel
def limited(self, batch, forward=SpanModel.forward):
    if len(batch.input_ids) > 900:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return forward(self, batch)
SpanModel.forward = limited
"""


@pytest.mark.parametrize("way", ["baseline", "zero2"])
def test_out_of_memory_names_a_number_that_fits(setting, way):
    name, options = f"memory-{way}", ["--batch-size", "24"]
    output = launch(way, setting, name, *options, before=AT + MEMORY, fails=True)
    line = next(line for line in output.splitlines() if line.startswith("error"))
    assert "out of memory on a micro-batch of" in line and "Traceback" not in output
    number = line.split("--max-tokens-per-device ")[1].split("`")[0]
    while True:  # half of what does not fit may not fit either; then the next line says so
        status, output = forking.server().run(
            WAYS[way][0], WAYS[way][1], [*setting[1], *WAYS[way][2], *options, "--run-name", f"{name}-{number}",
            "--max-tokens-per-device", number], before=AT + MEMORY,
        )  # fmt: skip
        if not any(status):
            break
        smaller = output.split("--max-tokens-per-device ")[1].split("`")[0]
        assert int(smaller) < int(number)
        number = smaller
    assert record(setting, f"{name}-{number}")["status"] == "finished"


def test_a_clock_that_is_set_back_changes_nothing(setting):
    before = "import time; real = time.time; count = [0]\n"
    before += "def back(): count[0] += 1; return real() - 3600 * count[0]\ntime.time = back"
    launch("baseline", setting, "clock", before=before)
    same(results(setting, "clock")[:3], undisturbed("baseline", setting)[:3])
    run = record(setting, "clock")
    assert run["attempts"][0]["seconds"] > 0 and all(epoch["train_seconds"] > 0 for epoch in run["epochs"])


def test_a_second_run_in_the_same_folder_is_refused(setting):
    # The first lets the second try while it trains.
    second = [*setting[1], "--run-name", "twice", "--resume"]
    before = AT + (
        "import json, subprocess, sys\n"
        f"command = [sys.executable, 'baseline.py', *json.loads({json.dumps(json.dumps(second))})]\n"
        "def other(*_):\n"
        "    done = subprocess.run(command, capture_output=True, text=True)\n"
        "    print('second:', done.returncode, done.stderr.splitlines()[-1], flush=True)\n"
        "at(Run, 'log_step', 4, [0], other)"
    )
    output = launch("baseline", setting, "twice", before=before)
    assert "second: 2 error: " in output and "twice: taken by the run that its lock names (host " in output
    same(results(setting, "twice"), undisturbed("baseline", setting))


def test_whose_lock_may_be_taken_over(monkeypatch):
    mine = {"host": "here", "pid": os.getpid(), "begun": process_begun(os.getpid()), "job_id": "7"}
    assert not holder_is_gone(mine, mine)
    assert holder_is_gone(mine | {"begun": 1}, mine)  # another process has its number now
    assert holder_is_gone(mine | {"host": "elsewhere"}, mine)  # the same job, requeued to another node
    monkeypatch.setattr(lock, "job_is_gone", lambda job: job == "6")
    assert holder_is_gone(mine | {"host": "elsewhere", "job_id": "6"}, mine)
    assert not holder_is_gone(mine | {"host": "elsewhere", "job_id": "8"}, mine)
    assert not holder_is_gone(mine | {"host": "elsewhere", "job_id": None}, mine)


DEEP = pytest.param("[" * 100_000, id="deep")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"attempts": 5}', '{"attempts": "ab", "started": 1}', DEEP, '{"started": 1']
)
def test_a_damaged_record_is_begun_anew(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(text)
    with RunFolder(tmp_path, "run", resume=True):
        pass
    written = json.loads((tmp_path / "run" / "run.json").read_text())
    assert written["status"] == "finished" and len(written["attempts"]) == 1


def scalars(folder):
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars("step/loss")] if events.Tags()["scalars"] else []


def test_damaged_curves_do_not_end_a_run(tmp_path):
    """What can be read of them goes on, and nothing but scalars is taken from them."""
    with SummaryWriter(tmp_path) as writer:
        writer.add_histogram("step/loss", torch.randn(9), 0)
        for step in (1, 2, 3):
            writer.add_scalar("step/loss", 1 / step, step)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    broken = path.with_name("events.broken")
    with open(broken, "wb") as file:
        RecordWriter(file).write(b"\xff" * 9)  # the checksum is right, and the content none of TensorBoard's
    Curves(tmp_path, {"step": 2, "epochs": []}).close()
    assert scalars(tmp_path) == [(1, 1.0), (2, 0.5)]
    dice = random.Random(0)
    for _ in range(50):
        folder = tmp_path / "damaged"
        folder.mkdir()
        damaged = bytearray(whole[: dice.randrange(len(whole))])
        if damaged:
            damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        (folder / "events.damaged").write_bytes(damaged)
        Curves(folder, {"step": 2, "epochs": []}).close()
        assert scalars(folder) in ([], [(1, 1.0)], [(1, 1.0), (2, 0.5)])
        shutil.rmtree(folder)


def test_a_record_never_names_an_epoch_whose_files_could_not_be_written(tmp_path):
    """What is given to the background is written in order. After a failure nothing more is, and the run fails."""
    done = []

    def fail():
        raise UserError("no room for the model")

    def on_disk():
        return [epoch["epoch"] for epoch in records.read_record(tmp_path / "run")["epochs"]]

    with pytest.raises(UserError, match="no room for the model"), RunFolder(tmp_path, "run") as folder:
        folder.background.run(done.append, "files of epoch 1")
        folder.record["epochs"].append({"epoch": 1, "best": True})
        folder.save()
        folder.background.wait()
        assert done and on_disk() == [1]
        folder.background.run(fail)
        folder.background.run(done.append, "what comes later")
        folder.record["epochs"].append({"epoch": 2, "best": True})
        folder.save()
    assert done == ["files of epoch 1"] and on_disk() == [1]
    assert records.read_record(tmp_path / "run")["status"] == "failed"
    assert "no room" in records.read_record(tmp_path / "run")["error"]


def test_a_finished_run_without_a_checkpoint_is_not_begun_anew(tmp_path):
    with RunFolder(tmp_path, "run"):
        records.check_free(tmp_path, "run", taken_over=True)
    with pytest.raises(UserError, match="holds a finished run, and no checkpoint"):
        RunFolder(tmp_path, "run", resume=True)
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    records.check_free(tmp_path, "run", taken_over=True)
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(UserError, match="holds a run already"):  # whose checkpoints would be taken for the new one's
        RunFolder(tmp_path, "run")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"host": 1}', '{"host": "a", "pid": []}', DEEP])
def test_a_lock_that_says_nothing_is_left_alone(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text(text)
    with pytest.raises(UserError, match=r"remove \S+lock if that run is gone"):
        RunFolder(tmp_path, "run", resume=True)
    assert (tmp_path / "run" / "lock").read_text() == text


def test_a_read_only_folder_is_told_before_the_work(setting, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(UserError, match="not a folder that can be written to"):
        records.check_free(setting[0], "read-only")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    for runs_dir, name in ((tmp_path / ("x" * 300), "run"), (tmp_path, "x" * 300)):
        with pytest.raises(UserError, match="cannot be made: File name too long"):
            RunFolder(runs_dir, name)
        with pytest.raises(UserError, match="cannot be made: File name too long"):
            RunFolder(runs_dir, name, resume=True)


def test_which_run_must_be_said(setting):
    script, ranks, _ = WAYS["baseline"]
    status, output = forking.server().run(script, ranks, [*setting[1], "--resume"])
    assert status == [2] and "--resume: of which run?" in output and output.count("\n") == 1


def test_gathering_leaves_nothing_where_nothing_is_kept():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    world, buffers = World("cpu"), {}
    world.rank = 1
    assert training_state(model, optimizer, world, buffers) == ({}, {}) and not buffers
    world.rank = 0
    weights, moments = training_state(model, optimizer, world, buffers)
    assert set(moments) == {f"{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq", "step") for name in weights}
    again, _ = training_state(model, optimizer, world, buffers)
    assert all(again[name].data_ptr() == weights[name].data_ptr() for name in weights)
