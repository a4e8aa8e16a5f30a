"""SQuAD v1.1 and v2.0 files, plain or gzipped, as pandas DataFrames.

A file that cannot be read as SQuAD stops with one line (UserError). A fault in a single question is repaired or set
aside by the rule that FAULTS states, counted and listed, never passed over in silence.
"""

import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from common.errors import UserError

ROOT = Path(__file__).resolve().parent.parent

# What can be wrong with one question, and the rule that is followed. A question with no usable answer left is not
# trained on; in a dev set it is still asked and scored against its gold texts.
FAULTS = {
    "misaligned": "answer_start is not where the text is: moved to the nearest place where it is",
    "unusable": "the answer's text is not in the context, or is blank: not used as a label",
    "surrogate": "a lone surrogate is not text: replaced by U+FFFD",
    "contradiction": "is_impossible is true and answers are given: is_impossible is believed",
    "no answers": "answerable, but no answers are given: not used as a label",
    "no tokens": "the tokenizer drops all of the answer's characters: not used as a label",
    "blank context": "the context holds no text: no answer can be found in it",
    "long question": "the question leaves too little of the window: cut, see --max-length and --overlap",
}
TOLERATED_FAULTS = 0.1  # the share of faulty questions up to which a file is trained on

UNPACKED = 100  # a gzip file may unpack to so many times its size, and 64 MiB; SQuAD's unpack to less than ten times

SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass
class SquadData:
    """The questions of one file or of a part of it.

    frame: one row a question: id, title, question, context (str), answers (list of (text, start); start is a
        character position in the context, or -1 for an answer that cannot be used), is_impossible (bool).
    faults: one row a fault: id, fault (a key of FAULTS), detail.
    """

    path: str
    version: str  # "1.1" or "2.0"
    frame: pd.DataFrame
    faults: pd.DataFrame


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


def read_squad(path, labelled=True):
    """Read one SQuAD file (.json or .json.gz) whole; UserError for what is not SQuAD. labelled: see `parse_squad`."""
    path = find_file(path)
    return parse_squad(path, read_bytes(path), labelled)


def parse_squad(path, raw, labelled=True):
    """`raw`, the bytes of a SQuAD file, as SquadData; `path` only names it in messages.

    labelled: False reads questions alone, so that their answers may be absent, as in a test set's file.
    """
    tree = parse_json(path, raw)
    if not isinstance(tree, dict) or not isinstance(tree.get("data"), list):
        raise UserError(f'{path}: not SQuAD: expected an object {{"version": ..., "data": [articles]}} at the top')
    version = "2.0" if str(tree.get("version", "")).lower().lstrip("v").startswith("2") else "1.1"
    rows, faults, seen = [], [], set()

    def fault(question_id, kind, detail):
        faults.append((question_id, kind, detail))

    def text(value, where, question_id):
        if SURROGATES.search(value):
            fault(question_id, "surrogate", where)
            return SURROGATES.sub("\ufffd", value)
        return value

    for number, article in enumerate(tree["data"]):
        where = f"{path}: article {number}"
        expect(article, dict, "the article", where)
        title = expect(article.get("title", f"article {number}"), str, "title", where)
        clean_title = SURROGATES.sub("\ufffd", title)
        for position, paragraph in enumerate(field(article, "paragraphs", list, where)):
            place = f"{where}, paragraph {position}"
            expect(paragraph, dict, "the paragraph", place)
            context = field(paragraph, "context", str, place)
            cleaned = SURROGATES.sub("\ufffd", context)
            blank = not cleaned.strip()
            damaged = [name for name, a, b in (("title", title, clean_title), ("context", context, cleaned)) if a != b]
            for qa in field(paragraph, "qas", list, place):
                expect(qa, dict, "a question", place)
                question_id = field(qa, "id", str, place)
                ask = f"{path}: question {quoted(question_id)}"
                if question_id in seen:
                    raise UserError(f"{ask}: the id occurs twice; ids must be unique, rename one")
                if SURROGATES.search(question_id):
                    raise UserError(f"{ask}: the id holds a lone surrogate, which no file can hold as UTF-8; rename it")
                seen.add(question_id)
                question = text(field(qa, "question", str, ask), "question", question_id)
                for name in damaged:  # counted for each question that stands on it
                    fault(question_id, "surrogate", name)
                if "is_impossible" in qa:
                    version = "2.0"
                impossible = expect(qa.get("is_impossible", False), bool, "is_impossible", ask)
                answers = []
                if labelled and (qa.get("answers") or not impossible):
                    answers = field(qa, "answers", list, ask)
                if impossible and answers:
                    fault(question_id, "contradiction", f"{len(answers)} answers given")
                    answers = []
                if blank:
                    fault(question_id, "blank context", "")
                placed = []
                for answer in answers:
                    expect(answer, dict, "an answer", ask)
                    gold = text(field(answer, "text", str, ask), "answer", question_id)
                    start = field(answer, "answer_start", int, ask)
                    found = locate(gold, start, cleaned)
                    if found < 0:
                        fault(question_id, "unusable", f"{shorten(gold)!r} at {shorten(str(start))}")
                    elif found != start:
                        stated = shorten(str(start))
                        fault(question_id, "misaligned", f"{shorten(gold)!r} stated at {stated}, found at {found}")
                    placed.append((gold, found))
                rows.append((question_id, clean_title, question, cleaned, placed, impossible))

    if not rows:
        raise UserError(f"{path}: holds no questions; is it the right file?")
    unanswered = [row for row in rows if labelled and not row[4]]
    if version == "1.1" and unanswered:
        ask = f"{path}: question {quoted(unanswered[0][0])}"
        raise UserError(f"{ask}: has no answers; v1.1 needs one, v2.0 says is_impossible")
    faults += [(row[0], "no answers", "") for row in unanswered if not row[5]]
    return SquadData(str(path), version, question_frame(rows), fault_frame(faults))


