"""Short runs of a small model by each way to train, for tests that stop them and compare what comes of it."""

import json

import forking
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import SAMPLE, minilm_tokenizer, save_network

WAYS = {  # name: (script, ranks, options)
    "baseline": ("baseline.py", 1, []),
    "accumulation": ("baseline.py", 1, ["--accumulation", "3"]),
    "ddp 3": ("distributed_ddp.py", 3, []),
    "ddp 4": ("distributed_ddp.py", 4, []),
    "zero1": ("distributed_ddp.py", 2, ["--zero1"]),
    "zero2": ("distributed_fsdp.py", 2, ["--shard", "zero2"]),
    "zero3": ("distributed_fsdp.py", 2, ["--shard", "zero3"]),
}


def prepare(folder):
    """(folder, the arguments that all runs share) for runs in this folder: 8 steps an epoch."""
    save_network(folder / "model")
    minilm_tokenizer().save_pretrained(folder / "model")
    options = ["--train-file", str(SAMPLE / "train.json"), "--dev-file", str(SAMPLE / "dev.json")]
    options += ["--max-train-examples", "60", "--max-dev-examples", "40", "--eval-tokens", "800"]
    options += ["--batch-size", "8", "--epochs", "2", "--dropout", "0.1", "--learning-rate", "1e-3", "--device", "cpu"]
    options += ["--model", str(folder / "model"), "--cache-dir", str(folder / "cache"), "--runs-dir", str(folder)]
    return folder, options


def launch(way, setting, name, *options, fails=False, before=""):
    """Run a way to train into the run folder `name`; its output. before: see forking.Server.start."""
    script, ranks, own = WAYS[way]
    arguments = [*setting[1], *own, "--run-name", name, *options]
    status, output = forking.server().run(script, ranks, arguments, before=before)
    assert any(status) == fails, f"{status}\n{output[-5000:]}"
    return output


def record(setting, name):
    return json.loads((setting[0] / name / "run.json").read_text())


def results(setting, name):
    """(weights, predictions, curves by epoch, curves by step) of a run."""
    run = setting[0] / name
    epochs = [
        {key: epoch[key] for key in ("train_loss", "f1", "dev_loss")} for epoch in record(setting, name)["epochs"]
    ]
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    tags = ("step/loss", "step/grad_norm", "step/learning_rate", "epoch/f1", "epoch/train_loss")
    curves = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    weights = load_file(run / "model" / "model.safetensors")
    return weights, (run / "predictions.json").read_text(), epochs, curves


def undisturbed(way, setting):
    """The results of a whole run of this way."""
    name = f"whole {way}".replace(" ", "-")
    if not (setting[0] / name).exists():
        launch(way, setting, name)
    return results(setting, name)


# The run ends by its own hand after the checkpoint: as a kill does, without a word to the record.
END_AT = """
import os
from common.run.run import Run

def ending(self, save=Run.save):
    save(self)
    if rank == 0 and self.step == {step}:
        os._exit(9)

Run.save = ending
"""


def stopped_at(way, setting, step):
    """The name of a run folder as it was right after the checkpoint of this step."""
    name = f"{way} to {step}".replace(" ", "-")
    options = ["--save-steps", step, "--save-epochs", "1"]
    launch(way, setting, name, *options, fails=True, before=END_AT.format(step=step))
    return name


def equal(ours, theirs):
    """Whether two results are equal to the bit."""
    alike = ours[1:] == theirs[1:] and ours[0].keys() == theirs[0].keys()
    return alike and all(torch.equal(ours[0][key], theirs[0][key]) for key in theirs[0])


def same(ours, theirs):
    assert ours[1:] == theirs[1:]
    assert equal(ours, theirs)
