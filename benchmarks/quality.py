"""The usual way to its F1: Hugging Face Trainer trains as run_qa.py does, and this project scores after each epoch.

    python -m benchmarks.quality --seed 0                                     (tuned: bf16, torch_compile)
    python -m benchmarks.quality --seed 0 --precision fp32 --no-compile       (plain)

The recipe is run_qa.py's, windows padded to --max-length: batch 32, a learning rate of 5e-5 that falls linearly to 0,
no weight decay, 2 epochs. The options are those of baseline.py, and so is the run folder: F1 and seconds of training
stand beside those of its runs; no model is kept.
"""

import os
import tempfile
import time

import torch
import transformers

from benchmarks.peers.harness import PaddedWindows, applied_dropout
from common import errors
from common.args import RESOLVED, build_parser, classes
from common.data.data import Data
from common.errors import UserError
from common.model.loading import load_config, load_model, set_dropout
from common.model.precision import HALF, compute_in
from common.run.devices import PeakMemory, by_rank, synchronize
from common.run.environment import describe
from common.run.record import RunFolder
from common.run.results import write_results
from common.run.seeds import seed_everything
from common.run.settings import resolve, resolve_hardware
from common.run.world import World
from common.scoring.evaluation import evaluate
from common.scoring.selection import Selection, first_threshold

RECIPE = {"batch_size": 32, "learning_rate": 5e-5, "warmup": 0.0, "weight_decay": 0.0}
# The options of baseline.py that mean the same here: those that name the data, the model and the experiment, and these.
ALSO = {"cache_dir", "run_name", "runs_dir", "device", "compile", "eval_tokens", "n_best"}
BUT = {"dropout", "tune_fraction", "patience"}  # the Trainer has its own way


def takes(argument, kind):
    """Whether this argument of baseline.py, of this class, has a meaning here."""
    return argument in ALSO or (kind in ("input", "experiment") and argument not in BUT)


class Epochs(transformers.TrainerCallback):
    """Times each epoch and gives its training figures to `score`, outside the clock."""

    def __init__(self, device, score):
        self.device, self.score = device, score

    def now(self):
        synchronize(self.device)
        return time.perf_counter()

    def on_epoch_begin(self, *_, **__):
        self.began = self.now()

    def on_epoch_end(self, *_, **__):
        self.seconds = self.now() - self.began

    def on_log(self, args, state, control, logs, **__):
        if "loss" in logs:  # the epoch's mean, which comes after its end
            self.score({"epoch": round(state.epoch), "train_loss": logs["loss"], "train_seconds": self.seconds})


def main():
    parser = build_parser(__doc__)
    parser.prog = "python -m benchmarks.quality"
    parser.set_defaults(**RECIPE, attention_dropout=None)  # None: the model's own
    args = resolve(parser)
    for name, kind in classes(parser).items():
        if name not in RESOLVED and not takes(name, kind) and getattr(args, name) != parser.get_default(name):
            raise UserError(f"--{name.replace('_', '-')}: not an option here; the Trainer keeps its own way")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]  # a Trainer spreads over all the GPUs it sees
    world = World(args.device)
    resolve_hardware(args, world)
    data = Data(args, world)
    world.connect()
    device, features, seconds = world.device, data.features, {"prepare_data": data.seconds}
    begin = time.perf_counter()
    judge = load_model(args.model_path, args.attention, vocabulary=data.vocabulary).to(device)  # for the scores
    compute_in(judge, HALF.get(args.precision))
    transformers.logging.set_verbosity_error()  # it would report the new head at length
    seed_everything(args.seed)
    config = load_config(args.model_path)
    if args.attention_dropout is not None:
        set_dropout(config, None, args.attention_dropout)
    network = transformers.AutoModelForQuestionAnswering.from_pretrained(
        args.model_path, config=config, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    dropout = applied_dropout(network)
    args.attention_dropout = dropout["attention"]  # for the record
    seconds["load"] = time.perf_counter() - begin
    memory = PeakMemory(device)
    threshold, selection = first_threshold(features), Selection(args.select, patience=0)
    windows = PaddedWindows(features["train"], args.max_length)

    with RunFolder(args.runs_dir, args.run_name) as folder, tempfile.TemporaryDirectory() as scratch:
        record = describe(args, "hf-trainer", judge, data, world, seconds)
        # All of these are the Trainer's, not the judge's.
        record |= {"compile": args.compile, "graphs": False, "kernels": [], "dropout": dropout, "fallbacks": []}
        folder.update(record | {"attention": "padded"})

        def score(epoch):
            clock = time.perf_counter()
            memory.end("training")
            judge.network.load_state_dict(network.state_dict())
            result = evaluate(judge, features["dev"], data.sets["dev"].data, args, world, threshold)
            memory.end("evaluation")
            epoch |= {name: value for name, value in result.figures.items() if value is not None}
            epoch |= {"evaluation_seconds": time.perf_counter() - clock}
            epoch["windows_per_second"] = len(windows) / epoch["train_seconds"]
            epoch["best"] = selection.update(epoch["epoch"], result.figures)
            if epoch["best"]:
                write_results(folder.path, result, args.n_best)
            folder.record["epochs"].append(epoch)
            folder.update({"peak_memory": by_rank([memory.peaks])})
            training = f"train loss {epoch['train_loss']:.4f} in {epoch['train_seconds']:.1f} s"
            print(f"epoch {epoch['epoch']}: {training}; dev {result}", flush=True)

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
            processing_class=data.tokenizer,
            data_collator=transformers.default_data_collator,
            callbacks=[Epochs(device, score)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        print(f"best epoch: {selection.epoch}; run folder: {folder.path}")


if __name__ == "__main__":
    errors.run(main)
