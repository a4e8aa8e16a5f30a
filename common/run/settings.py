"""What the arguments come to: data, model and recipe from the files, the rest from the device."""

import math
import os
import sys
from pathlib import Path

import torch

from common.data.files import default_files
from common.data.splits import question_sets
from common.data.tokenizer import question_limit
from common.errors import UserError
from common.model.attention import flash_takes, has_kernels
from common.model.finding import MINILM, find_model, load_config, positions
from common.model.precision import HALF
from common.run.record import check_free
from common.run.seeds import quiet_warnings, seed_everything
from common.start import ended


def choose_precision(name, device):
    """Resolve --precision for `device` and set torch's matrix-product mode accordingly."""
    capable = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        name = "bf16" if capable else "fp32"
    if name == "bf16" and device.type == "cuda" and not capable:
        raise UserError("--precision bf16: this card has no bf16 units; use fp16 or fp32")
    if name == "tf32" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError("--precision tf32: this card has no TF32 units; use fp16 or fp32")
    if name in ("tf32", "fp16") and device.type == "cpu":
        raise UserError(f"--precision {name} needs a GPU; use fp32 or bf16 on the CPU")
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    return name


def resolve_hardware(args, world):
    """Fill in what depends on the device: precision, attention, compilation, graphs; seed; print what the run is to be.

    UserError for what this device cannot do.
    """
    quiet_warnings()
    choose_kernels(args, world.device)
    seed_everything(args.seed, args.deterministic)
    world.log(banner(args))
    ended("device")


def choose_kernels(args, device):
    """Set precision, attention, compile, cuda_graphs and eval_tokens of `args` to what runs on `device`."""
    args.precision = choose_precision(args.precision, device)
    if args.precision == "fp16" and getattr(args, "zero1", False):
        raise UserError(
            "--zero1 with --precision fp16: the shared optimizer would wait for the device at each step; "
            "use another precision, or distributed_fsdp.py"
        )
    if args.attention in ("fused", "flash") and not has_kernels(device):
        raise UserError(f"--attention {args.attention} needs CUDA and an Ampere card or newer; use sdpa")
    if args.attention == "flash" and not flash_takes(HALF.get(args.precision)):
        raise UserError(
            "--attention flash needs --precision bf16 or fp16, and torch.nn.attention.varlen; use fused or sdpa"
        )
    if args.attention in ("fused", "flash") and args.attention_dropout:
        raise UserError(f"--attention {args.attention} has no dropout; leave --attention-dropout at 0 or use sdpa")
    if args.attention == "auto":
        args.attention = "fused" if has_kernels(device) and not args.attention_dropout else "sdpa"
    if args.compile is None:
        args.compile = device.type == "cuda" and not args.deterministic
    if args.cuda_graphs and device.type != "cuda":
        raise UserError("--cuda-graphs needs a GPU")
    if args.cuda_graphs is None:
        args.cuda_graphs = device.type == "cuda" and not args.deterministic
    if args.eval_tokens is None:
        args.eval_tokens = 65536 if device.type == "cuda" else 4096


# The recipe of the bundled sample, where the user gives none of his own: it is too small for BERT's.
DEFAULTS = {"batch_size": 32, "learning_rate": 5e-5}
SAMPLE_DEFAULTS = {"batch_size": 8, "learning_rate": 5e-5}
MINILM_SAMPLE_DEFAULTS = {"batch_size": 8, "learning_rate": 3e-4}


def resolve(parser, argv=None):
    """Parse the command line and fill in what it leaves open: data, model, recipe.

    Adds questions (arguments of question_sets), data_name, model_path, model_name, and settings (what an
    evaluated model folder says of itself). UserError for settings that contradict each other.
    """
    ended("imports")
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
    ended("arguments and configuration")
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
