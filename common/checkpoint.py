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
import threading
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.errors import Preempted, UserError
from common.model import file_sha256, weights_file
from common.record import default_name

KEEP = 2  # the newest checkpoints of a run
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
STATE = {  # what state.json holds at least
    "step": int, "epoch": int, "loss_sum": float, "windows_seen": int, "train_seconds": float, "epochs": list,
    "scaler": dict, "threshold": (float, int, type(None)), "selection": dict, "experiment": dict,
}  # fmt: skip
SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}  # GradScaler's state
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of a parameter
# Arguments that may differ when a run goes on: they change where or how fast it runs, not what it computes.
HARMLESS = {
    "accumulation", "attention", "cache_dir", "checkpoint_activations", "compile", "cuda_graphs", "data_name",
    "deterministic", "dev_file", "device", "dry_run", "eval_tokens", "hang_minutes", "log_every",
    "max_tokens_per_device", "model", "model_name", "model_path", "n_best", "profile", "questions", "reduce",
    "resume", "run_name", "runs_dir", "save_epochs", "save_in_background", "save_minutes", "save_steps",
    "score_train", "score_untrained", "settings", "shard", "train_file", "zero1",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The state of model and optimizer


def whole_state(model, keep=True):
    """{name: whole tensor on the CPU} of a model; all ranks take part, and those that do not keep it get Nones."""
    wholes = ((name, whole(tensor)) for name, tensor in model.state_dict().items())
    return {name: tensor.cpu() if keep else None for name, tensor in wholes}


def whole(tensor):
    """A tensor put together from all ranks' parts if it is sharded; all ranks take part."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def training_state(model, optimizer, gather, keep=True, buffers=None):
    """(weights, moments), each {name: whole tensor on the CPU}; all ranks take part.

    gather: all ranks' values as a list. keep: False on ranks that only lend their parts; they get empty dicts.
    buffers: {name: tensor} kept from save to save, so that the memory, page-locked for CUDA, is made once.
    """
    weights = [(name, tensor, keep) for name, tensor in model.state_dict().items()]  # FSDP shards its weights here,
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # which evaluation leaves whole
    inner = getattr(optimizer, "optim", optimizer)  # .optim: what ZeRO-1 wraps, a part of the state on each rank
    shared = inner is not optimizer
    buffers = {} if buffers is None else buffers

    def copy(name, tensor, keep):
        tensor = whole(tensor)
        if keep:
            if name not in buffers:
                buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffers[name].copy_(tensor, non_blocking=True)

    moments = [
        (f"{kind}/{names[id(parameter)]}", tensor, keep or shared)
        for parameter, state in inner.state.items()
        for kind, tensor in state.items()
    ]
    for one in (*weights, *moments):
        copy(*one)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    weights = {name: buffers[name] for name, _, kept in weights if kept}
    moments = {name: buffers[name] for name, _, kept in moments if kept}
    if shared:
        moments = {name: tensor for part in gather(moments) for name, tensor in part.items()}
    return weights, moments


@torch.no_grad()
def load_training_state(model, optimizer, weights, moments, distribute):
    """Take over what `training_state` gave, under any strategy; all ranks take part.

    distribute: gives of a whole tensor what this rank holds of a tensor like the second argument.
    """
    for name, tensor in model.state_dict().items():
        tensor.copy_(distribute(weights[name], tensor))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inner = getattr(optimizer, "optim", optimizer)
    for group in inner.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            if f"step/{name}" not in moments:
                continue  # it has had no gradient yet
            state = {"step": moments[f"step/{name}"].to(parameter.device)}
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = torch.zeros_like(parameter)
                state[kind].copy_(distribute(moments[f"{kind}/{name}"], parameter))
            inner.state[parameter] = state


# ---------------------------------------------------------------------------------------------------------------------
# Folders


class Saver:
    """Saves a run's state; rank 0 writes, if wanted in a thread and from a copy, while training goes on.

    As a context manager it waits for the thread at the end.
    """

    def __init__(self, args, sets, folder, rank, gather, log):
        """folder: the RunFolder. gather: all ranks' values as a list."""
        self.folder, self.rank, self.gather, self.log = Path(folder.path) / "checkpoints", rank, gather, log
        self.in_background, self.experiment = args.save_in_background, experiment(args, sets)
        self.buffers, self.thread, self.whole = {}, None, True

    def save(self, model, optimizer, state):
        """Save model, optimizer and `state`, a dict whose "step" names the checkpoint; all ranks take part."""
        self.wait()  # for the buffers
        weights, moments = training_state(model, optimizer, self.gather, self.rank == 0, self.buffers)
        if self.rank == 0:
            state = json.dumps(state | {"experiment": self.experiment})  # now: the thread would see later values
            work = (self.folder, json.loads(state), weights, moments, self.log)
            self.whole = False
            if self.in_background:
                self.thread = threading.Thread(target=self.write, args=work)
                self.thread.start()
            else:
                self.write(*work)

    def write(self, *work):
        self.whole = write(*work)

    def wait(self):
        """Wait until the checkpoint that is being written is whole."""
        if self.thread:
            self.thread.join()
            self.thread = None

    def stopped(self, step):
        """The exception that ends a run as asked, once `save` was called for this step; all ranks take part."""
        self.wait()
        name = self.folder.parent.name
        if self.gather(self.whole)[0]:  # rank 0 knows
            return Preempted(f"stopped as asked, at step {step}; to go on: --resume, with --run-name {name}")
        text = f"stopped as asked, but step {step} is not saved, as the warning says"
        before = "goes on from the checkpoint before it, if there is one"
        return Preempted(f"{text}; --resume, with --run-name {name}, {before}", status=1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()


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


def sync(path):
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path):
    return file_sha256.__wrapped__(path)  # not the cached one: the file may have changed


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


# ---------------------------------------------------------------------------------------------------------------------
# Going on


def experiment(args, sets):
    """What a run that goes on must have in common with the one that it continues: arguments, data and first weights."""
    weights = weights_file(args.model_path)
    arguments = {name: value for name, value in vars(args).items() if name not in HARMLESS}
    data = {name: [questions.sha256, questions.cuts] for name, questions in sets.items() if not questions.part}
    data["model"] = file_sha256(weights) if weights else args.model_name
    return json.loads(json.dumps({"arguments": arguments, "data": data}))


def check_same(path, state, args, sets):
    """UserError with a list of what would make another experiment of the run that `state` is of."""
    saved, own = state["experiment"], experiment(args, sets)
    changed = []
    for part, told in (("arguments", "--{0} was {1} and is {2}"), ("data", "{0}: other contents")):
        before, after = saved.get(part, {}), own[part]
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                changed.append(told.format(name.replace("_", "-"), before.get(name), after.get(name)))
    if changed:
        raise UserError(f"{path}: of another experiment: {'; '.join(changed)}; start a new run, without --resume")


def fits(model, weights, moments):
    """Whether weights have the model's shapes, and moments those of their parameters, for each all three or none."""
    same = all(weights[name].shape == tensor.shape for name, tensor in model.state_dict().items())
    for name, parameter in model.named_parameters():
        shapes = [moments[key].shape if (key := f"{kind}/{name}") in moments else None for kind in MOMENTS]
        same &= shapes in ([None] * 3, [torch.Size(), parameter.shape, parameter.shape])
    return same


def resume(args, model, optimizer, sets, rank, gather, log, distribute=lambda tensor, like: tensor):
    """The state of the checkpoint that --resume means, after loading it into model and optimizer; all ranks take part.

    {} where nothing is to be resumed; what a state holds say the scripts' `save` and Monitor.state, and "folder" is the
    run's, None for a checkpoint copied out of it. distribute: see load_training_state.
    """
    if args.resume is None:
        return {}
    auto = args.resume == "auto"
    place = Path(args.runs_dir) / (args.run_name or default_name()) if auto else Path(args.resume)
    path, state = gather(find(place, log) if rank == 0 else None)[0]
    if path is None:
        if not auto:
            raise UserError(f"{place}: no whole checkpoint there; name a run folder or one of its checkpoints")
        log(f"{place}: no whole checkpoint there: this is a new run")
        return {}
    check_same(path, state, args, sets)
    weights, moments = read(path)
    if weights.keys() != model.state_dict().keys() or not fits(model, weights, moments):
        raise UserError(f"{path}: the weights of another kind of model; start a new run, without --resume")
    if not 1 <= state["epoch"] <= args.epochs:
        raise UserError(f"{path}: damaged: of epoch {state['epoch']}, and there are {args.epochs}")
    load_training_state(model, optimizer, weights, moments, distribute)
    log(f"going on from {path}: epoch {state['epoch']}, step {state['step']}")
    return state | {"folder": run_of(path)}
