"""The question sets of a run: parts of files, cut and split in a way that depends on the data alone."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from common.data.files import find_file, read_bytes
from common.data.squad import SquadData, parse_squad
from common.errors import UserError


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


@dataclass(frozen=True)
class Cuts:
    """What is cut from the files of a run.

    max_train: the first questions of the training file, taken before anything is split off. dev_fraction: this part of
    the training file becomes the dev set. tune_fraction: this part of the training questions is held out to set the
    no-answer threshold. split_by: "article" or "question". max_dev: the first questions of the dev set. first_answer:
    keep each question's first gold answer alone. seen: the first so many training questions, which are scored as well.
    """

    dev_fraction: float = 0.0
    tune_fraction: float = 0.0
    split_by: str = "article"
    max_train: int | None = None
    max_dev: int | None = None
    first_answer: bool = False
    seen: int = 0


def question_sets(train_file, dev_file, **cuts):
    """The sets a run uses, as {"train": QuestionSet, "dev": …}; "tune" and "seen" where `cuts` ask for them.

    cuts: see Cuts. With dev_fraction, dev_file is not used. Without a train_file there is only "dev".
    """
    cuts = Cuts(**cuts)
    first_answer = (("first answer",),) if cuts.first_answer else ()
    first_dev = (("first", cuts.max_dev),) if cuts.max_dev else ()
    if train_file is None:
        return {"dev": QuestionSet(find_file(dev_file), first_answer + first_dev)}
    train_file = find_file(train_file)
    first_train = (("first", cuts.max_train),) if cuts.max_train else ()
    train, dev, dev_path = first_train + first_answer, first_answer, dev_file
    if cuts.dev_fraction:
        split = ("split", cuts.dev_fraction, cuts.split_by)
        train, dev, dev_path = (*train, (*split, 0)), (*train, (*split, 1)), train_file
    sets = {}
    if cuts.tune_fraction:
        split = ("split", cuts.tune_fraction, cuts.split_by)
        sets["tune"] = QuestionSet(train_file, (*train, (*split, 1)))
        train = (*train, (*split, 0))
    if cuts.seen:
        sets["seen"] = QuestionSet(train_file, (*train, ("first", cuts.seen)), part=True)
    dev_set = QuestionSet(find_file(dev_path), dev + first_dev)
    return {"train": QuestionSet(train_file, train), "dev": dev_set, **sets}
