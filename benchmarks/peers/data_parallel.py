"""nn.DataParallel: one process that copies the model to every GPU at every step; a GPU takes its part of the batch."""

import torch
from torch import nn

from benchmarks.peers.harness import epochs


def train(bench):
    network, dataset, collate = bench.padded()
    model = nn.DataParallel(network.to(bench.device), list(range(bench.world_size)))
    loader = bench.loader(dataset, collate, bench.way.batch_size * bench.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    for batch in epochs(loader):
        optimizer.zero_grad()
        batch = {name: tensor.to(bench.device) for name, tensor in batch.items()}
        loss = model(**batch).loss.mean()
        loss.backward()
        optimizer.step()
        if bench.step():
            break
