"""The peers and the commands that compare with them, small and on the CPU."""

import importlib
import importlib.util
import json
import os
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import ROOT, SAMPLE, minilm_tokenizer, sample_features, save_network

from benchmarks import compare, whole_runs
from benchmarks.peers.harness import Bench, PaddedWindows
from benchmarks.workload import build_network
from common.data.packing import pack
from common.data.splits import QuestionSet
from common.errors import UserError
from common.run.environment import environment
from common.run.record import write_json
from common.scoring import metrics
from common.scoring.evaluation import gold_texts
from tools.report.reading import read_run

WAYS = {way.name: way for way in compare.WAYS}
SMALL = ["--shape", "tiny", "--train-file", str(SAMPLE / "train.json"), "--warmup", "2", "--seconds", "0.1"]


def needs(package):
    """Skip without a package of requirements-bench.txt; CI has them all but DeepSpeed."""
    if importlib.util.find_spec(package) is None:
        assert not os.environ.get("CI"), f"{package} is missing: .ci/run installs it"
        pytest.skip(f"{package} is not installed: `pip install -r requirements-bench.txt`")


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Lightning and Accelerate leave ranks in the environment and a process group, which other tests would take."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def parse(*options):
    args = compare.build_parser().parse_args([*SMALL, "--out", "somewhere", *options])
    args.device = "cpu"
    return args


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
# Each way, in this process


def train(name, turns, **changes):
    """What a way replies to these turns on a few windows of the sample."""
    way, replies = replace(WAYS[name], batch_size=4, **changes), []
    features, _ = sample_features()
    bench = Bench(way, "tiny", features, minilm_tokenizer(), torch.device("cpu"), (0, 1), iter(turns), replies.append)
    importlib.import_module(f"benchmarks.peers.{way.module}").train(bench)
    assert bench.done == sum(map(sum, turns)) and bench.last is None
    return replies


@pytest.mark.parametrize(
    "name",
    [
        *("this-project-8", "hf-trainer-8-dynamic", "hf-trainer-32-grouped", "course-loop-8-fp32"),
        *("lightning-ddp-8", "data-parallel-8", "accelerate-32"),
    ],
)
def test_a_way_trains_in_turns(name):
    if WAYS[name].needs:
        needs(WAYS[name].needs)
    first, second = train(name, [(1, 2), (1, 3)], pad_to=None)
    assert (first["steps"], second["steps"]) == (2, 3)
    for reply in (first, second):
        assert reply["seconds"] > 0 and reply["cpu_seconds"] > 0 and reply["peak_memory"][0] > 1e8
        ran, ours = reply["ran"], name == "this-project-8"
        assert reply["precision"] == "fp32" and (ran["attention"] == "padded") == (not ours)
        assert ran["dropout"] == {"hidden": 0.1, "attention": 0.0 if ours else 0.1}
        assert not any(ran[one] for one in ("compile", "graphs", "kernels", "fallbacks", "deterministic"))
        assert ran["tf32"] == {"matmul": False, "cudnn": False}


def test_a_peer_in_the_matched_setting_has_no_attention_dropout():
    (reply,) = train("course-loop-8-fp32", [(1, 1)], pad_to=None, dropout="matched")
    assert reply["ran"]["dropout"] == {"attention": 0.0, "hidden": 0.1}


def test_a_way_trains_the_network(monkeypatch):
    """The steps that are timed are real: the weights end elsewhere than they began, as far as AdamW moves them."""
    from benchmarks.peers import harness

    seen = {}
    monkeypatch.setattr(harness, "build_network", lambda *a, **k: seen.setdefault("network", build_network(*a, **k)))
    train("course-loop-8-fp32", [(1, 4)], pad_to=None)
    before, after = build_network("tiny").state_dict(), seen["network"].state_dict()
    moved = torch.stack([(after[name] - before[name]).abs().max() for name in before])
    assert len(moved) == len(after) and (moved > 0).float().mean() > 0.9 and moved.max() < 6 * 5e-5


