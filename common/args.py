"""The command line of the three training scripts: definitions only. `common.run.settings` resolves them.

Each argument has a class, which says what a change of it means:

    experiment    it changes what is computed: a resumed run must have the same
    input         a file or a model: compared by content, not by name
    placement     where and how fast it runs: a resumed run may change it, a report compares it
    output        what is computed beside the training: a report compares it
    bookkeeping   names, folders, checkpoints, log lines: free
    mode          the command does not train
"""

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

RESOLVED = {  # the class of what `common.run.settings.resolve` adds
    "data_name": "input", "model_name": "input", "model_path": "input", "questions": "input", "settings": "input",
    "score_untrained": "bookkeeping",
}  # fmt: skip


def build_parser(description):
    """The parser of all three scripts; each adds the few flags that it alone has.

    description: a script's docstring, of which the first line is shown.
    """
    parser = Parser(description=description.split("\n")[0], formatter_class=HelpFormatter, allow_abbrev=False)
    for title, add_arguments in GROUPS.items():
        add_arguments(group(parser, title))
    return parser


def group(parser, title):
    """A function that adds an argument of a class to a new group: add(class, flag, …)."""
    arguments = parser.add_argument_group(title)

    def add(kind, flag, **settings):
        arguments.add_argument(flag, **settings).kind = kind

    return add


def classes(parser=None):
    """{argument: its class}; what a script adds to the common parser is "placement"."""
    parser = parser or build_parser("")
    own = {action.dest: getattr(action, "kind", "placement") for action in parser._actions if action.dest != "help"}
    return own | RESOLVED


def data_arguments(add):
    add("input", "--train-file", help="SQuAD JSON, plain or .gz; default: SQuAD v1.1 if fetched, else the sample")
    add("input", "--dev-file", help="SQuAD JSON to evaluate on; default: the dev set of the default data")
    add(
        "experiment", "--dev-fraction", type=share_of_one, default=0.0,
        help="split this part of --train-file off as the dev set",
    )  # fmt: skip
    add("experiment", "--split-by", choices=["article", "question"], default="article", help="unit of all splits")
    add(
        "experiment", "--max-train-examples", type=positive,
        help="first questions of --train-file, taken before any split",
    )  # fmt: skip
    add("experiment", "--max-dev-examples", type=positive, help="first questions of the dev set")
    add("experiment", "--first-answer-only", action="store_true", help="keep the first gold answer of each question")
    add("experiment", "--max-length", type=positive, help="tokens in a window, at most; default: 384")
    add(
        "experiment", "--overlap", type=whole,
        help="tokens that neighbouring windows share (doc_stride elsewhere); default: 128",
    )  # fmt: skip
    add("bookkeeping", "--cache-dir", default=str(ROOT / "cache"), help="where tokenised windows are kept")


def model_arguments(add):
    add("input", "--model", help="folder or Hugging Face name; default: bert-base-uncased if it is here, else MiniLM")
    add("experiment", "--dropout", type=share_of_one, help="of the hidden layers; default: the model's own")
    add(
        "experiment", "--attention-dropout", type=share_of_one, default=0.0,
        help="above 0 needs and selects sdpa attention",
    )  # fmt: skip
    add(
        "placement", "--attention", choices=["auto", "fused", "flash", "sdpa"], default="auto",
        help="auto: fused (BERT's layers by our own kernels, others by flash or sdpa) on Ampere or newer, else sdpa",
    )  # fmt: skip


