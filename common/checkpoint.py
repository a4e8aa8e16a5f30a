"""Checkpoints: all that a run needs to go on where it was, in one format for every strategy and number of ranks.

A checkpoint is a folder, runs/NAME/checkpoints/step-00000120/:

    model.safetensors       the weights, whole and fp32
    optimizer.safetensors   exp_avg, exp_avg_sq and step of every parameter, named KIND/PARAMETER
    state.json              step, epoch, sums of the epoch so far, best epoch, scaler, arguments, data
    manifest.json           size and sha256 of the other three, written last

It appears under its name only when it is whole. Nothing is pickled. Dropout needs no saved state: it is reseeded each
step from the seed, the step and the rank.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.errors import UserError
from common.model import file_sha256
from common.record import default_name

KEEP = 2  # the newest checkpoints of a run
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
# Arguments that may differ when a run goes on: they change where or how fast it runs, not what it computes.
HARMLESS = {
    "accumulation", "attention", "cache_dir", "checkpoint_activations", "compile", "cuda_graphs", "data_name",
    "deterministic", "dev_file", "device", "eval_tokens", "log_every", "max_tokens_per_device", "model", "model_path",
    "model_name", "n_best", "profile", "questions", "reduce", "resume", "run_name", "runs_dir", "save_epochs",
    "save_steps", "score_untrained", "settings", "shard", "train_file", "zero1",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The state of model and optimizer


def whole(tensor):
    """A tensor on the CPU, put together from all ranks' parts if it is sharded; all ranks take part."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().to("cpu", copy=True).contiguous()


def whole_state(model):
    """{name: whole tensor} of a model; all ranks take part."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def training_state(model, optimizer, gather):
    """(weights, moments), each {name: whole tensor}; all ranks take part. gather: all ranks' values as a list."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weights = whole_state(model)
    inner = getattr(optimizer, "optim", optimizer)  # .optim: what ZeRO-1 wraps, a part of the state on each rank
    moments = {
        f"{kind}/{names[id(parameter)]}": whole(tensor)
        for parameter, state in inner.state.items()
        for kind, tensor in state.items()
    }
    if inner is not optimizer:
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


def write(run, weights, moments, state, args, sets, log):
    """Write a checkpoint into the RunFolder `run` and remove all but the newest.

    If it cannot be written (a full disk), the run goes on with a warning, and the checkpoints before stay.
    """
    folder, step = run.path / "checkpoints", state["step"]
    state = state | {"experiment": experiment(args, sets)}
    path, new = folder / f"step-{step:08d}", folder / f".step-{step:08d}.tmp"
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        save_file(weights, new / "model.safetensors")
        save_file(moments, new / "optimizer.safetensors")
        (new / "state.json").write_text(json.dumps(state), encoding="utf-8")
        manifest = {name: {"bytes": (new / name).stat().st_size, "sha256": digest(new / name)} for name in FILES}
        (new / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        for name in (*FILES, "manifest.json", "."):
            sync(new / name)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        return log(f"warning: {path}: cannot be written: {reason}; the run goes on, free some space")
    shutil.rmtree(path, ignore_errors=True)  # a damaged one of the same step
    new.rename(path)
    sync(folder)
    for old in sorted(folder.glob("step-*"))[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


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
        if not isinstance(state, dict) or type(state.get("step")) is not int:
            raise UserError(f"{path / 'state.json'}: damaged: it names no step")
        return state
    except OSError as error:
        raise UserError(f"{path}: no whole checkpoint: {error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path / 'manifest.json'}: damaged: it does not name {', '.join(FILES)}") from None


def find(place, log=lambda text: None):
    """(path, state) of the newest whole checkpoint at `place`: a checkpoint, a run folder or its checkpoints/.

    (None, None) where there is none; damaged ones are reported and passed over.
    """
    place = Path(place)
    candidates = [place] if (place / "manifest.json").exists() else []
    for folder in (place / "checkpoints", place):
        candidates = candidates or sorted(folder.glob("step-*"), reverse=True)
    for path in candidates:
        try:
            return path, check(path)
        except UserError as error:
            log(f"warning: {error}; taking the checkpoint before it")
    return None, None


def read(path):
    """(weights, moments) of a checkpoint that `find` returned."""
    try:
        return tuple(load_file(Path(path) / name) for name in FILES[:2])
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Going on


def experiment(args, sets):
    """What a run that goes on must have in common with the one that it continues: arguments and data."""
    arguments = {name: value for name, value in vars(args).items() if name not in HARMLESS}
    data = {name: [questions.sha256, questions.cuts] for name, questions in sets.items()}
    return json.loads(json.dumps({"arguments": arguments, "data": data}))


def check_same(path, state, args, sets):
    """UserError with a list of what would make another experiment of the run that `state` is of."""
    saved, own = state.get("experiment", {}), experiment(args, sets)
    changed = [
        f"--{name.replace('_', '-')} {saved.get('arguments', {}).get(name)!r} is now {own['arguments'].get(name)!r}"
        for name in sorted({*saved.get("arguments", {}), *own["arguments"]})
        if saved.get("arguments", {}).get(name) != own["arguments"].get(name)
    ]
    changed += [f"the {name} data is other" for name, value in own["data"].items() if saved["data"].get(name) != value]
    if changed:
        raise UserError(f"{path}: of another experiment: {'; '.join(changed)}; start a new run, without --resume")


def resume(args, model, optimizer, sets, rank, gather, log, distribute=lambda tensor, like: tensor):
    """The state of the checkpoint that --resume means, after loading it into model and optimizer; all ranks take part.

    {} where nothing is to be resumed; what a state holds say the scripts' `save` and Monitor.state. distribute: see
    load_training_state.
    """
    if args.resume is None:
        return {}
    auto = args.resume == "auto"
    place = Path(args.runs_dir) / (args.run_name or default_name()) if auto else Path(args.resume)
    path, state = gather(find(place, log) if rank == 0 else None)[0]
    if path is None:
        if not auto:
            raise UserError(f"{place}: no whole checkpoint there; name a run folder or one of its checkpoints")
        return {}
    check_same(path, state, args, sets)
    load_training_state(model, optimizer, *read(path), distribute)
    log(f"going on from {path}: epoch {state['epoch']}, step {state['step']}")
    return state | {"folder": str(path.parent.parent)}
