"""The command line of the three training scripts: one parser, grouped, help on every flag."""

import argparse

from common.errors import UserError
from common.features import question_limit
from common.model import MINILM, find_model, load_config, positions
from common.squad import ROOT, default_files

# The recipe of the bundled sample, where the user gives none of his own: it is too small for BERT's.
DEFAULTS = {"batch_size": 32, "learning_rate": 5e-5}
SAMPLE_DEFAULTS = {"batch_size": 8, "learning_rate": 3e-4}


class HelpFormatter(argparse.HelpFormatter):
    """Adds each default to its help, except where there is none to tell."""

    def _get_help_string(self, action):
        told = action.default in (None, argparse.SUPPRESS) or action.default is False or "default" in action.help
        return action.help if told else f"{action.help} (default: %(default)s)"


def share_of_one(text):
    """A number from 0 up to, not including, 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction from 0 to 1")
    return value


def positive(text):
    """A whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return value


def not_negative(text):
    """A finite number from 0."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0")
    return value


def build_parser(description):
    """The parser of all three scripts; each adds the few flags that it alone has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter, allow_abbrev=False)
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
    data.add_argument("--max-length", type=positive, default=384, help="tokens in a window, at most")
    data.add_argument("--overlap", type=int, default=128, help="tokens that neighbouring windows share")
    data.add_argument("--cache-dir", default=str(ROOT / "cache"), help="where tokenised windows are kept")

    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", help="folder or Hugging Face name; default: bert-base-uncased if it is here, else MiniLM"
    )
    model.add_argument("--dropout", type=share_of_one, help="of the hidden layers; default: the model's own")
    model.add_argument(
        "--attention-dropout", type=share_of_one, default=0.0, help="above 0 needs and selects sdpa attention"
    )
    model.add_argument("--attention", choices=["auto", "flash", "sdpa"], default="auto", help="attention backend")

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=positive, default=2, help="passes over the training set")
    training.add_argument(
        "--batch-size", type=positive, help="windows in a global batch (one step); default: 32, 8 for the sample"
    )
    training.add_argument("--learning-rate", type=not_negative, help="peak; default: 5e-5, 3e-4 for the sample")
    training.add_argument("--warmup", type=share_of_one, default=0.1, help="part of all steps in linear warm-up")
    training.add_argument("--weight-decay", type=not_negative, default=0.01, help="not on biases and LayerNorm")
    training.add_argument("--max-grad-norm", type=not_negative, default=1.0, help="clipping")
    training.add_argument("--accumulation", type=positive, default=1, help="micro-steps that share a global batch")
    training.add_argument(
        "--max-tokens-per-device", type=positive, help="more micro-steps where one would hold more tokens than this"
    )
    training.add_argument("--seed", type=int, default=0, help="of the new head, the epoch plan and dropout")
    training.add_argument("--deterministic", action="store_true", help="deterministic kernels only (slower)")
    training.add_argument(
        "--select", choices=["f1", "exact", "dev_loss"], default="f1", help="dev metric that says which epoch is best"
    )
    training.add_argument(
        "--patience", type=int, default=0, help="stop after this many epochs without a better --select; 0: never"
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
        "--compile", action=argparse.BooleanOptionalAction, help="compile the encoder layers; default: on CUDA"
    )
    speed.add_argument("--profile", action="store_true", help="trace a few steps into the run folder, print a table")

    evaluation = parser.add_argument_group("evaluation")
    evaluation.add_argument("--max-answer-tokens", type=positive, default=30, help="longest answer")
    evaluation.add_argument("--n-best", type=positive, default=20, help="answers kept for each question")
    evaluation.add_argument(
        "--tune-fraction", type=share_of_one, default=0.0, help="hold out training questions to set the null threshold"
    )
    evaluation.add_argument("--eval-tokens", type=positive, help="tokens in a chunk; default: 4096 (CPU), 65536 (CUDA)")
    evaluation.add_argument("--evaluate-only", metavar="MODEL", help="no training: evaluate this model folder")

    run = parser.add_argument_group("run")
    run.add_argument("--run-name", help="folder under --runs-dir; default: the Slurm job id, else the time")
    run.add_argument("--runs-dir", default="runs", help="where run folders are made")
    run.add_argument("--log-every", type=positive, default=50, help="steps between readings of loss and norm")
    return parser


def resolve(parser, argv=None):
    """Parse the command line and fill in what it leaves open: data, model, recipe.

    Adds questions (arguments of squad.question_sets), data_name, model_path, model_name, and settings (what an
    evaluated model folder says of its own windows). UserError for settings that contradict each other.
    """
    args = parser.parse_args(argv)
    train_file, dev_file, args.data_name = default_files()
    if args.train_file or args.dev_file:
        args.data_name = "files"
        if args.train_file and not (args.dev_file or args.dev_fraction) and not args.evaluate_only:
            raise UserError("--train-file needs --dev-file, or --dev-fraction to split a dev set off")
        if not args.train_file and not args.evaluate_only:
            raise UserError("--dev-file needs --train-file (or --evaluate-only MODEL)")
    if args.dev_file and args.dev_fraction:
        raise UserError("--dev-file and --dev-fraction exclude each other: the dev set is one or the other")
    args.score_untrained = args.data_name == "sample"
    args.questions = {
        "train_file": None if args.evaluate_only else args.train_file or train_file,
        "dev_file": args.dev_file or dev_file,
        "dev_fraction": args.dev_fraction,
        "tune_fraction": args.tune_fraction,
        "split_by": args.split_by,
        "max_train": args.max_train_examples,
        "max_dev": args.max_dev_examples,
        "first_answer": args.first_answer_only,
    }
    for name, value in (SAMPLE_DEFAULTS if args.data_name == "sample" else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)

    args.model_path, args.model_name = find_model(args.evaluate_only or args.model)
    config = load_config(args.model_path)
    settings = getattr(config, "squad", None) if args.evaluate_only else None
    if isinstance(settings, dict):  # a model of ours: windows as it was trained on
        args.max_length = int(settings.get("max_length", args.max_length))
        args.overlap = int(settings.get("overlap", args.overlap))
    args.settings = settings if isinstance(settings, dict) else {}
    question_limit(args.max_length, args.overlap, 4, positions(config))
    if args.max_tokens_per_device and args.max_tokens_per_device < args.max_length:
        raise UserError(
            f"--max-tokens-per-device {args.max_tokens_per_device} is less than one window: "
            f"use {args.max_length} (--max-length) or more"
        )
    return args


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
            f"recipe: {args.epochs} epochs, global batch {args.batch_size}, learning rate {args.learning_rate:g}, "
            f"seed {args.seed}"
        )
    return "\n".join(lines)