# ---------------------------------------------------------------------------------------------------------------------
# The comparison


def run_compare(monkeypatch, *options):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["compare", *SMALL, "--device", "cpu", *map(str, options)])
    return compare.main()


def test_the_comparison_on_two_ranks(monkeypatch, capsys, tmp_path):
    """The command itself: each way in its processes, gloo between two ranks, records and the table.

    A way that stops with an error leaves its message in the record and its log beside it, and the others go on.
    """
    needs("accelerate")
    broken = replace(WAYS["lightning-ddp-8"], module="no_such_module", needs=None)
    names = ["this-project-8", "hf-trainer-8-dynamic", "data-parallel-8"]
    monkeypatch.setattr(compare, "WAYS", [*(WAYS[name] for name in names), broken])
    out, options = tmp_path / "out", ["--ranks", "2", "--rounds", "2", "--cache-dir", tmp_path / "cache"]
    options += ["--dropout", "own"]
    assert run_compare(monkeypatch, *options, "--out", out) == 0
    output = capsys.readouterr().out
    records = compare.read_records(out)
    assert set(records) == {"this-project-8-x2", *(f"{name}-own-x2" for name in [*names[1:], "lightning-ddp-8"])}
    for name in ("this-project-8-x2", "hf-trainer-8-dynamic-own-x2"):
        record, run = records[name], read_run(out / f"{name}.json")
        speeds = [16 * one["steps"] / one["seconds"] for one in record["rounds"]]
        assert record["status"] == "finished" and len(speeds) == 2 and run.ranks == 2 and run.batch == 16
        assert run.measures["windows_per_second"] == pytest.approx(sum(speeds) / 2)
        assert run.assumed == () and None not in run.ran.values()  # a report knows all that ran
        assert len(record["peak_memory"]["training"]) == 2 and f"| {record['way']} " in output
    assert records["data-parallel-8-own-x2"]["error"] == "runs on GPUs only"
    assert "not measured: data-parallel-8-own on 2: runs on GPUs only" in output
    failed = records["lightning-ddp-8-own-x2"]
    assert failed["status"] == "failed" and failed["error"].startswith("ModuleNotFoundError: No module named")
    assert "no_such_module" in (out / "lightning-ddp-8-own-x2.log").read_text()
    assert "not measured: lightning-ddp-8-own on 2: ModuleNotFoundError" in output
    assert sorted(path.suffix for path in out.iterdir()) == [".json"] * 4 + [".log"]
    assert run_compare(monkeypatch, "--rounds", "0", "--out", out) == 0  # shows the same
    assert capsys.readouterr().out in output
    with pytest.raises(UserError, match="holds no records to show"):
        run_compare(monkeypatch, "--rounds", "0", "--out", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="holds records already"):
        run_compare(monkeypatch, "--out", out)


def test_both_settings_and_whole_runs_in_one_call(monkeypatch, capsys, tmp_path):
    """A peer with its own attention dropout and with 0, in turn; then whole runs, each epoch with F1 and its time."""
    needs("accelerate")
    save_network(tmp_path / "model")
    minilm_tokenizer().save_pretrained(tmp_path / "model")
    options = ["--ways", "hf-trainer-8", "--rounds", "1", "--cache-dir", tmp_path / "cache", "--out", tmp_path / "out"]
    whole = ["--model", tmp_path / "model", "--dev-file", SAMPLE / "dev.json", "--max-train-examples", "24"]
    whole += ["--max-dev-examples", "10", "--max-length", "128", "--overlap", "32", "--epochs", "2"]
    assert run_compare(monkeypatch, *options, "--", *whole) == 0
    records = compare.read_records(tmp_path / "out")
    assert list(records) == ["hf-trainer-8-matched-x1", "hf-trainer-8-own-x1", "this-project-8-x1"]
    for record, setting, dropout in zip(records.values(), ("matched", "own", "own"), (0.0, 0.1, 0.0), strict=True):
        assert record["dropout"] == {"setting": setting, "attention": dropout, "hidden": 0.1}
        assert (
            record["arguments"]["attention_dropout"] == record["whole_run"]["arguments"]["attention_dropout"] == dropout
        )
        first, second = record["whole_run"]["epochs"]
        assert 0 < first["seconds"] < second["seconds"] and first["f1"] >= 0
    found = compare.rows(records)
    assert [row["attention dropout"] for row in found] == ["0", "0.1", "0"] and found[0]["s to equal F1"] == "–"
    assert all(re.fullmatch(r"\d+ \(ours \d+\)", row["s to equal F1"]) for row in found[1:])


