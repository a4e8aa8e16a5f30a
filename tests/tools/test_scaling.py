"""The scaling study's arithmetic, and the command itself on two CPU ranks."""

import json
import subprocess
import sys
import types

import pytest
from tiny import ROOT, SAMPLE

from benchmarks import estimate, steps
from benchmarks.scaling import main, plan, rows, table
from common.errors import UserError


def result(ranks, strategy, batch_size, speed, exposed=None):
    return {
        "ranks": ranks, "strategy": strategy, "batch_size": batch_size,
        "windows_per_second": [speed, speed - 10, speed + 10],
        "ms_a_step": 1000 * batch_size / speed, "peak_memory_gb": 3.5, "parameters": 25_000_000,
        "ms_of": exposed and {"communication, hidden": 2.0, "communication, exposed": exposed},
    }  # fmt: skip


RESULTS = [
    result(1, "baseline", 96, 4000),
    result(1, "baseline", 384, 5000),
    result(4, "ddp", 384, 15000, 1.5),
    result(4, "fsdp-zero2", 384, 14000, 2.5),
]


def test_weak_and_strong_are_not_mixed():
    found = rows(RESULTS, [96], [384], bandwidth=100)
    kinds = {(row["scaling"], row["gpus"], row["strategy"]): row for row in found}
    weak, strong = (kinds[kind, 4, "ddp"] for kind in ("weak, 96 per GPU", "strong, 384 in all"))
    assert weak["speed-up"] == pytest.approx(3.75) and strong["speed-up"] == pytest.approx(3.0)
    assert weak["efficiency"] == pytest.approx(0.9375) and strong["exposed, ms"] == 1.5
    assert weak["ring, ms"] == pytest.approx(1.5)  # 100 MB, 1.5 times over 100 GB/s
    assert len(found) == 6 and kinds["weak, 96 per GPU", 1, "baseline"]["speed-up"] == 1
    text = table(found)
    assert "94%" in text and "| 15,000 |" in text and "–" in text


def test_without_one_gpu_there_is_no_speed_up():
    assert rows(RESULTS[2:], [96], [384]) == []


def test_one_gpu_must_be_among_them(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["scaling", str(tmp_path / "study.json"), "--gpus", "2", "4"])
    with pytest.raises(UserError, match="--gpus: add 1"):
        main()


@pytest.mark.parametrize(
    "strategy, ranks, message", [("ddp", None, "need torchrun"), ("baseline", "2", "without torchrun")]
)
def test_steps_refuses_a_strategy_that_the_launch_does_not_fit(monkeypatch, strategy, ranks, message):
    """DDP alone has no process group; two baselines would each train on half a batch and call it whole."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(name, value) if ranks else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["steps", "--strategy", strategy])
    with pytest.raises(UserError, match=message):
        steps.main()


@pytest.mark.parametrize(
    "captures, taken, steady", [([], [0, 1], True), ([0, 2], [1, 3], True), ([0, 1, 2, 4, 5], [4, 5], False)]
)
def test_runs_in_which_a_graph_is_made_are_warm_up(captures, taken, steady):
    class Setting:
        def __init__(self):
            self.run_step, self.runs = types.SimpleNamespace(graphs={}), 0

        def run(self, steps):
            assert steps == 7
            if self.runs in captures:
                self.run_step.graphs[self.runs] = "a graph"
            self.runs += 1
            return self.runs - 1

    assert steps.steady_runs([Setting()], 7, 2) == ([[number] for number in taken], steady)


def test_settings_in_turn_are_compared_within_each_round(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.steps", "--strategy", "ddp", "--batch-size", "8", "--shape", "tiny", "--in-turn"]
    command += ["--device", "cpu", "--steps", "2", "--warmup", "1", "--profile", "--reduce", "fp32", "rows"]
    command += ["--train-file", str(SAMPLE / "train.json"), "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert (first["reduce"], second["reduce"]) == ("fp32", "rows") and first["time_to_first"] == [1, 1, 1]
    median, least, most = second["time_to_first"]
    assert 0 < least <= median <= most


@pytest.mark.parametrize("further", [["--in-turn"], ["--reduce", "fp32", "bf16"], ["--bucket-mb", "1", "25"]])
def test_a_study_has_one_row_for_each_setting(monkeypatch, tmp_path, further):
    monkeypatch.setattr(sys, "argv", ["scaling", str(tmp_path / "study.json"), *further])
    with pytest.raises(UserError, match="take one value here"):
        main()


def test_the_estimate_of_slow_links():
    assert estimate.ALL == 108_893_186  # as the records of BERT-base say
    sent, exposed = estimate.communication(2, estimate.WORDS)
    last = (estimate.LAYER + estimate.REST + estimate.WORDS * estimate.WORD) / estimate.ALL  # not before the pass ends
    assert sent == pytest.approx(43) and exposed == pytest.approx(43 * last)
    assert estimate.communication(2, 10_240)[1] < exposed < estimate.communication(2, estimate.WORDS, 4)[1]
    assert estimate.communication(32, estimate.WORDS)[0] == pytest.approx(43 * 2 * 31 / 32)
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text()
    assert "\n".join(estimate.table()) in notes, "`python -m benchmarks.estimate` prints the table of NOTES.md"


def test_buckets_are_as_large_as_in_the_script():
    assert f'"bucket_cap_mb": {steps.BUCKET_MB}}}' in (ROOT / "distributed_ddp.py").read_text()


def test_each_setting_is_measured_once():
    args = steps.build_parser().parse_args(["--strategy", "baseline", "ddp", "fsdp-zero2", "--batch-size", "8"])
    args.reduce, args.bucket_mb = ["rows", "rows-bf16", "fp32", "bf16"], [10, 25]
    found = steps.choices(args)
    assert len(found) == 1 + 8 + 2
    assert ("baseline", 8, None, None) in found and ("fsdp-zero2", 8, "bf16", None) in found
    wanted = plan([1, 4], ["ddp"], [96], [384])
    assert wanted == [(1, "baseline", 96), (1, "baseline", 384), (4, "ddp", 384)]


def test_the_command_on_two_ranks(tmp_path):
    command = [sys.executable, "-m", "benchmarks.scaling", str(tmp_path / "study.json"), "--gpus", "1", "2"]
    command += ["--strategy", "ddp", "fsdp-zero2", "--weak", "4", "--strong", "8", "--shape", "tiny"]
    command += ["--device", "cpu", "--steps", "2", "--warmup", "1", "--repeats", "1", "--cache-dir", str(tmp_path)]
    command += ["--train-file", str(SAMPLE / "train.json"), "--reduce", "bf16", "--bucket-mb", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    study = json.loads((tmp_path / "study.json").read_text())
    assert {(r["ranks"], r["strategy"], r["batch_size"]) for r in study["results"]} == {
        (1, "baseline", 4), (1, "baseline", 8), (2, "ddp", 8), (2, "fsdp-zero2", 8),
    }  # fmt: skip
    sent = {r["strategy"]: (r["reduce"], r["bucket_mb"]) for r in study["results"]}
    assert sent == {"baseline": (None, None), "ddp": ("bf16", 1), "fsdp-zero2": ("bf16", None)}
    assert all(len(r["peak_memory_gb_by_rank"]) == r["ranks"] for r in study["results"])
    assert len(study["rows"]) == 6 and "weak, 4 per GPU" in done.stdout
