"""Progress of an epoch or an evaluation: a bar on a terminal, a line now and then in a log file."""

import sys
import time


class Progress:
    """A tqdm bar on a terminal; elsewhere one line every `every` seconds, as a log file wants it."""

    def __init__(self, total, what, show=True, every=30.0):
        """total: tokens. what: the name of the work."""
        self.total, self.what, self.show, self.every = total, what, show, every
        self.done, self.note = 0, ""
        self.started = self.last = time.monotonic()
        self.bar = None
        if show and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, desc=what, unit="tok", unit_scale=True, dynamic_ncols=True, leave=False)

    def __call__(self, amount, note=""):
        """Take so many more tokens; `note` stands behind the time left until the next one."""
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
