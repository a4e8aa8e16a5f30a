"""The command line of the three training scripts: one parser, grouped, help on every flag."""

import argparse
import math
import os
import sys
from pathlib import Path

from common.errors import Parser, UserError
from common.features import question_limit
from common.model import MINILM, find_model, load_config, positions
from common.record import check_free
from common.squad import ROOT, default_files, question_sets

# The recipe of the bundled sample, where the user gives none of his own: it is too small for BERT's.
DEFAULTS = {"batch_size": 32, "learning_rate": 5e-5}
SAMPLE_DEFAULTS = {"batch_size": 8, "learning_rate": 5e-5}
MINILM_SAMPLE_DEFAULTS = {"batch_size": 8, "learning_rate": 3e-4}


class HelpFormatter(argparse.HelpFormatter):
    """Adds each default to its help, except where there is none to tell."""

    def _get_help_string(self, action):
        told = action.default in (None, argparse.SUPPRESS) or action.default is False or "default" in action.help
        return action.help if told else f"{action.help} (default: %(default)s)"


def number(kind, least, below, what):
    """A type for argparse: a number of this kind, least <= number < below."""

    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value < below:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return convert


share_of_one = number(float, 0, 1, "a fraction from 0 to less than 1")
positive = number(int, 1, 2**31, "a whole number from 1")
few = number(int, 1, 1001, "a whole number from 1 to 1000")
whole = number(int, 0, 2**31, "a whole number from 0")
seed = number(int, 0, 2**63, "a whole number from 0 to 2**63 - 1")
not_negative = number(float, 0, float("inf"), "a number from 0")
above_zero = number(float, 1e-30, float("inf"), "a number above 0")
minutes = number(float, 1e-30, 1e6, "a number above 0 and below a million")  # clocks have an end


