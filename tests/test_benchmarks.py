"""The peers and the commands that compare with them, small and on the CPU."""

import importlib
import importlib.util
import json
import statistics
import sys

import numpy as np
import pytest
import torch
from tiny import ROOT, SAMPLE, minilm_tokenizer, sample_features

from benchmarks import compare, quality
from benchmarks.peers.harness import PaddedWindows
from common import metrics
from common.batches import pack
from common.errors import UserError
from common.evaluation import gold_texts
from common.model import load_model
from common.squad import QuestionSet

SMALL = ["--shape", "tiny", "--train-file", str(SAMPLE / "train.json"), "--warmup", "2", "--steps", "3"]


def parse(*options):
    args = compare.build_parser().parse_args([*SMALL, *options])
    args.ranks = args.ranks or [1]
    return args


def measured(speed, **changes):
    record = {
        "status": "finished",
        "started": 0.0,
        "windows_per_second": speed,
        "seconds": {},
        "peak_memory_bytes": [9],
    }
    settings = {"arguments": {"batch_size": 8, "pad_to": 512, "seed": 0}, "precision": "fp32", "attention": "padded"}
    where = {"versions": {}, "data": {}, "gpus": [], "device": "CPU", "git_commit": None}
    return record | settings | where | changes


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


# ---------------------------------------------------------------------------------------------------------------------
# What the peers train on


def test_padded_windows_are_the_packed_ones():
    features, _ = sample_features()
    data = PaddedWindows(features, 384)
    for row in (0, 7, len(data) - 1):
        item, window = data[row], data.windows[row]
        packed, tokens = pack(features, [window]), int(features.lengths[window])
        assert item["input_ids"][:tokens].equal(packed.input_ids)
        assert item["token_type_ids"][:tokens].equal(packed.token_type_ids)
        assert item["attention_mask"].tolist() == [1] * tokens + [0] * (384 - tokens)
        assert set(item["input_ids"][tokens:].tolist()) == {features.pad_id}
        assert (item["start_positions"], item["end_positions"]) == (int(packed.start), int(packed.end))


def test_windows_without_padding_collate_to_the_longest():
    from transformers import DataCollatorWithPadding

    features, _ = sample_features()
    rows = [PaddedWindows(features, None)[i] for i in range(4)]
    batch = DataCollatorWithPadding(minilm_tokenizer())(rows)
    lengths = batch["attention_mask"].sum(1)
    assert batch["input_ids"].shape == (4, int(lengths.max()))
    assert lengths.tolist() == [len(row["input_ids"]) for row in rows]


def test_windows_without_a_label_are_left_out():
    features, _ = sample_features()
    features.start = np.where(np.arange(len(features.start)) == 3, -1, features.start)
    assert 3 not in PaddedWindows(features, 384).windows


# ---------------------------------------------------------------------------------------------------------------------
# Each peer, in this process


def run_peer(monkeypatch, capfd, cache, module, *options):
    """The record that a peer prints; skips where its package is not installed."""
    package = next((way.needs for way in compare.WAYS if way.module == module), None)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: requirements-bench.txt")
    peer = importlib.import_module(f"benchmarks.peers.{module}")
    monkeypatch.setattr(sys, "argv", [f"{module}.py", *SMALL, "--cache-dir", cache, "--device", "cpu", *options])
    peer.main()
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith('{"schema"')]
    return json.loads(lines[-1])


@pytest.mark.parametrize(
    "module, options",
    [
        ("this_project", ["--precision", "fp32"]),
        ("hf_trainer", ["--pad-to", "384"]),
        ("hf_trainer", ["--group-by-length"]),
        ("course_loop", ["--pad-to", "384", "--batch-size", "4"]),
        ("data_parallel", ["--pad-to", "384", "--batch-size", "4"]),
        ("accelerate_loop", []),
    ],
)
def test_a_peer_trains_and_leaves_a_record(monkeypatch, capfd, cache, module, options):
    record = run_peer(monkeypatch, capfd, cache, module, *options)
    arguments, seconds = record["arguments"], record["seconds"]
    assert (arguments["warmup"], arguments["steps"], record["precision"]) == (2, 3, "fp32")
    assert record["windows_per_second"] == pytest.approx(arguments["batch_size"] * 3 / seconds["timed"])
    assert 0 < seconds["warmup"] + seconds["timed"] < seconds["total"]
    assert record["data"]["train"]["windows"] == 666 and record["model"]["parameters"] > 1e6
    assert record["world_size"] == len(record["peak_memory_bytes"]) == 1 and record["status"] == "finished"
    assert (record["attention"] == "padded") == (module != "this_project")


def test_a_peer_trains_the_network(monkeypatch, capfd, cache):
    """The steps that are timed are real: the weights end elsewhere than they began, as far as AdamW moves them."""
    from benchmarks.peers import harness
    from benchmarks.workload import load_network

    seen = {}
    monkeypatch.setattr(harness, "load_network", lambda *a, **k: seen.setdefault("network", load_network(*a, **k)))
    run_peer(monkeypatch, capfd, cache, "course_loop", "--pad-to", "384", "--batch-size", "2")
    before, after = load_network("tiny").state_dict(), seen["network"].state_dict()
    moved = torch.stack([(after[name] - before[name]).abs().max() for name in before])
    assert len(moved) == len(after) and (moved > 0).float().mean() > 0.9 and moved.max() < 6 * 5e-5