def test_a_whole_run_that_fails_leaves_its_error():
    result = whole_runs.train_whole(WAYS["this-project-8"], parse("--", "--epochs", "1"))
    assert result == {"error": "error: --train-file needs --dev-file, or --dev-fraction to split a dev set off"}


def with_run(record, *epochs, **changes):
    """The record with a whole run of its machine. epochs: (F1, seconds since the command began)."""
    kept = ("host", "processor", "ranks", "model", "versions")
    run = {name: record[name] for name in kept} | {"data": "squad"} | changes
    return record | {"whole_run": run | {"epochs": [{"f1": f1, "seconds": seconds} for f1, seconds in epochs]}}


def test_seconds_to_equal_f1():
    ours = with_run(record_of("this-project-8", 10.0, uuid="a"), (80.0, 20.0), (82.0, 30.4))
    plain = record_of("hf-trainer-8", 10.0, uuid="a")
    theirs = with_run(plain, (81.0, 60.0), (81.5, 120.2))
    assert whole_runs.equal_f1(theirs, ours) == "120 (ours 30)"
    assert whole_runs.equal_f1(with_run(plain, (79.0, 60.0), (79.9, 120.2)), ours) == "120 (ours 20)"
    elsewhere = with_run(record_of("hf-trainer-8", 10.0, uuid="b"), (82.0, 60.0))
    other_model = with_run(plain, (82.0, 60.0), model={"name": "another"})
    for record in (plain, elsewhere, other_model, plain | {"whole_run": {"error": "stopped"}}):
        assert whole_runs.equal_f1(record, ours) == "–"
    assert whole_runs.equal_f1(theirs, None) == whole_runs.equal_f1(ours, ours) == "–"


def test_the_setting_in_which_ours_leads_by_less():
    records = {
        "this-project-8-x1": record_of("this-project-8", 100.0, attention="sdpa", uuid="a"),
        "course-loop-8-fp32-matched-x1": record_of("course-loop-8-fp32", 20.0, dropout="matched", uuid="a"),
        "course-loop-8-fp32-own-x1": record_of("course-loop-8-fp32", 10.0, uuid="a"),
        "hf-trainer-8-own-x1": record_of("hf-trainer-8", 40.0, uuid="a"),
        "hf-trainer-8-matched-x1": record_of("hf-trainer-8", dropout="matched"),  # did not run
    }
    names = ["this-project-8-x1", "course-loop-8-fp32-matched-x1", "hf-trainer-8-own-x1"]
    assert list(compare.closest(records)) == names
    records["this-project-8-x1"] = record_of("this-project-8", 100.0, uuid="b")  # on another machine
    assert [row["ours ÷ it"] for row in compare.rows(compare.closest(records))] == ["1.00", "–", "–"]


def record_of(name, *speeds, ranks=1, attention="padded", uuid=None, dropout="own"):
    args = parse()
    features, _ = sample_features()
    questions = QuestionSet(SAMPLE / "train.json")
    way = replace(WAYS[name], dropout=dropout)
    record = compare.start_record(way, ranks, args, questions, features, environment())
    for speed in speeds:
        reply = {"steps": 10, "seconds": 80 * ranks / speed, "cpu_seconds": 1.0, "threads": 1, "precision": "fp32"}
        dropout = {"attention": record["arguments"]["attention_dropout"], "hidden": 0.1}
        reply |= {"ran": {"attention": attention, "compile": False, "dropout": dropout}, "peak_memory": [10**9]}
        reply["devices"] = [{"name": "CPU", "uuid": uuid}]
        record = compare.add_round(record, [reply] * ranks, on_cuda=False)
    return record


