"""When each part of a start ended, up to the first optimizer step. `python -m benchmarks.start` shows the seconds."""

import time

ENDED = {}  # part: reading of time.perf_counter


def ended(part):
    """Note that this part of the start ends now."""
    ENDED.setdefault(part, time.perf_counter())


def seconds(total):
    """{part: its seconds}, in order. total: seconds from the start of the process to the end of the last part."""
    ends = list(ENDED.values())
    begins = [ends[-1] - total, *ends[:-1]]
    return {part: end - begin for part, begin, end in zip(ENDED, begins, ends, strict=True)}