def build_parser(description):
    """The parser of all three scripts; each adds the few flags that it alone has."""
    parser = Parser(description=description, formatter_class=HelpFormatter, allow_abbrev=False)
    data = parser.add_argument_group("data")
    data.add_argument("--train-file", help="SQuAD JSON, plain or .gz; default: SQuAD v1.1 if fetched, else the sample")
    data.add_argument("--dev-file", help="SQuAD JSON to evaluate on; default: the dev set of the default data")
    data.add_argument(
        "--dev-fraction", type=share_of_one, default=0.0, help="split this part of --train-file off as the dev set"
    )
    data.add_argument("--split-by", choices=["article", "question"], default="article", help="unit of all splits")
    data.add_argument(
        "--max-train-examples", type=positive, help="first questions of --train-file, taken before any split"
    )
    data.add_argument("--max-dev-examples", type=positive, help="first questions of the dev set")
    data.add_argument("--first-answer-only", action="store_true", help="keep the first gold answer of each question")
    data.add_argument("--max-length", type=positive, help="tokens in a window, at most; default: 384")
    data.add_argument(
        "--overlap", type=whole, help="tokens that neighbouring windows share (doc_stride elsewhere); default: 128"
    )
    data.add_argument("--cache-dir", default=str(ROOT / "cache"), help="where tokenised windows are kept")

    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", help="folder or Hugging Face name; default: bert-base-uncased if it is here, else MiniLM"
    )
    model.add_argument("--dropout", type=share_of_one, help="of the hidden layers; default: the model's own")
    model.add_argument(
        "--attention-dropout", type=share_of_one, default=0.0, help="above 0 needs and selects sdpa attention"
    )
    model.add_argument(
        "--attention",
        choices=["auto", "fused", "flash", "sdpa"],
        default="auto",
        help="auto: fused (BERT's layers by our own kernels, others by flash or sdpa) on Ampere or newer, else sdpa",
    )

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=positive, default=2, help="passes over the training set")
    training.add_argument(
        "--batch-size", type=positive, help="windows in a global batch (one step); default: 32, 8 for the sample"
    )
    training.add_argument(
        "--learning-rate", type=not_negative, help="its peak; default: 5e-5, 3e-4 for MiniLM on the sample"
    )
    training.add_argument("--warmup", type=share_of_one, default=0.1, help="part of all steps in linear warm-up")
    training.add_argument("--weight-decay", type=not_negative, default=0.01, help="not on biases and LayerNorm")
    training.add_argument("--max-grad-norm", type=above_zero, default=1.0, help="clip the gradient to this norm")
    training.add_argument("--accumulation", type=positive, default=1, help="micro-steps that share a global batch")
    training.add_argument(
        "--max-tokens-per-device",
        type=positive,
        help="less memory: split a step into micro-steps of at most so many tokens, which graphs round up; the "
        "experiment stays the same",
    )
    training.add_argument(
        "--checkpoint-activations", action="store_true", help="less memory: recompute the layers in the backward pass"
    )
    training.add_argument("--seed", type=seed, default=0, help="of the new head, the epoch plan and dropout")
    training.add_argument("--deterministic", action="store_true", help="deterministic kernels only (slower)")
    training.add_argument(
        "--select", choices=["f1", "exact", "dev_loss"], default="f1", help="dev metric that says which epoch is best"
    )
    training.add_argument(
        "--patience", type=whole, default=0, help="stop after this many epochs without a better --select; 0: never"
    )

    speed = parser.add_argument_group("hardware and precision")
    speed.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto", help="where to run")
    speed.add_argument(
        "--precision",
        choices=["auto", "fp32", "tf32", "bf16", "fp16"],
        default="auto",
        help="the tensor-core switch; auto: bf16 on a card that has it, else fp32",
    )
    speed.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile layers that are not fused; default: on CUDA unless --deterministic",
    )
    speed.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="replay steps of like shape as CUDA graphs; default: on CUDA unless --deterministic",
    )
    speed.add_argument("--profile", action="store_true", help="trace a few steps into the run folder, print a table")

    evaluation = parser.add_argument_group("evaluation")
    evaluation.add_argument("--max-answer-tokens", type=positive, help="longest answer, in tokens; default: 30")
    evaluation.add_argument("--n-best", type=few, default=20, help="answers kept for each question")
    evaluation.add_argument(
        "--tune-fraction",
        type=share_of_one,
        default=0.0,
        help="v2.0: hold out this part of the training questions to set the null threshold",
    )
    evaluation.add_argument(
        "--score-train",
        type=whole,
        default=0,
        help="score so many training questions after each epoch too: far above dev's F1, it is overfitting; 0: none",
    )
    evaluation.add_argument(
        "--eval-tokens", type=positive, help="tokens in one pass; default: 4096 (CPU), 65536 (CUDA)"
    )
    evaluation.add_argument("--evaluate-only", metavar="MODEL", help="no training: evaluate this model folder")

    run = parser.add_argument_group("run")
    run.add_argument("--run-name", help="folder under --runs-dir; default: the Slurm job id, else the time")
    run.add_argument("--runs-dir", default="runs", help="where run folders are made")
    run.add_argument("--save-steps", type=whole, default=0, help="a checkpoint each so many steps; 0: none")
    run.add_argument(
        "--save-epochs", type=whole, default=0, help="a checkpoint each so many epochs, before evaluating; 0: none"
    )
    run.add_argument("--save-minutes", type=not_negative, default=15, help="a checkpoint each so many minutes; 0: none")
    run.add_argument(
        "--save-in-background", action="store_true", help="write checkpoints in a thread while training goes on"
    )
    run.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="PATH",
        help="go on from the newest checkpoint of this run, if there is one, or of the run or checkpoint at PATH",
    )
    run.add_argument(
        "--hang-minutes", type=minutes, default=10, help="end a distributed run that makes no progress for so long"
    )
    run.add_argument("--log-every", type=positive, default=50, help="steps between readings of loss and norm")
    run.add_argument("--dry-run", action="store_true", help="print all arguments, check that files are there, and end")
    return parser


def resolve(parser, argv=None):
    """Parse the command line and fill in what it leaves open: data, model, recipe.

    Adds questions (arguments of squad.question_sets), data_name, model_path, model_name, and settings (what an
    evaluated model folder says of itself). UserError for settings that contradict each other.
    """
    args = parser.parse_args(argv)
    check_combinations(args)
    train_file, dev_file, args.data_name = default_files()
    if args.train_file or args.dev_file:
        args.data_name = Path(args.train_file or args.dev_file).name.removesuffix(".gz").removesuffix(".json")
    args.questions = {
        "train_file": None if args.evaluate_only else args.train_file or train_file,
        "dev_file": args.dev_file or dev_file,
        "dev_fraction": args.dev_fraction,
        "tune_fraction": args.tune_fraction,
        "split_by": args.split_by,
        "max_train": args.max_train_examples,
        "max_dev": args.max_dev_examples,
        "seen": args.score_train,
        "first_answer": args.first_answer_only,
    }
    args.model_path, args.model_name = find_model(args.evaluate_only or args.model)
    config = load_config(args.model_path)
    args.settings = read_settings(config, args.model_path) if args.evaluate_only else {}
    for name, default in (("max_length", 384), ("overlap", 128), ("max_answer_tokens", 30)):
        if getattr(args, name) is None:
            setattr(args, name, args.settings.get(name, default))  # windows as an evaluated model was trained on
    args.score_untrained = args.data_name == "sample" and not args.evaluate_only
    recipe = DEFAULTS
    if args.data_name == "sample":
        recipe = MINILM_SAMPLE_DEFAULTS if args.model_name == MINILM else SAMPLE_DEFAULTS
    for name, value in recipe.items():
        if getattr(args, name) is None:
            setattr(args, name, value)

    question_limit(args.max_length, args.overlap, 4, positions(config))
    if args.max_tokens_per_device and args.max_tokens_per_device < args.max_length:
        raise UserError(
            f"--max-tokens-per-device {args.max_tokens_per_device} is less than one window: "
            f"use {args.max_length} (--max-length) or more"
        )
    if args.resume == "auto" and not (args.run_name or os.environ.get("SLURM_JOB_ID")):
        raise UserError("--resume: of which run? Add --run-name NAME to go on in its folder, or say --resume runs/NAME")
    check_free(args.runs_dir, args.run_name, taken_over=args.resume == "auto")
    if args.dry_run:
        show(args)
        sys.exit(0)
    return args


