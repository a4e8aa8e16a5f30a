"""Answer questions about a text, a Markdown file or a SQuAD file with a fine-tuned model.

    python -m tools.ask --model runs/NAME/model --context-file notes.txt --question "Who built the bridge?"
    python -m tools.ask --model runs/NAME/model --context-file notes.txt                  (asks you for questions)
    python -m tools.ask --model runs/NAME/model --context-file dev-v1.1.json --predictions predictions.json

From Python: `reader = load("runs/NAME/model")`, then `ask(reader, text, ["Who built the bridge?"])`.
"""

import argparse
import bisect
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import sys
import time
from pathlib import Path

from common import errors
from common.args import HelpFormatter, few, positive
from common.data.files import read_bytes
from common.data.squad import SURROGATES, SquadData, fault_frame, question_frame, read_squad
from common.data.tokenizer import load_tokenizer, question_limit, read_template, vocabulary_size
from common.data.windows import build
from common.errors import Parser, UserError, tell
from common.model.finding import find_model, load_config, positions
from common.model.loading import load_model, settle_attention
from common.model.precision import HALF, compile_layers, compute_in
from common.model.span import SpanModel
from common.run.progress import Progress
from common.run.record import write_json
from common.run.seeds import quiet_warnings
from common.run.settings import choose_kernels, read_settings
from common.run.world import World
from common.scoring.answers import decide, probabilities
from common.scoring.evaluation import find_answers, predict
from common.scoring.selection import finished_threshold

SEARCHED = 20  # answers searched for each question, as the training scripts' --n-best; fewer are shown


class Quiet(World):
    """A World whose log lines go to stderr: stdout is for answers."""

    def log(self, text):
        tell(text)


@dataclasses.dataclass
class Reader:
    """A fine-tuned model, and how it wants to be asked.

    settings: what its folder says of its training, see common.args.read_settings. max_length, overlap: of the windows,
    in tokens.
    """

    model: SpanModel
    tokenizer: object
    settings: dict
    world: World
    max_length: int
    overlap: int
    max_answer_tokens: int
    eval_tokens: int
    n_best: int = SEARCHED


