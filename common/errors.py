"""Expected errors: one clear line on stderr and exit status 2, never a traceback."""

import argparse
import errno
import os
import signal
import sys
import time

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
LOST = ("Connection closed by peer", "Connection reset by peer", "remote process exited")  # gloo's words, and NCCL's


class UserError(Exception):
    """Something the user can mend: the message names the file, the question id and what to do."""


class Preempted(BaseException):
    """The run was asked to end and has tried to save; no `except Exception` on the way may take it.

    status: that the process ends with; 0 if all ranks end together and have saved.
    """

    def __init__(self, text, status=0):
        super().__init__(text)
        self.status = status


def end_at_once(*_):
    """For SIGTERM, where there is nothing to be saved: temporary files and locks are removed on the way out."""
    raise Preempted("ended by SIGTERM, nothing was lost", 128 + signal.SIGTERM)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else args
        for word in args:
            if word.startswith("--") and word.endswith("=--"):  # an empty list to argparse before Python 3.13
                self.error(f"{word}: -- is no value")
        return super().parse_known_args(args, namespace)

    def error(self, message):
        command = f"python {self.prog.removeprefix('python ')} --help"
        raise UserError(f"{message} (`{command}` explains all options)")


def tell(text):
    """Write this to stderr, its line end with it: print() writes the end apart, and other ranks may write between."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def shorten(text, width=40):
    """`text`, cut to `width` characters for a message."""
    return text if len(text) <= width else text[: width - 1] + "…"


def quoted(question_id):
    """An id for a message: in quotes, on one line, of bearable length."""
    return repr(shorten(question_id, 80))


def one_line(error):
    """The message of a UserError on one line of bearable length: what it quotes may hold line ends and escapes."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(error))
    return text if len(text) <= 2000 else f"{text[:1500]} … {text[-400:]}"


def let_others_speak():
    """Wait a while for the end that torchrun makes of all ranks when one has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # without a word
    time.sleep(3)


def run(main, finish=None):
    """Call `main()`, then `finish()`; turn a UserError into one line and status 2, an interrupt into status 130."""
    rank = os.environ.get("RANK", "0")
    prefix = "error" if rank == "0" else f"error on rank {rank}"
    signal.signal(signal.SIGTERM, end_at_once)
    sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what the terminal cannot show
    try:
        try:
            status = main()
        except Preempted as request:
            if rank == "0":
                print(request, flush=True)
            status = request.status
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one, as Slurm and torchrun send: it is on its way out
        if finish and not status:
            finish()
        sys.exit(status)
    except UserError as error:
        if rank != "0":  # mostly all ranks meet the same error, and rank 0 tells it
            let_others_speak()
        tell(f"{prefix}: {one_line(error)}")
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if any(words in str(error) for words in LOST):
            let_others_speak()
            tell(f"{prefix}: another rank has ended, and it says why: {one_line(error)}")
            sys.exit(2)
        full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if not full and "can't allocate memory" not in str(error):  # so torch says it on the CPU
            raise
        tell(
            f"{prefix}: out of memory; `--max-tokens-per-device N` splits each step into smaller parts and leaves the "
            "experiment the same; in evaluation a smaller --eval-tokens helps"
        )
        sys.exit(2)
    except KeyboardInterrupt:
        tell("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        sys.stderr.close()
        sys.exit(128 + signal.SIGPIPE)  # as a shell has it: a training is not done
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        place = f"{error.filename}: " if error.filename else ""
        tell(f"{prefix}: {place}{error.strerror}; what was saved before is whole")
        sys.exit(2)
