"""The state of model and optimizer as whole tensors, whatever holds them: one process, DDP, ZeRO-1 or FSDP."""

import torch

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of a parameter


def whole_state(model, keep=True):
    """{name: copy of the whole tensor on the CPU} of a model; all ranks take part. Nones for one that keeps nothing."""
    wholes = ((name, whole(tensor)) for name, tensor in model.state_dict().items())
    return {name: tensor.to("cpu", copy=True) if keep else None for name, tensor in wholes}


def whole(tensor):
    """A tensor put together from all ranks' parts if it is sharded; all ranks take part."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def training_state(model, optimizer, world, buffers):
    """(weights, moments), each {name: whole tensor on the CPU}; all ranks take part.

    Ranks other than 0 only lend their parts and get empty dicts. buffers: a dict kept from save to save, so that the
    memory, page-locked for CUDA, is made once.
    """
    keep = world.rank == 0
    weights = [(name, tensor, keep) for name, tensor in model.state_dict().items()]  # FSDP shards its weights here,
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # which evaluation leaves whole
    inner = getattr(optimizer, "optim", optimizer)  # .optim: what ZeRO-1 wraps, a part of the state on each rank
    shared = inner is not optimizer

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
        moments = {name: tensor for part in world.gather(moments) for name, tensor in part.items()}
    return weights, moments


@torch.no_grad()
def load_training_state(model, optimizer, weights, moments, world):
    """Load what `training_state` gave, under any strategy; all ranks take part."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(world.part_of(weights[name], tensor))
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
                state[kind].copy_(world.part_of(moments[f"{kind}/{name}"], parameter))
            inner.state[parameter] = state


def fits(model, weights, moments):
    """Whether weights have the model's shapes, and moments those of their parameters, for each all three or none."""
    same = all(weights[name].shape == tensor.shape for name, tensor in model.state_dict().items())
    for name, parameter in model.named_parameters():
        shapes = [moments[key].shape if (key := f"{kind}/{name}") in moments else None for kind in MOMENTS]
        same &= shapes in ([None] * 3, [torch.Size(), parameter.shape, parameter.shape])
    return same
