"""What the distributed scripts need beside their loop: the World of many processes, DDP's hooks, FSDP's mesh."""

import datetime
import gc
import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from common.errors import UserError
from common.run import world
from common.run.devices import choose_device
from common.run.interrupts import watchdog


class World(world.World):
    """One of several processes that torchrun started: NCCL joins them on GPUs, gloo on CPUs."""

    def __init__(self, device):
        """device: "auto", "cuda" or "cpu". UserError where torchrun has not started this process."""
        try:
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
            self.rank, self.local_rank, self.size = (int(os.environ[name]) for name in names)
        except KeyError:
            raise UserError(
                "started without torchrun: `torchrun --standalone --nproc-per-node=2 SCRIPT …` on one machine, "
                "`sbatch run_distributed.sh` on a cluster"
            ) from None
        self.device = choose_device(device, self.local_rank, self.log)

    def connect(self, hang_minutes=None):
        """Make the process group, then as for one process.

        A rank that makes no progress for hang_minutes ends the run and shows where each rank stands. The group's own
        time limit shows nothing, so it comes later.
        """
        limit = None
        if hang_minutes is not None:
            watchdog.watch(self.rank, 60 * hang_minutes)
            limit = datetime.timedelta(minutes=2 * hang_minutes + 1)
        if self.device.type == "cuda":
            dist.init_process_group("nccl", device_id=self.device, timeout=limit)
        else:
            dist.init_process_group("gloo", timeout=limit)
        super().connect()

    def gather(self, value):
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def all_sum(self, tensor):
        dist.all_reduce(tensor)
        return tensor

    def part_of(self, tensor, like):
        if not isinstance(like, DTensor):
            return tensor
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)

    @staticmethod
    def finish():
        """Leave the process group. FSDP on gloo can abort at exit if models and optimizers outlive the group."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group()
        watchdog.rest()


SHARDS = ("zero2", "zero3", "hsdp")  # --shard


def sharding_mesh(shard, device):
    """The device mesh for fully_shard: all ranks in a row, or for "hsdp" nodes times the ranks of a node.

    Under zero2 and zero3 every rank holds an equal part. Under hsdp the ranks of each node hold one whole copy.
    """
    ranks = dist.get_world_size()
    if shard == "hsdp":
        a_node = int(os.environ["LOCAL_WORLD_SIZE"])
        return init_device_mesh(device.type, (ranks // a_node, a_node), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))


# ---------------------------------------------------------------------------------------------------------------------
# Communication hooks for DistributedDataParallel, called for each bucket of gradients that is ready. Each gives the
# mean over the ranks. Their state is the SpanModel.


def mean_fp32(model, bucket):
    """torch's own hook: the whole bucket, as it is."""
    return default_hooks.allreduce_hook(None, bucket)


def mean_bf16(model, bucket):
    """torch's own hook: the whole bucket, sent in bf16."""
    return default_hooks.bf16_compress_hook(None, bucket)


def mean_of_rows(dtype):
    """A hook that sends only those rows of the word embeddings' gradient that are not zero on every rank.

    dtype: the type that is sent. The embedding gradient is ready last, so its all-reduce cannot overlap: fewer rows
    shorten the step. The rows are those of model.token_ids, which are equal on all ranks.
    """

    def mean(tensor, put):
        sent = tensor.to(dtype).div_(dist.get_world_size())  # in place if the type is the bucket's
        return dist.all_reduce(sent, async_op=True).get_future().then(lambda done: put(done.value()[0]))

    def hook(model, bucket):
        buffer, ids = bucket.buffer(), model.token_ids
        table = None if ids is None else model.network.get_input_embeddings().weight
        held = [grad for grad, weight in zip(bucket.gradients(), bucket.parameters(), strict=True) if weight is table]
        if not held or len(ids) >= len(table):  # a small table is sent whole; else every id is one of its rows
            return mean(buffer, lambda total: total if total.dtype == buffer.dtype else buffer.copy_(total))

        (gradient,) = held
        begin = gradient.storage_offset() - buffer.storage_offset()
        before, after = buffer[:begin], buffer[begin + gradient.numel() :]
        parts = [before, gradient[ids].flatten(), after]

        def put_back(total):
            first, rows, last = total.to(buffer.dtype).split([len(part) for part in parts])
            before.copy_(first)
            gradient[ids] = rows.view(len(ids), -1)
            after.copy_(last)
            return buffer

        return mean(torch.cat(parts), put_back)

    return hook


HOOKS = {  # --reduce
    "rows": mean_of_rows(torch.float32),
    "rows-bf16": mean_of_rows(torch.bfloat16),
    "fp32": mean_fp32,
    "bf16": mean_bf16,
}
