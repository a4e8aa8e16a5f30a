"""TODO."""

import json
from pathlib import Path

from common.errors import UserError
from common.model.finding import file_sha256, weights_file
from common.run.checkpoint import find, read, run_of
from common.run.record import default_name
from common.run.state import fits, load_training_state

# Arguments that may differ when a run goes on: they change where or how fast it runs, not what it computes.
HARMLESS = {
    "accumulation", "attention", "cache_dir", "checkpoint_activations", "compile", "cuda_graphs", "data_name",
    "deterministic", "dev_file", "device", "dry_run", "eval_tokens", "hang_minutes", "log_every",
    "max_tokens_per_device", "model", "model_name", "model_path", "n_best", "profile", "questions", "reduce",
    "resume", "run_name", "runs_dir", "save_epochs", "save_in_background", "save_minutes", "save_steps",
    "score_train", "score_untrained", "settings", "shard", "train_file", "zero1",
}  # fmt: skip


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
