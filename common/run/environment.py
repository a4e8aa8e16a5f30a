"""What a reader of the record needs to repeat the run: machine, versions, code, data, model, settings."""

import os
import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

from common import ROOT
from common.model.finding import file_sha256, weights_file
from common.model.fused.fuse import fused_parts
from common.model.span import count_parameters
from common.run.devices import cpu_count, device_name
from common.run.driver import driver_cuda

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy", "pandas", "tensorboard")


def git_state():
    """(commit, whether the tree has changes), (None, None) outside a git checkout."""

    def git(*arguments):
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        # Files that git does not know, a text to ask about among them, are no change: code that uses them would be one.
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def environment():
    """Host, cluster, Slurm job, versions and code state: what a reader of the record needs to repeat the run."""
    commit, dirty = git_state()
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    versions["torch"] = torch.__version__  # says which CUDA the build is for, as the package's version may not
    if torch.cuda.is_available():
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver_cuda": driver_cuda()}
    return {
        "host": socket.gethostname(),
        "processor": device_name(torch.device("cpu")),
        "cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions,
        "git_commit": commit,
        "git_dirty": dirty,
    }


def switches():
    """The record's fields of torch's own switches, which other people's code may have set."""
    products = torch.get_float32_matmul_precision() != "highest"
    return {
        "tf32": {"matmul": products, "cudnn": torch.backends.cudnn.allow_tf32},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def applied_dropout(config, attention):
    """The dropout that a network of this config applies on this attention backend; None where it has no such one."""
    hidden = getattr(config, "hidden_dropout_prob", getattr(config, "dropout", None))
    attended = getattr(config, "attention_probs_dropout_prob", getattr(config, "attention_dropout", None))
    return {"hidden": hidden, "attention": 0.0 if attention in ("fused", "flash") else attended}  # those have none


def as_it_ran(model, graphs):
    """The record's fields of how a SpanModel runs, whatever was asked for. tools.report compares these."""
    return {
        "attention": model.attention,
        "compile": model.compiled,  # whether anything was: nothing is where all is fused
        "graphs": bool(graphs),
        "kernels": fused_parts(model),
        "dropout": applied_dropout(model.network.config, model.attention),
        "fallbacks": model.fallbacks,
        **switches(),
    }


def describe(args, strategy, model, data, world, seconds):
    """The record's fields that are known before the first step. seconds: {what: how long it took}."""
    sets, places = {}, world.places
    for name, questions in data.sets.items():
        meta = data.features[name].meta
        sets[name] = {
            "file": str(questions.path),
            "sha256": questions.sha256,
            "cuts": questions.cuts,
            "faults": len(meta["faults"]),
            **{key: meta[key] for key in ("version", "questions", "unanswerable", "windows", "tokens")},
        }
    parameters, outside = count_parameters(model)
    weights = weights_file(args.model_path)
    return {
        "script": Path(sys.argv[0]).name,
        "strategy": strategy,
        "arguments": {key: value for key, value in vars(args).items() if key not in ("questions", "settings")},
        "data": {"name": args.data_name, **sets},
        "model": {
            "name": args.model_name,
            "type": model.network.config.model_type,
            "parameters": parameters,
            "parameters_outside_embeddings": outside,
            "sha256": file_sha256(weights) if weights else None,
        },
        "world_size": world.size,
        "nodes": len({(place["host"], place["node"]) for place in places}),
        "hosts": [place["host"] for place in places],
        "gpus": [place["name"] for place in places if place["device"] != "cpu"],
        "ranks": places,
        "cpus": cpu_count(),
        "threads": torch.get_num_threads(),  # of each rank
        "precision": args.precision,
        **as_it_ran(model, args.cuda_graphs),
        "seconds": seconds,
    }


def model_settings(args, version, threshold):
    """What answering with a trained model needs to know; kept in its config.json under "squad".

    version: of the training data.
    """
    return {
        "version": version,
        "null_threshold": threshold,
        "max_length": args.max_length,
        "overlap": args.overlap,
        "max_answer_tokens": args.max_answer_tokens,
    }
