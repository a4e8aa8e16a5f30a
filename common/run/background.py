"""What is written while training goes on: one thing after the other, in a thread."""

from concurrent.futures import ThreadPoolExecutor


class Background:
    """Runs functions in a thread, in the order in which they are given.

    So a checkpoint or a record that comes later never stands on the disk before the files that it speaks of. If one
    function fails, those after it are left out, and `wait` raises its error.
    """

    def __init__(self):
        self.pool, self.pending = ThreadPoolExecutor(1, "writer"), []

    def run(self, function, *arguments):
        """Call function(*arguments) in the thread, after all that was given before."""
        before = self.pending[-1:]

        def call():
            for earlier in before:
                earlier.result()  # has ended, since there is one thread; raises its error
            function(*arguments)

        self.pending.append(self.pool.submit(call))

    def wait(self):
        """Wait until everything given is done; raises the first error."""
        pending, self.pending = self.pending, []
        for one in pending:
            one.result()
