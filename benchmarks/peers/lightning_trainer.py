"""PyTorch Lightning's Trainer with DDP or FSDP, one process a GPU under torchrun, or a single one."""

import lightning
import torch


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
        self.trainer.should_stop = self.bench.step()


def train(bench):
    network, dataset, collate = bench.padded()
    trainer = lightning.Trainer(
        accelerator="gpu" if bench.device.type == "cuda" else "cpu",
        devices=bench.world_size,
        strategy=bench.way.options["strategy"],
        precision="bf16-mixed" if bench.precision == "bf16" else "32-true",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(QuestionAnswering(network, bench), bench.loader(dataset, collate))
