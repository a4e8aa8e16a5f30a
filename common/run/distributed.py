"""What the distributed scripts need beside their loop: ranks, sums, gathers, a way out."""

import datetime
import gc
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from common.errors import UserError
from common.run.interrupts import watchdog


def read_ranks():
    """(rank, local rank, world size), as torchrun states them."""
    try:
        return tuple(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    except KeyError:
        raise UserError(
            "started without torchrun: `torchrun --standalone --nproc-per-node=2 SCRIPT …` on one machine, "
            "`sbatch run_distributed.sh` on a cluster"
        ) from None


def start(device, hang_minutes=None):
    """Make the process group: NCCL on GPUs, gloo on CPUs; all ranks take part.

    From here on a rank that makes no progress for hang_minutes ends the run and shows where each rank stands; the
    group's own time limit, which does not, comes later. None leaves that to the group.
    """
    limit = None
    if hang_minutes is not None:
        watchdog.watch(int(os.environ["RANK"]), 60 * hang_minutes)
        limit = datetime.timedelta(minutes=2 * hang_minutes + 1)
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, timeout=limit)
    else:
        dist.init_process_group("gloo", timeout=limit)


def sharding_mesh(shard, device):
    """The device mesh for fully_shard: all ranks in a row, or for "hsdp" nodes times the ranks of a node.

    Under zero2 and zero3 every rank holds an equal part of all; under hsdp each node holds a whole copy in parts.
    """
    ranks = dist.get_world_size()
    if shard == "hsdp":
        a_node = int(os.environ["LOCAL_WORLD_SIZE"])
        return init_device_mesh(device.type, (ranks // a_node, a_node), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))


def all_sum(tensor):
    """The sum of `tensor` over all ranks; all ranks take part."""
    dist.all_reduce(tensor)
    return tensor


def gather(value):
    """[value of rank 0, value of rank 1, …] of any picklable values, on every rank; all ranks take part."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_as(dtype):
    """A communication hook for DistributedDataParallel: a bucket's sum over all ranks, in place, sent in this type.

    Without a hook, DDP takes the mean, for which it divides each gradient in a kernel of its own. The hook's state is
    the SpanModel. The word embeddings' gradient is the last to be ready, so that nothing hides its way: of it only the
    rows of the words that some rank has met are sent, since all others are zero.
    """

    def summed(tensor, put):
        return dist.all_reduce(tensor.to(dtype), async_op=True).get_future().then(lambda done: put(done.value()[0]))

    def hook(model, bucket):
        buffer, words = bucket.buffer(), model.words
        table = None if words is None else model.network.get_input_embeddings().weight
        held = [grad for grad, weight in zip(bucket.gradients(), bucket.parameters(), strict=True) if weight is table]
        if not held or len(words) >= len(table):  # a small table goes whole; else all of words are its rows
            return summed(buffer, lambda total: total if total.dtype == buffer.dtype else buffer.copy_(total))

        (gradient,) = held
        begin = gradient.storage_offset() - buffer.storage_offset()
        before, after = buffer[:begin], buffer[begin + gradient.numel() :]
        parts = [before, gradient[words].flatten(), after]

        def put_back(total):
            first, rows, last = total.to(buffer.dtype).split([len(part) for part in parts])
            before.copy_(first)
            gradient[words] = rows.view(len(words), -1)
            after.copy_(last)
            return buffer

        return summed(torch.cat(parts), put_back)

    return hook


SUMS = {"fp32": sum_as(torch.float32), "bf16": sum_as(torch.bfloat16)}  # by --reduce


def part_of(tensor, like):
    """What this rank holds of a whole tensor, sharded as `like` is; all ranks take part."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


def finish():
    """Leave the process group once all ranks are done with it; call it after the model has gone out of scope.

    FSDP on gloo now and then aborts at exit if models and optimizers outlive the group.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    watchdog.rest()
