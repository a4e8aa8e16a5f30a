"""Expected errors: one clear line on stderr and exit status 2, never a traceback."""

import sys


class UserError(Exception):
    """Something the user can mend: the message names the file, the question id and what to do."""


def run(main):
    """Call `main()`; turn a UserError into one line and exit status 2, an interrupt into exit status 130."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        sys.stderr.close()
        sys.exit(0)
