"""Which epoch is best, and from which null odds on a question has no answer."""

import math

from common.errors import UserError
from common.scoring.metrics import best_threshold


def first_threshold(features):
    """The null threshold to begin with: 0.0, or None after training on version 1.1, when a model never abstains."""
    if features["train"].meta["version"] == "2.0":
        return 0.0
    if "tune" in features:
        raise UserError(
            "--tune-fraction sets the no-answer threshold, but the training data is SQuAD v1.1; leave it out"
        )
    return None


def finished_threshold(settings, version):
    """The null threshold of a finished model: the one stored with it, None where it was trained on version 1.1.

    settings: see read_settings. version: of the data; somebody else's model, which stores nothing, may abstain
    where there are unanswerable questions.
    """
    if settings:
        return settings.get("null_threshold")
    return 0.0 if version == "2.0" else None


def tune_threshold(held_out):
    """The threshold of the null odds with the best F1 on an Evaluation of held-out training questions."""
    has_answer, scores = map(bool, held_out.gold.values()), held_out.scores.values()
    odds = [odds for _, odds in held_out.answers.best.values()]
    return best_threshold(list(has_answer), [f1 for _, f1 in scores], odds)[1]


class Selection:
    """Which epoch is best by a dev metric, and whether to stop.

    metric: "f1", "exact" (more is better) or "dev_loss" (less is). patience: epochs without a better one, 0: no end.
    """

    def __init__(self, metric, patience, best=None, epoch=None, worse=0):
        """best, epoch, worse: from `state` of a run that goes on."""
        self.metric, self.patience = metric, patience
        self.sign = -1 if metric == "dev_loss" else 1
        self.best, self.epoch, self.worse = -math.inf if best is None else best, epoch, worse

    def state(self):
        """What a checkpoint keeps."""
        return {"best": self.best if math.isfinite(self.best) else None, "epoch": self.epoch, "worse": self.worse}

    def update(self, epoch, figures):
        """Take an epoch's figures; whether it is the best so far (the first one is)."""
        value = figures[self.metric]
        value = -math.inf if value is None else self.sign * value
        better = self.epoch is None or value > self.best
        self.worse = 0 if better else self.worse + 1
        if better:
            self.best, self.epoch = value, epoch
        return better

    @property
    def stop(self):
        return bool(self.patience) and self.worse >= self.patience