def training_arguments(add):
    add("experiment", "--epochs", type=positive, default=2, help="passes over the training set")
    add(
        "experiment", "--batch-size", type=positive,
        help="windows in a global batch (one step); default: 32, 8 for the sample",
    )  # fmt: skip
    add(
        "experiment", "--learning-rate", type=not_negative,
        help="its peak; default: 5e-5, 3e-4 for MiniLM on the sample",
    )  # fmt: skip
    add("experiment", "--warmup", type=share_of_one, default=0.1, help="part of all steps in linear warm-up")
    add("experiment", "--weight-decay", type=not_negative, default=0.01, help="not on biases and LayerNorm")
    add("experiment", "--max-grad-norm", type=above_zero, default=1.0, help="clip the gradient to this norm")
    add("placement", "--accumulation", type=positive, default=1, help="micro-batches that share a global batch")
    add(
        "placement", "--max-tokens-per-device", type=positive,
        help="less memory: split a step into micro-batches of at most so many tokens, which graphs round up; the "
        "experiment stays the same",
    )  # fmt: skip
    add(
        "placement", "--checkpoint-activations", action="store_true",
        help="less memory: recompute the layers in the backward pass",
    )  # fmt: skip
    add("experiment", "--seed", type=seed, default=0, help="of the new head, the epoch plan and dropout")
    add("placement", "--deterministic", action="store_true", help="deterministic kernels only (slower)")
    add(
        "experiment", "--select", choices=["f1", "exact", "dev_loss"], default="f1",
        help="dev metric that says which epoch is best",
    )  # fmt: skip
    add(
        "experiment", "--patience", type=whole, default=0,
        help="stop after this many epochs without a better --select; 0: never",
    )  # fmt: skip


def hardware_arguments(add):
    add("placement", "--device", choices=["auto", "cuda", "cpu"], default="auto", help="where to run")
    add(
        "experiment", "--precision", choices=["auto", "fp32", "tf32", "bf16", "fp16"], default="auto",
        help="the tensor-core switch; auto: bf16 on a card that has it, else fp32",
    )  # fmt: skip
    add(
        "placement", "--compile", action=argparse.BooleanOptionalAction,
        help="compile layers that are not fused; default: on CUDA unless --deterministic",
    )  # fmt: skip
    add(
        "placement", "--cuda-graphs", action=argparse.BooleanOptionalAction,
        help="replay steps of like shape as CUDA graphs; default: on CUDA unless --deterministic",
    )  # fmt: skip
    add("output", "--profile", action="store_true", help="trace a few steps into the run folder, print a table")


def evaluation_arguments(add):
    add("experiment", "--max-answer-tokens", type=positive, help="longest answer, in tokens; default: 30")
    add("output", "--n-best", type=few, default=20, help="answers kept for each question")
    add(
        "experiment", "--tune-fraction", type=share_of_one, default=0.0,
        help="v2.0: hold out this part of the training questions to set the null threshold",
    )  # fmt: skip
    add(
        "output", "--score-train", type=whole, default=0,
        help="score so many training questions after each epoch too: far above dev's F1, it is overfitting; 0: none",
    )  # fmt: skip
    add("placement", "--eval-tokens", type=positive, help="tokens in one pass; default: 4096 (CPU), 65536 (CUDA)")
    add("mode", "--evaluate-only", metavar="MODEL", help="no training: evaluate this model folder")


def run_arguments(add):
    kind = "bookkeeping"
    add(kind, "--run-name", help="folder under --runs-dir; default: the Slurm job id, else the time")
    add(kind, "--runs-dir", default="runs", help="where run folders are made")
    add(kind, "--save-steps", type=whole, default=0, help="a checkpoint each so many steps; 0: none")
    add(
        kind, "--save-epochs", type=whole, default=0,
        help="a checkpoint each so many epochs, before evaluating; 0: none",
    )  # fmt: skip
    add(kind, "--save-minutes", type=not_negative, default=15, help="a checkpoint each so many minutes; 0: none")
    add(
        kind, "--save-in-background", action="store_true",
        help="write checkpoints in a thread while training continues",
    )  # fmt: skip
    add(
        kind, "--resume", nargs="?", const="auto", metavar="PATH",
        help="resume from the newest checkpoint of this run, if there is one, or of the run or checkpoint at PATH",
    )  # fmt: skip
    add(
        kind, "--hang-minutes", type=minutes, default=10,
        help="end a distributed run that makes no progress for so long",
    )  # fmt: skip
    add(kind, "--log-every", type=positive, default=50, help="steps between readings of loss and norm")
    add("mode", "--dry-run", action="store_true", help="print all arguments, check that files are there, and end")


GROUPS = {
    "data": data_arguments,
    "model": model_arguments,
    "training": training_arguments,
    "hardware and precision": hardware_arguments,
    "evaluation": evaluation_arguments,
    "run": run_arguments,
}
