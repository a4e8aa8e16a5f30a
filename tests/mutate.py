"""Valid input made hostile: changes of JSON trees, of the bytes and containers around them, and of command lines.

All chance comes from the random.Random that is passed in, so that a seed gives the same input again.
"""

import copy
import functools
import gzip
import json
import os
import struct
import unicodedata

import numpy as np


class Raw:
    """JSON text that stands in a tree as it is: what no Python value is written as."""

    def __init__(self, text):
        self.text = text


class Twin(str):
    """A key that may stand beside an equal one."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


DEEP = 100_000
HOSTILE = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    2**31,
    2**32 + 1,
    2**63,
    -(2**63),
    2**64,
    10**400,
    0.5,
    -0.0,
    1e-320,
    1e308,
]
HOSTILE += [float("nan"), float("inf"), -float("inf"), Raw("1e999"), Raw("9" * 4000), Raw("9" * 5001), Raw("-0")]
HOSTILE += [
    "",
    " ",
    "\0",
    "\ud800",
    "\udc80x",
    "a\nb",
    "\x1b[31m",
    "\u202e",
    "e\u0301",
    "\ufeff",
    "x" * 100_000,
    "a " * 5_000,
]
HOSTILE += ["1", "true", "../../etc/passwd", "/dev/zero", "%s%n", "{}", "2.0", "v2.0", "1.1", "nan"]
HOSTILE += [[], {}, [[]], [None], {"": None}, [1, "a"], {"a": {"a": {}}}]
HOSTILE += [
    Raw("[" * DEEP + "]" * DEEP),
    Raw('{"a":' * DEEP + "1" + "}" * DEEP),
    Raw("[" * DEEP),
    Raw("[" * 300 + "]" * 300),
]
LETTERS = "a .,'\"\\/\n\t\r\0\x1b\x7f\u0085\u00a0\u0301\u200b\u200d\u202e\u2028\ufeff\ufffd"
LETTERS += "\ud800\udfff\U0001f388\U0010ffffİßǆﬁ東"


def nodes(tree):
    """All places in a tree below its root, as (container, key)."""
    found, waiting = [], [tree]
    while waiting:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                waiting.append(container[key])
    return found


def mutate(rng, tree, harsh=0.25):
    """A copy of `tree` with one to five changes; `harsh` is the share of changes that keep no type."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 5])):
        places = nodes(tree)
        if not places:
            return rng.choice(HOSTILE)
        container, key = rng.choice(places)
        if rng.random() >= harsh:
            container[key] = bend(rng, container[key])
            continue
        kind = rng.randrange(6)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[Twin(key)] = container[key]
        elif kind == 2:
            other, place = rng.choice(places)
            container[key] = copy.deepcopy(other[place])
        elif kind == 3 and rng.random() < 0.1:
            return rng.choice([*HOSTILE, [tree], {"data": tree}])
        else:
            container[key] = rng.choice(HOSTILE)
    return tree


