"""Exact match and F1 of predicted answers, equal to both official SQuAD scripts to the last digit.

The rules are those of evaluate-v1.1.py and evaluate-v2.0.py (https://rajpurkar.github.io/SQuAD-explorer/). Both compare
normalised answers and take the best score over a question's gold answers. They differ where nothing is left of an
answer: prediction `The` against gold `the` has F1 0 under rule 1.1 and 1 under rule 2.0, and only rule 2.0 knows
questions whose right answer is the empty string.
"""

import functools
import json
import re
import string
from collections import Counter

from common.errors import UserError

RULES = ("1.1", "2.0")

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only, as in the scripts: “ and – stay


def normalize_answer(text):
    """Lower case, without ASCII punctuation and English articles, single blanks between words.

    The order matters and is the official one: punctuation goes first, so `a-b` becomes `ab` and keeps its a.
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


@functools.lru_cache(1 << 17)  # the gold texts of both dev sets, which are compared after each epoch, and predictions
def words(text):
    """The words of a normalised answer, a tuple."""
    return tuple(normalize_answer(text).split())


def score_answer(prediction, gold_texts, rule):
    """Exact match (0 or 1) and F1 (0 to 1) of one prediction: each the best over the gold texts.

    Rule 2.0 first drops gold texts of which nothing is left; when none remains, the empty string is the right answer.
    Under rule 1.1 nothing is right where there is no gold text (the official script fails there).
    """
    # Two normalised texts are equal exactly when their words are, so that words serve both measures.
    predicted = words(prediction)
    golds = {words(text) for text in gold_texts}
    if rule == "2.0":
        golds = golds - {()} or {()}
    exact = max((int(predicted == gold) for gold in golds), default=0)
    f1 = max((_word_f1(predicted, gold, rule) for gold in golds), default=0)
    return exact, f1


def _word_f1(predicted, gold, rule):
    """Harmonic mean of precision and recall over words, each counted as often as both sides have it."""
    if rule == "2.0" and not (predicted and gold):
        return int(predicted == gold)
    if predicted == gold and gold:
        return 1.0
    if set(predicted).isdisjoint(gold):  # most pairs are equal or share nothing: no need to count
        return 0
    shared = sum((Counter(predicted) & Counter(gold)).values())
    precision = shared / len(predicted)
    recall = shared / len(gold)
    return (2 * precision * recall) / (precision + recall)  # written as official: another order rounds differently


def evaluate(gold, predictions, rule, na_probs=None, na_threshold=1.0, scores=None):
    """The official result: a dict with the official script's keys in its order, scores in per cent.

    gold: {question id: list of gold texts, empty for an unanswerable question}, in the order of the data, which is the
    order of summation. predictions: {question id: text}. na_probs (rule 2.0): {question id: how likely the question has
    no answer}; a prediction whose value is above na_threshold counts as empty, and the four best_* keys are added.
    scores: {question id: (exact, F1)} from `score_answer`, if they are known already.

    A question without a prediction scores 0 and is counted. Rule 1.1's script does the same; rule 2.0's leaves it out
    of the total and then fails. Ids that are no question are ignored. `missing_ids` names both.

    Raises UserError for no question at all, and with na_probs for a predicted question that is not in them.
    """
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is none of {', '.join(RULES)}")
    if rule == "1.1" and na_probs is not None:
        raise ValueError("no-answer scores need rule 2.0")
    if not gold:
        raise UserError("no question to score")

    raw = {}  # of the questions with a prediction: (exact, f1) before the no-answer threshold
    for question, texts in gold.items():
        if question in predictions:
            if na_probs is not None and question not in na_probs:
                raise UserError(f"question {shown(question)} has a prediction and no no-answer score: add it")
            raw[question] = scores[question] if scores else score_answer(predictions[question], texts, rule)

    if rule == "1.1":
        exact, f1 = _mean(raw, gold)
        return {"exact_match": exact, "f1": f1}

    scores = {}
    for question, score in raw.items():
        abstains = (0.0 if na_probs is None else na_probs[question]) > na_threshold
        unanswerable = int(not gold[question])
        scores[question] = (unanswerable, unanswerable) if abstains else score
    result = {}
    groups = {
        "": list(gold),
        "HasAns_": [question for question, texts in gold.items() if texts],
        "NoAns_": [question for question, texts in gold.items() if not texts],
    }
    for prefix, questions in groups.items():
        if questions:
            exact, f1 = _mean(scores, questions)
            result |= {f"{prefix}exact": exact, f"{prefix}f1": f1, f"{prefix}total": len(questions)}

    if na_probs is not None:
        questions = [question for question in na_probs if question in raw]  # the file's order decides among equals
        for number, name in enumerate(("exact", "f1")):
            best, threshold = best_threshold(
                [bool(gold[question]) for question in questions],
                [raw[question][number] for question in questions],
                [na_probs[question] for question in questions],
                answered=[bool(predictions[question]) for question in questions],
                official=True,
            )
            result |= {f"best_{name}": 100.0 * best / len(gold), f"best_{name}_thresh": threshold}
    return result


def _mean(scores, questions):
    """Mean exact match and F1 in per cent over `questions`; one without scores counts 0."""
    # A plain loop: sum() of floats compensates rounding errors from Python 3.12 on and so changes the last digit.
    exact = f1 = 0
    for question in questions:
        if question in scores:
            exact += scores[question][0]
            f1 += scores[question][1]
    return 100.0 * exact / len(questions), 100.0 * f1 / len(questions)


def best_threshold(has_answer, scores, na_scores, answered=None, official=False):
    """The threshold on no-answer scores with the best summed score: (sum over questions, threshold).

    A question is answered when its no-answer score is at most the threshold. Per question, all of one length:
    has_answer (bool); scores, the exact match or F1 of its best non-empty answer; na_scores, how much speaks for no
    answer (a probability, or null score minus best score); answered, whether its prediction is a non-empty text
    (default: all are). To tune on F1 pass F1 scores, on exact match exact scores.

    By default the threshold returned attains the sum returned. official=True is the search of evaluate-v2.0.py: the
    same, except that it also stops between questions of equal no-answer score, which no threshold can part, and that it
    gives 0.0, whatever the scale, where answering nothing is best.
    """
    order = sorted(range(len(na_scores)), key=lambda i: na_scores[i])  # stable, as the official sort
    total = best = sum(1 for answerable in has_answer if not answerable)  # answering nothing
    threshold = 0.0 if official or not order else na_scores[order[0]] - 1.0
    for place, i in enumerate(order):
        if has_answer[i]:
            total += scores[i]
        elif answered is None or answered[i]:
            total -= 1
        splits = official or place + 1 == len(order) or na_scores[order[place + 1]] != na_scores[i]
        if total > best and splits:
            best, threshold = total, na_scores[i]
    return best, threshold


def missing_ids(gold, predictions):
    """Two lists of ids: questions without a prediction (they score 0), and predictions of no question (ignored)."""
    missing = [question for question in gold if question not in predictions]
    extra = [question for question in predictions if question not in gold]
    return missing, extra


def shown(question):
    """An id for a message: quoted, on one line, in ASCII, of bearable length."""
    shown = json.dumps(question)
    return shown if len(shown) <= 80 else shown[:76] + '..."'
