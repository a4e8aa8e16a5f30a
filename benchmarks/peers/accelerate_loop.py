"""Hugging Face Accelerate, as transformers' examples/pytorch/question-answering/run_qa_no_trainer.py uses it."""

import torch
from accelerate import Accelerator
from transformers import get_scheduler

from benchmarks.peers.harness import epochs


def train(bench):
    network, dataset, collate = bench.padded()
    half = "bf16" if bench.precision == "bf16" else "no"
    accelerator = Accelerator(mixed_precision=half, cpu=bench.device.type == "cpu")
    loader = bench.loader(dataset, collate)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-5)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=2 * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, loader, scheduler)
    for batch in epochs(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if bench.step():
            break
