"""The official SQuAD scores of a predictions file, as JSON.

    python -m common.metrics DATA PREDICTIONS [--na-probs FILE] [--na-threshold X] [--rule {1.1,2.0}]

The scores are those of common.scoring.metrics; here is the command, which reads files.
"""

import json
import math
from collections import Counter

from common.data.files import parse_json, read_bytes
from common.data.squad import SURROGATES, read_squad
from common.errors import Parser, UserError, run, tell
from common.scoring.metrics import RULES, evaluate, missing_ids, shown


def read_predictions(path):
    """{question id: text} from a JSON file, plain or .gz. UserError, naming file and id, for anything else."""
    predictions = _read_object(path, "predictions")
    for question, text in predictions.items():
        if not isinstance(text, str):
            raise UserError(
                f'{path}: the prediction of question {shown(question)} is {_kind(text)}: write a text, "" for no answer'
            )
        if SURROGATES.search(text):
            raise UserError(
                f"{path}: the prediction of question {shown(question)} has a lone surrogate, half of a character "
                f"({ascii(text)[:60]}): write the file anew"
            )
    return predictions


def read_na_probs(path):
    """{question id: number} from a JSON file, plain or .gz. UserError, naming file and id, for anything else."""
    na_probs = _read_object(path, "no-answer scores")
    for question, value in na_probs.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and -1e308 < value < 1e308):
            given = value if number else _kind(value)
            raise UserError(
                f"{path}: the no-answer score of question {shown(question)} is {str(given)[:40]}: write a finite number"
            )
    return na_probs


def _read_object(path, what):
    """One JSON object from a file, read as the data is; UserError for anything else, and for an id twice."""

    raw = read_bytes(path)
    values = parse_json(path, raw)
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {_kind(values)}: write the {what} as one JSON object, question id to value")
    counts = Counter(question for question, _ in json.loads(raw.decode("utf-8-sig"), object_pairs_hook=list))
    for question, times in counts.items():
        if times > 1:
            raise UserError(f"{path}: id {shown(question)} is there twice: keep one")
        if SURROGATES.search(question):
            raise UserError(f"{path}: id {shown(question)} has a lone surrogate: write the file anew")
    return values


def _kind(value):
    """What a JSON value is, in JSON's words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return {dict: "an object", list: "a list", str: "a text"}.get(type(value), "a number")


def _warn(path, ids, text, of=""):
    """One warning line on stderr: what is wrong, how often, and the first ids."""
    if ids:
        first = ", ".join(shown(question) for question in ids[:3]) + (", ..." if len(ids) > 3 else "")
        tell(f"warning: {path}: {text}: {len(ids)}{of} ({first})")


def build_parser():
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
    return parser


def warn_of_ids(args, gold, predictions, na_probs, rule):
    """Warn of questions without a prediction or an answer, and of predictions and scores without a question."""
    missing, extra = missing_ids(gold, predictions)
    of = f" of {len(gold)}"
    _warn(args.predictions, missing, "questions without a prediction, each scores 0", of)
    _warn(args.predictions, extra, f"predictions for no question of {args.data}, ignored")
    _warn(args.na_probs, missing_ids(gold, na_probs or {})[1], f"scores for no question of {args.data}, ignored")
    if rule == "1.1":
        unanswerable = [question for question, texts in gold.items() if not texts]
        _warn(args.data, unanswerable, "questions without a gold answer, each scores 0 under rule 1.1", of)


def main(argv=None):
    parser = build_parser()
    args = parser.parse_args(argv)
    if math.isnan(args.na_threshold):
        parser.error("argument --na-threshold: NaN is no threshold: give a number")

    predictions = read_predictions(args.predictions)
    na_probs = read_na_probs(args.na_probs) if args.na_probs else None
    data = read_squad(args.data)
    rule = args.rule or data.version
    if rule == "1.1" and na_probs is not None:
        raise UserError(f"{args.data}: rule 1.1 knows no no-answer scores: leave --na-probs out or add --rule 2.0")
    rows = zip(data.frame["id"], data.frame["answers"], strict=True)
    gold = {question: [text for text, _ in answers] for question, answers in rows}

    warn_of_ids(args, gold, predictions, na_probs, rule)
    try:
        result = evaluate(gold, predictions, rule, na_probs, args.na_threshold)
    except UserError as error:  # with no-answer scores, only they can be at fault; without, only the data
        raise UserError(f"{args.na_probs or args.data}: {error}") from None
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    run(main)
