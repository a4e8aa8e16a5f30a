"""What the peers share, so that each of them is its users' code and little more: options, windows, clock, record.

A peer trains --warmup and then --steps optimizer steps in a process of its own, calls `Bench.step` after each, and
prints its run record as one line of JSON.
"""

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from benchmarks.workload import add_workload, load_network, load_windows
from common import runtime
from common.args import positive
from common.errors import UserError
from common.features import trainable_windows
from common.model import count_parameters
from common.record import SCHEMA, environment


def build_parser(doc):
    """The options that every peer has; `doc` is its docstring."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    add_workload(parser)
    parser.add_argument("--batch-size", type=positive, default=8, help="global")
    parser.add_argument("--precision", choices=["auto", "fp32", "tf32", "bf16"], default="fp32")
    parser.add_argument("--pad-to", type=positive, help="tokens in every row of a batch; default: the longest window's")
    parser.add_argument("--attention-dropout", type=float, help="default: the model's own")
    parser.add_argument("--warmup", type=positive, default=20, help="steps before the timing")
    parser.add_argument("--steps", type=positive, default=50, help="timed steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(compile=False)
    return parser


class PaddedWindows(torch.utils.data.Dataset):
    """The windows with a label as transformers' question-answering networks take them: one dict each.

    length: tokens to pad to. None leaves that to the collator, which takes lists.
    """

    def __init__(self, features, length):
        self.features, self.length = features, length
        self.windows = trainable_windows(features)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        features, window = self.features, self.windows[index]
        begin, end = features.offsets[window], features.offsets[window + 1]
        tokens, context_at = end - begin, features.context_at[window]
        length = self.length or tokens
        ids = np.full(length, features.pad_id, np.int64)
        ids[:tokens] = features.input_ids[begin:end]
        types, mask = np.zeros((2, length), np.int64)
        types[context_at:tokens] = features.token_type
        mask[:tokens] = 1
        item = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
        item = {name: torch.from_numpy(row) if self.length else row.tolist() for name, row in item.items()}
        return item | {"start_positions": int(features.start[window]), "end_positions": int(features.end[window])}


class Bench:
    """One measurement in this process: what is trained on what, the clock, and the record at its end.

    strategy: its name in the record. rank, local_rank, world_size: as torchrun states them, else one process.
    """

    def __init__(self, args, strategy):
        self.args, self.strategy, self.started = args, strategy, time.time()
        self.rank, self.local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        on_cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda", self.local_rank) if on_cuda else torch.device("cpu")
        if args.batch_size % self.world_size:
            raise UserError(f"--batch-size {args.batch_size} does not divide by {self.world_size} ranks")
        self.per_rank = args.batch_size // self.world_size
        self.questions, self.tokenizer, self.features = load_windows(
            args, lambda text: print(text, file=sys.stderr), builds=self.local_rank == 0
        )
        self.done = 0

    def load_padded(self):
        """The network, the data set and its collator, as transformers' run_qa.py makes them."""
        from transformers import DataCollatorWithPadding, default_data_collator

        args = self.args
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        args.precision = runtime.choose_precision(args.precision, self.device)
        changes = {} if args.attention_dropout is None else {"attention_probs_dropout_prob": args.attention_dropout}
        network = load_network(args.shape, **changes)
        self.takes(network)
        if args.pad_to and args.pad_to < self.features.max_length:
            raise UserError(
                f"--pad-to {args.pad_to} is less than the longest window, {self.features.max_length} tokens"
            )
        torch.manual_seed(args.seed)
        dataset, collate = PaddedWindows(self.features, args.pad_to), default_data_collator
        if args.pad_to is None:
            multiple = 8 if args.precision == "bf16" else None
            collate = DataCollatorWithPadding(self.tokenizer, pad_to_multiple_of=multiple)
        return network, dataset, collate

    def takes(self, network):
        """Note which network is trained, before a strategy takes it apart, and start the clock of the warm-up."""
        args, windows = self.args, len(trainable_windows(self.features))
        if (
            args.warmup + args.steps
        ) * args.batch_size > windows:  # the smaller batch at an epoch's end is not measured
            raise UserError(
                f"{args.warmup} + {args.steps} steps of {args.batch_size} windows are more than the {windows} of "
                f"{self.questions.path}; lower --warmup, --steps or --batch-size"
            )
        parameters, outside = count_parameters(network)
        self.model = {
            "name": args.shape,
            "type": network.config.model_type,
            "dropout": network.config.hidden_dropout_prob,
            "attention_dropout": network.config.attention_probs_dropout_prob,
            "parameters": parameters,
            "parameters_outside_embeddings": outside,
        }
        self.began = time.perf_counter()

    def step(self):
        """Count an optimizer step; True once all are timed. Waits for the device before and after the timed ones."""
        self.done += 1
        if self.done == self.args.warmup:
            runtime.synchronize(self.device)
            self.warm = time.perf_counter()
        elif self.done == self.args.warmup + self.args.steps:
            runtime.synchronize(self.device)
            self.seconds = time.perf_counter() - self.warm
        return self.done >= self.args.warmup + self.args.steps

    def report(self, attention="padded", gpus=None):
        """Print the record of this measurement, on rank 0; all ranks take part.

        gpus: how many a single process uses (nn.DataParallel).
        """
        args, meta = self.args, self.features.meta
        devices = [torch.device("cuda", i) for i in range(gpus)] if gpus else [self.device]
        memory = self.gather([runtime.peak_memory(device) for device in devices])
        if self.rank:
            return
        data = {"file": self.questions.path.name, "sha256": self.questions.sha256}
        data |= {key: meta[key] for key in ("version", "questions", "windows", "tokens")}
        record = {"schema": SCHEMA, "status": "finished", "started": self.started, **environment()}
        for package in ("lightning", "accelerate", "deepspeed"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                record["versions"][package] = metadata.version(package)
        record |= {
            "script": Path(sys.argv[0]).name,
            "strategy": self.strategy,
            "arguments": vars(args),
            "data": {"name": self.questions.path.name, "train": data},
            "model": self.model,
            "world_size": len(memory),
            "nodes": 1,
            "hosts": [socket.gethostname()] * len(memory),
            "gpus": [runtime.device_name(device) for device in devices] * self.world_size
            if devices[0].type == "cuda"
            else [],
            "device": runtime.device_name(self.device),
            "cpus": runtime.cpu_count(),
            "threads": torch.get_num_threads(),
            "precision": args.precision,
            "attention": attention,
            "compile": args.compile,
            "epochs": [],  # none is whole
            "seconds": {"warmup": self.warm - self.began, "timed": self.seconds, "total": runtime.process_seconds()},
            "windows_per_second": args.batch_size * args.steps / self.seconds,
            "peak_memory_bytes": memory,
        }
        print(json.dumps(record), flush=True)

    def gather(self, values):
        """The lists of all ranks as one; all ranks take part."""
        if self.world_size == 1:
            return values
        parts = [None] * self.world_size
        torch.distributed.all_gather_object(parts, values)
        return [value for part in parts for value in part]
