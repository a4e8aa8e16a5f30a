"""A run that goes on from a checkpoint gives what the undisturbed run gives: to the bit on the same ranks."""

import json
import os
import shutil
from pathlib import Path

import forking
import pytest
import short_runs
import torch
from short_runs import WAYS, launch, record, results, same, stopped_at, undisturbed
from tiny import SAMPLE

from common import errors
from common.errors import UserError
from common.run import checkpoint
from common.run import record as records
from common.run.lock import process_begun
from common.run.record import RunFolder


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return short_runs.prepare(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("way", WAYS)
def test_resuming_mid_epoch_is_exact(setting, way):
    expected = undisturbed(way, setting)
    name = stopped_at(way, setting, 5)
    assert record(setting, name)["status"] == "running"
    output = launch(way, setting, name, "--resume")
    assert "resuming from" in output and "step 5" in output
    same(results(setting, name), expected)
    assert record(setting, name)["status"] == "finished" and len(record(setting, name)["attempts"]) == 2


@pytest.mark.parametrize("step", [8, 11, 16])  # an epoch's end, the second epoch, after the last step
def test_resuming_at_an_epochs_end_and_in_the_second(setting, step):
    expected = undisturbed("baseline", setting)
    name = stopped_at("baseline", setting, step)
    launch("baseline", setting, name, "--resume")
    same(results(setting, name), expected)


def test_resuming_twice_and_in_another_folder(setting):
    expected = undisturbed("baseline", setting)
    first = stopped_at("baseline", setting, 3)
    checkpoints = sorted((setting[0] / first / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step-00000003"]
    launch("baseline", setting, "elsewhere", "--resume", str(setting[0] / first), "--save-steps", "4")
    same(results(setting, "elsewhere"), expected)
    again = launch("baseline", setting, "once-more", "--resume", str(setting[0] / "elsewhere"))
    assert "step 16" in again  # the newest of the two that are kept
    same(results(setting, "once-more"), expected)


def test_early_stopping_goes_on_counting(setting):
    options = ["--learning-rate", "0", "--patience", "2", "--epochs", "5"]
    stopped = [*options, "--save-steps", "9"]
    whole = launch("baseline", setting, "patient-whole", *options)
    launch("baseline", setting, "patient", *stopped, fails=True, before=short_runs.END_AT.format(step=18))
    resumed = launch("baseline", setting, "patient", *options, "--resume")
    assert "no better f1 for 2 epochs" in resumed and "epoch 3" in whole
    same(results(setting, "patient"), results(setting, "patient-whole"))


def test_nothing_to_resume_is_a_new_run(setting):
    launch("baseline", setting, "fresh", "--resume")
    same(results(setting, "fresh"), undisturbed("baseline", setting))
    output = launch("baseline", setting, "absent", "--resume", str(setting[0] / "nowhere"), fails=True)
    assert "no whole checkpoint" in output and output.count("error") == 1


@pytest.mark.parametrize("before, after", [("ddp 4", "zero2"), ("zero3", "baseline"), ("baseline", "zero1")])
def test_another_strategy_goes_on_with_the_same_batches(setting, before, after):
    """To the tolerance of the parity tests: dropout differs between ranks, so it is off here."""
    expected_name = f"plain-{after}".replace(" ", "-")
    launch(after, setting, expected_name, "--dropout", "0")
    name = f"{before} then {after}".replace(" ", "-")
    launch(before, setting, f"{name}-begun", "--dropout", "0", "--save-steps", "9")
    launch(after, setting, name, "--dropout", "0", "--resume", str(setting[0] / f"{name}-begun"))
    ways = [(one["strategy"], one["world_size"]) for one in record(setting, name)["attempts"]]
    runs = [record(setting, one) for one in (f"{name}-begun", name)]
    assert ways == [(run["strategy"], run["world_size"]) for run in runs]
    assert all(one["seconds"] == run["seconds"]["total"] for one, run in zip(runs[1]["attempts"], runs, strict=True))
    ours, theirs = results(setting, name), results(setting, expected_name)
    for epoch, other in zip(ours[2], theirs[2], strict=True):
        assert epoch["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
    assert ours[1] == theirs[1]


@pytest.mark.parametrize(
    "options, told",
    [
        (["--learning-rate", "2e-3"], "--learning-rate was 0.001 and is 0.002"),
        (["--max-train-examples", "50"], "train: other contents"),
    ],
)
def test_another_experiment_is_refused(setting, options, told):
    undisturbed("baseline", setting)
    begun = setting[0] / "other-begun"
    if not begun.exists():
        launch("baseline", setting, begun.name, "--save-epochs", "1")
    output = launch("baseline", setting, "other", *options, "--resume", str(begun), fails=True)
    assert told in output and "Traceback" not in output


def test_an_evaluation_does_not_replace_a_training(setting):
    launch("baseline", setting, "kept", "--save-epochs", "1")
    before = record(setting, "kept")
    arguments = ["--evaluate-only", str(setting[0] / "kept" / "model"), "--dev-file", str(SAMPLE / "dev.json")]
    arguments += ["--device", "cpu", "--runs-dir", str(setting[0]), "--run-name", "kept", "--resume"]
    arguments += ["--cache-dir", str(setting[0] / "cache")]
    status, output = forking.server().run("baseline.py", 1, arguments)
    assert status == [2] and "kept: holds a training" in output and record(setting, "kept") == before
    again = [*arguments[:-5], "--run-name", "evaluated", *arguments[-3:]]
    for _ in range(2):  # the second as after a requeue
        assert forking.server().run("baseline.py", 1, again)[0] == [0]
        path = setting[0] / "evaluated" / "run.json"
        path.write_text(path.read_text().replace('"status": "finished"', '"status": "running"'))


STATE = {"epoch": 1, "loss_sum": 0.0, "windows_seen": 0, "train_seconds": 0.0, "epochs": [], "scaler": {}}
STATE |= {"threshold": None, "selection": {}, "experiment": {}}


@pytest.fixture
def kept(tmp_path):
    """Two checkpoints on disk."""
    for step in (1, 2, 3):
        tensors = {"a": torch.full((3,), float(step))}
        checkpoint.write(
            tmp_path / "checkpoints", STATE | {"step": step}, tensors, {"step/a": torch.tensor(1.0)}, print
        )
    return tmp_path


def test_the_newest_two_are_kept(kept):
    assert sorted(path.name for path in (kept / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    path, state = checkpoint.find(kept)
    assert state["step"] == 3 and torch.equal(checkpoint.read(path)[0]["a"], torch.full((3,), 3.0))


def test_after_damaged_ones_new_ones_are_kept(kept):
    """A run that has found none whole begins anew, below their steps."""
    for path in (kept / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
    checkpoint.write(kept / "checkpoints", STATE | {"step": 1}, {}, {}, print)
    assert [path.name for path in (kept / "checkpoints").iterdir()] == ["step-00000001"]
    assert checkpoint.find(kept)[1]["step"] == 1


def test_the_gradient_scalers_state_is_known():
    assert torch.amp.GradScaler("cpu").state_dict().keys() == checkpoint.SCALER


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "model.safetensors").write_bytes(b"\0" * 80),
        lambda path: (path / "optimizer.safetensors").unlink(),
        lambda path: (path / "manifest.json").write_text("{"),
        lambda path: (path / "manifest.json").write_text("[[[]]]"),
        lambda path: (path / "manifest.json").unlink(),
        lambda path: (path / "state.json").write_text("{}"),
        lambda path: shutil.rmtree(path),
    ],
)
def test_of_a_damaged_checkpoint_the_one_before_is_taken(kept, damage):
    damage(kept / "checkpoints" / "step-00000003")
    said = []
    path, state = checkpoint.find(kept, said.append)
    assert state["step"] == 2 and path.name == "step-00000002"
    assert len(said) == (1 if (kept / "checkpoints" / "step-00000003").exists() else 0)
    damage(kept / "checkpoints" / "step-00000002")
    assert checkpoint.find(kept) == (None, None)


def test_the_run_of_a_checkpoint(kept, monkeypatch):
    """Named in full, from within its folder, or copied out of the run."""
    one = kept / "checkpoints" / "step-00000003"
    assert checkpoint.run_of(one) == str(kept)
    for place, name in ((one.parent, one.name), (one, "."), (kept, f"checkpoints/{one.name}")):
        monkeypatch.chdir(place)
        path, _ = checkpoint.find(name)
        assert checkpoint.run_of(path) == str(kept)
    shutil.copytree(one, kept / "backup" / one.name)
    assert checkpoint.run_of(checkpoint.find(kept / "backup")[0]) is None


def test_the_best_model_goes_with_the_run(tmp_path):
    (tmp_path / "before" / "model").mkdir(parents=True)
    saved = {"epochs": [{}], "selection": {"epoch": 1, "best": 50.0, "worse": 0}}
    with RunFolder(tmp_path, "after") as folder:
        folder.resume_from(saved | {"folder": str(tmp_path / "before")})
    assert (tmp_path / "after" / "model").is_dir()
    told = r"alone/model: absent, .* best epoch, 1, .* copy that run's folder whole"
    with pytest.raises(UserError, match=told), RunFolder(tmp_path, "alone") as folder:
        folder.resume_from(saved | {"folder": None})  # the checkpoint was copied out of the run's folder
    with RunFolder(tmp_path, "none") as folder:
        folder.resume_from(saved | {"folder": None, "selection": {"epoch": None}})


def test_attempts_are_taken_over_once(tmp_path):
    """A job that was requeued before its first checkpoint takes the same run over once more."""
    with RunFolder(tmp_path, "before") as folder:
        folder.update({"strategy": "baseline", "world_size": 1, "hosts": ["n2", "n1", "n1"]})
    for _ in range(2):
        with RunFolder(tmp_path, "after", resume=True) as folder:
            folder.resume_from({"folder": str(tmp_path / "before")})
            folder.update({"strategy": "ddp", "world_size": 2, "arguments": {"zero1": True}})
            folder.record["status"] = "running"
        (tmp_path / "after" / "run.json").write_text(json.dumps(folder.record | {"status": "preempted"}))
    ways = [(one["strategy"], one["world_size"], one["zero1"]) for one in folder.record["attempts"]]
    assert ways == [("baseline", 1, False), ("ddp", 2, True), ("ddp", 2, True)]
    assert folder.record["attempts"][0]["hosts"] == ["n1", "n2"]


def test_a_model_that_a_killed_start_had_moved_away_is_back(tmp_path):
    """It was replaced by two renames, and the kill came between them, or after both."""
    saved = {"epochs": [{}], "selection": {"epoch": 1}, "folder": str(tmp_path / "killed")}
    for name in ("model.12.new", "model.12.old", "model-last", "model-last.12.old"):
        (tmp_path / "killed" / name).mkdir(parents=True)
        (tmp_path / "killed" / name / "weights").write_text(name)
    with RunFolder(tmp_path, "killed", resume=True) as folder:
        folder.resume_from(saved)
    assert {path.name for path in (tmp_path / "killed").glob("model*")} == {"model", "model-last"}
    assert (tmp_path / "killed" / "model" / "weights").read_text() == "model.12.old"
    assert (tmp_path / "killed" / "model-last" / "weights").read_text() == "model-last"


def test_so_it_is_in_the_folder_that_takes_the_run_over(tmp_path):
    (tmp_path / "killed" / "model.12.old").mkdir(parents=True)
    (tmp_path / "killed" / "model.12.old" / "weights").touch()
    with RunFolder(tmp_path, "after") as folder:
        folder.resume_from({"selection": {"epoch": 1}, "folder": str(tmp_path / "killed")})
    assert (tmp_path / "after" / "model" / "weights").exists()


def test_a_run_that_ends_while_its_record_begins_leaves_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "environment", errors.end_at_once)  # SIGTERM while git is asked
    with pytest.raises(errors.Preempted):
        RunFolder(tmp_path, "run").__enter__()
    assert not (tmp_path / "run" / "lock").exists()


def test_what_cannot_be_written_leaves_the_others(kept):
    said = []
    (kept / "checkpoints" / ".step-00000004.tmp").write_text("in the way")
    checkpoint.write(kept / "checkpoints", STATE | {"step": 4}, {}, {}, said.append)
    assert checkpoint.find(kept)[1]["step"] == 3 and "the run goes on" in said[0]


def test_no_pickle_anywhere(kept):
    names = {path.name for path in kept.rglob("*") if path.is_file()}
    assert names == {*checkpoint.FILES, "manifest.json"}
    assert "pickle" not in Path(checkpoint.__file__).read_text().replace("Nothing is pickled", "")


def test_running_jobs_keep_their_lock(setting, tmp_path):
    (tmp_path / "run").mkdir()
    lock = {"host": os.uname().nodename, "pid": os.getpid(), "begun": process_begun(os.getpid()), "job_id": None}
    (tmp_path / "run" / "lock").write_text(json.dumps(lock))
    with pytest.raises(UserError, match="taken by the run"):
        RunFolder(tmp_path, "run", resume=True)
    (tmp_path / "run" / "lock").write_text(json.dumps(lock | {"pid": 2**22 + 1}))  # a process that is no more
    RunFolder(tmp_path, "run", resume=True)
