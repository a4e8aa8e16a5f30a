"""Data files: finding them, reading them, unpacking gzip, and what is taken where no file is named."""

import gzip
import hashlib
import io
import json
import os
import zlib
from pathlib import Path

from common import ROOT
from common.errors import UserError

UNPACKED = 100  # a gzip file may unpack to so many times its size, and 64 MiB; SQuAD's unpack to less than ten times


def find_file(path):
    """`path`, or the same name with or without .gz, whichever is there; UserError if neither is a file."""
    path = Path(path)
    if os.path.isdir(path):  # os.path, since Path's own test fails on a name too long or a folder that may not be read
        raise UserError(f"{path}: is a folder; name a SQuAD file in it (.json or .json.gz)")
    twin = path.with_suffix("") if path.suffix == ".gz" else path.with_name(path.name + ".gz")
    for candidate in (path, twin):
        if os.path.isfile(candidate):
            return candidate
    raise UserError(f"{path}: no such file; `python -m tools.fetch squad-v1.1 squad-v2.0` downloads SQuAD")


def read_bytes(path):
    """The file's bytes, unpacked if they are gzip's: what is in it does not depend on how it is kept."""
    try:
        if Path(path).is_char_device():  # /dev/zero has no end
            raise UserError(f"{path}: is a device; name a file")
        return unpack(path, Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; check the path and its permissions") from None


def digest(path):
    """sha256 of a file, as hexadecimal text."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def sync(path):
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unpack(path, raw):
    """Bytes, decompressed if they are gzip's; UserError for damage, and for a small file that fills the memory."""
    if raw[:2] != b"\x1f\x8b":
        return raw
    blocks, room = [], UNPACKED * len(raw) + (1 << 26)
    try:
        with gzip.open(io.BytesIO(raw)) as file:
            while block := file.read(1 << 20):
                room -= len(block)
                if room < 0:
                    raise UserError(f"{path}: unpacks to more than {UNPACKED} times its size; unpack it yourself")
                blocks.append(block)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise UserError(f"{path}: truncated or damaged gzip; copy or fetch the file again") from None
    return b"".join(blocks)


def parse_json(path, raw):
    """Bytes, with or without a byte-order mark, to the JSON value in them."""
    if not raw.strip(b"\xef\xbb\xbf \t\r\n"):
        raise UserError(f"{path}: the file is empty; copy or fetch it again")
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: not JSON: {error.msg} at line {error.lineno} column {error.colno}; is the file complete?"
        ) from None
    except (RecursionError, ValueError):
        raise UserError(f"{path}: not SQuAD: the JSON is nested too deeply or holds an absurd number") from None


def squad_folder():
    """The folder that SQUAD_DIR names, else data/squad in the project."""
    return Path(os.environ.get("SQUAD_DIR") or ROOT / "data" / "squad")


def default_files():
    """(train file, dev file, what they are): SQuAD v1.1 where it has been fetched, else the bundled sample."""
    folder = squad_folder()
    for suffix in (".json", ".json.gz"):
        train, dev = folder / f"train-v1.1{suffix}", folder / f"dev-v1.1{suffix}"
        if os.path.isfile(train) and os.path.isfile(dev):  # os.path: see find_file
            return train, dev, "SQuAD v1.1"
    return ROOT / "data" / "sample" / "train.json", ROOT / "data" / "sample" / "dev.json", "sample"