def test_the_table_divides_by_this_project_at_the_same_size():
    records = {
        "this-project-8-x1": record_of("this-project-8", 100.0, 120.0, 110.0, attention="sdpa"),
        "course-loop-8-fp32-x1": record_of("course-loop-8-fp32", 10.0, 9.0, 11.5),
        "data-parallel-8-x2": record_of("data-parallel-8", ranks=2),
    }
    assert records["course-loop-8-fp32-x1"]["windows_per_second"] == pytest.approx(10.0)
    records["this-project-8-tf32-x1"] = tf32 = record_of("this-project-8-tf32", 220.0, attention="sdpa")
    tf32["precision"] = "tf32"
    records["course-loop-8-tf32-x1"] = record_of("course-loop-8-tf32", 20.0) | {"precision": "tf32"}
    records["accelerate-32-x1"] = record_of("accelerate-32", 5.0)  # and nothing of ours with 32 windows
    found = compare.rows(records)
    ours = ["this-project-8", "1", "8", "fp32", "–", "0", "110", "100", "120", "1.00", "1.00", "–", "1.0"]
    assert [list(row.values()) for row in found] == [
        ours,
        ["this-project-8-tf32", "1", "8", "tf32", "–", "0", "220", "220", "220", "0.50", "1.00", "–", "1.0"],
        ["course-loop-8-fp32", "1", "8", "fp32", "512", "0.1", "10.0", "9.0", "11.5", "11.00", "11.00", "–", "1.0"],
        ["course-loop-8-tf32", "1", "8", "tf32", "512", "0.1", "20.0", "20.0", "20.0", "5.50", "11.00", "–", "1.0"],
        ["accelerate-32", "1", "32", "fp32", "longest", "0.1", "20.0", "20.0", "20.0", "–", "–", "–", "1.0"],
    ]
    lines = compare.table(found).splitlines()
    assert len(lines) == 7 and len({len(line) for line in lines}) == 1


def test_ways_of_two_machines_have_no_ratio():
    """Copied into one folder, their records are shown and not divided by each other."""

    def ratio(**changes):
        ours = record_of("this-project-8", 100.0, uuid="a")
        other = record_of("course-loop-8-fp32", 10.0, uuid=changes.pop("uuid", "a")) | changes
        return compare.rows({"this-project-8-x1": ours, "course-loop-8-fp32-x1": other})[1]["ours ÷ it"]

    versions = record_of("this-project-8")["versions"]
    assert ratio() == "10.00"
    assert ratio(uuid="b") == ratio(host="elsewhere") == ratio(versions=versions | {"torch": "2.1.0"}) == "–"


def test_a_report_can_tell_the_machines_of_the_ways_apart(tmp_path):
    for name, uuid in ("a", "1234"), ("b", None):
        write_json(tmp_path / f"{name}.json", record_of("course-loop-8-fp32", 10.0, uuid=uuid))
    assert [read_run(tmp_path / f"{name}.json").uuids for name in "ab"] == [{"1234"}, set()]


def test_the_ways_of_a_gpu_and_of_a_cpu():
    asked = parse("--ways", "course-loop-8-tf32", "course-loop-8-fp32", "hf-trainer-32-compiled")
    on_gpu = [way.full_name for way in compare.chosen_ways(asked, on_cuda=True)]
    on_cpu = [way.full_name for way in compare.chosen_ways(asked, on_cuda=False)]
    peers = ("hf-trainer-32-compiled", "course-loop-8-fp32", "course-loop-8-tf32")
    settings = [f"{name}-{dropout}" for name in peers for dropout in ("own", "matched")]
    assert on_gpu == ["this-project-8", "this-project-32", *settings]
    assert on_cpu == [name for name in on_gpu if "tf32" not in name]  # it would be the same
    one, four = ({way.name for way in compare.chosen_ways(parse("--ranks", n), on_cuda=True)} for n in "14")
    assert one | four == set(WAYS)
    assert "course-loop-8-fp32" not in four and "this-project-8-fsdp" not in one


