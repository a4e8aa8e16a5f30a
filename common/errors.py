"""Expected errors: one clear line on stderr and exit status 2, never a traceback."""

import os
import sys
import time


class UserError(Exception):
    """Something the user can mend: the message names the file, the question id and what to do."""


def run(main, finish=None):
    """Call `main()`, then `finish()`; turn a UserError into one line and status 2, an interrupt into status 130."""
    try:
        status = main()
        if finish:
            finish()
        sys.exit(status)
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            # Mostly all ranks meet the same error: rank 0 tells it, and its end is the end of the others meanwhile.
            time.sleep(3)
        print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        print(
            "error: out of memory; `--max-tokens-per-device N` splits each step into smaller parts and leaves the "
            "experiment the same; in evaluation a smaller --eval-tokens helps",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        sys.stderr.close()
        sys.exit(0)
