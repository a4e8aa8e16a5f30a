"""DeepSpeed's ZeRO-2: optimizer state and gradients shared out over the ranks."""

import deepspeed
import torch
from torch.utils.data.distributed import DistributedSampler

from benchmarks.peers.harness import epochs


def train(bench):
    network, dataset, collate = bench.padded()
    deepspeed.init_distributed()
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=torch.optim.AdamW(network.parameters(), lr=5e-5),
        config={
            "train_micro_batch_size_per_gpu": bench.way.batch_size,
            "bf16": {"enabled": bench.precision == "bf16"},
            "zero_optimization": {"stage": 2, "overlap_comm": True},
            "zero_allow_untested_optimizer": True,
        },
    )
    sampler = DistributedSampler(dataset, bench.world_size, bench.rank, shuffle=True)
    for batch in epochs(bench.loader(dataset, collate, sampler=sampler)):
        batch = {name: tensor.to(bench.device) for name, tensor in batch.items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        if bench.step():
            break