def bend(rng, value):
    """A value of the same type that means something else."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(
            [value + 1, value - 1, -value, 0, 1, 3, value * 1000, 2**31, 2**53, 10**18, rng.randrange(100)]
        )
    if isinstance(value, float):
        return rng.choice(
            [value * 2, -value, 0.0, 1e-30, 1e30, value + 1, float(int(value)) if abs(value) < 1e9 else 1.0]
        )
    if isinstance(value, str):
        return bend_text(rng, value)
    value = copy.deepcopy(value)
    if not value:
        return value
    if isinstance(value, list):
        kind = rng.randrange(4)
        place = rng.randrange(len(value))
        if kind == 0:
            rng.shuffle(value)
        elif kind == 1:
            del value[place]
        elif kind == 2:
            value.insert(rng.randrange(len(value) + 1), copy.deepcopy(value[place]))
        else:
            value *= rng.choice([0, 2, 20])
    elif isinstance(value, dict):
        key = rng.choice(list(value))
        kind = rng.randrange(3)
        if kind == 0:
            value[f"{key}x"] = value.pop(key)
        elif kind == 1:
            value["new"] = value[key]
        else:
            value = dict(sorted(value.items(), key=lambda _: rng.random()))
    return value


def bend_text(rng, text):
    place, end = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    kind = rng.randrange(8)
    if kind == 0:
        return unicodedata.normalize(rng.choice(["NFC", "NFD", "NFKC", "NFKD"]), text)
    if kind == 1:
        return text[:place] + rng.choice(LETTERS) + text[place:]
    if kind == 2:
        return text[place:end]
    if kind == 3:
        return text[:place] + text[end:]
    if kind == 4:
        return (text * rng.choice([2, 50]))[:20_000]
    if kind == 5:
        return rng.choice([text.upper(), text.swapcase(), text[::-1], f" {text} ", text + "\u0301"])
    if kind == 6:
        return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(40)))
    return text[:place] + "".join(rng.sample(text[place:end], end - place)) + text[end:]


def dump(rng, tree):
    """A tree as JSON bytes, in one of the ways that JSON can be written."""
    raw = []

    def mark(value):
        raw.append(value.text)
        return f"<raw {len(raw) - 1}>"

    ascii_only = rng.random() < 0.7
    text = json.dumps(tree, default=mark, ensure_ascii=ascii_only, indent=rng.choice([None, None, 1]))
    for i, value in enumerate(raw):
        text = text.replace(f'"<raw {i}>"', value)
    return text.encode("utf-8", "surrogatepass")


def damage(rng, data):
    """Bytes with a few of them changed, cut away, doubled or coded otherwise."""
    data = bytearray(data)
    kind = rng.randrange(7)
    place, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    if kind == 0:
        return bytes(data[:place])
    if kind == 1:
        return bytes(data[:place] + data[end:])
    if kind == 2:
        return bytes(data[:end] + data[place:])
    if kind == 3:
        return bytes(data) + rng.choice([b"\0" * 64, b"}", b"\xff", bytes(data[:100])])
    if kind == 4:
        return rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\n\n", b"\0", b"\x1f\x8b", b"PK\x03\x04"]) + bytes(data)
    if kind == 5:
        return data.decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-32", "latin-1"]), "replace")
    for _ in range(rng.choice([1, 1, 4, 50])):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


@functools.cache
def bomb():
    """A gzip file of 1 MB that unpacks to 1 GB."""
    block = gzip.compress(bytes(1 << 24), 9, mtime=0)
    return block * 64


def pack(rng, data):
    """Bytes in gzip's container, which is itself damaged now and then."""
    packed = gzip.compress(data, 1, mtime=0)
    kind = rng.randrange(20)
    if kind == 0:
        return damage(rng, packed)
    if kind == 1:
        return packed + rng.choice([b"\0" * 100, b"x", packed, gzip.compress(b" \n", mtime=0)])
    if kind == 2 and rng.random() < 0.05:
        return bomb()
    if kind == 3:
        return gzip.compress(packed, 1, mtime=0)
    return packed


def write_json(rng, folder, name, tree, gz=True, harsh=0.25):
    """Write a changed `tree` into the folder as name.json or name.json.gz; returns its path."""
    data = dump(rng, mutate(rng, tree, harsh))
    if rng.random() < 0.06:
        data = damage(rng, data)
    zipped = gz and rng.random() < 0.4
    path = folder / f"{name}.json{'.gz' if zipped else ''}"
    path.write_bytes(pack(rng, data) if zipped else data)
    return path


def safetensors(rng, data):
    """A changed safetensors file: its header's tree, its length or its body."""
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    kind = rng.randrange(8)
    if kind < 3 and len(body) % 4 == 0:  # a valid file of other numbers
        numbers = np.frombuffer(body, np.float32).copy()
        numbers[:: rng.choice([1, 7, len(numbers)])] = rng.choice([np.nan, np.inf, -np.inf, 0, 1e30, 1e-40, -3])
        body = numbers.tobytes()
        if rng.random() < 0.3:
            header["__metadata__"] = {"format": rng.choice(["pt", "tf", "flax", "", "x"])}
    elif kind <= 3:
        header = mutate(rng, header, harsh=0.5)
    elif kind == 4:
        entry = header[rng.choice([name for name in header if name != "__metadata__"])]
        rng.choice([change_type, change_shape, change_offsets])(rng, entry)
    elif kind == 5:  # names
        old = rng.choice(list(header))
        header[rng.choice([f"{old}x", "", "qa_outputs.weight", "\ud800"])] = header.pop(old)
    elif kind == 6:
        body = damage(rng, body)
    head = dump(rng, header)
    length = len(head) if kind < 7 else rng.choice([0, 1, len(head) - 1, len(head) + 1, 2**31, 2**63, 2**64 - 1])
    return struct.pack("<Q", length) + head + body