def test_ranks_find_each_other_and_their_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    second = compare.surroundings(WAYS["lightning-ddp-8"], "cuda", 2, 1, 1234)
    assert (second["RANK"], second["WORLD_SIZE"], second["CUDA_VISIBLE_DEVICES"]) == ("1", "2", "0,1")
    alone = compare.surroundings(WAYS["data-parallel-8"], "cuda", 2, 0, 1234)
    assert alone["CUDA_VISIBLE_DEVICES"] == "0,1" and "RANK" not in alone
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert compare.surroundings(WAYS["hf-trainer-8"], "cuda", 1, 0, 1)["CUDA_VISIBLE_DEVICES"] == "3"
    assert "RANK" in compare.surroundings(WAYS["deepspeed-zero2-8"], "cuda", 1, 0, 1)  # without it looks for MPI


def test_a_missing_package_is_told_with_its_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told = compare.obstacle(WAYS["deepspeed-zero2-8"], 1, True)
    assert told == "deepspeed is not installed: `pip install -r requirements-bench.txt`"
    pinned = (ROOT / "requirements-bench.txt").read_text()
    assert all(f"{way.needs}==" in pinned for way in compare.WAYS if way.needs)


def test_commands_in_the_readme_parse():
    text = (ROOT / "benchmarks" / "README.md").read_text().replace("\\\n", "")
    lines = re.findall(r"^python -m benchmarks\.compare (.*?)(?:  #.*)?$", text, flags=re.M)
    for line in lines:
        compare.build_parser().parse_args(line.split())
    assert len(lines) >= 4
    assert not [name for name in WAYS if f"`{name}`" not in text]


def test_other_files_in_the_folder_are_refused(tmp_path):
    (tmp_path / "some.json").write_text(json.dumps([]))
    with pytest.raises(UserError, match=r"some\.json: not a record"):
        compare.read_records(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Quality


def test_the_trainers_way_to_its_f1(monkeypatch, capsys, tmp_path):
    """It learns, is scored as the official script scores, and leaves a run record that a report reads."""
    needs("accelerate")
    from benchmarks import quality

    options = ["--max-train-examples", "24", "--max-dev-examples", "10", "--max-length", "128", "--overlap", "32"]
    options += ["--batch-size", "4", "--learning-rate", "3e-4", "--epochs", "2", "--device", "cpu", "--train-file"]
    options += [str(SAMPLE / "train.json"), "--dev-file", str(SAMPLE / "train.json")]  # what it has seen
    options += ["--runs-dir", str(tmp_path), "--run-name", "run", "--cache-dir", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", ["quality.py", *options])
    quality.main()
    record, run = json.loads((tmp_path / "run" / "run.json").read_text()), read_run(tmp_path / "run" / "run.json")
    first, second = record["epochs"]
    assert (record["strategy"], record["status"], record["attention"]) == ("hf-trainer", "finished", "padded")
    assert run.assumed == () and None not in run.ran.values()  # a report knows all that ran
    assert run.ran["attention dropout"] == 0.1  # the model's own, whatever --attention-dropout says
    assert second["train_loss"] < first["train_loss"]
    assert run.measures["run_training_seconds"] == first["train_seconds"] + second["train_seconds"] > 0
    predictions = json.loads((tmp_path / "run" / "predictions.json").read_text())
    gold = gold_texts(QuestionSet(SAMPLE / "train.json", (("first", 10),)).data.frame)
    assert metrics.evaluate(gold, predictions, "1.1")["f1"] == run.measures["f1"] > 0
    assert f"F1 {second['f1']:.2f}" in capsys.readouterr().out


def test_options_of_ours_alone_are_refused(monkeypatch):
    needs("accelerate")
    from benchmarks import quality

    monkeypatch.setattr(sys, "argv", ["quality.py", "--accumulation", "2"])
    with pytest.raises(UserError, match="--accumulation: not an option here"):
        quality.main()
