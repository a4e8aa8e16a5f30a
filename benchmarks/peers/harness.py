"""What the ways share, so that each of them is its users' code and little more: windows, network, clock, turns.

As a program it is one rank of one way: `benchmarks.compare` starts it, gives it turns on stdin and reads its figures.
"""

import argparse
import importlib
import json
import os
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.workload import build_network, load_windows
from common import errors
from common.data.windows import trainable_windows
from common.run.devices import PeakMemory, device_name, device_uuid, synchronize
from common.run.environment import switches
from common.run.seeds import quiet_warnings
from common.run.settings import choose_precision


@dataclass(frozen=True)
class Way:
    """One way to train: a module of benchmarks.peers and what it is asked for.

    batch_size: windows of each rank. precision: on GPUs. pad_to: tokens in every row; None: the batch's longest window.
    options: for the module. ranks: "one", "many" or "any". needs: a package beyond requirements.txt. gpus_from: the
    number of ranks from which it runs on GPUs only. alone: one process takes all GPUs. cycle: time multiples of so many
    steps. warmup: times the usual one, on GPUs. dropout: the setting of a peer: "own" keeps the model's attention
    dropout, "matched" sets it to 0, as this project has it.
    """

    name: str
    module: str
    batch_size: int
    precision: str = "auto"
    pad_to: int | None = None
    options: dict = field(default_factory=dict)
    ranks: str = "any"
    needs: str | None = None
    gpus_from: int | None = None
    alone: bool = False
    cycle: int = 1
    warmup: int = 1
    dropout: str = "own"

    @property
    def ours(self):
        return self.module == "this_project"

    @property
    def full_name(self):
        """The name with the setting, "hf-trainer-8-own". This project has one setting and no suffix."""
        return self.name if self.ours else f"{self.name}-{self.dropout}"


def applied_dropout(network):
    """{"attention", "hidden"}: the dropout that the modules of a BERT network apply."""
    rates = {"attention": set(), "hidden": set()}
    for name, module in network.named_modules():
        if isinstance(module, nn.Dropout):
            rates["attention" if ".attention.self." in name else "hidden"].add(module.p)
    return {kind: max(found, default=0.0) for kind, found in rates.items()}


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
    """One way on one rank, in a process of its own that stands still between its turns.

    turns: an iterator of (untimed, timed) steps. reply: called after each turn with its figures.
    """

    def __init__(self, way, shape, features, tokenizer, device, ranks, turns, reply):
        self.way, self.shape = way, shape
        self.features, self.tokenizer, self.device = features, tokenizer, device
        self.rank, self.world_size = ranks
        self.turns, self.reply, self.done = turns, reply, 0
        self.precision = choose_precision(way.precision if device.type == "cuda" else "fp32", device)
        compiled = bool(way.options.get("compile")) and device.type == "cuda"
        # What runs, as a run record says it; `padded` adds the dropout, and this project's own way has its own.
        self.ran = {"attention": "padded", "compile": compiled, "graphs": False, "kernels": [], "fallbacks": []}
        several = way.alone and device.type == "cuda"  # cards in one process
        devices = [torch.device("cuda", i) for i in range(self.world_size)] if several else [device]
        self.memory = [PeakMemory(one) for one in devices]
        self.untimed, self.last = self.next_turn()

    def next_turn(self):
        """(step after which the clock starts, last step) of the next turn, waiting for it; None if all is over."""
        untimed, timed = next(self.turns, (0, 0))
        return (self.done + untimed, self.done + untimed + timed) if timed else (None, None)

    def step(self):
        """Called by the loop after an optimizer step, waits after the last of a turn; returns whether all is over."""
        self.done += 1
        if self.done == self.untimed:
            synchronize(self.device)
            self.began = time.perf_counter(), time.process_time()
        if self.done != self.last:
            return False
        synchronize(self.device)
        seconds, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        devices = [one.device for one in self.memory]
        self.reply(
            {
                "steps": self.last - self.untimed,
                "seconds": seconds,
                "cpu_seconds": cpu,  # less than seconds times threads where others took the CPU
                "peak_memory": [one.read() for one in self.memory],
                "devices": [{"name": device_name(device), "uuid": device_uuid(device)} for device in devices],
                "threads": torch.get_num_threads(),
                "precision": self.precision,
                "ran": self.ran | switches(),  # as others' code has left them
            }
        )
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # room for the other ways
        self.untimed, self.last = self.next_turn()
        return self.last is None

    def padded(self):
        """The network, the data set and its collator, as transformers' run_qa.py makes them."""
        from transformers import DataCollatorWithPadding, default_data_collator

        changes = {"attention_probs_dropout_prob": 0.0} if self.way.dropout == "matched" else {}
        network = build_network(self.shape, **changes)
        self.ran["dropout"] = applied_dropout(network)
        dataset, collate = PaddedWindows(self.features, self.way.pad_to), default_data_collator
        if self.way.pad_to is None:
            collate = DataCollatorWithPadding(
                self.tokenizer, pad_to_multiple_of=8 if self.precision == "bf16" else None
            )
        return network.train(), dataset, collate

    def loader(self, dataset, collate, batch_size=None, sampler=None):
        """A DataLoader of whole batches."""
        size = batch_size or self.way.batch_size
        return DataLoader(dataset, size, shuffle=sampler is None, sampler=sampler, collate_fn=collate, drop_last=True)


def epochs(loader):
    """The batches of a loader, epoch after epoch."""
    while True:
        yield from loader


def main():
    given = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is for the log
    way, args = Way(**given["way"]), argparse.Namespace(**given["args"])
    rank, world_size = int(os.environ.get("RANK", 0)), given["ranks"]
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    quiet_warnings()
    _, tokenizer, features = load_windows(args, builds=False)
    module = importlib.import_module(f"benchmarks.peers.{way.module}")
    turns = (json.loads(line) for line in sys.stdin)

    def reply(figures):
        print(json.dumps(figures), file=replies, flush=True)

    bench = Bench(way, args.shape, features, tokenizer, device, (rank, world_size), turns, reply)
    module.train(bench)
    if bench.last is not None:
        raise RuntimeError("the training loop ended by itself")


if __name__ == "__main__":
    errors.run(main)
