"""The result does not depend on the number of ranks: one list of losses and norms for every way to train.

Twenty steps of a small BERT in fp32 without dropout on real windows, the last batch uneven, on CPUs under torchrun.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from squad_dir import squad_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import ROOT, minilm_tokenizer, save_network

STEPS = 20
# In exact arithmetic these have no gradient (softmax is blind to a shift of its input), so that Adam makes weights of
# rounding noise: they are left out of the comparison of weights.
NO_GRADIENT = ("attention.self.key.bias", "qa_outputs.bias", "layer.2.output.LayerNorm.bias")

WAYS = {  # name: (script, ranks, options)
    "baseline": ("baseline.py", 1, []),
    "baseline, accumulation": ("baseline.py", 1, ["--accumulation", "4"]),
    "ddp 2": ("distributed_ddp.py", 2, []),
    "ddp 3": ("distributed_ddp.py", 3, []),
    "ddp 4": ("distributed_ddp.py", 4, []),
    "ddp 2, accumulation": ("distributed_ddp.py", 2, ["--accumulation", "3"]),
    "ddp 3, torch's own hook": ("distributed_ddp.py", 3, ["--reduce", "fp32", "--accumulation", "2"]),
    "ddp 2, zero1": ("distributed_ddp.py", 2, ["--zero1"]),
    "fsdp 2, zero2": ("distributed_fsdp.py", 2, ["--shard", "zero2"]),
    "fsdp 4, zero2": ("distributed_fsdp.py", 4, ["--shard", "zero2"]),
    "fsdp 2, zero2, accumulation": ("distributed_fsdp.py", 2, ["--shard", "zero2", "--accumulation", "3"]),
    "fsdp 2, zero3": ("distributed_fsdp.py", 2, ["--shard", "zero3"]),
    "fsdp 4, zero3, accumulation": ("distributed_fsdp.py", 4, ["--shard", "zero3", "--accumulation", "2"]),
    "fsdp 2, recomputed": ("distributed_fsdp.py", 2, ["--checkpoint-activations"]),
    "ddp 2, recomputed": ("distributed_ddp.py", 2, ["--checkpoint-activations"]),
    "fsdp 2x2, hsdp": ("distributed_fsdp.py", (2, 2), ["--shard", "hsdp"]),
}


@pytest.fixture(scope="session")
def setting(tmp_path_factory):
    """Arguments that all ways share, with the model and a cache of their own."""
    folder = tmp_path_factory.mktemp("parity")
    save_network(folder / "model")
    minilm_tokenizer().save_pretrained(folder / "model")
    dev = str(squad_file("dev-v1.1.json.gz"))
    options = ["--train-file", dev, "--dev-file", dev, "--max-train-examples", "155", "--max-dev-examples", "23"]
    options += ["--batch-size", "8", "--epochs", "1", "--dropout", "0", "--learning-rate", "1e-3", "--device", "cpu"]
    options += ["--model", str(folder / "model"), "--cache-dir", str(folder / "cache"), "--runs-dir", str(folder)]
    return folder, options


def launch(script, ranks, options, env=None):
    """Run a script under torchrun (the baseline without it); (2, 2) is two agents of two ranks, as two nodes are."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
    if ranks == 1:
        agents = [[sys.executable, str(script), *options]]
    else:
        run = [sys.executable, "-m", "torch.distributed.run"]
        if isinstance(ranks, tuple):
            port = str(20000 + os.getpid() % 10000)
            run += [f"--nnodes={ranks[0]}", f"--nproc-per-node={ranks[1]}", "--master-addr=127.0.0.1"]
            agents = [
                [*run, f"--master-port={port}", f"--node-rank={node}", str(script), *options]
                for node in range(ranks[0])
            ]
        else:
            agents = [[*run, "--standalone", f"--nproc-per-node={ranks}", str(script), *options]]
    started = [
        subprocess.Popen(agent, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for agent in agents
    ]
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(outputs)[-4000:]
    return "\n".join(outputs)


def read_curve(run, tag):
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return [event.value for event in events.Scalars(tag)]


def train(setting, name, script, ranks, options, env=None):
    """(losses, gradient norms, final weights, predictions, record) of one way to train."""
    folder, shared = setting
    name = "".join(letter if letter.isalnum() else "-" for letter in name)
    run = folder / name
    if not run.exists():
        launch(script, ranks, [*shared, *options, "--run-name", name], env)
    return (
        read_curve(run, "step/loss"),
        read_curve(run, "step/grad_norm"),
        load_file(run / "model" / "model.safetensors"),
        (run / "predictions.json").read_text(),
        json.loads((run / "run.json").read_text()),
    )


def differences(result, reference):
    """What differs between two results, as a list of lines; empty if they agree."""
    found = []
    for what, ours, theirs in zip(("loss", "norm"), result[:2], reference[:2], strict=True):
        if len(ours) != len(theirs):
            found.append(f"{what}: {len(ours)} steps instead of {len(theirs)}")
        found += [
            f"{what} of step {step}: {a} instead of {b}"
            for step, (a, b) in enumerate(zip(ours, theirs, strict=False), 1)
            if abs(a - b) > 1e-5 * abs(b)
        ]
    for name, tensor in reference[2].items():
        distance = (result[2][name] - tensor).norm() / tensor.norm()
        if not name.endswith(NO_GRADIENT) and distance > 1e-4:
            found.append(f"{name}: differs by {distance:.1e}")
    return found


@pytest.fixture(scope="session")
def reference(setting):
    result = train(setting, "baseline", *WAYS["baseline"])
    assert len(result[0]) == STEPS and max(result[1]) > 1.0  # so that clipping does something
    assert result[0][-1] < result[0][0]
    return result


@pytest.mark.parametrize("name", [name for name in WAYS if name != "baseline"])
def test_every_way_gives_one_curve(setting, reference, name):
    script, ranks, options = WAYS[name]
    result = train(setting, name, script, ranks, options)
    assert not differences(result, reference)
    assert result[3] == reference[3], "predictions differ"
    record = result[4]
    assert record["world_size"] == (ranks if isinstance(ranks, int) else 4)
    assert record["epochs"][0]["f1"] == reference[4]["epochs"][0]["f1"]
    memory = record["peak_memory"]
    assert list(memory) == ["training", "evaluation", "saving"]
    assert all(len(ranks) == record["world_size"] and min(ranks) > 1e7 for ranks in memory.values())
    assert len(record["ranks"]) == record["world_size"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "script, options",
    [
        ("distributed_ddp.py", []),
        ("distributed_ddp.py", ["--accumulation", "2"]),
        ("distributed_ddp.py", ["--checkpoint-activations"]),
        ("distributed_fsdp.py", []),
    ],
)
def test_two_gpus_give_the_curve_of_the_cpu(setting, reference, script, options):
    """With the kernels, the graphs and NCCL, rounded otherwise."""
    options = ["--device", "cuda", "--precision", "fp32", *options]
    losses, norms, *_, record = train(setting, f"cuda {script} {options}", script, 2, options)
    assert record["attention"] == "fused"
    assert losses == pytest.approx(reference[0], rel=1e-3) and norms == pytest.approx(reference[1], rel=1e-2)


@pytest.mark.parametrize(
    "script, reduce",
    [("distributed_ddp.py", "bf16"), ("distributed_ddp.py", "rows-bf16"), ("distributed_fsdp.py", "bf16")],
)
def test_gradients_that_travel_in_bf16_lose_a_little(setting, reference, script, reduce):
    """Rounded on their way, so not the fp32 run's to 1e-5, but near it."""
    losses, norms, *_ = train(setting, f"{reduce} {script}", script, 2, ["--reduce", reduce])
    assert losses == pytest.approx(reference[0], rel=0.02) and losses != pytest.approx(reference[0], rel=1e-7)
    assert norms == pytest.approx(reference[1], rel=0.05)


FAULTS = {  # name: (script, what stands there, what is written in the faulty script)
    "ddp: world size forgotten": ("distributed_ddp.py", "loss * torch.distributed.get_world_size()", "loss"),
    "ddp: a sum taken for the mean": (
        "distributed_ddp.py",
        "    model.register_comm_hook(model.module, HOOKS[args.reduce])",
        "    add = lambda state, bucket: (  # noqa: E731\n"
        "        torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()"
        ".then(lambda done: done.value()[0])\n"
        "    )\n"
        "    model.register_comm_hook(model.module, add)",
    ),
    "mean of rank means": (
        "distributed_ddp.py",
        "span_loss(start_logits, end_logits, batch) / num_windows",
        "span_loss(start_logits, end_logits, batch) / max(int(batch.weight.sum()), 1) "
        "/ torch.distributed.get_world_size()",
    ),
    "last batch dropped": (
        "distributed_ddp.py",
        "in data.steps(epoch, run.step):",
        "in list(data.steps(epoch, run.step))[:-1]:",
    ),
    "clip forgotten": ("distributed_ddp.py", "model.parameters(), max_grad_norm)", "model.parameters(), float('inf'))"),
    "a parameter not synchronised": (
        "distributed_ddp.py",
        "    model = Dist",
        "    model._ddp_params_and_buffers_to_ignore = ['network.qa_outputs.weight']\n    model = Dist",
    ),
    "fsdp: world size forgotten": ("distributed_fsdp.py", "loss * torch.distributed.get_world_size()", "loss"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(setting, reference, tmp_path, name):
    script, right, wrong = FAULTS[name]
    text = (ROOT / script).read_text()
    assert text.count(right) == 1
    (tmp_path / script).write_text(text.replace(right, wrong))
    assert differences(train(setting, name, tmp_path / script, 2, []), reference)


COUNTER = """
import atexit, runpy, sys
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
import torch.distributed as dist

count = 0
def counted(function, when):
    def call(*arguments, **named):
        global count
        count += bool(when(*arguments))
        return function(*arguments, **named)
    return call

DDP.forward = counted(DDP.forward, lambda self, *_: torch.is_grad_enabled() and self.require_backward_grad_sync)
name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
setattr(dist, name, counted(getattr(dist, name), lambda *_: True))
atexit.register(lambda: print(f"synchronised {count} times", flush=True))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "script, right, wrong, syncs",
    [
        ("distributed_ddp.py", "grad_sync = batch is micro_batches[-1]", "grad_sync = True", 1),
        ("distributed_fsdp.py", "gradient_sync(batch is micro_batches[-1])", "gradient_sync(True)", 5),
    ],
)
def test_gradients_travel_once_a_step(setting, tmp_path, script, right, wrong, syncs):
    """A sync in every micro-batch gives the same sums, only slower: it is the number of syncs that shows it."""
    _, shared = setting
    (tmp_path / "counter.py").write_text(COUNTER)
    text = (ROOT / script).read_text()
    assert text.count(right) == 1
    (tmp_path / script).write_text(text.replace(right, wrong))
    counts = []
    for number, path in enumerate((ROOT / script, tmp_path / script)):
        name = f"syncs-{script[:-3]}-{number}"
        options = [str(path), *shared, "--accumulation", "3", "--run-name", name, "--max-train-examples", "16"]
        output = launch(tmp_path / "counter.py", 2, options)
        counts.append({int(line.split()[1]) for line in output.splitlines() if line.startswith("synchronised")})
    # 2 passes of 3 micro-batches without a gradient, then 2 steps; fsdp: one a layer, of the head, at the root.
    assert counts == [{(2 * 3 + 2) * syncs}, {(2 * 3 + 2 * 3) * syncs}]


SMALLER = """
import runpy, sys
import torch
import torch.distributed as dist
from common.data import packing

all_reduce, distinct_token_ids = dist.all_reduce, packing.distinct_token_ids
most = 0
def watched(tensor, *arguments, **named):
    global most
    most = max(most, tensor.numel())
    return all_reduce(tensor, *arguments, **named)

dist.all_reduce = watched
if sys.argv[1] == "a token id forgotten":
    packing.distinct_token_ids = lambda *arguments: distinct_token_ids(*arguments)[:-1]
sys.argv = sys.argv[2:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(f"at most {most} numbers sent\\n", end="", flush=True)
"""


@pytest.mark.parametrize("buckets", [25, 0.001])
@pytest.mark.parametrize("fault", ["", "a token id forgotten"])
def test_of_the_word_embeddings_only_what_occurs_is_sent(setting, reference, tmp_path, buckets, fault):
    """In one bucket with all other gradients, and with few others in it."""
    text = (ROOT / "distributed_ddp.py").read_text()
    assert text.count('"bucket_cap_mb": 25') == 1
    (tmp_path / "distributed_ddp.py").write_text(text.replace('"bucket_cap_mb": 25', f'"bucket_cap_mb": {buckets}'))
    (tmp_path / "smaller.py").write_text(SMALLER)
    name = re.sub(r"[\W_]", "-", f"rows {buckets} {fault}")
    arguments = [fault, str(tmp_path / "distributed_ddp.py"), *setting[1], "--accumulation", "2", "--run-name", name]
    output = launch(tmp_path / "smaller.py", 2, arguments)
    result = train(setting, name, None, None, None)
    assert bool(differences(result, reference)) == bool(fault)
    table = next(tensor for key, tensor in result[2].items() if key.endswith("word_embeddings.weight"))
    sent = {int(number) for number in re.findall(r"at most (\d+) numbers sent", output)}
    assert len(sent) == 1 and 0 < sent.pop() < table.numel() / 4


def test_fewer_windows_than_ranks(setting):
    """Three windows to train on and two to evaluate, on four ranks."""
    few = ["--max-train-examples", "3", "--max-dev-examples", "2"]
    alone = train(setting, "few alone", "baseline.py", 1, few)
    for script in ("distributed_ddp.py", "distributed_fsdp.py"):
        many = train(setting, f"few {script}", script, 4, few)
        assert many[0] == pytest.approx(alone[0], rel=1e-5) and many[3] == alone[3]


def test_without_torchrun_it_says_how(setting):
    _, shared = setting
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "distributed_ddp.py", *shared], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2 and "torchrun --standalone" in done.stderr and done.stderr.count("\n") == 1


def test_dropout_differs_between_ranks_and_repeats():
    from common.run.seeds import seed_dropout

    draws = []
    for rank in (0, 1, 0):
        seed_dropout(7, 3, rank)
        draws.append(torch.rand(4))
    assert torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[1])
