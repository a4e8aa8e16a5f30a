"""Checkpoints: all that a run needs to go on where it was, in one format for every strategy and number of ranks.

A checkpoint is a folder, runs/NAME/checkpoints/step-00000120/:

    model.safetensors       the weights, whole and fp32
    optimizer.safetensors   exp_avg, exp_avg_sq and step of every parameter, named KIND/PARAMETER
    state.json              step, epoch, sums of the epoch so far, best epoch, scaler, arguments, data
    manifest.json           size and sha256 of the other three, written last

It appears under its name only when it is whole. Nothing is pickled. Dropout needs no saved state: it is reseeded each
step from the seed, the step and the rank.
"""

import contextlib
import json
import math
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.data.files import digest, sync
from common.errors import Preempted, UserError
from common.run.state import training_state

KEEP = 2  # the newest checkpoints of a run
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
STATE = {  # what state.json holds at least
    "step": int, "epoch": int, "loss_sum": float, "windows_seen": int, "train_seconds": float, "epochs": list,
    "scaler": dict, "threshold": (float, int, type(None)), "selection": dict, "experiment": dict,
}  # fmt: skip
SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}  # GradScaler's state


class Saver:
    """Saves a run's state; rank 0 writes, if wanted in the background and from a copy, while training goes on."""

    def __init__(self, folder, world, experiment, background, wait):
        """folder: of the checkpoints. experiment: a dict kept with each, see `common.run.resume.experiment`.

        background: a common.run.background.Background. wait: until each checkpoint is written.
        """
        self.folder, self.world, self.experiment = Path(folder), world, experiment
        self.background, self.wait = background, wait
        self.buffers, self.whole = {}, True

    def save(self, model, optimizer, state):
        """Save model, optimizer and `state`, a dict whose "step" names the checkpoint; all ranks take part."""
        self.background.wait()  # for the buffers
        weights, moments = training_state(model, optimizer, self.world, self.buffers)
        if self.world.rank == 0:
            state = json.dumps(state | {"experiment": self.experiment})  # now: the thread would see later values
            work = (self.folder, json.loads(state), weights, moments, self.world.log)
            self.whole = False
            self.background.run(self.write, *work)
            if self.wait:
                self.background.wait()

    def write(self, *work):
        self.whole = write(*work)

    def stopped(self, step):
        """The exception that ends a run as asked, once `save` was called for this step; all ranks take part."""
        self.background.wait()
        name = self.folder.parent.name
        if self.world.gather(self.whole)[0]:  # rank 0 knows
            return Preempted(f"stopped as asked, at step {step}; to resume: --resume --run-name {name}")
        text = f"stopped as asked, but step {step} is not saved, as the warning says"
        before = "goes on from the checkpoint before it, if there is one"
        return Preempted(f"{text}; --resume, with --run-name {name}, {before}", status=1)


def write(folder, state, weights, moments, log):
    """Write a checkpoint into `folder` and remove all but the newest; returns whether it is there.

    If it cannot be written (a full disk), the run goes on with a warning, and the checkpoints before stay.
    """
    path, new = folder / f"step-{state['step']:08d}", folder / f".step-{state['step']:08d}.tmp"
    if path.exists():
        with contextlib.suppress(UserError):
            check(path)
            return True  # a stop during evaluation: nothing has changed since
    try:
        for left in (path, *folder.glob(".step-*.tmp")):  # damaged; by a kill
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir(parents=True)
        save_file(weights, new / "model.safetensors")
        save_file(moments, new / "optimizer.safetensors")
        (new / "state.json").write_text(json.dumps(state), encoding="utf-8")
        manifest = {name: {"bytes": (new / name).stat().st_size, "sha256": digest(new / name)} for name in FILES}
        (new / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        for name in (*FILES, "manifest.json", "."):
            sync(new / name)
        new.rename(path)
        sync(folder)
        every = sorted(folder.glob("step-*"))
        past = every[: every.index(path) + 1]
        for old in {*every} - {*past[-KEEP:]}:  # later ones are damaged: the run went on from one before them
            shutil.rmtree(old, ignore_errors=True)
        return True
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        log(f"warning: {path}: cannot be written: {reason}; the run goes on, free some space")
        return False


def check(path):
    """The state of the checkpoint at `path`; UserError if it is not whole."""
    path = Path(path)
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        for name in FILES:
            told = manifest[name]
            if (path / name).stat().st_size != told["bytes"] or digest(path / name) != told["sha256"]:
                raise UserError(f"{path / name}: damaged: it is not what the manifest says")
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        wrong = [name for name, kinds in STATE.items() if not isinstance(state.get(name), kinds)] or absurd(state)
        if wrong:
            raise UserError(f"{path / 'state.json'}: damaged: not what a run writes: {', '.join(wrong)}")
        return state
    except OSError as error:
        raise UserError(f"{path}: no whole checkpoint: {error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path / 'manifest.json'}: damaged: it does not name {', '.join(FILES)}") from None


def absurd(state):
    """Names of what a state of the right types holds and no run would write."""
    counts, sums, best = ("step", "epoch", "windows_seen"), ("loss_sum", "train_seconds"), state["selection"]
    wrong = [name for name in counts if not 0 <= state[name] < 2**53]
    wrong += [name for name in sums if not math.isfinite(state[name])]
    if not all(isinstance(epoch, dict) for epoch in state["epochs"]):
        wrong.append("epochs")
    if not all(isinstance(state["experiment"].get(part, {}), dict) for part in ("arguments", "data")):
        wrong.append("experiment")
    if not state["scaler"].keys() <= SCALER or not all(isinstance(n, int | float) for n in state["scaler"].values()):
        wrong.append("scaler")
    number = isinstance(best.get("best"), int | float | None) and isinstance(best.get("epoch"), int | None)
    if not best.keys() <= {"best", "epoch", "worse"} or not number or not isinstance(best.get("worse", 0), int):
        wrong.append("selection")
    return wrong


def find(place, log=lambda text: None):
    """(path, state) of the newest whole checkpoint at `place`: a checkpoint, a run folder or its checkpoints/.

    (None, None) where there is none; damaged ones are reported and passed over.
    """
    place = Path(place)
    if not os.path.isdir(place):  # os.path: Path's own tests fail on a name too long, or what may not be entered
        return None, None
    candidates = [place] if os.path.exists(place / "manifest.json") else []
    for folder in (place / "checkpoints", place):
        candidates = candidates or sorted(folder.glob("step-*"), reverse=True)
    for path in candidates:
        try:
            return path, check(path)
        except UserError as error:
            log(f"warning: {error}; passed over")
    return None, None


def run_of(path):
    """The folder of the run that the checkpoint at `path` is in; None if it was copied elsewhere."""
    folder = Path(os.path.abspath(path)).parent
    return str(folder.parent) if folder.name == "checkpoints" else None


def read(path):
    """(weights, moments) of a checkpoint that `find` returned."""
    try:
        weights, moments = (load_file(Path(path) / name) for name in FILES[:2])
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    return weights, moments
