"""SQuAD v1.1 and v2.0 files, plain or gzipped, as pandas DataFrames.

A file that cannot be read as SQuAD stops with one line (UserError). A fault in a single question is repaired or set
aside by the rule that FAULTS states, counted and listed, never passed over in silence.
"""

import re
from collections import Counter
from dataclasses import dataclass

import pandas as pd

from common.data.files import find_file, parse_json, read_bytes
from common.errors import UserError, quoted, shorten

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
    reader = SquadReader(path, labelled)
    if str(tree.get("version", "")).lower().lstrip("v").startswith("2"):
        reader.version = "2.0"
    for number, article in enumerate(tree["data"]):
        reader.read_article(article, number)
    return reader.finish()


class SquadReader:
    """Collects the questions and faults of one file, article by article; see parse_squad."""

    def __init__(self, path, labelled):
        self.path, self.labelled, self.version = path, labelled, "1.1"
        self.rows, self.faults, self.seen = [], [], set()

    def fault(self, question_id, kind, detail):
        self.faults.append((question_id, kind, detail))

    def text(self, value, what, question_id):
        """`value` without lone surrogates, which are counted as a fault of the question."""
        if SURROGATES.search(value):
            self.fault(question_id, "surrogate", what)
            return SURROGATES.sub("\ufffd", value)
        return value

    def read_article(self, article, number):
        where = f"{self.path}: article {number}"
        expect(article, dict, "the article", where)
        title = expect(article.get("title", f"article {number}"), str, "title", where)
        for position, paragraph in enumerate(field(article, "paragraphs", list, where)):
            place = f"{where}, paragraph {position}"
            expect(paragraph, dict, "the paragraph", place)
            context = field(paragraph, "context", str, place)
            texts = {"title": title, "context": context}
            cleaned = {name: SURROGATES.sub("\ufffd", value) for name, value in texts.items()}
            damaged = [name for name, value in texts.items() if cleaned[name] != value]
            for qa in field(paragraph, "qas", list, place):
                self.read_question(qa, cleaned, damaged, place)

    def read_question(self, qa, texts, damaged, place):
        """texts: {"title": …, "context": …}. damaged: names of those that held lone surrogates."""
        expect(qa, dict, "a question", place)
        question_id = field(qa, "id", str, place)
        ask = f"{self.path}: question {quoted(question_id)}"
        if question_id in self.seen:
            raise UserError(f"{ask}: the id occurs twice; ids must be unique, rename one")
        if SURROGATES.search(question_id):
            raise UserError(f"{ask}: the id holds a lone surrogate, which no file can hold as UTF-8; rename it")
        self.seen.add(question_id)
        question = self.text(field(qa, "question", str, ask), "question", question_id)
        for name in damaged:  # counted for each question that stands on it
            self.fault(question_id, "surrogate", name)
        if "is_impossible" in qa:
            self.version = "2.0"
        impossible = expect(qa.get("is_impossible", False), bool, "is_impossible", ask)
        answers = []
        if self.labelled and (qa.get("answers") or not impossible):
            answers = field(qa, "answers", list, ask)
        if impossible and answers:
            self.fault(question_id, "contradiction", f"{len(answers)} answers given")
            answers = []
        if not texts["context"].strip():
            self.fault(question_id, "blank context", "")
        placed = [self.place_answer(answer, texts["context"], question_id, ask) for answer in answers]
        self.rows.append((question_id, texts["title"], question, texts["context"], placed, impossible))

    def place_answer(self, answer, context, question_id, ask):
        """(text, start) of a gold answer, start -1 where it is not to be found."""
        expect(answer, dict, "an answer", ask)
        gold = self.text(field(answer, "text", str, ask), "answer", question_id)
        start = field(answer, "answer_start", int, ask)
        found = locate(gold, start, context)
        if found < 0:
            self.fault(question_id, "unusable", f"{shorten(gold)!r} at {shorten(str(start))}")
        elif found != start:
            stated = shorten(str(start))
            self.fault(question_id, "misaligned", f"{shorten(gold)!r} stated at {stated}, found at {found}")
        return gold, found

    def finish(self):
        """The SquadData of all that was read."""
        if not self.rows:
            raise UserError(f"{self.path}: holds no questions; is it the right file?")
        unanswered = [row for row in self.rows if self.labelled and not row[4]]
        if self.version == "1.1" and unanswered:
            ask = f"{self.path}: question {quoted(unanswered[0][0])}"
            raise UserError(f"{ask}: has no answers; v1.1 needs one, v2.0 says is_impossible")
        self.faults += [(row[0], "no answers", "") for row in unanswered if not row[5]]
        return SquadData(str(self.path), self.version, question_frame(self.rows), fault_frame(self.faults))


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
