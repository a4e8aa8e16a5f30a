"""Losses and gradient norms by step: kept on the device and read together, since reading waits for the device."""

import math
import time

import torch

from common.errors import UserError


class Losses:
    """Collects the steps' figures and reads them at log lines.

    loss_sum: of each window's loss in this epoch, over all starts. windows_seen: how many they are.
    """

    def __init__(self, agreement, curves, partial, total_steps, tolerant):
        """partial: as for begin_epoch. tolerant: a norm may be infinite, as fp16's gradient scaler skips such steps."""
        self.agreement, self.curves = agreement, curves
        self.total_steps, self.tolerant = total_steps, tolerant
        self.begin_epoch(partial)

    def begin_epoch(self, partial):
        """partial: the state of a checkpoint made in this epoch, or {}."""
        self.loss_sum, self.windows_seen = partial.get("loss_sum", 0.0), partial.get("windows_seen", 0)
        self.pending, self.last_read = [], time.perf_counter()

    def add(self, step, windows, loss, norm, rate):
        """Keep one step's figures. loss: this rank's part of the mean over the global batch; all on the device."""
        self.pending.append((step, windows, loss, norm, rate))

    def leave_out(self, seconds):
        """Do not count these seconds, which a checkpoint took, in windows a second."""
        self.last_read += seconds

    def read(self):
        """Read what is pending: a note for the progress line; all ranks take part.

        UserError for a loss or norm that is not finite. It names the step and its windows.
        """
        if not self.pending:
            return ""
        steps, batches, losses, norms, rates = zip(*self.pending, strict=True)
        self.pending = []
        losses = self.agreement.sum(torch.stack(losses))
        norms, rates = torch.stack(norms).tolist(), torch.stack(rates).tolist()
        now = time.perf_counter()
        speed = sum(map(len, batches)) / max(now - self.last_read, 1e-9)
        self.last_read = now
        for step, windows, loss, norm, rate in zip(steps, batches, losses, norms, rates, strict=True):
            if not (math.isfinite(loss) and (self.tolerant or math.isfinite(norm))):
                raise UserError(
                    f"step {step}: loss {loss}, gradient norm {norm}: not finite, and the step was not applied; its "
                    f"windows: {windows.tolist()}; try a lower --learning-rate, or --precision bf16 or fp32"
                )
            self.loss_sum += loss * len(windows)
            self.windows_seen += len(windows)
            self.curves.add("step", step, {"loss": loss, "learning_rate": rate, "grad_norm": norm})
        self.curves.add("step", steps[-1], {"windows_per_second": speed})
        return f"step {steps[-1]}/{self.total_steps}, loss {losses[-1]:.3f}, {speed:,.0f} windows/s"

    def mean(self, epoch):
        """The mean loss of this epoch's windows; UserError for an epoch without any."""
        if not self.windows_seen:
            raise UserError(f"epoch {epoch}: nothing left to train on: the checkpoint's state.json is damaged")
        return self.loss_sum / self.windows_seen
