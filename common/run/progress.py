"""TODO."""

import sys
import time


def linear_schedule(total_steps, warmup, done=0):
    """The factor on the learning rate at a step: linear from 0 over the warm-up part, then linear down to 0.

    done: steps of the run before the scheduler's first.
    """
    rising = max(1, round(total_steps * warmup))

    def factor(step):
        step += done
        return min((step + 1) / rising, max(0.0, (total_steps - step) / max(1, total_steps - rising)))

    return factor


class Progress:
    """A tqdm bar on a terminal; elsewhere one line every `every` seconds, as a log file wants it."""

    def __init__(self, total, what, show=True, every=30.0):
        self.total, self.what, self.show, self.every = total, what, show, every
        self.done, self.note = 0, ""
        self.started = self.last = time.monotonic()
        self.bar = None
        if show and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, desc=what, unit="tok", unit_scale=True, dynamic_ncols=True, leave=False)

    def __call__(self, amount, note=""):
        self.done += amount
        self.note = note or self.note
        if self.bar is not None:
            self.bar.update(amount)
            if note:
                self.bar.set_postfix_str(note)
        elif self.show and time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            elapsed = self.last - self.started
            share = min(self.done / self.total, 1)  # of an evaluation rank 0 alone counts, for all ranks
            left = elapsed * (1 / max(share, 1e-9) - 1)
            print(f"{self.what} {share:4.0%} {elapsed:5.0f} s, {left:.0f} s left {self.note}", flush=True)

    def close(self):
        if self.bar is not None:
            self.bar.close()


def printer(rank):
    """`print` on rank 0, silence elsewhere."""
    return (lambda text: print(text, flush=True)) if rank == 0 else (lambda text: None)
