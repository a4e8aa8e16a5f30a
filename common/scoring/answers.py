"""From logits to answers: the best spans of each window, pooled over the windows of a question.

Nothing here knows files, models or ranks.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F

NO_SPAN_ODDS = 1e9  # null odds of a question without any span; finite, since JSON has no infinity


def best_spans(start_logits, end_logits, context_start, context_end, max_answer_tokens, n_best):
    """The best valid spans of each window, searched exhaustively.

    start_logits, end_logits: float32 [B, L]. context_start, context_end: int64 [B], the window's context tokens.
    A span is valid if it lies in the context and has 1 to max_answer_tokens tokens.
    Returns start and end positions, int64 [B, n_best], the highest sum of both logits first, and bool [B, n_best]:
    False, at position 0, where there are fewer spans.
    """
    length = start_logits.shape[1]
    width = min(max_answer_tokens, length)
    place = torch.arange(length, device=start_logits.device)
    outside = (place < context_start[:, None]) | (place >= context_end[:, None])
    start_logits = start_logits.masked_fill(outside, -math.inf)
    end_logits = end_logits.masked_fill(outside, -math.inf)
    ends = F.pad(end_logits, (0, width - 1), value=-math.inf).unfold(1, width, 1)  # [B, L, width], a view
    scores = (start_logits[:, :, None] + ends).flatten(1)
    best, index = scores.topk(min(n_best, scores.shape[1]), dim=1)
    missing = (0, n_best - best.shape[1])
    exists, index = F.pad(best.isfinite(), missing), F.pad(index, missing)
    index = index.masked_fill(~exists, 0)  # of a span that does not exist, the end would lie outside
    start = index // width
    return start, start + index % width, exists


@dataclass
class Answers:
    """The best spans of all windows of a question set, and the answers that they give.

    ids, contexts: lists [Q]. question: int [W], the question of each window; each question has a window. null: float32
    [W, 2], start and end logit of each window's [CLS]. start_logit, end_logit: float32 [W, K], the highest sum first,
    -inf where a window has fewer spans. first, past: int [W, K], characters of the context.
    """

    ids: list
    contexts: list
    question: np.ndarray
    null: np.ndarray
    start_logit: np.ndarray
    end_logit: np.ndarray
    first: np.ndarray
    past: np.ndarray

    def of_each_window(self, count):
        """The same of the `count` best spans of each window."""
        names = ("start_logit", "end_logit", "first", "past")
        return replace(self, **{name: getattr(self, name)[:, :count] for name in names})

    @cached_property
    def scores(self):
        """Start plus end logit of each span, float32 [W, K]; -inf for a span without text: a token may be a blank."""
        return np.where(self.past > self.first, self.start_logit + self.end_logit, -np.inf)

    def lowest(self, values):
        """The window with the lowest of `values` [W], the first of several, for each question: int [Q]."""
        order = np.lexsort((values, self.question))
        return order[np.searchsorted(self.question[order], np.arange(len(self.ids)))]

    @cached_property
    def null_logits(self):
        """Start and end logit of no answer for each question, float32 [Q, 2]: the lowest sum of its windows."""
        return self.null[self.lowest(self.null.sum(1))]

    @cached_property
    def best(self):
        """{id: (text of the best span, null odds)}: null odds are the null score minus that span's.

        The text is "" where there is no span.
        """
        column = self.scores.argmax(1)  # of equal scores the first
        score = self.scores[np.arange(len(column)), column]
        window = self.lowest(-score)
        span = window, column[window]
        exists = np.isfinite(score[window])
        odds = self.null_logits.sum(1).astype(float) - score[window]
        odds = np.where(exists, odds, NO_SPAN_ODDS).tolist()
        first, past = np.where(exists, self.first[span], 0).tolist(), np.where(exists, self.past[span], 0).tolist()
        texts = map(str.__getitem__, self.contexts, map(slice, first, past))
        return dict(zip(self.ids, zip(texts, odds, strict=True), strict=True))

    def n_best(self, count, can_abstain):
        """Yields (id, n-best list) of each question, in order: at most `count` texts, each once, the best first.

        can_abstain: whether the list holds the null answer (SQuAD v2.0) too. An entry is (text, start logit, end logit,
        first character, one past the last), the last two None for the null answer.
        """
        owner, scores = np.repeat(self.question, self.scores.shape[1]), self.scores.ravel()
        order = np.lexsort((-scores, owner))
        order = order[np.isfinite(scores[order])]
        bounds = np.searchsorted(owner[order], np.arange(len(self.ids) + 1)).tolist()
        arrays = (self.start_logit, self.end_logit, self.first, self.past)
        starts, ends, first, past = (array.ravel()[order].tolist() for array in arrays)
        for row, null in enumerate(self.null_logits.tolist()):
            context, found = self.contexts[row], {}
            for i in range(bounds[row], bounds[row + 1]):
                text = context[first[i] : past[i]]
                if text not in found:
                    found[text] = i
                    if len(found) == count:
                        break
            entries = [(text, starts[i], ends[i], first[i], past[i]) for text, i in found.items()]
            if can_abstain or not found:
                entries.append(("", *null, None, None))
            yield self.ids[row], sorted(entries, key=lambda entry: -(entry[1] + entry[2]))


def probabilities(entries):
    """The softmax of the scores of an n-best list."""
    top = entries[0][1] + entries[0][2]
    odds = [math.exp(entry[1] + entry[2] - top) for entry in entries]
    total = sum(odds)
    return [one / total for one in odds]


def decide(best, threshold):
    """{id: text} as predictions.json, from {id: (text, null odds)}.

    No answer ("") where the null odds exceed `threshold`; None never abstains.
    """
    if threshold is None:
        return {key: text for key, (text, _) in best.items()}
    return {key: "" if odds > threshold else text for key, (text, odds) in best.items()}
