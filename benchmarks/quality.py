"""run_qa's way to its F1: Hugging Face Trainer trains, and this project evaluates after each epoch.

    python -m benchmarks.quality --model MODEL_FOLDER --seed 0

The recipe is that of transformers' run_qa.py, tuned for one card: bf16 and torch_compile (on a CPU neither), windows
padded to --max-length, batch 32, a learning rate of 5e-5 that falls linearly to 0, 2 epochs. The options are those of
baseline.py, and so is the run folder: F1 and seconds of training stand beside those of its runs.
"""

import os
import tempfile
import time

import transformers

from benchmarks.peers.harness import PaddedWindows
from benchmarks.workload import load_network
from common import errors, runtime
from common.args import build_parser, resolve
from common.errors import UserError
from common.evaluation import Selection, evaluate, first_threshold, write_results
from common.features import load_tokenizer, prepare
from common.model import compute_in, load_model, save_model
from common.record import RunFolder, describe, model_settings
from common.squad import question_sets

RECIPE = {"batch_size": 32, "learning_rate": 5e-5, "warmup": 0.0, "weight_decay": 0.0}
FIXED = (  # options that the Trainer's way has no place for
    *("dropout", "attention_dropout", "attention", "accumulation", "max_tokens_per_device", "deterministic"),
    *("cuda_graphs", "profile", "patience", "tune_fraction", "evaluate_only"),
)
STEADY = 10  # steps of the run that windows a second leave out, as in runtime.Monitor


class Epochs(transformers.TrainerCallback):
    """Times each epoch, then gives its training figures to `finish_epoch`, outside the clock."""

    def __init__(self, device, windows, batch_size, finish_epoch):
        self.device, self.windows, self.batch_size, self.finish_epoch = device, windows, batch_size, finish_epoch

    def now(self):
        runtime.synchronize(self.device)
        return time.perf_counter()

    def on_train_begin(self, *_, **__):
        self.steps = 0

    def on_epoch_begin(self, *_, **__):
        self.began = self.steady = self.now()
        self.first, self.skipped = self.steps, 0

    def on_step_end(self, *_, **__):
        self.steps += 1
        if self.steps == STEADY:
            self.steady, self.skipped = self.now(), (self.steps - self.first) * self.batch_size

    def on_epoch_end(self, *_, **__):
        now, left = self.now(), self.windows - self.skipped
        rate = left / (now - self.steady) if self.steps > STEADY else None
        self.training = {"train_seconds": now - self.began, "windows_per_second": rate}

    def on_log(self, _, state, control, logs, **__):
        if "loss" in logs:  # the epoch's mean, which comes after its end
            self.finish_epoch({"epoch": round(state.epoch), "train_loss": logs["loss"], **self.training})


def main():
    parser = build_parser(__doc__.split("\n")[0])
    parser.set_defaults(**RECIPE)
    args = resolve(parser)
    for name in FIXED:
        if getattr(args, name) != parser.get_default(name):
            raise UserError(f"--{name.replace('_', '-')}: not an option here; the Trainer keeps its own way")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]  # a Trainer spreads over all the GPUs it sees
    device = runtime.choose_device(args.device)
    runtime.quiet_warnings()
    runtime.resolve_hardware(args, device)
    runtime.seed_everything(args.seed)
    tokenizer, sets = load_tokenizer(args.model_path), question_sets(**args.questions)
    clock = time.perf_counter()
    features = {
        name: prepare(questions, tokenizer, args.max_length, args.overlap, args.cache_dir)
        for name, questions in sets.items()
    }
    seconds = {"prepare_data": time.perf_counter() - clock}
    clock = time.perf_counter()
    network = load_network(args.model_path, args.seed)
    judge = load_model(args.model_path, args.attention, vocabulary=len(tokenizer)).to(device)
    compute_in(judge, runtime.HALF.get(args.precision))
    seconds["load"] = time.perf_counter() - clock
    threshold, selection = first_threshold(features), Selection(args.select, patience=0)
    windows = PaddedWindows(features["train"], args.max_length)
    places = [runtime.place(0, 0, device)]

    with RunFolder(args.runs_dir, args.run_name) as folder, tempfile.TemporaryDirectory() as scratch:
        folder.update(describe(args, "hf-trainer", judge, sets, features, 1, places, seconds))
        folder.update({"attention": "padded"})

        def finish_epoch(epoch):
            clock = time.perf_counter()
            judge.network.load_state_dict(network.state_dict())
            result = evaluate(
                judge, features["dev"], sets["dev"].data, args, device, threshold, 0, 1, lambda one: [one]
            )
            figures = {name: value for name, value in result.figures.items() if value is not None}
            rate = epoch["windows_per_second"]
            epoch["tokens_per_second"] = rate and rate * float(features["train"].lengths.mean())
            epoch |= figures | {"evaluation_seconds": time.perf_counter() - clock}
            epoch["best"] = selection.update(epoch["epoch"], result.figures)
            settings = model_settings(args, features, threshold)
            save_model(judge, judge.state_dict(), tokenizer, folder.model_path(epoch["best"]), settings)
            if epoch["best"]:
                write_results(folder.path, result)
            folder.record["epochs"].append(epoch)
            folder.record["attempts"][-1]["steps"] = timing.steps
            folder.update({"peak_memory_bytes": [runtime.peak_memory(device)]})
            training = f"train loss {epoch['train_loss']:.4f} in {epoch['train_seconds']:.1f} s"
            print(f"epoch {epoch['epoch']}: {training}; dev {result}", flush=True)

        timing = Epochs(device, len(windows), args.batch_size, finish_epoch)
        training_args = transformers.TrainingArguments(
            output_dir=scratch,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            warmup_steps=args.warmup,
            weight_decay=args.weight_decay,
            max_grad_norm=args.max_grad_norm,
            bf16=args.precision == "bf16",
            fp16=args.precision == "fp16",
            torch_compile=args.compile,
            logging_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
            seed=args.seed,
        )
        trainer = transformers.Trainer(
            model=network,
            args=training_args,
            train_dataset=windows,
            processing_class=tokenizer,
            data_collator=transformers.default_data_collator,
            callbacks=[timing],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        print(f"best epoch: {selection.epoch}; run folder: {folder.path}")


if __name__ == "__main__":
    errors.run(main)