def locate(answer, start, context):
    """Where `answer` stands in `context`: `start` if that is right, else the nearest place; -1 if blank or nowhere."""
    if not answer.strip():
        return -1
    if start >= 0 and context.startswith(answer, start):
        return start
    after = context.find(answer, max(start, 0))
    before = context.rfind(answer, 0, max(start, 0) + len(answer))
    places = [place for place in (before, after) if place >= 0]
    return min(places, key=lambda place: abs(place - start)) if places else -1


KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a whole number"}


def expect(value, kind, what, where):
    """`value`, if it is of type `kind`; else UserError: `what` at `where` is of the wrong type."""
    if type(value) is not kind:
        found = "null" if value is None else KINDS.get(type(value), "a number")
        raise UserError(f"{where}: {what} is {found}; expected {KINDS[kind]}")
    return value


def field(record, key, kind, where):
    """record[key], of type `kind`; UserError that names `where` if it is missing or of another type."""
    if key not in record:
        raise UserError(f"{where}: has no {key!r}; expected {KINDS[kind]}")
    return expect(record[key], kind, key, where)


def shorten(text, width=40):
    """`text`, cut to `width` characters for a message."""
    return text if len(text) <= width else text[: width - 1] + "…"


def quoted(question_id):
    """An id for a message: in quotes, on one line, of bearable length."""
    return repr(shorten(question_id, 80))


# ---------------------------------------------------------------------------------------------------------------------
# Parts of files


def split_frame(frame, fraction, by):
    """Two frames: about `fraction` of the questions drawn into the second, whole articles or single questions.

    The draw depends on the data and the fraction only, not on the training seed, so that runs with different seeds are
    scored on the same questions.
    """
    generator = np.random.default_rng(0)
    wanted = round(fraction * len(frame))
    if by == "article":
        sizes = Counter(frame["title"])  # not pandas' own counts: pandas 2 mixes strings up that hold NUL
        if len(sizes) < 2:
            raise UserError("the file holds a single article and cannot be split by article; use --split-by question")
        titles = list(sizes)
        order = [titles[i] for i in generator.permutation(len(titles))]
        chosen, total = set(), 0
        for title in order:  # taken where that brings the share nearer to what is wanted
            if abs(total + sizes[title] - wanted) < abs(total - wanted) and len(chosen) < len(titles) - 1:
                chosen.add(title)
                total += sizes[title]
        if wanted and not chosen:  # every article is large
            chosen.add(min(order, key=sizes.get))
        drawn = np.array([title in chosen for title in frame["title"]])
    else:
        drawn = np.zeros(len(frame), bool)
        drawn[generator.permutation(len(frame))[:wanted]] = True
    if drawn.all() or not drawn.any():
        raise UserError(
            f"a fraction of {fraction} of {len(frame)} questions leaves one side empty; change --dev-fraction or "
            "--tune-fraction"
        )
    return frame[~drawn].reset_index(drop=True), frame[drawn].reset_index(drop=True)


