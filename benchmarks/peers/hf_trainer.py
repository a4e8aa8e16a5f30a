"""Hugging Face Trainer, set up as transformers' examples/pytorch/question-answering/run_qa.py sets it up."""

import tempfile

from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments


def train(bench):
    network, dataset, collate = bench.padded()

    class Turns(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = bench.step()

    with tempfile.TemporaryDirectory() as folder:
        training_args = TrainingArguments(
            output_dir=folder,
            max_steps=10**6,
            per_device_train_batch_size=bench.way.batch_size,
            learning_rate=5e-5,
            bf16=bench.precision == "bf16",
            torch_compile=bench.ran["compile"],
            train_sampling_strategy="group_by_length" if bench.way.options.get("grouped") else "random",
            dataloader_drop_last=True,
            use_cpu=bench.device.type == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=network,
            args=training_args,
            train_dataset=dataset,
            processing_class=bench.tokenizer,
            data_collator=collate,
            callbacks=[Turns()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
