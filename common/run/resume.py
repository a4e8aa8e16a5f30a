"""Resuming: whether a checkpoint belongs to this experiment, and loading it."""

import json
from pathlib import Path

from common.args import classes
from common.errors import UserError
from common.model.finding import file_sha256, weights_file
from common.run.checkpoint import find, read, run_of
from common.run.record import default_name
from common.run.state import fits, load_training_state


def experiment(args, sets):
    """What a resumed run must have in common with the one it continues: arguments, data and first weights."""
    weights, kinds = weights_file(args.model_path), classes()
    arguments = {name: value for name, value in vars(args).items() if kinds.get(name) == "experiment"}
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


def resume(args, world, sets, model, optimizer):
    """The state of the checkpoint that --resume means, after loading it into model and optimizer; all ranks take part.

    {} for a new run. Otherwise what `common.run.run.Run.save` wrote, and "folder": the run's, None for a checkpoint
    copied out of it. UserError for a checkpoint of another experiment, a damaged one, or none where one was named.
    """
    if args.resume is None:
        return {}
    auto = args.resume == "auto"
    place = Path(args.runs_dir) / (args.run_name or default_name()) if auto else Path(args.resume)
    path, state = world.gather(find(place, world.log) if world.rank == 0 else None)[0]
    if path is None:
        if not auto:
            raise UserError(f"{place}: no whole checkpoint there; name a run folder or one of its checkpoints")
        world.log(f"{place}: no whole checkpoint there: this is a new run")
        return {}
    check_same(path, state, args, sets)
    weights, moments = read(path)
    if weights.keys() != model.state_dict().keys() or not fits(model, weights, moments):
        raise UserError(f"{path}: the weights of another kind of model; start a new run, without --resume")
    if not 1 <= state["epoch"] <= args.epochs:
        raise UserError(f"{path}: damaged: of epoch {state['epoch']}, and there are {args.epochs}")
    load_training_state(model, optimizer, weights, moments, world)
    world.log(f"resuming from {path}: epoch {state['epoch']}, step {state['step']}")
    return state | {"folder": run_of(path)}
