"""Seconds of training and what was done in them: an epoch's time, its throughput, the warm-up."""

import math
import os
import time

from common import start
from common.run.devices import synchronize
from common.run.lock import process_begun


def process_seconds():
    """Seconds since this process was started, imports included; None where that is not known."""
    ticks = process_begun(os.getpid())
    if ticks is None:  # not Linux
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Clocks:
    """Times the training of each epoch, over all starts of the run and without the seconds of saving.

    Throughput leaves out the first WARMUP steps of this start, which compile and make graphs.
    """

    WARMUP = 10

    def __init__(self, device, partial, seconds):
        """partial: the state of a checkpoint made in the first epoch of this start, or {}.

        seconds: the record's; from the start of the process to the first step, and those of warm-up, are put into it.
        """
        self.device, self.record = device, seconds
        self.record["warmup"] = None
        self.steps, self.earlier = 0, 0.0  # of this start; seconds of training in its epochs before this one
        self.begin_epoch(partial)
        self.trained = self.before  # nothing is trained before the first epoch begins

    def begin_epoch(self, partial):
        """partial: the state of a checkpoint made in this epoch, or {}."""
        synchronize(self.device)
        self.before = partial.get("train_seconds", 0.0)
        self.saving, self.trained = 0.0, None
        self.started = self.steady = time.perf_counter()
        self.num_windows = self.num_tokens = 0  # since `steady`

    def step(self, num_windows, num_tokens):
        """Count one optimizer step."""
        self.steps += 1
        self.num_windows += num_windows
        self.num_tokens += num_tokens
        if self.steps == 1:
            synchronize(self.device)
            self.record["first_step"] = process_seconds()
            start.ended("first step")
            self.record["start"] = self.record["first_step"] and start.seconds(self.record["first_step"])
        if self.steps == self.WARMUP:
            synchronize(self.device)
            self.steady = time.perf_counter()
            self.record["warmup"] = self.earlier + self.steady - self.started - self.saving
            self.num_windows = self.num_tokens = 0

    def leave_out(self, seconds):
        """Do not count these seconds, which a checkpoint took, as training."""
        self.saving += seconds
        self.steady += seconds

    @property
    def seconds(self):
        """Seconds of training in this epoch so far, or in all of it once it has ended."""
        if self.trained is not None:
            return self.trained
        return self.before + time.perf_counter() - self.started - self.saving

    def end_epoch(self):
        """Wait for the device and stop: a dict of train_seconds, windows_per_second and tokens_per_second.

        The rates are None for an epoch that was warm-up alone.
        """
        synchronize(self.device)
        warm = self.record["warmup"] is not None and self.num_windows
        steady = max(time.perf_counter() - self.steady, 1e-9) if warm else math.inf
        self.trained = self.seconds
        self.earlier += self.trained - self.before
        return {
            "train_seconds": self.trained,
            "windows_per_second": self.num_windows / steady or None,
            "tokens_per_second": self.num_tokens / steady or None,
        }
