"""Exact match and F1 of predicted answers, equal to both official SQuAD scripts to the last digit.

    python -m common.metrics DATA PREDICTIONS [--na-probs FILE] [--na-threshold X] [--rule {1.1,2.0}]

The rules are those of evaluate-v1.1.py and evaluate-v2.0.py (https://rajpurkar.github.io/SQuAD-explorer/). Both compare
normalised answers and take the best score over a question's gold answers. They differ where nothing is left of an
answer: prediction `The` against gold `the` has F1 0 under rule 1.1 and 1 under rule 2.0, and only rule 2.0 knows
questions whose right answer is the empty string.
"""

import json
import math
import re
import string
from collections import Counter

from common.errors import Parser, UserError, run, tell

RULES = ("1.1", "2.0")

ARTICLES = re.compile(r"\b(a|an|the)\b")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only, as in the scripts: “ and – stay


def normalize_answer(text):
    """Lower case, without ASCII punctuation and English articles, single blanks between words.

    The order matters and is the official one: punctuation goes first, so `a-b` becomes `ab` and keeps its a.
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def score_answer(prediction, gold_texts, rule):
    """Exact match (0 or 1) and F1 (0 to 1) of one prediction: each the best over the gold texts.

    Rule 2.0 first drops gold texts of which nothing is left; when none remains, the empty string is the right answer.
    Under rule 1.1 nothing is right where there is no gold text (the official script fails there).
    """
    # Two normalised texts are equal exactly when their words are, so that words serve both measures.
    predicted = normalize_answer(prediction).split()
    golds = [normalize_answer(text).split() for text in gold_texts]
    if rule == "2.0":
        golds = [gold for gold in golds if gold] or [[]]
    exact = max((int(predicted == gold) for gold in golds), default=0)
    f1 = max((_word_f1(predicted, gold, rule) for gold in golds), default=0)
    return exact, f1


def _word_f1(predicted, gold, rule):
    """Harmonic mean of precision and recall over words, each counted as often as both sides have it."""
    if rule == "2.0" and not (predicted and gold):
        return int(predicted == gold)
    shared = sum((Counter(predicted) & Counter(gold)).values())
    if shared == 0:
        return 0
    precision = shared / len(predicted)
    recall = shared / len(gold)
    return (2 * precision * recall) / (precision + recall)  # written as official: another order rounds differently


def evaluate(gold, predictions, rule, na_probs=None, na_threshold=1.0):
    """The official result: a dict with the official script's keys in its order, scores in per cent.

    gold: {question id: list of gold texts, empty for an unanswerable question}, in the order of the data, which is the
    order of summation. predictions: {question id: text}. na_probs (rule 2.0): {question id: how likely the question has
    no answer}; a prediction whose value is above na_threshold counts as empty, and the four best_* keys are added.

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
                raise UserError(f"question {_shown(question)} has a prediction and no no-answer score: add it")
            raw[question] = score_answer(predictions[question], texts, rule)

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


# From here on: the command line, the only part that knows of files.


def read_predictions(path):
    """{question id: text} from a JSON file, plain or .gz. UserError, naming file and id, for anything else."""
    predictions = _read_object(path, "predictions")
    for question, text in predictions.items():
        if not isinstance(text, str):
            raise UserError(
                f"{path}: the prediction of question {_shown(question)} is {_kind(text)}: "
                'write a text, "" for no answer'
            )
        if LONE_SURROGATE.search(text):
            raise UserError(
                f"{path}: the prediction of question {_shown(question)} has a lone surrogate, half of a character "
                f"({ascii(text)[:60]}): write the file anew"
            )
    return predictions


def read_na_probs(path):
    """{question id: number} from a JSON file, plain or .gz. UserError, naming file and id, for anything else."""
    na_probs = _read_object(path, "no-answer scores")
    for question, value in na_probs.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and -1e308 < value < 1e308):
            shown = value if number else _kind(value)
            raise UserError(
                f"{path}: the no-answer score of question {_shown(question)} is {str(shown)[:40]}: "
                "write a finite number"
            )
    return na_probs


