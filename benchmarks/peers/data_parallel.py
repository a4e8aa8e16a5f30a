"""nn.DataParallel: one process that copies the model to every GPU at every step; a GPU takes its part of the batch.

    python -m benchmarks.peers.data_parallel --pad-to 512 --batch-size 8 --precision tf32

On one GPU, or on the CPU, it calls the model as it is.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.peers.harness import Bench, build_parser
from common import errors


def main():
    args = build_parser(__doc__).parse_args()
    bench = Bench(args, "data-parallel")
    network, dataset, collate = bench.load_padded()
    gpus = torch.cuda.device_count() if bench.device.type == "cuda" else None
    model = nn.DataParallel(network.to(bench.device))
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        batch = {name: tensor.to(bench.device) for name, tensor in batch.items()}
        loss = model(**batch).loss.mean()
        loss.backward()
        optimizer.step()
        if bench.step():
            break
    bench.report(gpus=gpus)


if __name__ == "__main__":
    errors.run(main)
