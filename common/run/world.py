"""This process among those of a run: its rank, its device, and what it exchanges with the others."""

import time

from common.run.devices import choose_device, place, topology
from common.start import ended


class World:
    """A run of one process. `common.run.distributed` has the World of many, with the same methods.

    rank: among all processes. local_rank: among those of this node. size: number of processes. device: torch.device.
    places: where each rank runs, known after `connect`.
    """

    rank, local_rank, size = 0, 0, 1

    def __init__(self, device):
        """device: "auto", "cuda" or "cpu"."""
        self.device = choose_device(device, log=self.log)

    def connect(self, hang_minutes=None):
        """Meet the other ranks and print where each runs; all ranks take part.

        hang_minutes: end the run if a rank makes no progress for so long; None leaves that to the process group.
        """
        self.places = self.gather(place(self.rank, self.local_rank, self.device))
        self.log(topology(self.places))
        self.connected = time.perf_counter()
        ended("process group")

    def log(self, text):
        """Print, on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def gather(self, value):
        """[value of rank 0, value of rank 1, …], any picklable values, on every rank; all ranks take part."""
        return [value]

    def all_sum(self, tensor):
        """The sum of `tensor` over all ranks, in place; all ranks take part."""
        return tensor

    def part_of(self, tensor, like):
        """What this rank holds of a whole tensor, if it is sharded as `like` is; all ranks take part."""
        return tensor

    @staticmethod
    def finish():
        """Leave the process group once all ranks are done; the model must have gone out of scope."""
