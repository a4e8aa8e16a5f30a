"""The all-reduce measurement: its arithmetic, and a run on two ranks."""

import json
import socket
import subprocess
import sys

import pytest
from tiny import ROOT

from tools.allreduce import SHAPES, messages, ring_seconds


def test_what_a_ring_takes():
    # 435.6 MB between 4 ranks at 12.5 GB/s: 1.5 times the message over the slowest link
    assert ring_seconds(435.6e6, 4, 12.5e9, 0) == pytest.approx(0.05227, rel=1e-3)
    assert ring_seconds(0, 4, 1e9, 5e-6) == pytest.approx(30e-6)  # 2 (N - 1) steps
    assert ring_seconds(1e6, 1, 1e9, 1.0) == 0


def test_messages_hold_the_gradient_and_its_word_embeddings():
    sizes = messages(*SHAPES["bert-base"])
    assert sizes == sorted(sizes) and sizes[-1] == 435_572_744 and 93_763_584 in sizes
    assert messages(*SHAPES["bert-base"], [20, 3]) == [4096, 3_000_000, 20_000_000]  # the prediction needs the order


@pytest.mark.parametrize("nodes, rows", [(1, 3), (2, 9)])
def test_it_measures_on_several_ranks(tmp_path, nodes, rows):
    with socket.socket() as probe:  # a port that is free now
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=2"]
    run += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    tool = ["-m", "tools.allreduce", "--device", "cpu", "--megabytes", "2", "1", "--types", "fp32", "--repeats", "3"]
    agents = [
        subprocess.Popen(
            [*run, f"--node-rank={node}", *tool, "--output", str(tmp_path / "record.json")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(nodes)
    ]
    outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    assert all(agent.returncode == 0 for agent in agents), outputs
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["world_size"] == 2 * nodes and len(record["all_reduce"]) == rows
    for row in record["all_reduce"]:
        median, least, most = row["milliseconds"]
        assert 0 < least <= median <= most and row["bus_gb_per_second"] > 0
        if row["bytes"] == 2_000_000:  # the bandwidth is the largest message's own
            assert row["ring_milliseconds"] >= 0.99 * median
    assert {row["path"] for row in record["all_reduce"]} == (
        {"all ranks"} if nodes == 1 else {"all ranks", "within a node", "between nodes"}
    )
    assert "bus GB/s" in outputs[0]


def test_one_rank_is_refused():
    done = subprocess.run([sys.executable, "-m", "tools.allreduce"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "torchrun" in done.stderr and done.stderr.count("\n") == 1
