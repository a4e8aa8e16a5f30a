"""The run folder: runs/NAME/ with run.json (the record), predictions, the model, TensorBoard files and a lock."""

import contextlib
import glob
import json
import os
import shutil
import socket
import time
from pathlib import Path

from common.errors import Preempted, UserError
from common.run.background import Background
from common.run.clocks import process_seconds
from common.run.environment import environment
from common.run.lock import process_begun, read_lock, remove_stale

SCHEMA = 2
# What a run hands on, beside its checkpoint, to the run that goes on from it in another folder.
RESULTS = ("model", "model-last", "tensorboard", "predictions.json", "nbest.json", "null_odds.json", "hardware.csv")


def write_json(path, value, indent=None):
    """Write a value as JSON, see `write_text`."""
    write_text(path, [json.dumps(value, ensure_ascii=False, indent=indent) + "\n"])


def write_text(path, pieces):
    """Write strings under a temporary name, sync and rename: a reader sees the old file or the new one, never half."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:  # names may be undecodable
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot be written: {error.strerror}; free some space or name another folder"
        ) from None


def read_record(folder):
    """The run.json in a run folder; {} if there is none, or a damaged one."""
    try:
        record = json.loads((Path(folder) / "run.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def way(record):
    """How a run is spread over ranks: an attempt says so of itself, since the next one may be spread in another way."""
    arguments = record.get("arguments")
    found = {name: record[name] for name in ("strategy", "world_size") if name in record}
    return found | {"zero1": bool(isinstance(arguments, dict) and arguments.get("zero1"))}


def attempts(record):
    """The attempts of a record that was read; those of before they said so are given the way of the whole."""
    found = record.get("attempts")
    return [way(record) | one for one in (found if isinstance(found, list) else []) if isinstance(one, dict)]


def result(folder, name):
    """The path of one of a run's RESULTS; a start killed between save_model's two renames left its model beside it."""
    path = Path(folder) / name
    return path if path.exists() else next(path.parent.glob(f"{name}.*.old"), path)


def default_name():
    """The Slurm job id, or the time to the second."""
    return os.environ.get("SLURM_JOB_ID") or time.strftime("%Y%m%d-%H%M%S")


def check_free(runs_dir, name, taken_over=False):
    """UserError if a run folder of this name cannot be made (or taken over); asked before the work starts."""
    name = name or default_name()
    if Path(name).name != name or name in (".", ".."):
        raise UserError(f"--run-name {name}: must be a plain name; --runs-dir says where the folder goes")
    path = Path(runs_dir) / name
    saved = glob.glob("step-*", root_dir=path / "checkpoints")  # Path's own way fails on a name too long
    if (saved or os.path.exists(path / "run.json")) and not taken_over:
        raise UserError(f"{path}: holds a run already; name another --run-name, remove the folder, or go on: --resume")
    if taken_over and not saved and read_record(path).get("status") == "finished":
        raise UserError(f"{path}: holds a finished run, and no checkpoint to go on from; name another --run-name")
    for folder in (path, *path.parents):
        if os.path.exists(folder):
            if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
                raise UserError(f"{folder}: is not a folder that can be written to; name another --runs-dir")
            break


class RunFolder:
    """One run's folder and its record. As a context manager it records how the run ended.

    Ranks other than 0 get one with write=False, which keeps the record in memory only.
    """

    def __init__(self, runs_dir, name, write=True, resume=False):
        name = name or default_name()
        self.path = Path(runs_dir) / name
        self.write = write
        self.resume = resume  # take over a folder that an earlier start of this run has left
        self.record, self.background, self.epochs_written = {}, Background(), 0
        self.started = time.time() - (process_seconds() or 0)  # of this process, as all its seconds
        if write:
            self._claim()

    def _claim(self):
        """Make the folder and take its lock; a second run in the same folder is refused."""
        check_free(self.path.parent, self.path.name, self.resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be made: {error.strerror}; name another --runs-dir") from None
        pid, job = os.getpid(), os.environ.get("SLURM_JOB_ID")
        owner = {"host": socket.gethostname(), "pid": pid, "begun": process_begun(pid), "job_id": job}
        lock = self.path / "lock"
        if self.resume:
            remove_stale(lock, owner)
        new = lock.with_name(f".lock.{pid}.new")
        try:
            new.write_text(json.dumps(owner))
            os.link(new, lock)  # appears whole, or fails if there is one
        except FileExistsError:
            raise UserError(
                f"{self.path}: taken by the run that its lock names ({read_lock(lock)}); name another "
                f"--run-name, or remove {lock} if that run is gone"
            ) from None
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}; name another --runs-dir") from None
        finally:
            new.unlink(missing_ok=True)

    def model_path(self, best):
        """Where an epoch's model goes: model/ if it is the best so far, else model-last/ beside it."""
        last = self.path / "model-last"
        if best:
            shutil.rmtree(last, ignore_errors=True)  # the last epoch is the best one again
        return self.path / "model" if best else last

    def update(self, fields):
        """Add fields to the record, those of them that an attempt has to it as well, and write it at once."""
        self.record.update(fields)
        attempt = self.record["attempts"][-1]
        attempt |= way(self.record)
        if "hosts" in fields:
            attempt["hosts"] = sorted(set(fields["hosts"]))
        self.save()
        self.background.wait()

    def save(self):
        """Write run.json as it stands now, once all that was to be written before is on the disk."""
        if self.write:
            text = json.dumps(self.record, ensure_ascii=False, indent=1)
            self.background.run(write_text, self.path / "run.json", [text + "\n"])
            self.background.run(setattr, self, "epochs_written", len(self.record["epochs"]))

    def __enter__(self):
        try:
            self._begin()
        except BaseException:  # __exit__ is called for what comes later
            self._release()
            raise
        return self

    def _begin(self):
        """Make the record, from what earlier starts have left."""
        self.record = {"schema": SCHEMA, "status": "running", "started": self.started, **environment(), "epochs": []}
        self.record["attempts"] = [{"hosts": [socket.gethostname()], "started": self.started, "steps": 0}]
        if self.resume and (self.path / "run.json").exists():
            earlier = read_record(self.path)
            if "attempts" in earlier:
                self.record["attempts"] = [*attempts(earlier), *self.record["attempts"]]
                self.record["started"] = earlier.get("started", self.started)
        self.save()
        self.background.wait()

    def _release(self):
        if self.write:
            (self.path / "lock").unlink(missing_ok=True)

    def resume_from(self, saved):
        """Restore what the run had given at the checkpoint that it resumes from; {} for a new run.

        UserError where the model of its best epoch is not to be had: a later epoch need not be better.
        """
        self.record["epochs"] = saved.get("epochs", [])
        source = saved.get("folder")
        if self.write:
            for name in ("model", "model-last"):
                with contextlib.suppress(OSError):
                    result(self.path, name).rename(self.path / name)
            for left in [*self.path.glob("model*.new"), *self.path.glob("model*.old"), *self.path.glob(".*.tmp")]:
                shutil.rmtree(left) if left.is_dir() else left.unlink()  # of a start that was killed
        if self.write and source and Path(source).resolve() != self.path.resolve():
            try:
                for name in RESULTS:
                    file = result(source, name)
                    if file.is_dir():
                        shutil.copytree(file, self.path / name, dirs_exist_ok=True)
                    elif file.exists():
                        shutil.copy2(file, self.path / name)
                own = self.record["attempts"]  # with the source's, if an earlier start got no further than this
                self.record["attempts"] = [*(one for one in attempts(read_record(source)) if one not in own), *own]
            except OSError as error:
                reason = error.strerror or error
                raise UserError(f"{self.path}: cannot take over what {source} holds: {reason}") from None
        best = saved.get("selection", {}).get("epoch")
        if self.write and best is not None and not (self.path / "model").is_dir():
            raise UserError(
                f"{self.path}/model: absent, and the run that is to go on had its best epoch, {best}, there: copy that "
                "run's folder whole, and say --resume with the copy"
            )

    def __exit__(self, kind, error, trace):
        failure = None
        try:
            self.background.wait()
        except UserError as unwritten:
            failure = None if kind else unwritten
            kind, error = kind or UserError, error or unwritten
            del self.record["epochs"][self.epochs_written :]  # their files are not on the disk
        if kind is Preempted:
            self.record["status"] = "preempted"
        elif kind is not None:
            self.record["status"] = "failed"
            self.record["error"] = f"{kind.__name__}: {error}".splitlines()[0][:500]
        else:
            self.record["status"] = "finished"
        total = process_seconds()
        self.record["attempts"][-1]["seconds"] = total
        self.record.setdefault("seconds", {})["total"] = total
        try:
            self.save()
            self.background.wait()
        finally:
            self._release()
        if failure:
            raise failure
