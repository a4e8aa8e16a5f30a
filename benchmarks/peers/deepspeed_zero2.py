"""DeepSpeed's ZeRO-2: optimizer state and gradients shared out over the ranks.

torchrun --standalone --nproc-per-node=4 -m benchmarks.peers.deepspeed_zero2 --pad-to 512 --batch-size 32
"""

import deepspeed
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.peers.harness import Bench, build_parser
from common import errors


def main():
    args = build_parser(__doc__).parse_args()
    bench = Bench(args, "deepspeed-zero2")
    network, dataset, collate = bench.load_padded()
    deepspeed.init_distributed()
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=torch.optim.AdamW(network.parameters(), lr=5e-5),
        config={
            "train_micro_batch_size_per_gpu": bench.per_rank,
            "bf16": {"enabled": args.precision == "bf16"},
            "zero_optimization": {"stage": 2, "overlap_comm": True},
            "zero_allow_untested_optimizer": True,
        },
    )
    sampler = DistributedSampler(dataset, bench.world_size, bench.rank, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=bench.per_rank, sampler=sampler, collate_fn=collate)
    engine.train()
    for batch in loader:
        batch = {name: tensor.to(bench.device) for name, tensor in batch.items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        if bench.step():
            break
    bench.report()


if __name__ == "__main__":
    errors.run(main)
