"""The lock of a run folder: one run at a time writes there, and the same job takes it over after a requeue."""

import json
import os
import subprocess
from pathlib import Path


def read_lock(path):
    """What a lock says of its holder, for a message."""
    try:
        return ", ".join(f"{key} {value}" for key, value in json.loads(path.read_text()).items() if value)
    except (OSError, ValueError, AttributeError, RecursionError):
        return "not readable"


def process_begun(pid):
    """Clock ticks from the machine's start to the process's, which tell it from a later one of the same number.

    None if there is none.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def job_is_gone(job):
    """Whether Slurm knows this job no more, or as ended; False where no Slurm answers."""
    try:
        command = ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    alive = {"PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "SIGNALING", "REQUEUED"}
    if done.returncode:
        return "Invalid job id" in done.stderr
    return not set(done.stdout.split()) & alive


def holder_is_gone(holder, owner):
    """Whether the run that a lock names has ended: its process is no more, or its Slurm job is not in the queue."""
    if holder["host"] == owner["host"]:
        return process_begun(holder["pid"]) != holder["begun"]
    if holder["job_id"]:  # another host's: of this job's earlier start, before a requeue, or of a job that has ended
        return holder["job_id"] == owner["job_id"] or job_is_gone(holder["job_id"])
    return False


def remove_stale(lock, owner):
    """Remove the lock of a run that has ended."""
    aside = lock.with_name(f".lock.{os.getpid()}")
    try:
        text = lock.read_text()
        if not holder_is_gone(json.loads(text), owner):
            return
        lock.rename(aside)  # one of several that find it stale gets it
        if aside.read_text() != text:  # the lock of another that was faster
            aside.rename(lock)
        aside.unlink(missing_ok=True)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # no lock, or one that says nothing: taking it will tell