def load(name, device="auto", precision="auto", eval_tokens=None, compiled=False):
    """The Reader of a model folder or name; UserError for what is no fine-tuned model.

    device, precision, eval_tokens: as the options of the training scripts. compiled: True, False, or None for what
    an evaluation does: it takes a while to start and then answers thousands of questions faster.
    """
    path, _ = find_model(name)
    config = load_config(path)
    settings = read_settings(config, path)
    max_length = settings.get("max_length", min(384, positions(config) or 384))
    overlap = settings.get("overlap", max_length // 3)  # 128 of 384, as in training
    tokenizer = load_tokenizer(path)
    try:
        question_limit(max_length, overlap, read_template(tokenizer).specials, positions(config))
    except UserError as error:
        raise UserError(f"{path}/config.json: {error}") from None

    args = argparse.Namespace(precision=precision, attention="auto", attention_dropout=0.0, eval_tokens=eval_tokens)
    args.compile, args.cuda_graphs, args.deterministic = compiled, False, False
    world = Quiet(device)
    quiet_warnings()
    choose_kernels(args, world.device)
    model = load_model(path, args.attention, vocabulary=vocabulary_size(tokenizer), needs_head=True)
    model.to(world.device)
    compute_in(model, HALF.get(args.precision))
    settle_attention(model, world, training=False)
    for line in model.fallbacks:
        tell(f"note: {line}")
    if args.compile:
        compile_layers(model)
    longest = settings.get("max_answer_tokens", 30)
    return Reader(model, tokenizer, settings, world, max_length, overlap, longest, args.eval_tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Questions and answers


def read_text(path):
    """The text of a file, its line ends as they are; UserError for what is not text."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if "\0" in text:
        raise UserError(f"{path}: holds NUL characters, so it is no text; name a text, Markdown or SQuAD file")
    return text


def text_questions(text, questions, name="the text"):
    """SquadData of `questions` about one text; UserError where either is blank. `name` stands in messages."""
    if not text.strip():
        raise UserError(f"{name}: holds no text to find answers in")
    if not all(question.strip() for question in questions):
        raise UserError("a question is empty; write what you want to know")
    text, *questions = (SURROGATES.sub("\ufffd", one) for one in (text, *questions))
    rows = [(str(i), name, question, text, [], False) for i, question in enumerate(questions)]
    return SquadData(name, "1.1", question_frame(rows), fault_frame([]))


def find(reader, data, n_best=SEARCHED):
    """(Answers, the null threshold) for all questions of `data` (SquadData), as an evaluation finds them."""
    threshold = finished_threshold(reader.settings, data.version)
    features = build(data, reader.tokenizer, reader.max_length, reader.overlap)
    cut = [detail for _, fault, detail in features.meta["faults"] if fault == "long question"]
    if cut:
        tell(f"warning: {len(cut)} of {len(data.frame)} questions are too long and were cut, the first: {cut[0]}")
    tokens = features.meta["tokens"]
    several = tokens > reader.eval_tokens  # a single pass needs no bar, and a log file none at all
    progress = Progress(tokens, "answering", show=several and sys.stderr.isatty())
    n_best = max(n_best, SEARCHED)  # a shorter search could break ties otherwise than the evaluation's
    limits = dataclasses.replace(reader, n_best=n_best)
    outputs = predict(reader.model, features, limits, reader.world, progress)
    progress.close()
    return find_answers(outputs, features, data.frame), threshold


@functools.lru_cache(maxsize=1)
def line_ends(text):
    """Where the lines of a text end: kept, since many answers in a row stand in one text."""
    return [match.start() for match in re.finditer("\n", text)]


def describe(entry, probability, context):
    """An entry of an n-best list with the line of its text: a dict, see `ask`."""
    text, start_logit, end_logit, start, end = entry
    return {
        "answer": text,
        "score": start_logit + end_logit,
        "probability": probability,
        "start": start,
        "end": end,
        "line": None if start is None else 1 + bisect.bisect_left(line_ends(context), start),
    }


def ask_all(reader, data, n_best=3):
    """The answers to all questions of `data` (SquadData), in order: a list of dicts, see `ask`."""
    if not len(data.frame):
        return []
    answers, threshold = find(reader, data, n_best)
    abstains = threshold is not None
    lists = answers.n_best(max(n_best, SEARCHED), abstains)
    usual = answers.of_each_window(SEARCHED).n_best(SEARCHED, abstains)  # as in nbest.json
    predictions, results = decide(answers.best, threshold), []
    for (key, entries), (_, twenty), row in zip(lists, usual, data.frame.itertuples(), strict=True):
        top = entries[0][1] + entries[0][2]
        share = probabilities(twenty)[0]
        shares = [share * math.exp(entry[1] + entry[2] - top) for entry in entries]
        described = [describe(*pair, row.context) for pair in zip(entries, shares, strict=True)]
        best = next(one for one in described if one["answer"] == predictions[key])
        odds = {"null_odds": answers.best[key][1], "threshold": threshold}
        results.append({"id": key, "question": row.question, **best, **odds, "n_best": described[:n_best]})
    return results


def ask(reader, text, questions, n_best=3):
    """The answers to `questions` (a list, or one as text) from `text`, computed together: a list of dicts.

    id: the question's number, as text. answer: "" for no answer. score: start plus end logit. probability: its share
    among the 20 best, however many are shown. start, end: characters of the text, from 0, end not included; line: from
    1; None, all three, for no answer. null_odds, threshold: no answer where the first exceeds the second; None never
    abstains. n_best: the best answers, each with the fields from answer to line. UserError for an empty text or
    question.
    """
    questions = [questions] if isinstance(questions, str) else list(questions)
    return ask_all(reader, text_questions(text, questions), n_best)


# ---------------------------------------------------------------------------------------------------------------------
# The command


def one_line(text):
    """For a terminal: blanks and line ends are spaces, and what would command it or turn the line round is escaped."""
    joiners = "\u200c\u200d"  # of letters (Persian, Hindi) and emoji; not printable to Python
    text = " ".join(text.split())
    return "".join(c if c.isprintable() or c in joiners else c.encode("unicode_escape").decode() for c in text)


def report(result):
    """A result for the eye: its answer, and below it the other answers of the n-best list."""

    def told(entry):
        place = f"line {entry['line']}, characters {entry['start']}-{entry['end']}, " if entry["answer"] else ""
        figures = f"score {entry['score']:.2f}, probability {entry['probability']:.2f}"
        return f"{one_line(entry['answer']) or 'no answer'}  ({place}{figures})"

    others = [told(entry) for entry in result["n_best"] if entry["answer"] != result["answer"]]
    return "\n".join([f"  {told(result)}", *(f"    or {other}" for other in others)])


def piped_or_typed():
    """The questions that stdin gives, a line each, as lists: one by one from a terminal, all at once from a pipe."""
    if not sys.stdin.isatty():
        questions = [line.strip() for line in sys.stdin if line.strip()]
        if not questions:
            raise UserError("no question: give --question, or questions on stdin, a line each")
        yield questions
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  lets the arrow keys edit the line
    while True:
        try:
            question = input("question (Ctrl-D ends): " if sys.stdout.isatty() else "").strip()
        except EOFError:
            return tell("")  # the shell's prompt begins a line of its own
        if question:
            yield [question]


def same_file(one, other):
    """Whether two names are of one file, be it by a link, or would be once it is written."""
    both_there = os.path.exists(one) and os.path.exists(other)
    return os.path.realpath(one) == os.path.realpath(other) or (both_there and os.path.samefile(one, other))


def build_parser():
    description = __doc__.split("\n")[0]
    parser = Parser(
        prog="python -m tools.ask", description=description, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="a run's model folder, or any fine-tuned one with a span head")
    parser.add_argument(
        "--context-file", required=True, metavar="FILE", help="text or Markdown in UTF-8; SQuAD (.json or .json.gz)"
    )
    parser.add_argument(
        "--question",
        action="append",
        metavar="Q",
        help="about the text; may be given several times; default: from stdin, a line each, or those of the SQuAD file",
    )
    parser.add_argument("--n-best", type=few, default=3, help="answers to show for each question")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON object a line")
    how.add_argument(
        "--predictions", metavar="FILE", help="SQuAD: write {id: answer} here, as an evaluation does; print no answers"
    )
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto", help="where to run")
    parser.add_argument(
        "--precision", choices=["auto", "fp32", "tf32", "bf16", "fp16"], default="auto", help="as in training"
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile layers that are not fused; default: on CUDA over a SQuAD file, as an evaluation does",
    )
    parser.add_argument(
        "--eval-tokens", type=positive, help="tokens in one pass; default: 4096 (CPU), 65536 (CUDA), as in training"
    )
    return parser


def main(argv=None):
    args = build_parser().parse_args(argv)
    sys.stdin.reconfigure(errors="replace")
    # JSON is UTF-8 whatever the terminal is; other text may hold what the terminal cannot show.
    sys.stdout.reconfigure(**({"encoding": "utf-8"} if args.json else {"errors": "backslashreplace"}))
    is_squad = args.context_file.lower().endswith((".json", ".json.gz"))
    if is_squad and args.question:
        raise UserError(f"{args.context_file}: a SQuAD file has its own questions; leave --question out")
    if args.predictions and not is_squad:
        raise UserError("--predictions needs a SQuAD file as --context-file, whose questions have ids; use --json")
    if args.predictions and not os.path.isdir(Path(args.predictions).absolute().parent):
        raise UserError(f"{args.predictions}: no such folder; make it first")

    # The input first, since loading a model takes seconds.
    if is_squad:
        data = read_squad(args.context_file, labelled=False)  # data.path may have .gz where the name has none
        if args.predictions and any(same_file(args.predictions, path) for path in (args.context_file, data.path)):
            raise UserError(f"{args.predictions}: is the SQuAD file itself; name another file for --predictions")
    else:
        text = read_text(args.context_file)
        data = text_questions(text, args.question or [], args.context_file)
    compiled = args.compile if args.compile is not None or is_squad else False
    reader = load(args.model, args.device, args.precision, args.eval_tokens, compiled)
    typed = not (is_squad or args.question) and sys.stdin.isatty()  # then the question stands there already

    def answer(data):
        for result in ask_all(reader, data, args.n_best):
            if args.json:
                print(json.dumps(result, ensure_ascii=False), flush=True)
            else:
                print(*([] if typed else [one_line(result["question"])]), report(result), sep="\n", flush=True)

    clock = time.perf_counter()
    if args.predictions:
        answers, threshold = find(reader, data)
        write_json(args.predictions, decide(answers.best, threshold))
    elif is_squad or args.question:
        answer(data)
    else:
        for questions in piped_or_typed():
            answer(text_questions(text, questions, args.context_file))
    if is_squad:
        tell(f"{len(data.frame):,} questions answered in {time.perf_counter() - clock:.1f} s")


if __name__ == "__main__":
    errors.run(main)