@dataclass(frozen=True)
class QuestionSet:
    """The questions that one job uses: a file and the cuts made to it. The text is parsed only when it is asked for.

    cuts: applied in order: ("first", n), ("split", fraction, by, side), ("first answer",).
    part: of another set of the run, whose faults are judged and told there.
    """

    path: Path
    cuts: tuple = ()
    part: bool = False

    @cached_property
    def raw(self):
        return read_bytes(self.path)

    @cached_property
    def sha256(self):
        return hashlib.sha256(self.raw).hexdigest()

    @cached_property
    def key(self):
        """What identifies these questions: the file's content, not its name nor whether it is packed, and the cuts."""
        return json.dumps([self.sha256, self.cuts])

    @cached_property
    def data(self):
        whole = parse_squad(self.path, self.raw)
        frame = whole.frame
        for name, *values in self.cuts:
            if name == "first":
                frame = frame.head(values[0])
            elif name == "split":
                fraction, by, side = values
                try:
                    frame = split_frame(frame, fraction, by)[side]
                except UserError as error:
                    raise UserError(f"{self.path}: {error}") from None
            elif name == "first answer":
                frame = frame.assign(answers=[answers[:1] for answers in frame["answers"]])
        frame = frame.reset_index(drop=True)
        faults = whole.faults[whole.faults["id"].isin(set(frame["id"]))]
        return SquadData(whole.path, whole.version, frame, faults.reset_index(drop=True))


def question_sets(
    train_file,
    dev_file,
    dev_fraction=0.0,
    tune_fraction=0.0,
    split_by="article",
    max_train=None,
    max_dev=None,
    first_answer=False,
    seen=0,
):
    """The sets a run uses, as {"train": QuestionSet, "dev": …}; "tune" and "seen" where these are not 0.

    max_train: the first questions of the training file, taken before anything is split off.
    dev_fraction: this part of the training file becomes the dev set, and dev_file is not used.
    tune_fraction: this part of the training questions is held out to set the no-answer threshold.
    seen: the first so many of the training questions, which are scored as well.
    Without a train_file there is only "dev".
    """
    cut_dev = (("first answer",),) if first_answer else ()
    if train_file is None:
        return {"dev": QuestionSet(find_file(dev_file), (*cut_dev, ("first", max_dev)) if max_dev else cut_dev)}
    train_file = find_file(train_file)
    base = (("first", max_train),) if max_train else ()
    if first_answer:
        base += (("first answer",),)
    train, dev, dev_path = base, cut_dev, dev_file
    if dev_fraction:
        train = (*base, ("split", dev_fraction, split_by, 0))
        dev, dev_path = (*base, ("split", dev_fraction, split_by, 1)), train_file
    if max_dev:
        dev = (*dev, ("first", max_dev))
    sets = {}
    if tune_fraction:
        sets["tune"] = QuestionSet(train_file, (*train, ("split", tune_fraction, split_by, 1)))
        train = (*train, ("split", tune_fraction, split_by, 0))
    if seen:
        sets["seen"] = QuestionSet(train_file, (*train, ("first", seen)), part=True)
    return {"train": QuestionSet(train_file, train), "dev": QuestionSet(find_file(dev_path), dev), **sets}


def question_frame(rows):
    """Questions as a frame: one row each, with the columns that SquadData names."""
    frame = pd.DataFrame(rows, columns=["id", "title", "question", "context", "answers", "is_impossible"], dtype=object)
    return frame.astype({"is_impossible": bool})


def fault_frame(rows):
    """Faults as a frame: one row each of question id, fault (a key of FAULTS) and detail."""
    return pd.DataFrame(rows, columns=["id", "fault", "detail"], dtype=object)


def fault_counts(faults):
    """How often each fault occurs, as {fault: count}, in the order of FAULTS."""
    counts = Counter(faults["fault"])
    return {kind: counts[kind] for kind in FAULTS if counts[kind]}


def check_faults(path, questions, faults):
    """One line for the faults of a set, or None if it has none; UserError if too many questions are faulty."""
    if not len(faults):
        return None
    faulty = len(set(faults["id"]))
    first = faults.iloc[0]
    counts = ", ".join(f"{count} {kind}" for kind, count in fault_counts(faults).items())
    line = f"{path}: {faulty} of {questions} questions faulty ({counts}), first: question {quoted(first['id'])}: "
    line += f"{FAULTS[first['fault']]}" + (f" ({first['detail']})" if first["detail"] else "")
    if faulty > TOLERATED_FAULTS * questions:
        mend = "mend the file"
        if fault_counts(faults).get("long question", 0) > TOLERATED_FAULTS * questions:
            mend = "raise --max-length, lower --overlap or mend the file"
        raise UserError(f"{line}; too many to go on: {mend} (`python -m tools.audit FILE` lists them)")
    return f"{line}; `python -m tools.audit FILE` lists them"


# ---------------------------------------------------------------------------------------------------------------------
# Where data sets are looked for


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
