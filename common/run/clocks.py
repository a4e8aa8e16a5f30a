"""TODO."""

import os
import time
from pathlib import Path


def process_seconds():
    """Seconds since this process was started, imports included."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return None
