"""Hugging Face Accelerate, as transformers' examples/pytorch/question-answering/run_qa_no_trainer.py uses it.

python -m benchmarks.peers.accelerate_loop --batch-size 32 --precision bf16
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import get_scheduler

from benchmarks.peers.harness import Bench, build_parser
from common import errors


def main():
    args = build_parser(__doc__).parse_args()
    bench = Bench(args, "accelerate")
    network, dataset, collate = bench.load_padded()
    accelerator = Accelerator(
        mixed_precision="bf16" if args.precision == "bf16" else "no", cpu=bench.device.type == "cpu"
    )
    loader = DataLoader(dataset, batch_size=bench.per_rank, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-5)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=2 * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, loader, scheduler)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if bench.step():
            break
    bench.report()
    accelerator.end_training()


if __name__ == "__main__":
    errors.run(main)
