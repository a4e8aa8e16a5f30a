"""What the ranks agree on while they train: whether to stop or to save, without a collective of its own."""

import time

import torch


class Agreement:
    """Sums losses over the ranks and, in the same all-reduce, decides for all ranks whether to stop or to save.

    stop_wanted, save_wanted: what was decided last.
    """

    INTERVAL = 2.0  # seconds between looks for a request to stop, where steps are so slow that log lines are rarer

    def __init__(self, world, save_minutes, request):
        """save_minutes: between checkpoints; 0: none. request: the interrupts.StopRequest of this rank."""
        self.world, self.save_minutes, self.request = world, save_minutes, request
        self.stop_wanted = self.save_wanted = False
        self.until_look, self.passes = 1, 0
        self.last_look = self.last_save = time.monotonic()

    def is_due(self):
        """Count one step of training or pass of evaluation. Whether the ranks had agreed to look again after this."""
        self.passes += 1
        self.until_look -= 1
        return self.until_look <= 0

    def look_soon(self):
        """Look again after the next step or pass, which may take longer than those before."""
        self.until_look = 1

    def sum(self, losses):
        """The sums of `losses`, float [N], over all ranks, as a list; all ranks take part.

        In double precision a sum of fp32 values is exact, whatever their order. An all-reduce chooses the order by the
        place in the tensor, and how many losses are read together depends on when the run was saved or resumed.
        """
        now = time.monotonic()
        due = self.save_minutes and now - self.last_save > 60 * self.save_minutes
        wait = self.INTERVAL * self.passes / max(now - self.last_look, 1e-9)  # in steps, or passes
        own = [self.request.made(), *((due, min(wait, 1e6)) if self.world.rank == 0 else (0, 0))]
        own = torch.tensor([float(value) for value in own], dtype=torch.double, device=self.world.device)
        *sums, stop, due, wait = self.world.all_sum(torch.cat([losses.double(), own])).tolist()
        self.stop_wanted, self.save_wanted = stop > 0, stop > 0 or due > 0
        self.until_look, self.passes, self.last_look = max(1, int(wait)), 0, now
        return sums

    def must_stop(self):
        """Count one pass of evaluation. Whether the ranks have agreed to stop; all ranks take part now and then."""
        if self.is_due():
            self.sum(torch.zeros(0, device=self.world.device))
        return self.stop_wanted

    def saved(self):
        """A checkpoint is written."""
        self.save_wanted, self.last_save = False, time.monotonic()