def show(args):
    """Print what a run would be, on its first rank; UserError if a data file is missing. Nothing is written."""
    question_sets(**args.questions)
    if os.environ.get("RANK", "0") == "0":
        files = {name: args.questions[name] for name in ("train_file", "dev_file")}
        given = {n: v for n, v in (vars(args) | files).items() if n not in ("questions", "settings", "dry_run")}
        print("\n".join([banner(args), "arguments:", *(f"  {name}: {value}" for name, value in given.items())]))


def check_combinations(args):
    """UserError for options that exclude or need each other, and for empty ones: a variable that is not set."""
    for name, value in vars(args).items():
        if value == "":
            raise UserError(f"--{name.replace('_', '-')} is empty: give it a value, or leave it out")
    if args.evaluate_only:
        for name in ("train_file", "dev_fraction", "tune_fraction", "max_train_examples", "score_train", "model"):
            if getattr(args, name):
                raise UserError(f"--{name.replace('_', '-')} has no meaning with --evaluate-only; use --dev-file alone")
    elif args.train_file and not (args.dev_file or args.dev_fraction):
        raise UserError("--train-file needs --dev-file, or --dev-fraction to split a dev set off")
    elif args.dev_file and not args.train_file:
        raise UserError("--dev-file needs --train-file (or --evaluate-only MODEL)")
    if args.dev_file and args.dev_fraction:
        raise UserError("--dev-file and --dev-fraction exclude each other: the dev set is one or the other")


def read_settings(config, path):
    """What save_model left in a model folder's config.json under "squad", checked; {} in other people's models."""
    settings = getattr(config, "squad", None)
    if settings is None:
        return {}
    kinds = {"max_length": int, "overlap": int, "max_answer_tokens": int, "version": str}
    good = isinstance(settings, dict) and all(type(settings.get(name)) is kind for name, kind in kinds.items())
    if good:
        threshold = settings.get("null_threshold")
        is_number = type(threshold) in (int, float) and -math.inf < threshold < math.inf
        good = {"1.1": threshold is None, "2.0": is_number}.get(settings["version"], False)  # v1.1 never abstains
        good = good and settings["max_answer_tokens"] > 0  # question_limit judges the other two
    if not good:
        raise UserError(f'{path}/config.json: its "squad" section is damaged; remove it, or train the model again')
    return settings


def banner(args):
    """The first lines of a run: which data and model it took, and how to get the real ones."""
    questions = args.questions
    lines = [f"data: {args.data_name}: {questions['train_file'] or 'no training'}"]
    lines[0] += (
        f", dev {questions['dev_fraction']} of it" if questions["dev_fraction"] else f", {questions['dev_file']}"
    )
    if args.data_name == "sample":
        lines[0] = "data: the small bundled sample, so the scores are the sample's and not SQuAD's"
        lines.append("      `python -m tools.fetch squad-v1.1` gets SQuAD, which is then taken by itself")
    lines.append(f"model: {args.model_name}")
    if args.model_name == MINILM:
        lines[-1] += ", 6 layers, pretrained"
        lines.append("      `python -m tools.fetch bert-base-uncased` gets BERT-base, which is then taken by itself")
    if not args.evaluate_only:
        lines.append(
            f"recipe: epochs {args.epochs}, global batch {args.batch_size}, learning rate {args.learning_rate:g}, "
            f"seed {args.seed}"
        )
    return "\n".join(lines)