def _read_object(path, what):
    """One JSON object from a file, read as the data is; UserError for anything else, and for an id twice."""
    from common import squad  # here, because the scores above know nothing of files

    raw = squad.read_bytes(path)
    values = squad.parse_json(path, raw)
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {_kind(values)}: write the {what} as one JSON object, question id to value")
    counts = Counter(question for question, _ in json.loads(raw.decode("utf-8-sig"), object_pairs_hook=list))
    for question, times in counts.items():
        if times > 1:
            raise UserError(f"{path}: id {_shown(question)} is there twice: keep one")
        if LONE_SURROGATE.search(question):
            raise UserError(f"{path}: id {_shown(question)} has a lone surrogate: write the file anew")
    return values


def _kind(value):
    """What a JSON value is, in JSON's words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return {dict: "an object", list: "a list", str: "a text"}.get(type(value), "a number")


def _shown(question):
    """An id for a message: quoted, on one line, in ASCII, of bearable length."""
    shown = json.dumps(question)
    return shown if len(shown) <= 80 else shown[:76] + '..."'


def _warn(path, ids, text, of=""):
    """One warning line on stderr: what is wrong, how often, and the first ids."""
    if ids:
        first = ", ".join(_shown(question) for question in ids[:3]) + (", ..." if len(ids) > 3 else "")
        tell(f"warning: {path}: {text}: {len(ids)}{of} ({first})")


def main(argv=None):
    parser = Parser(
        prog="python -m common.metrics", description="Print the official SQuAD scores of a predictions file as JSON."
    )
    parser.add_argument("data", metavar="DATA", help="SQuAD v1.1 or v2.0 JSON, plain or .gz")
    parser.add_argument("predictions", metavar="PREDICTIONS", help="JSON object, question id to answer text")
    parser.add_argument("--na-probs", metavar="FILE", help="JSON object, question id to no-answer score (rule 2.0)")
    parser.add_argument(
        "--na-threshold",
        metavar="X",
        type=float,
        default=1.0,
        help="a no-answer score above X makes the prediction empty (default: 1.0, as the official script)",
    )
    parser.add_argument("--rule", choices=RULES, help="score by this version's script (default: as the data)")
    args = parser.parse_args(argv)
    if math.isnan(args.na_threshold):
        parser.error("argument --na-threshold: NaN is no threshold: give a number")

    from common import squad  # here, because the scores above know nothing of files

    predictions = read_predictions(args.predictions)
    na_probs = read_na_probs(args.na_probs) if args.na_probs else None
    data = squad.read_squad(args.data)
    rule = args.rule or data.version
    if rule == "1.1" and na_probs is not None:
        raise UserError(f"{args.data}: rule 1.1 knows no no-answer scores: leave --na-probs out or add --rule 2.0")
    rows = zip(data.frame["id"], data.frame["answers"], strict=True)
    gold = {question: [text for text, _ in answers] for question, answers in rows}

    missing, extra = missing_ids(gold, predictions)
    of = f" of {len(gold)}"
    _warn(args.predictions, missing, "questions without a prediction, each scores 0", of)
    _warn(args.predictions, extra, f"predictions for no question of {args.data}, ignored")
    _warn(args.na_probs, missing_ids(gold, na_probs or {})[1], f"scores for no question of {args.data}, ignored")
    if rule == "1.1":
        unanswerable = [question for question, texts in gold.items() if not texts]
        _warn(args.data, unanswerable, "questions without a gold answer, each scores 0 under rule 1.1", of)
    try:
        result = evaluate(gold, predictions, rule, na_probs, args.na_threshold)
    except UserError as error:  # with no-answer scores, only they can be at fault; without, only the data
        raise UserError(f"{args.na_probs or args.data}: {error}") from None
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    run(main)