def change_type(rng, entry):
    entry["dtype"] = rng.choice(
        ["F64", "F16", "BF16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "F4", "C64", "X", 1, None]
    )


def change_shape(rng, entry):
    shape = entry["shape"]
    entry["shape"] = rng.choice(
        [shape[::-1], [], [-1], [0], [2**63], [2**32, 2**32], [*shape, 1], shape[:-1], "x", [0.5]]
    )


def change_offsets(rng, entry):
    begin, end = entry["data_offsets"]
    choice = [
        [end, begin],
        [begin, begin],
        [begin + 1, end + 1],
        [begin, 2**63],
        [0, 2**64 - 1],
        [-1, end],
        [begin],
        [0, end],
    ]
    entry["data_offsets"] = rng.choice(choice)


NUMBERS = [
    "nan",
    "inf",
    "-inf",
    "0",
    "-0",
    "-1",
    "1",
    "2",
    "3",
    "0.5",
    "0.999999",
    "1e-30",
    "1e-400",
    "1e308",
    "1e309",
    "",
    " ",
]
NUMBERS += [
    "9" * 30,
    "9" * 5000,
    "0x10",
    "1_000",
    "١٢",
    "½",
    "²",
    "2147483647",
    "2147483648",
    "9223372036854775807",
    "384",
    "64",
]
WORDS = [
    "",
    " ",
    "auto",
    "cpu",
    "fp32",
    "bf16",
    "x",
    "é",
    "e\u0301",
    "\u202e",
    "a\nb",
    "\x1b[31m",
    "\udcff",
    "x" * 300,
    "y" * 5000,
]
WORDS += [
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "/",
    ".",
    "..",
    "~",
    "/root/x/y",
    "-",
    "--",
    "--help",
    "-1",
    "@x",
    "%s",
    "a/b",
]
WORDS += [
    "ddp",
    "baseline",
    "article",
    "question",
    "f1",
    "2x4",
    "0x0",
    "squad-v1.1",
    "http://localhost:1",
    "file:///etc/passwd",
]


PLAIN = ["0", "1", "2", "3", "8", "32", "64", "128", "0.1", "0.5", "1e-3", "cpu", "fp32", "auto", "question", "exact"]


def command_line(rng, argv, flags):
    """`argv` with one to four changes: words lost, doubled, exchanged, and flags with values of any kind.

    flags: {flag: values that fit it, none where it takes none}.
    """
    argv = list(argv)
    for _ in range(rng.choice([1, 1, 1, 1, 2, 4])):
        place, kind = rng.randrange(len(argv) or 1), rng.randrange(12)
        flag = rng.choice(list(flags))
        fitting = flags[flag] or [""]
        value = rng.choice(rng.choice([fitting, fitting, argv or WORDS, NUMBERS, WORDS]))
        if kind < 7:
            usual = [flag, value] if flags[flag] else [flag]
            argv += rng.choice([usual, usual, usual, usual, [f"{flag}={value}"], [flag]])
        elif kind == 7 or not argv:
            argv.insert(place, value)
        elif kind == 8:
            del argv[place]
        elif kind == 9:
            argv[place] = bend_text(rng, argv[place])
        else:  # a value exchanged
            places = [i for i, word in enumerate(argv) if not word.startswith("--")] or [place]
            argv[rng.choice(places)] = rng.choice(rng.choice([PLAIN, argv, NUMBERS, WORDS]))
    # As a program gets them: without NUL, undecodable bytes as surrogates.
    return [os.fsdecode(word.replace("\0", "").encode("utf-8", "surrogatepass")) for word in argv]