@pytest.mark.parametrize(
    "options, message",
    [
        (["--pad-to", "128"], "--pad-to 128 is less than the longest window"),
        (["--batch-size", "200"], "2 + 3 steps of 200 windows are more than the 666"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capfd, cache, options, message):
    with pytest.raises(UserError, match=message.replace("+", r"\+")):
        run_peer(monkeypatch, capfd, cache, "course_loop", *options)


# ---------------------------------------------------------------------------------------------------------------------
# The comparison


def test_the_comparison_on_two_ranks(monkeypatch, capsys, cache, tmp_path):
    """The command itself: each way in its processes, gloo between two ranks, records and the table."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ways = ["lightning-ddp-8", "hf-trainer-8-dynamic", "data-parallel-8"]
    options = ["--ways", *ways, "--ranks", "2", "--repeats", "1", "--device", "cpu", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["compare", *SMALL, "--cache-dir", cache, *options])
    assert compare.main() == 0
    output = capsys.readouterr().out
    records = compare.read_records(tmp_path / "out")
    assert set(records) == {f"{name}-x2" for name in ["this-project-8", *ways]}
    for way in compare.WAYS:
        if f"{way.name}-x2" not in records:
            continue
        record = records[f"{way.name}-x2"]
        hindrance = compare.obstacle(way, 2, on_cuda=False)
        assert record.get("error") == hindrance and (record["status"] == "failed") == bool(hindrance)
        if hindrance:
            assert f"{way.name}, 2 ranks: {hindrance}" in output
            continue
        assert record["world_size"] == len(record["peak_memory_bytes"]) == 2
        assert record["arguments"]["batch_size"] == 16 and record["windows_per_second"] > 0
        assert f"| {way.name} " in output
    assert records["this-project-8-x2"]["strategy"] == "ddp"
    assert "data-parallel-8, 2 ranks: runs on GPUs only" in output


def test_a_failing_way_is_told_and_the_others_go_on(monkeypatch, capsys, cache, tmp_path):
    """A peer that stops with an error leaves its message in the record, its stderr beside it, and exit status 1."""
    out = tmp_path / "out"
    monkeypatch.setattr(compare, "command", lambda way, *_, **__: [sys.executable, "-c", f"{way.name!r}; 1 / 0"])
    monkeypatch.setattr(sys, "argv", ["compare", *SMALL, "--cache-dir", cache, "--repeats", "2", "--out", str(out)])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--ranks", "1", "--ways", "course-loop-8-fp32", "--device", "cpu"])
    assert compare.main() == 1
    output = capsys.readouterr().out
    for name in ("this-project-8", "course-loop-8-fp32"):
        record = compare.read_records(out)[f"{name}-x1"]
        assert record["error"].startswith("ZeroDivisionError: division by zero, see ") and len(record["rounds"]) == 2
        assert "ZeroDivisionError" in (out / f"{name}-x1.log").read_text()
        assert f"{name}, 1 ranks: ZeroDivisionError" in output and "(2 of 2 rounds)" in output


def test_rounds_add_up_to_medians():
    record = None
    for speed in (10.0, 30.0, 14.0):
        record = compare.add_round(record, measured(speed, peak_memory_bytes=[int(speed), 20]))
    record = compare.add_round(record, {"status": "failed", "started": 0.0, "error": "gone"})
    assert record["windows_per_second"] == 14.0 and record["peak_memory_bytes"] == [30, 20]
    assert [one["status"] for one in record["rounds"]] == ["finished"] * 3 + ["failed"]
    assert record["status"] == "finished" and record["arguments"]["batch_size"] == 8


def test_the_table_divides_by_this_project_at_the_same_size():
    speeds = {"this-project-8": [100.0, 120.0, 110.0], "course-loop-8-fp32": [10.0, 9.0, 11.5]}
    records = {}
    for name, values in speeds.items():
        changes = {"attention": "flash"} if name == "this-project-8" else {}
        for value in values:
            round_ = compare.add_round(records.get(f"{name}-x1"), measured(value, **changes))
            records[f"{name}-x1"] = round_ | {"way": name, "ranks": 1}
    lines = compare.table(records).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2] == ["this-project-8", "1", "8", "fp32", "-", "110", "100", "120", "1.00", "0.00"]
    ratio = f"{110 / statistics.median(speeds['course-loop-8-fp32']):.2f}"
    assert cells[3] == ["course-loop-8-fp32", "1", "8", "fp32", "512", "10.0", "9.0", "11.5", ratio, "0.00"]
    assert len({len(line) for line in lines}) == 1


def test_unlike_measurements_are_not_added_up():
    assert compare.same_setting(measured(1.0), measured(2.0, arguments=measured(0)["arguments"] | {"seed": 5}))
    assert not compare.same_setting(measured(1.0), measured(1.0, device="another"))
    assert not compare.same_setting(measured(1.0), measured(1.0, arguments=measured(0)["arguments"] | {"pad_to": 384}))


def test_the_ways_of_a_gpu_and_of_a_cpu():
    asked = parse("--ways", "course-loop-8-tf32", "course-loop-8-fp32", "hf-trainer-32-compiled")
    on_gpu = [way.name for way, _ in compare.chosen_ways(asked, on_cuda=True)]
    on_cpu = [way.name for way, _ in compare.chosen_ways(asked, on_cuda=False)]
    assert on_gpu == [
        *("this-project-8", "this-project-32", "hf-trainer-32-compiled"),
        *("course-loop-8-fp32", "course-loop-8-tf32"),
    ]
    assert on_cpu == [name for name in on_gpu if name != "course-loop-8-tf32"]  # it would be the same
    everything = [(way.name, ranks) for way, ranks in compare.chosen_ways(parse("--ranks", "1", "4"), on_cuda=True)]
    assert len(everything) == len(set(everything))
    assert ("course-loop-8-fp32", 4) not in everything and ("this-project-8-fsdp", 1) not in everything
    assert {name for name, _ in everything} == {way.name for way in compare.WAYS}


def test_commands_of_a_way():
    args = parse("--attention-dropout", "0.0")
    ways = {way.name: way for way in compare.WAYS}

    def line(name, ranks, on_cuda=True):
        return " ".join(compare.command(ways[name], ranks, args, on_cuda, seed=3))

    assert line("hf-trainer-32-compiled", 4).endswith(
        "--nproc-per-node=4 -m benchmarks.peers.hf_trainer --compile --device cuda --precision bf16 --batch-size 128 "
        f"--seed 3 --pad-to 384 --shape tiny --train-file {SAMPLE / 'train.json'} --cache-dir cache --warmup 2 "
        "--steps 3 --attention-dropout 0.0"
    )
    assert "--compile" not in line("hf-trainer-32-compiled", 1, on_cuda=False)
    assert "--precision fp32" in line("hf-trainer-32-compiled", 1, on_cuda=False)
    assert "--strategy ddp" in line("this-project-8", 2) and "--strategy" not in line("this-project-8", 1)
    assert "--attention-dropout" not in line("this-project-8", 1)
    assert "torch.distributed.run" not in line("data-parallel-8", 4) and "--batch-size 32" in line("data-parallel-8", 4)
    assert "torch.distributed.run" in line("deepspeed-zero2-8", 1)  # without a launcher it looks for MPI


def test_a_missing_package_is_told_with_its_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    way = next(way for way in compare.WAYS if way.name == "deepspeed-zero2-8")
    assert compare.obstacle(way, 1, True) == ("deepspeed is not installed: `pip install -r requirements-bench.txt`")
    pinned = (ROOT / "requirements-bench.txt").read_text()
    assert all(f"{way.needs}==" in pinned for way in compare.WAYS if way.needs)


def test_commands_in_the_readme_parse():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    lines = [line.split("  #")[0] for line in text.splitlines() if line.startswith("python -m benchmarks.compare")]
    for line in lines:
        compare.build_parser().parse_args(line.split()[3:])
    assert len(lines) >= 4
    assert not [way.name for way in compare.WAYS if f"`{way.name}`" not in text]


def test_other_files_in_the_folder_are_refused(tmp_path):
    (tmp_path / "some.json").write_text("[]")
    with pytest.raises(UserError, match=r"some\.json: not a record"):
        compare.read_records(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Quality


def test_the_trainers_way_to_its_f1(monkeypatch, capsys, tmp_path):
    pytest.importorskip("accelerate", reason="requirements-bench.txt")
    options = ["--max-train-examples", "24", "--max-dev-examples", "10", "--max-length", "128", "--overlap", "32"]
    options += ["--batch-size", "4", "--learning-rate", "3e-4", "--epochs", "2", "--device", "cpu"]
    options += ["--runs-dir", str(tmp_path), "--run-name", "run", "--cache-dir", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", ["quality.py", *options])
    quality.main()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    first, second = record["epochs"]
    assert (record["strategy"], record["status"], record["attention"]) == ("hf-trainer", "finished", "padded")
    assert second["train_loss"] < first["train_loss"] and second["f1"] > 5
    assert record["attempts"][0]["steps"] == 12 and second["windows_per_second"] > 0
    assert f"F1 {second['f1']:.2f}" in capsys.readouterr().out
    predictions = json.loads((tmp_path / "run" / "predictions.json").read_text())
    gold = gold_texts(QuestionSet(SAMPLE / "dev.json", (("first", 10),)).data.frame)
    best = max(record["epochs"], key=lambda epoch: epoch["f1"])
    assert metrics.evaluate(gold, predictions, "1.1")["f1"] == best["f1"]
    model = load_model(str(tmp_path / "run" / "model"), needs_head=True)  # what baseline.py --evaluate-only takes
    assert model.network.config.squad["max_length"] == 128


def test_options_of_ours_alone_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["quality.py", "--accumulation", "2"])
    with pytest.raises(UserError, match="--accumulation: not an option here"):
        quality.main()
