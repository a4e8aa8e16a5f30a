"""Hugging Face Trainer, set up as transformers' examples/pytorch/question-answering/run_qa.py sets it up.

python -m benchmarks.peers.hf_trainer --pad-to 384                                         (its defaults)
python -m benchmarks.peers.hf_trainer --pad-to 384 --batch-size 32 --precision bf16 --compile
python -m benchmarks.peers.hf_trainer --batch-size 32 --precision bf16 --group-by-length
"""

import tempfile

from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers.harness import Bench, build_parser
from common import errors


def main():
    parser = build_parser(__doc__)
    parser.add_argument("--compile", action="store_true", help="torch_compile")
    parser.add_argument("--group-by-length", action="store_true", help="batches of windows of like length")
    args = parser.parse_args()
    bench = Bench(args, "hf-trainer")
    network, dataset, collate = bench.load_padded()

    class Timing(TrainerCallback):
        def on_step_end(self, *_, **__):
            bench.step()

    with tempfile.TemporaryDirectory() as folder:
        training_args = TrainingArguments(
            output_dir=folder,
            max_steps=args.warmup + args.steps,
            per_device_train_batch_size=bench.per_rank,
            learning_rate=5e-5,
            bf16=args.precision == "bf16",
            torch_compile=args.compile,
            train_sampling_strategy="group_by_length" if args.group_by_length else "random",
            use_cpu=bench.device.type == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=args.seed,
        )
        trainer = Trainer(
            model=network,
            args=training_args,
            train_dataset=dataset,
            processing_class=bench.tokenizer,
            data_collator=collate,
            callbacks=[Timing()],
        )
        trainer.train()
    bench.report()


if __name__ == "__main__":
    errors.run(main)
