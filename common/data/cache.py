"""The windows of a question set on disk: built once, memory-mapped by every rank of every run after that."""

import hashlib
import json
import os
import shutil
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from common.data.squad import check_faults, fault_frame
from common.data.windows import ARRAYS, Features, build
from common.errors import UserError, tell

CACHE_FORMAT = 4  # raise it when the meaning of the arrays changes: older caches are then built anew


def prepare(questions, tokenizer, max_length, overlap, cache_dir, log=print, builds=True):
    """The Features of a QuestionSet: from the cache if it holds them, else built and left there.

    Several processes may call this at once: each builds in a folder of its own and the first to rename it wins. With
    builds=False it waits, however long it takes, until another process has left them there; the launcher ends the wait
    if that one fails.
    UserError if too many questions are faulty or the cache cannot be written.
    """
    backend = tokenizer.backend_tokenizer.to_str()
    settings = [CACHE_FORMAT, questions.key, backend, tokenizer.pad_token_id, max_length, overlap]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:20]
    folder = Path(cache_dir) / f"features-{key}"
    features = read_cache(folder)
    waiting = time.monotonic()
    while features is None and not builds:
        time.sleep(0.2)
        features = read_cache(folder)
        if time.monotonic() - waiting > 60:
            tell(f"still waiting for local rank 0 to leave {folder}")
            waiting = time.monotonic()
    if features is None:
        if os.path.exists(folder):  # Path's own test fails where the folder above may not be entered
            log(f"warning: {folder}: damaged, built anew")
        started = time.perf_counter()
        with temporary_folder(folder) as temporary:  # before the work: if nothing can be written, that is told at once
            features = build(questions.data, tokenizer, max_length, overlap, log)
            write_cache(temporary, folder, features)
        log(f"{features.meta['windows']:,} windows in {time.perf_counter() - started:.1f} s, cached in {folder}")
        features = read_cache(folder) or features
    faults = fault_frame(features.meta["faults"])
    line = None if questions.part else check_faults(questions.path, features.meta["questions"], faults)
    if line:
        log(f"warning: {line}")
    return features


def read_cache(folder):
    """The Features in a cache folder, memory-mapped, or None if it is absent, of another format or damaged."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        checksum = meta.pop("crc32")
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        if any(arrays[name].dtype != kind for name, kind in ARRAYS.items()) or crc32(arrays, meta) != checksum:
            return None
        return Features(**arrays, **meta)
    except Exception:  # numpy raises many kinds for a damaged file
        return None


def crc32(arrays, meta):
    """A checksum of all that a cache holds."""
    checksum = zlib.crc32(json.dumps([meta, [arrays[name].shape for name in ARRAYS]]).encode())
    for name in ARRAYS:
        checksum = zlib.crc32(arrays[name], checksum)
    return checksum


@contextmanager
def temporary_folder(folder):
    """A new folder beside `folder`, which is gone afterwards unless it was renamed."""
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise cannot_write(folder, error) from None
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_cache(temporary, folder, features):
    """Write `features` into the folder `temporary` and rename it: a reader sees a whole folder or none."""
    try:
        arrays = {name: getattr(features, name) for name in ARRAYS}
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array)
        meta = {name: getattr(features, name) for name in ("token_type", "pad_id", "max_length", "meta")}
        (temporary / "meta.json").write_text(json.dumps(meta | {"crc32": crc32(arrays, meta)}))
        if read_cache(folder) is None:
            if folder.exists():  # damaged or of another format: moved away whole, then removed with `temporary`
                folder.rename(temporary / "damaged")
            temporary.rename(folder)
            shutil.rmtree(folder / "damaged", ignore_errors=True)
    except OSError as error:
        if read_cache(folder) is None:  # not just another process that was faster
            raise cannot_write(folder, error) from None


def cannot_write(folder, error):
    return UserError(f"{folder.parent}: cannot write the cache: {error.strerror or error}; name another --cache-dir")
