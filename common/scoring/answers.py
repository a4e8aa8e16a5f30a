"""From logits to answers: the best spans of each window, pooled over the windows of a question.

Nothing here knows files, models or ranks.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

NO_SPAN_ODDS = 1e9  # null odds of a question without any span; finite, since JSON has no infinity


def best_spans(start_logits, end_logits, context_start, context_end, max_answer_tokens, n_best):
    """The best valid spans of each window, searched exhaustively.

    start_logits, end_logits: float32 [B, L]. context_start, context_end: int64 [B], the window's context tokens.
    A span is valid if it lies in the context and has 1 to max_answer_tokens tokens.
    Returns scores [B, n_best] (start plus end logit, highest first, -inf where there are fewer spans), start and end
    positions, int64 [B, n_best], 0 where there are fewer.
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
    best, index = F.pad(best, missing, value=-math.inf), F.pad(index, missing)
    index = index.masked_fill(~best.isfinite(), 0)  # of a span that does not exist, the end would lie outside
    start = index // width
    return best, start, start + index % width


def pool(ids, contexts, question, null, spans, can_abstain, n_best):
    """The answers of all questions from the best spans of all their windows.

    ids, contexts: lists [Q]. question: int [W], the question of each window. null: float [W, 2], start and end logit
    of each window's [CLS]. spans: dict of arrays [W, K]: score, start_logit, end_logit, first and past (characters).
    can_abstain: whether n-best lists hold the null answer (SQuAD v2.0).
    Returns {id: {"text": best non-null text, "null_odds": null score minus best score, "nbest": [...], "places":
    {text: (first, past)}}}, where the null score is the smallest [CLS] sum of a question's windows, nbest is as the
    official baselines write it and places says where its texts stand in the context.
    """
    width = spans["score"].shape[1]
    owner = np.repeat(question, width)
    score = spans["score"].ravel()
    order = np.lexsort((-score, owner))
    order = order[np.isfinite(score[order])]
    bounds = np.searchsorted(owner[order], np.arange(len(ids) + 1))
    first, past = spans["first"].ravel().tolist(), spans["past"].ravel().tolist()
    logits = np.stack([spans["start_logit"].ravel(), spans["end_logit"].ravel()], axis=1)
    windows = np.argsort(question, kind="stable")
    window_bounds = np.searchsorted(question[windows], np.arange(len(ids) + 1))

    answers = {}
    for row, (question_id, context) in enumerate(zip(ids, contexts, strict=True)):
        found, places = {}, {}
        for index in order[bounds[row] : bounds[row + 1]]:
            text = context[first[index] : past[index]]
            if text and text not in found:  # a token that stands for blanks alone has no text
                found[text], places[text] = logits[index], (first[index], past[index])
                if len(found) == n_best:
                    break
        own = null[windows[window_bounds[row] : window_bounds[row + 1]]]
        lowest = own[own.sum(1).argmin()]
        best = next(iter(found), "")
        odds = float(lowest.sum()) - float(found[best].sum()) if found else NO_SPAN_ODDS
        if can_abstain or not found:
            found[""] = lowest
        answers[question_id] = {
            "text": best,
            "null_odds": odds,
            "nbest": n_best_list(found),
            "places": places,
        }
    return answers


def n_best_list(found):
    """{text: (start logit, end logit)} as the official n-best list: highest first, with probabilities."""
    scores = np.array([float(pair[0]) + float(pair[1]) for pair in found.values()])
    odds = np.exp(scores - scores.max())
    entries = [
        {
            "text": text,
            "probability": float(probability),
            "start_logit": float(pair[0]),
            "end_logit": float(pair[1]),
        }
        for (text, pair), probability in zip(found.items(), odds / odds.sum(), strict=True)
    ]
    return [entries[i] for i in np.argsort(-scores, kind="stable")]  # small probabilities may all round to 0


def decide(answers, threshold):
    """{id: text} as predictions.json: no answer ("") where the null odds exceed `threshold`; None never abstains."""
    return {
        question_id: "" if threshold is not None and answer["null_odds"] > threshold else answer["text"]
        for question_id, answer in answers.items()
    }
