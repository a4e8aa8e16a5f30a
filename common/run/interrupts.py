"""What ends a run early, and how nothing is lost by it: requests to stop, and a rank that hangs."""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback

from common.errors import tell

GRACE = 5.0  # seconds from a rank's stacks to its end, which ends the others too


class StopRequest:
    """Whether this run has been asked to end: by SIGTERM to any rank, or by a file that rank 0 looks for.

    As a context manager it takes SIGTERM over from `errors.run`, which ends a process at once: inside, there is
    something to be saved first, and behind it the record of how the run ended.
    """

    def __init__(self, path):
        """path: the file that asks, runs/NAME/stop; None on the ranks that do not look for one."""
        self.path, self.signalled = path, False

    def __enter__(self):
        signal.signal(signal.SIGTERM, self.take)
        return self

    def take(self, *_):
        self.signalled = True

    def __exit__(self, *_):
        if self.path:
            self.path.unlink(missing_ok=True)

    def made(self):
        return self.signalled or (self.path is not None and self.path.exists())


def sleep_until(moment):
    """Sleep until the monotonic clock shows this."""
    time.sleep(max(0.0, moment - time.monotonic()))


def stacks():
    """Where each other thread of this process stands, the innermost call first, the main thread last.

    Reads no source lines, as the traceback module would: the file system may be what hangs.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    lines = []
    for ident in sorted(frames, key=lambda ident: ident == threading.main_thread().ident):
        lines.append(f"Thread {names.get(ident, ident)} (innermost call first):")
        for frame, line in traceback.walk_stack(frames[ident]):
            lines.append(f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}')
    return "\n".join(lines)


class Watchdog:
    """Ends this process, with the stacks of its threads on stderr, when `beat` has not been called for so long.

    A rank that hangs holds up all others in the next collective, so that every rank tells where it stands.
    """

    def __init__(self):
        self.seconds = 0  # not watching

    def watch(self, rank, seconds):
        """Begin. seconds: without a beat until the end."""
        self.rank, self.seconds, self.last = rank, seconds, 0.0
        self.beat()
        threading.Thread(target=self.announce, daemon=True).start()

    def beat(self):
        """Say that there is progress."""
        now = time.monotonic()
        if self.seconds and now - self.last > min(1.0, self.seconds / 10):
            self.last = now
            # For a process that holds the interpreter's lock: `announce` cannot run then, faulthandler's thread can.
            faulthandler.dump_traceback_later(self.seconds + GRACE / 2)

    def announce(self):
        """Write this rank's stacks once there has been no beat; end the process once all ranks have written theirs."""
        while self.seconds:
            last = self.last
            sleep_until(last + self.seconds)
            if self.seconds and self.last == last:
                faulthandler.cancel_dump_traceback_later()
                waited = f"no progress for {self.seconds:g} s (--hang-minutes)"
                # In one piece: all ranks write at this moment, and faulthandler's own many pieces would mix.
                tell(f"error: rank {self.rank}: {waited}; it stands here:\n{stacks()}")
                sleep_until(last + self.seconds + GRACE)
                if self.seconds and self.last == last:
                    os._exit(1)

    def rest(self):
        """Watch no longer."""
        self.seconds = 0
        faulthandler.cancel_dump_traceback_later()


watchdog = Watchdog()  # a process has one: the signal is the process's
