"""Steps as CUDA graphs give what steps without them give."""

import gc

import numpy as np
import pytest
import torch
from tiny import sample_features

from common.data.packing import pack_steps
from common.errors import UserError
from common.run.graphs import WARMUP, StepGraphs


def test_without_graphs_the_step_is_called():
    calls = []

    def function(micro_batches, num_windows):
        calls.append(([batch.window.tolist() for batch in micro_batches], num_windows))
        return torch.zeros(()), torch.ones(())

    features, _ = sample_features(20)
    run_step = StepGraphs(function, (), torch.device("cpu"), enabled=False, largest=None)
    for shares in pack_steps(features, [np.array([3, 1])] * 2, 0, 1, 1):
        assert run_step(shares, 2) == (torch.zeros(()), torch.ones(()))
    assert calls == [([[3, 1]], 2)] * 2 and not run_step.graphs


class Graph:
    """A CUDA graph that computes nothing."""

    def capture_begin(self, **_):
        pass

    def capture_end(self):
        pass

    def replay(self):
        pass


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def test_the_largest_step_becomes_a_graph_first(graphs):
    """So that the others find room in its memory."""
    captured = []

    def function(micro_batches, num_windows):
        captured.append((run_step.calls, sorted(micro_batches[0].window.tolist())[-num_windows:]))
        return torch.zeros(()), torch.ones(())

    features, _ = sample_features(60)
    plan = [np.array([3, 1]), *[np.array([7, 5, 2])] * WARMUP, np.array([3, 1]), np.array([7, 5, 2])]
    batches = list(pack_steps(features, [np.arange(40), *plan], 0, 1, 1, fixed_shapes=True))
    run_step = StepGraphs(function, (), torch.device("cpu"), enabled=True, largest=(batches[0], 40))
    for shares, windows in zip(batches[1:], plan, strict=True):
        run_step(shares, len(windows))
    assert [windows for call, windows in captured if call == WARMUP + 1] == [list(range(40)), [2, 5, 7]]
    assert [windows for call, windows in captured if call == WARMUP + 2] == [[1, 3]]
    assert len(run_step.graphs) == 3 and captured[-1][0] == WARMUP + 2  # then it is replayed


def test_a_step_that_fails_in_its_capture_says_why(graphs, monkeypatch):
    """Out of memory, not the broken capture that it leaves."""

    def broken(self):
        raise RuntimeError("operation failed due to a previous error during capture")

    def function(micro_batches, num_windows):
        if run_step.calls > WARMUP:
            raise torch.OutOfMemoryError
        return torch.zeros(()), torch.ones(())

    monkeypatch.setattr(Graph, "capture_end", broken)
    features, _ = sample_features(20)
    batches = list(pack_steps(features, [np.array([3, 1])] * (WARMUP + 1), 0, 1, 1, fixed_shapes=True))
    run_step = StepGraphs(function, (), torch.device("cpu"), enabled=True, largest=(batches[0], 2))
    with pytest.raises(UserError, match="out of memory on a micro-batch of"):
        for shares in batches:
            run_step(shares, 2)
    assert gc.isenabled()


def test_a_batch_takes_over_another():
    features, _ = sample_features(20)
    first, second = (share for (share,) in pack_steps(features, [np.array([3]), np.array([3])], 0, 1, 1))
    first.input_ids[:] = 7
    first.copy_(second)
    assert torch.equal(first.input_ids, second.input_ids)
