"""Steps on a GPU: as CUDA graphs, with our kernels or flash, against steps without graphs and on the CPU."""

import numpy as np
import pytest
import torch
from tiny import load_small, sample_features

from baseline import train_step
from common.data.packing import pack_steps, prefetch
from common.data.plan import largest_batch, plan_epoch
from common.model.precision import HALF, compute_in
from common.model.span import parameter_groups
from common.run.devices import choose_device
from common.run.graphs import WARMUP, StepGraphs
from common.run.seeds import seed_dropout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: graphs are CUDA's")


def steps(device, graphs, precision="bf16", accumulation=1, dropout=0.0, count=40, attention="fused", recompute=False):
    """(losses, norms, number of graphs) of `count` steps on the sample."""
    features, _ = sample_features(200)
    model = load_small("bert", attention if device.type == "cuda" else "sdpa").to(device)
    if recompute:
        model.network.gradient_checkpointing_enable({"use_reentrant": False})
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and not name.endswith("self.dropout"):  # none in attention
            module.p = dropout
    compute_in(model, HALF.get(precision))
    model.train()
    optimizer = torch.optim.AdamW(
        parameter_groups(model, 0.01), lr=torch.tensor(1e-3, device=device), fused=True, capturable=True
    )
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    plan = [windows for epoch in range(4) for windows in plan_epoch(np.arange(160), 16, 0, epoch)][:count]
    largest = next(pack_steps(features, [largest_batch(features, plan)], 0, 1, accumulation, fixed_shapes=True)), 16
    run_step = StepGraphs(train_step, (model, optimizer, scaler, 1.0), device, graphs, largest)
    losses, norms = [], []
    batches = prefetch(pack_steps(features, plan, 0, 1, accumulation, fixed_shapes=True), device)
    for step, (windows, micro_batches) in enumerate(zip(plan, batches, strict=True)):
        seed_dropout(0, step, 0)
        loss, norm = run_step(micro_batches, len(windows))
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, len(run_step.graphs)


@pytest.mark.parametrize("attention", ["fused", "flash"])
@pytest.mark.parametrize("precision, accumulation", [("bf16", 1), ("bf16", 2), ("fp32", 1), ("fp16", 1)])
def test_graphs_change_nothing(precision, accumulation, attention):
    device = choose_device("cuda", 0)
    plain = steps(device, False, precision, accumulation, attention=attention)
    graphs = steps(device, True, precision, accumulation, attention=attention)
    assert graphs[2] >= 1 and plain[2] == 0
    for ours, theirs in zip(graphs[:2], plain[:2], strict=True):
        assert ours == pytest.approx(theirs, rel=0.02 if precision != "fp32" else 1e-4)


def test_dropout_in_a_graph_is_drawn_anew_and_repeats():
    device = choose_device("cuda", 0)
    first, second = (steps(device, True, dropout=0.1)[0] for _ in range(2))
    assert first == pytest.approx(second, rel=0.02)
    assert len(set(first[WARMUP:])) == len(first[WARMUP:])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputed_activations_change_nothing(dropout):
    """Dropout is drawn again as it was, in a graph too."""
    device = choose_device("cuda", 0)
    kept, recomputed = (steps(device, True, dropout=dropout, recompute=one) for one in (False, True))
    assert recomputed[2] >= 1
    for ours, theirs in zip(recomputed[:2], kept[:2], strict=True):
        assert ours == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize("attention", ["fused", "flash"])
def test_the_fast_path_agrees_with_the_cpu(attention):
    """Graphs, our kernels or flash, and bf16 on the GPU against fp32 on the CPU."""
    reference = steps(torch.device("cpu"), False, "fp32")
    fast = steps(choose_device("cuda", 0), True, attention=attention)
    assert fast[0] == pytest.approx(reference[0], rel=0.05)


def test_the_kernels_agree_with_the_cpu_in_fp32():
    """The first steps, before rounding errors have grown: our kernels without tensor cores against torch's CPU code."""
    reference = steps(torch.device("cpu"), False, "fp32", count=5)
    ours = steps(choose_device("cuda", 0), True, "fp32", count=5)
    assert ours[0] == pytest.approx(reference[0], rel=1e-5)
    assert ours[1] == pytest.approx(reference[1], rel=1e-4)
