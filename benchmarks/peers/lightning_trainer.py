"""PyTorch Lightning's Trainer with DDP or FSDP, one process a GPU under torchrun, or a single one.

python -m benchmarks.peers.lightning_trainer --strategy fsdp --pad-to 512 --batch-size 8 --precision tf32
"""

import lightning
import torch
from torch.utils.data import DataLoader

from benchmarks.peers.harness import Bench, build_parser
from common import errors


class QuestionAnswering(lightning.LightningModule):
    def __init__(self, network, bench):
        super().__init__()
        self.network, self.bench = network, bench

    def training_step(self, batch, _):
        loss = self.network(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-5)

    def on_train_batch_end(self, *_):
        self.bench.step()


def main():
    parser = build_parser(__doc__)
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
    args = parser.parse_args()
    bench = Bench(args, f"lightning-{args.strategy}")
    network, dataset, collate = bench.load_padded()
    module = QuestionAnswering(network.train(), bench)
    loader = DataLoader(dataset, batch_size=bench.per_rank, shuffle=True, collate_fn=collate)
    trainer = lightning.Trainer(
        accelerator="gpu" if bench.device.type == "cuda" else "cpu",
        devices=bench.world_size,
        strategy=args.strategy,
        precision="bf16-mixed" if args.precision == "bf16" else "32-true",
        max_steps=args.warmup + args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    bench.report()


if __name__ == "__main__":
    errors.run(main)
