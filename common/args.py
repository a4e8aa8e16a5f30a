"""The command line of the three training scripts: one parser, grouped, help on every flag."""

import argparse

from common import ROOT
from common.errors import Parser


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
