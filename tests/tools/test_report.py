"""tools.report: figures against values computed by hand, unlike runs refused, hostile records, the files it writes."""

import base64
import copy
import html
import html.parser
import json
import math
import random
import re
import shlex
import subprocess
import sys

import pandas as pd
import pytest
from tiny import ROOT

from common.errors import UserError
from common.run import environment
from common.run.record import SCHEMA
from tools import sweep
from tools.report import __main__ as command
from tools.report import comparing, figures, grouping, page, reading, tables

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"


def record(strategy, ranks, seed=0, batch=384, precision="bf16", training=(), f1=(), total=None, rate=None, **more):
    """A run record as the scripts write it; `training`: seconds of each epoch. 8 s of evaluation and 2 s of saving."""
    card = more.get("card", H100)
    epochs = [
        {
            "epoch": i,
            "train_loss": 3.0 / i,
            "dev_loss": [2.0, 1.5, 1.75][i - 1],
            "train_seconds": spent,
            "evaluation_seconds": more.get("evaluation", 8.0),
            "checkpoint_seconds": more.get("saving", 2.0),
            "windows_per_second": rate,
            "share_of_peak": 0.25,
            "f1": score,
            "exact": score - 8,
            "best": score == max(f1[:i]),
            **({"train_f1": more["train_f1"][i - 1]} if "train_f1" in more else {}),
            "hardware": {
                str(rank): {
                    "utilisation": 80 + rank,
                    "power_watts": 500.0 + 10 * rank,
                    "energy_joules": 1.0,
                    "energy_counter_joules": 1000.0 * i,
                }
                for rank in range(ranks)
            },
        }
        for i, (spent, score) in enumerate(zip(training, f1, strict=True), 1)
    ]
    arguments = {"batch_size": batch, "epochs": 3, "precision": precision, "seed": seed, "max_length": 384}
    arguments |= {"overlap": 128, "attention": "flash", "compile": True, "cuda_graphs": True, "learning_rate": 5e-5}
    sets = {"train": {"sha256": "t", "cuts": [], "questions": 87599, "windows": 88000}}
    sets["dev"] = {"sha256": "d", "cuts": [], "questions": 10570, "windows": 10784}
    made = {
        "schema": 2,
        "status": "finished",
        "started": 1.75e9 + 1000 * seed + 100 * ranks + batch + len(strategy) / 10,
        "host": "node1",
        "git_commit": "abcdef0123",
        "git_dirty": False,
        "versions": {"torch": "2.13.0+cu130", "cuda": "13.0"},
        "strategy": strategy,
        "arguments": arguments,
        "data": {"name": "squad", **sets},
        "model": {"name": "bert-base", "parameters": 110_000_000, "sha256": "m"},
        "world_size": ranks,
        "nodes": 1,
        "hosts": ["node1"] * ranks,
        "gpus": [card] * ranks,
        "ranks": [{"rank": i, "uuid": f"card{i}", "name": card, "node_shared": False} for i in range(ranks)],
        "precision": precision,
        "attention": "flash",
        "compile": True,
        "graphs": True,
        "kernels": [],
        "deterministic": False,
        "tf32": {"matmul": precision == "tf32", "cudnn": precision == "tf32"},
        "dropout": {"hidden": 0.1, "attention": 0.0},
        "fallbacks": [],
        "epochs": epochs,
        "attempts": [{"seconds": 1.0}],
        "seconds": {"total": total},
        "peak_memory": {"training": [10e9 + 1e9 * rank for rank in range(ranks)], "evaluation": [2e9] * ranks},
    }
    return made | more.get("fields", {})


def campaign():
    """{name: record} of twenty runs."""
    made = {}
    for seed, (spent, f1) in enumerate([(100, 88.0), (102, 88.4), (98, 87.6)]):
        curve = {"f1": [80.0, f1, f1 - 1], "training": [spent + 30.0, spent, spent]}
        made[f"base-{seed}"] = record("baseline", 1, seed, total=400.0 + spent - 100, rate=900.0 + seed, **curve)
        curve["training"] = [spent + 60.0, spent * 1.2, spent * 1.2]
        made[f"small-{seed}"] = record("baseline", 1, seed, batch=96, total=500.0, rate=800.0, **curve)
        curve["training"] = [70.0, 50.0 + seed, 50.0 + seed]
        made[f"ddp2-{seed}"] = record("ddp", 2, seed, total=250.0 + seed, rate=1700.0, **curve)
        curve["training"] = [50.0, 25.0, 25.0]
        made[f"ddp4-{seed}"] = record("ddp", 4, seed, total=160.0, rate=3040.0, **curve)
        curve["training"] = [60.0, 30.0, 30.0]
        made[f"fsdp4-{seed}"] = record("fsdp-zero2", 4, seed, total=200.0, rate=2800.0, **curve)
    made["fsdp4-2"] |= {"status": "failed", "error": "RuntimeError: node down", "epochs": made["fsdp4-2"]["epochs"][:1]}
    curve = {"training": [40.0, 20.0, 20.0], "f1": [80.0, 88.0, 87.0]}
    made["tf32"] = record("ddp", 4, precision="tf32", total=150.0, rate=3500.0, **curve)
    made["a100"] = record("ddp", 4, card=A100, total=170.0, rate=2000.0, **curve)
    made["running"] = record("ddp", 4, seed=3, training=[50.0], f1=[80.0], rate=3040.0, fields={"status": "running"})
    # A course report: two epochs in 64 minutes on one GPU in fp32, 8 min 2 s on four, where Lightning used TF32.
    course = {"data": {"name": "course", "train": {"sha256": "c", "questions": 80000}}, "git_commit": None}
    curve = {"f1": [70.0, 75.0], "evaluation": None, "saving": None, "card": A100, "batch": 8, "fields": course}
    one, four = {"training": [1920.0] * 2, "total": 3840.0}, {"training": [241.0] * 2, "total": 482.0}
    made["sequential"] = record("baseline", 1, precision="fp32", **one, **curve)
    made["lightning"] = record("ddp", 4, precision="tf32", **four, **curve)
    for name in ("sequential", "lightning"):
        made[name]["arguments"] |= {"epochs": 2}
        made[name] |= {"attention": "eager", "compile": False, "graphs": False}
    return made


def save(folder, made):
    """Write records as run folders."""
    for name, one in made.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "run.json").write_text(json.dumps(one))
    return folder


def compared(made, tmp_path, baseline=None, f1=None, allow_unlike=False):
    """(experiments, {label: row}) of these records."""
    runs, left_out = page.load([save(tmp_path / "runs", made)])
    assert not left_out
    experiments = grouping.group(runs, f1)
    comparing.compare(experiments, comparing.choose_bases(experiments, baseline), allow_unlike)
    return experiments, {row.label: row for experiment in experiments for row in experiment.rows}


BF16, TF32 = "bf16, batch 384", "tf32, batch 384"
BASE, SMALL = f"baseline × 1, {BF16}", "baseline × 1, bf16, batch 96"
OTHER_CARD = f"ddp × 4, {BF16}, A100-SXM4-40GB"


@pytest.fixture(scope="module")
def twenty(tmp_path_factory):
    made = campaign()
    assert len(made) == 20
    experiments, rows = compared(made, tmp_path_factory.mktemp("campaign"))
    return experiments, rows


def test_runs_are_grouped_into_rows_of_repeats(twenty):
    experiments, rows = twenty
    assert [len(experiment.rows) for experiment in experiments] == [7, 2]
    assert experiments[0].title == (
        "bert-base (110 M parameters) on squad (87,599 questions, windows of 384), 3 epochs, "
        f"{H100} where a row names no other"
    )
    assert experiments[1].title.endswith(f"80,000 questions, windows of 384), 2 epochs, batch 8, {A100}")
    counts = {label: (len(row.finished), len(row.runs)) for label, row in rows.items()}
    assert counts == {
        BASE: (3, 3),
        SMALL: (3, 3),
        f"ddp × 2, {BF16}": (3, 3),
        f"ddp × 4, {BF16}": (3, 4),
        f"ddp × 4, {TF32}": (1, 1),
        OTHER_CARD: (1, 1),
        f"fsdp-zero2 × 4, {BF16}": (2, 3),
        "baseline × 1, fp32": (1, 1),
        "ddp × 4, tf32": (1, 1),
    }


def test_measures_are_medians_with_spread_and_count(twenty):
    _, rows = twenty
    expected = {  # median, least, most, count
        "training_seconds": (100, 98, 102, 3),  # of the epochs after the first
        "evaluation_seconds": (8, 8, 8, 3),
        "epoch_seconds": (110, 108, 112, 3),  # + 8 + 2
        "run_seconds": (400, 398, 402, 3),
        "run_training_seconds": (330, 324, 336, 3),  # 130 + 100 + 100
        "run_evaluation_seconds": (24, 24, 24, 3),
        "windows_per_second": (901, 900, 902, 3),
        "share_of_peak": (0.25, 0.25, 0.25, 3),
        "f1": (88.0, 87.6, 88.4, 3),  # of the second epoch, the best
        "exact": (80.0, 79.6, 80.4, 3),
        "training_memory": (10e9, 10e9, 10e9, 3),
        "evaluation_memory": (2e9, 2e9, 2e9, 3),
        "utilisation": (80, 80, 80, 3),
        "power_watts": (500, 500, 500, 3),
        "energy_joules": (2500, 2500, 2500, 3),  # of epochs 2 and 3, by the counter
        # F1 87, the most in whole numbers that all reach: after two epochs, 130 + 100 + 2 · 10
        "seconds_to_f1": (250, 246, 254, 3),
    }
    for name, (median, low, high, count) in expected.items():
        found = rows[BASE].stats[name]
        assert (found.median, found.low, found.high, found.count) == pytest.approx((median, low, high, count)), name
    four = rows[f"ddp × 4, {BF16}"]
    assert four.median("training_memory") == 13e9  # of the fullest rank
    assert four.median("utilisation") == 81.5 and four.median("power_watts") == 515  # per card
    assert four.median("energy_joules") == 10000  # 4 · 2,500
    assert rows[f"fsdp-zero2 × 4, {BF16}"].stats["f1"].count == 2
    assert rows[BASE].stats["HasAns_f1"] is None


def test_energy_without_a_counter_is_that_of_samples(tmp_path):
    made = record("ddp", 2, **CURVE)
    for i, epoch in enumerate(made["epochs"]):
        for card in epoch["hardware"].values():
            card |= {"energy_joules": [9.0, 300.0, 500.0][i], "energy_counter_joules": None}
    _, rows = compared({"one": made}, tmp_path)
    assert rows["ddp × 2"].median("energy_joules") == 800  # (2 · 300 + 2 · 500) / 2


def test_scores_with_and_without_answer(tmp_path):
    """Of SQuAD v2.0: those of the epoch that was kept, the second, as a median of 84, 86 and 87, of 70, 71 and 75."""
    made = {str(seed): record("baseline", 1, seed, **CURVE) for seed in range(3)}
    for one, answered, unanswered in zip(made.values(), (84.0, 86.0, 87.0), (75.0, 70.0, 71.0), strict=True):
        one["epochs"][0] |= {"HasAns_f1": 60.0, "NoAns_f1": 50.0}
        one["epochs"][1] |= {"HasAns_f1": answered, "NoAns_f1": unanswered}
    (experiment,), _ = compared(made, tmp_path)
    table = tables.result_table(experiment)
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["F1 with answer"] == "86.00 (84.00–87.00)" and cells["F1 without"] == "71.00 (70.00–75.00)"


def serial(speedup, ranks):
    return (1 / speedup - 1 / ranks) / (1 - 1 / ranks)


def test_strong_scaling(twenty):
    _, rows = twenty
    four = rows[f"ddp × 4, {BF16}"].strong
    assert four.base is rows[BASE] and not four.differences
    assert four.speedup["training"] == pytest.approx((4.0, 1.0, 0.0))  # 100 / 25
    assert four.speedup["epoch"] == pytest.approx((110 / 35, 110 / 35 / 4, serial(110 / 35, 4)))
    assert four.speedup["epoch"] == pytest.approx((3.142857, 0.785714, 0.090909), rel=1e-5)
    assert four.speedup["run"] == pytest.approx((2.5, 0.625, 0.2))  # 400 / 160; (0.4 − 0.25) / 0.75
    two = rows[f"ddp × 2, {BF16}"].strong
    assert two.speedup["training"] == pytest.approx((100 / 51, 50 / 51, 0.02))  # (0.51 − 0.5) / 0.5
    assert rows[f"fsdp-zero2 × 4, {BF16}"].strong.speedup["run"] == pytest.approx((2.0, 0.5, 1 / 3))
    assert rows[BASE].strong is None and rows[SMALL].strong is None  # baselines


def test_weak_scaling_is_another_thing(twenty, tmp_path):
    _, rows = twenty
    weak = rows[f"ddp × 4, {BF16}"].weak  # 96 windows on each GPU, as the small baseline has
    assert weak.base is rows[SMALL] and weak.speedup == {"weak": pytest.approx((3.8, 0.95, None))}  # 3,040 / 800
    assert rows[f"ddp × 2, {BF16}"].weak is None  # 192 on each
    # Without a baseline of the same global batch, no strong speed-up is made of it, asked for or not.
    made = {name: one for name, one in campaign().items() if name.startswith(("small", "ddp4"))}
    for allow in (False, True):
        experiments, rows = compared(made, tmp_path / str(allow), allow_unlike=allow)
        row = rows["ddp × 4, batch 384"]
        assert row.weak.speedup["weak"][0] == pytest.approx(3.8)
        assert row.strong.differences == ["global batch 384 against 96"]
        assert set(row.strong.speedup.values()) == {(None, None, None)}
        strong, weak = tables.tables(experiments[0])[2:]
        assert strong.rows[0][-1] == "not compared: global batch 384 against 96: weak scaling, below"
        assert weak.rows == [["ddp × 4, batch 384", "4", "baseline × 1, batch 96", "96", "800 → 3,040", "3.80", "95.0"]]


def test_the_course_report_is_caught(twenty, tmp_path):
    """Its 7.9 × on four GPUs compares TF32 with fp32."""
    experiments, rows = twenty
    claim = rows["ddp × 4, tf32"]
    assert claim.strong.base is rows["baseline × 1, fp32"]
    assert claim.strong.differences == ["precision tf32 against fp32"]
    assert set(claim.strong.speedup.values()) == {(None, None, None)} and claim.weak is None
    strong = tables.tables(experiments[1])[-1]
    assert strong.rows == [
        ["ddp × 4, tf32", "4", "baseline × 1, fp32", *["–"] * 5, "not compared: precision tf32 against fp32"]
    ]
    made = {name: one for name, one in campaign().items() if name in ("sequential", "lightning")}
    experiments, rows = compared(made, tmp_path, allow_unlike=True)
    speedup = rows["ddp × 4, tf32"].strong.speedup
    assert speedup["run"] == pytest.approx((3840 / 482, 3840 / 482 / 4, serial(3840 / 482, 4)))
    assert speedup["run"][0] == pytest.approx(7.97, abs=0.01) and speedup["run"][2] < 0  # faster than four times
    line = tables.tables(experiments[0])[-1].rows[0]
    assert line[5] == "7.97 †" and line[-1] == "† precision tf32 against fp32"


def change(one, name, value):
    """A record with the value at "a.b" changed."""
    *folders, last = name.split(".")
    place = one
    for folder in folders:
        place = place[folder]
    place[last] = value


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("precision", "tf32", "precision tf32 against bf16"),
        ("model.name", "bert-large", None),
        ("model.sha256", "other", r"model bert-base \(110 M parameters\), but not the same"),
        ("model.parameters", 340_000_000, r"model bert-base \(340 M parameters\) against bert-base \(110 M .*"),
        ("data.train.sha256", "other", "data squad .*, but not the same"),
        ("data.dev.cuts", [["first", 500]], "data squad .*, but not the same"),
        ("arguments.max_length", 512, "data squad .* windows of 512.* against squad .* windows of 384.*"),
        ("arguments.batch_size", 32, "global batch 32 against 384"),
        ("arguments.epochs", 5, "epochs 5 against 3"),
        ("gpus", [A100] * 4, f"card {A100} against {H100}"),
        ("gpus", [H100, H100, A100, A100], f"card {A100}, {H100} against {H100}"),
        ("attention", "sdpa", "attention sdpa against flash"),
        ("compile", False, "compile false against true"),
        ("graphs", False, "graphs false against true"),
        ("kernels", ["embeddings", "layers"], "own kernels embeddings, layers against none"),
        ("kernels", None, "own kernels unknown against embeddings"),  # on one side alone
        ("deterministic", True, "deterministic true against false"),
        ("tf32.cudnn", True, "TF32 cudnn against off"),
        ("dropout.hidden", 0.0, "hidden dropout 0.0 against 0.1"),
        ("dropout.attention", 0.1, "attention dropout 0.1 against 0.0"),
        ("versions.torch", "2.12.1+cu130", "torch 2.12 against 2.13"),
        ("versions.cuda", "12.9", "CUDA 12.9 against 13.0"),
        ("versions.cuda", None, "CUDA unknown against 13.0"),
        ("hosts", ["elsewhere"] * 4, "another machine: elsewhere against node1"),
        ("ranks", [{"uuid": "another"}] * 4, "another machine: node1 with other cards"),
        ("cluster", "other", "another machine: other against unknown"),
        ("processor", "slow", "another machine: slow against fast"),
        ("epochs", None, "epochs 2 against 3"),  # stopped early
    ],
)
def test_each_unlikeness_is_named_and_kept_out_of_the_speedups(tmp_path, name, value, said):
    made = campaign()
    base, row = made["base-0"], made["ddp4-0"]
    base["processor"] = row["processor"] = "fast"
    if name == "kernels":
        base["attention"] = row["attention"] = "fused"
        base["kernels"] = [] if value else ["embeddings"]
    change(row, name, row["epochs"][:2] if name == "epochs" else value)
    _, rows = compared({"base": base, "row": row}, tmp_path / "no")
    strong = next(one for label, one in rows.items() if label.startswith("ddp")).strong
    if said is None:  # the digest, not the name, says what a model is
        assert not strong.differences and strong.speedup["training"][0] == 4.0
        return
    assert len(strong.differences) == 1 and re.fullmatch(said, strong.differences[0]), strong.differences
    assert set(strong.speedup.values()) == {(None, None, None)}
    experiments, rows = compared({"base": base, "row": row}, tmp_path / "allowed", allow_unlike=True)
    strong = next(one for label, one in rows.items() if label.startswith("ddp")).strong
    assert strong.speedup["training"][0] == pytest.approx(4.0) and len(strong.differences) == 1
    made = [table for experiment in experiments for table in tables.tables(experiment)]
    lines = [line for table in made for line in table.rows if "training" in line]
    assert [line[5] for line in lines] == ["4.00 †"]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"attention": "sdpa", "fallbacks": ["attention sdpa instead of flash: no reason"]}, "attention sdpa against"),
        ({"ranks": [{"rank": i, "uuid": f"other{i}"} for i in range(4)]}, "another machine: node1 with other cards"),
        ({"dropout": {"hidden": 0.1, "attention": 0.1}}, "attention dropout 0.1 against 0.0"),
        ({"versions": {"torch": "2.12.0+cu130", "cuda": "13.0"}}, "torch 2.12 against 2.13"),
    ],
)
def test_a_doctored_record_gets_no_speedup(tmp_path, capsys, changes, said):
    """The command itself, on a record whose arguments are those of its baseline."""
    made = {name: campaign()[name] for name in ("base-0", "ddp4-0")}
    page.report([save(tmp_path / "like", made)], out=tmp_path / "out")
    assert "100.0 → 25.0      4.00" in capsys.readouterr().out
    made["ddp4-0"] |= changes
    page.report([save(tmp_path / "unlike", made)], out=tmp_path / "out")
    output = capsys.readouterr().out
    assert f"not compared: {said}" in output and "→" not in output and "4.00" not in output
    for line in changes.get("fallbacks", []):
        assert f"note: ddp × 4: fell back: {line}" in output


def test_what_was_asked_for_forbids_nothing(tmp_path):
    """A run that asked for fused and one that asked for flash are alike if flash ran in both."""
    made = {name: campaign()[name] for name in ("base-0", "ddp4-0")}
    made["ddp4-0"]["arguments"] |= {"attention": "fused", "compile": None, "attention_dropout": 0.1, "dropout": 0.1}
    _, rows = compared(made, tmp_path)
    assert not rows["ddp × 4"].strong.differences and rows["ddp × 4"].notes == ["one run alone, so no spread"]


def test_what_neither_record_has_is_a_remark(tmp_path):
    made = {name: campaign()[name] for name in ("base-0", "ddp4-0")}
    for one in made.values():
        for name in ("kernels", "dropout", "tf32", "graphs", "deterministic"):  # as older records
            del one[name]
        one["attention"], one["versions"] = "fused", {"torch": "2.13.0"}
        one["model"]["dropout"], one["arguments"]["dropout"] = 0.1, None
    _, rows = compared(made, tmp_path / "neither")
    assert rows["ddp × 4"].strong.speedup["training"][0] == 4.0
    unknown, assumed = rows["ddp × 4"].notes[-2:]
    assert unknown.endswith("so not compared: own kernels, attention dropout, CUDA")
    assert assumed.endswith("compared as asked for and not as it ran: TF32, deterministic, graphs, hidden dropout")
    made["ddp4-0"]["arguments"]["cuda_graphs"] = False
    _, rows = compared(made, tmp_path / "asked")
    assert rows["ddp × 4"].strong.differences == ["graphs false against true"]


def test_a_patch_of_torch_is_a_remark(tmp_path):
    made = {name: campaign()[name] for name in ("base-0", "ddp4-0", "ddp4-1")}
    made["ddp4-0"]["versions"]["torch"] = made["ddp4-1"]["versions"]["torch"] = "2.13.1+cu130"
    _, rows = compared(made, tmp_path)
    assert rows["ddp × 4"].strong.speedup["training"][0] == 100 / 25
    assert rows["ddp × 4"].notes[-1] == "other torch than its baseline: 2.13.1+cu130 against 2.13.0+cu130"


def test_repeats_on_another_torch_are_another_row(tmp_path):
    made = {name: campaign()[name] for name in ("base-0", "ddp4-0", "ddp4-1")}
    made["ddp4-1"]["versions"]["torch"] = "2.12.0+cu130"
    _, rows = compared(made, tmp_path)
    assert list(rows) == ["baseline × 1", "ddp × 4, torch 2.13", "ddp × 4, torch 2.12"]


def test_nodes_of_one_cluster_are_one_machine(tmp_path):
    made = campaign()
    base, row = made["base-0"] | {"cluster": "big"}, made["ddp4-0"] | {"cluster": "big"}
    row |= {"hosts": ["node7", "node8"] * 2, "nodes": 2, "ranks": [{"uuid": f"new{i}"} for i in range(4)]}
    _, rows = compared({"base": base, "row": row}, tmp_path)
    assert rows["ddp × 4 on 2 nodes"].strong.speedup["training"][0] == 4.0


def test_repeats_on_another_machine_are_not_averaged_away(tmp_path):
    made = {name: one for name, one in campaign().items() if name in ("base-0", "ddp4-0", "ddp4-1")}
    made["ddp4-1"]["hosts"] = ["elsewhere"] * 4
    _, rows = compared(made, tmp_path)
    assert rows["ddp × 4"].strong.differences == ["another machine: elsewhere, node1 against node1"]
    assert "repeats on several machines: elsewhere, node1" in rows["ddp × 4"].notes


def on_cards(one, *cards):
    return one | {"ranks": [{"rank": i, "uuid": card} for i, card in enumerate(cards)]}


CURVE = {"training": [50.0, 25.0, 25.0], "f1": [80.0, 88.0, 87.0]}
SLOW = {"training": [200.0, 150.0, 150.0], "f1": [80.0, 88.0, 87.0]}


def test_machines_of_one_name_are_told_apart_by_their_cards(tmp_path):
    made = {"b0": on_cards(record("baseline", 1, 0, **CURVE), "A0"), "b1": record("baseline", 1, 1, **SLOW)}
    made |= {"b1": on_cards(made["b1"], "Z9"), "d": on_cards(record("ddp", 2, **CURVE), "A0", "A1")}
    _, rows = compared(made, tmp_path / "some")
    assert rows["baseline × 1"].notes == [
        "repeats on cards that no run joins, so perhaps on several machines: A0, A1 | Z9"
    ]
    assert rows["ddp × 2"].strong.speedup["training"][0] == 87.5 / 25  # noted
    assert rows["ddp × 2"].notes[-1] == (
        "perhaps not all on the machine of its baseline, with cards that no run joins: A0, A1 against A0, A1 | Z9"
    )
    _, rows = compared({name: made[name] for name in ("b1", "d")}, tmp_path / "none")
    assert rows["ddp × 2"].strong.differences == ["another machine: node1 with other cards"]
    assert rows["ddp × 2"].strong.speedup["training"][0] is None
    # Runs on other cards of one machine are of it where a third run had them all, and none need know its cards.
    made["all"] = on_cards(record("ddp", 3, **CURVE), "A0", "A1", "Z9")
    _, rows = compared(made, tmp_path / "joined")
    assert not rows["baseline × 1"].notes and "cards" not in "; ".join(rows["ddp × 2"].notes)
    _, rows = compared({"b0": made["b0"], "b1": made["b1"] | {"ranks": []}, "d": made["d"]}, tmp_path / "unknown")
    assert not rows["baseline × 1"].notes and rows["ddp × 2"].strong.speedup["training"][0] == 87.5 / 25
    clustered = {name: one | {"cluster": "big"} for name, one in made.items() if name != "all"}
    _, rows = compared(clustered, tmp_path / "cluster")
    assert not rows["baseline × 1"].notes and "cards" not in "; ".join(rows["ddp × 2"].notes)


def test_runs_side_by_side_are_noted(tmp_path):
    made = {name: campaign()[name] for name in ("base-0", "base-1", "base-2", "ddp4-0", "ddp4-1")}
    made["base-0"]["attempts"] = [{"started": 100.0, "seconds": 50.0}]
    made["base-1"]["attempts"] = [{"started": 200.0}, {"started": 300.0, "seconds": 10.0}]  # the first was killed
    made["base-2"]["attempts"] = [{"started": 150.0, "seconds": 50.0}]  # after base-0
    made["ddp4-0"]["attempts"] = [{"started": 149.0, "seconds": 1.0}]
    made["ddp4-1"] |= {"attempts": [{"started": 150.0, "seconds": 90.0}], "hosts": ["elsewhere"] * 4}
    _, rows = compared(made, tmp_path)
    note = "ran beside another run on a host of the same name: "
    assert note + "base-0" in rows["baseline × 1"].notes and note + "ddp4-0" in rows["ddp × 4"].notes


def test_all_clusters_of_a_row_count(tmp_path):
    made = {name: campaign()[name] | {"cluster": "big"} for name in ("base-0", "base-1", "ddp4-0")}
    made["base-1"]["cluster"] = "other"
    _, rows = compared(made, tmp_path)
    assert rows["ddp × 4"].strong.differences == ["another machine: big against big, other"]
    assert rows["ddp × 4"].strong.speedup["training"][0] is None


def test_each_experiment_has_its_own_baseline(tmp_path):
    """What others are compared with there takes no speed-up away here."""

    def other(one):
        one["data"]["train"]["sha256"] = "other"
        return one

    made = {"a2": record("ddp", 2, **SLOW), "a4": record("ddp", 4, **CURVE)}
    made |= {"b4": other(record("ddp", 4, 1, **SLOW)), "b8": other(record("ddp", 8, 1, **CURVE))}
    (_, experiment), _ = compared(made, tmp_path / "1", baseline="ddp")
    base, row = experiment.rows
    assert row.strong.base is base and row.strong.speedup["training"] == (6.0, 3.0, None)
    made = {"a1": record("baseline", 1, **SLOW), "b1": other(record("ddp", 1, 1, **SLOW)), "b4": made["b4"]}
    _, rows = compared(made, tmp_path / "2")
    assert rows["ddp × 4"].strong.base is rows["ddp × 1"] and rows["ddp × 4"].strong.speedup["training"][0] == 1.0
    del made["b1"]
    _, rows = compared(made, tmp_path / "3")  # one of another experiment, for the differences, if there is no other
    assert rows["ddp × 4"].strong.base is rows["baseline × 1"]
    assert rows["ddp × 4"].strong.differences[0].startswith("data squad")
    made = {"row": record("ddp", 4, **CURVE), "own": record("baseline", 1, precision="fp32", card=A100, **CURVE)}
    made["far"] = record("baseline", 1, **CURVE)
    made["far"]["arguments"]["epochs"] = 5  # the only difference
    _, rows = compared(made, tmp_path / "4")
    assert rows["ddp × 4, bf16, H100 80GB HBM3"].strong.differences == [
        "precision bf16 against fp32",
        f"card {H100} against {A100}",
    ]


def test_the_nearer_of_two_baselines_is_that_of_weak_scaling(tmp_path):
    """Both differ in one thing; with the precision's named beside the other's ratio the lines would contradict."""
    made = {"bf16": record("baseline", 1, batch=32, rate=900.0, **SLOW)}
    made["fp32"] = record("baseline", 1, batch=8, precision="fp32", rate=300.0, **SLOW)
    made["row"] = record("ddp", 4, batch=32, precision="fp32", rate=1000.0, **CURVE)
    for allow in (False, True):
        (experiment,), rows = compared(made, tmp_path / str(allow), allow_unlike=allow)
        row = rows["ddp × 4, fp32, batch 32"]
        assert row.strong.base is row.weak.base is rows["baseline × 1, fp32, batch 8"]
        assert row.strong.speedup["training"][0] is None and row.weak.speedup["weak"][0] == pytest.approx(1000 / 300)
        assert (
            tables.strong_table(experiment).rows[0][-1]
            == "not compared: global batch 32 against 8: weak scaling, below"
        )


def test_a_run_that_was_begun_as_another_keeps_its_scores_alone(tmp_path):
    made = {"base": record("baseline", 1, total=100.0, rate=900.0, **SLOW)}
    made["taken"] = record("ddp", 2, total=20.0, rate=900.0, **CURVE)
    begun = {"started": 1e9, "seconds": 50.0, "strategy": "baseline", "world_size": 1}
    made["taken"]["attempts"] = [begun, begun | {"started": 2e9, "strategy": "ddp", "world_size": 2}]
    (experiment,), rows = compared(made, tmp_path)
    row = rows["ddp × 2"]
    assert "taken was begun as baseline × 1, so that its scores alone count, and no times" in row.notes
    assert {name for name, stat in row.stats.items() if stat} == {"f1", "exact"}
    assert all(ratio is None for ratio, _, _ in row.strong.speedup.values()) and row.weak is None
    assert tables.strong_table(experiment).rows[0][-1] == "not compared: no times recorded"
    figures.load_matplotlib()
    assert figures.time_figure(experiment) and figures.speedup_figure(experiment) is None


@pytest.mark.parametrize("begun, going_on", [(False, True), (True, False)])
def test_sharing_the_optimizers_state_is_another_strategy(tmp_path, begun, going_on):
    made = record("ddp", 2, total=20.0, rate=900.0, **CURVE)
    made["arguments"]["zero1"] = going_on
    made["attempts"] = [{"strategy": "ddp", "world_size": 2, "zero1": one} for one in (begun, going_on)]
    _, rows = compared({"one": made}, tmp_path)
    (row,) = rows.values()
    assert row.label == f"ddp{'-zero1' * going_on} × 2" and row.median("windows_per_second") is None
    assert f"one was begun as ddp{'-zero1' * begun} × 2, so that" in row.notes[0]


def test_the_energy_of_a_part_of_an_epoch_is_not_an_epochs(tmp_path):
    made = record("baseline", 1, **CURVE)
    for epoch, seconds in zip(made["epochs"], (60.0, 35.0, 27.0), strict=True):
        epoch["hardware"]["0"]["seconds"] = seconds  # the last one, of 35 s, was begun by an earlier start
    _, rows = compared({"one": made}, tmp_path)
    assert rows["baseline × 1"].median("energy_joules") == 2000.0 and rows["baseline × 1"].median("power_watts") == 500


def test_throughput_leaves_the_first_epoch_out(tmp_path):
    made = record("baseline", 1, rate=900.0, **CURVE)
    made["epochs"][0]["windows_per_second"] = 100.0  # graphs were still made
    _, rows = compared({"one": made}, tmp_path)
    assert rows["baseline × 1"].median("windows_per_second") == 900


def test_seeds_and_threads_that_differ_are_noted(tmp_path):
    on_cpu = {"gpus": [], "ranks": [], "device": "Some CPU"}
    made = {f"base{i}": record("baseline", 1, i, fields=on_cpu | {"threads": 4}, **SLOW) for i in range(2)}
    made |= {f"ddp{i}": record("ddp", 2, 7, fields=on_cpu | {"threads": 1, "started": i}, **CURVE) for i in range(2)}
    made["base2"] = record("baseline", 1, 2, fields=on_cpu | {"threads": 8}, **SLOW)
    made |= {f"three{i}": record("ddp", 3, i, fields=on_cpu | {"threads": 8 - 4 * i}, **CURVE) for i in range(2)}
    _, rows = compared(made, tmp_path)
    assert not any("threads a rank, other" in note for note in rows["ddp × 3"].notes)  # in another order
    assert "repeats with 4, 8 threads a rank" in rows["baseline × 1"].notes
    assert {
        "2 runs with seed 7, so their spread is not that of as many seeds",
        "threads a rank, other than its baseline's: 1 against 4, 8",
        "other seeds than its baseline: 7 against 0, 1, 2",
    } <= set(rows["ddp × 2"].notes)


def test_of_copies_the_one_that_got_furthest_stays(tmp_path):
    done = record("baseline", 1, **CURVE)
    begun = done | {"status": "running", "epochs": done["epochs"][:1]}
    runs, left_out = page.load([save(tmp_path, {"a-copy": begun, "run": done})])
    assert [run.name for run in runs] == ["run"]
    assert left_out == [f"{tmp_path}/a-copy/run.json: a copy of {tmp_path}/run/run.json"]


def test_a_doubt_about_the_code_is_of_the_runs_that_count(tmp_path):
    for dirty in (True, False):
        made = {"failed": record("baseline", 1, 0, **CURVE), "good": record("baseline", 1, 1, **CURVE)}
        made["failed"] |= {"status": "failed", "git_dirty": not dirty}
        made["good"]["git_dirty"] = dirty
        _, rows = compared(made, tmp_path / str(dirty))
        assert any("uncertain code version" in note for note in rows["baseline × 1"].notes) == dirty


def test_as_many_gpus_on_one_node_and_on_two_are_two_lines(tmp_path):
    made = {"base": record("baseline", 1, **SLOW), "one": record("ddp", 4, **CURVE)}
    made |= {f"two{n}": record("ddp", n, fields={"nodes": 2}, **CURVE) for n in (4, 8)}
    _, rows = compared(made, tmp_path / "both")
    assert {label: row.series for label, row in rows.items()} == {
        "baseline × 1": "baseline",
        "ddp × 4": "ddp",
        "ddp × 4 on 2 nodes": "ddp, 2 nodes",
        "ddp × 8 on 2 nodes": "ddp, 2 nodes",
    }
    del made["two4"]
    _, rows = compared(made, tmp_path / "one")
    assert rows["ddp × 8 on 2 nodes"].series == "ddp"


def test_what_else_a_reader_must_know_is_noted(twenty):
    experiments, rows = twenty
    assert rows[f"fsdp-zero2 × 4, {BF16}"].notes == [
        "fsdp4-2 is left out: failed (RuntimeError: node down)",
        "repeats missing: 2 where another row has 3",
    ]
    assert rows[f"ddp × 4, {BF16}"].notes == ["running is left out: running, or killed"]
    assert rows["ddp × 4, tf32"].notes == ["one run alone, so no spread", "uncertain code version: unknown"]
    assert "all rows: uncertain code version: unknown" in tables.notes(experiments[1])


def test_notes_on_code_machines_attempts_and_settings(tmp_path):
    made = {name: one for name, one in campaign().items() if name in ("base-0", "base-1", "ddp2-0", "ddp4-0")}
    made["base-1"] |= {"git_commit": "1234567890", "git_dirty": True}
    made["base-1"]["attempts"] = [{"seconds": 300.0}] * 2
    made["ddp4-0"]["attempts"] = [{}, {"seconds": 300.0}]  # a process that is killed writes no seconds
    made["ddp2-0"]["ranks"][0]["node_shared"] = True
    made["ddp2-0"]["arguments"]["learning_rate"] = 1e-4
    made["ddp4-0"]["ranks"][3]["other_processes"] = 1
    made["ddp4-0"]["versions"]["torch"] = "2.13.1"
    _, rows = compared(made, tmp_path)
    assert rows["baseline × 1"].notes == [
        "base-1 took 2 attempts; its whole run is their sum; each warmed up, so an epoch after the first may hold a "
        "warm-up",
        "mixed code versions: abcdef0; 1234567 with uncommitted changes",
    ]
    assert rows["baseline × 1"].stats["run_seconds"].high == 600
    two, four = "; ".join(rows["ddp × 2"].notes), "; ".join(rows["ddp × 4"].notes)
    assert "shared node" in two and "shared node" in four
    assert "other settings than its baseline: learning_rate 0.0001 against 5e-05" in two
    assert "other code than its baseline: abcdef0 against abcdef0, 1234567 with uncommitted changes" in two
    assert "ddp4-0 took 2 attempts; one was killed, so the whole run's time is not known" in four
    assert rows["ddp × 4"].stats["run_seconds"] is None
    assert "other torch than its baseline: 2.13.1 against 2.13.0+cu130" in four
    assert rows["ddp × 2"].strong.speedup["training"][0] == pytest.approx(101 / 50)  # noted, not refused


def test_notes_of_many_rows_are_counted(tmp_path):
    made = {str(ranks): record("ddp", ranks, **CURVE) for ranks in (1, 2, 3, 4, 5)}
    for ranks in range(2, 6):
        made[str(ranks)]["git_commit"] = f"{ranks}" * 7
    made["5"] = on_cards(made["5"], *(f"card{i}" for i in range(5)))
    made["5b"] = record("ddp", 5, 1, **CURVE) | {"git_commit": "5" * 7}
    (experiment,), rows = compared(made, tmp_path)
    assert rows["ddp × 3"].notes[-1] == "other code than its baseline: 3333333 against abcdef0"
    assert tables.notes(experiment) == [
        "4 of 5 rows (ddp × 1, …): repeats missing: 1 where another row has 2",
        "4 of 5 rows (ddp × 1, …): one run alone, so no spread",
        "4 of 5 rows (ddp × 2, …): other code than its baseline (each in rows.csv)",
    ]


def test_another_experiments_baseline_is_not_named(tmp_path):
    made = {name: one for name, one in campaign().items() if name in ("base-0", "ddp4-0", "lightning")}
    experiments, _ = compared(made, tmp_path / "no")
    (line,) = tables.strong_table(experiments[1]).rows
    assert line == ["ddp × 4", "4", *["–"] * 6, "no baseline of this model, data and number of epochs"]
    experiments, _ = compared(made, tmp_path / "allowed", allow_unlike=True)
    line = tables.strong_table(experiments[1]).rows[0]
    assert line[2:4] == ["baseline × 1", "training"] and "epochs 2 against 3" in line[-1]


def test_the_nearest_baseline_is_of_the_same_strategy(tmp_path):
    """Where there is none of baseline.py: ddp × 4 is compared with ddp × 1, not with what comes first."""
    made = {
        f"{name}{ranks}": record(name, ranks, **CURVE) for name in ("alone", "ddp", "fsdp-zero2") for ranks in (1, 4)
    }
    made["ddp4"]["arguments"]["learning_rate"] = 1e-4  # a difference less would be alone × 1
    made["alone1"]["arguments"]["learning_rate"] = 1e-4
    _, rows = compared(made, tmp_path)
    for name in ("alone", "ddp", "fsdp-zero2"):
        assert rows[f"{name} × 4"].strong.base is rows[f"{name} × 1"]


def test_what_all_rows_share_stands_in_the_title(tmp_path):
    """Precision, batch and card, without which no table can be handed in."""
    made = {name: one for name, one in campaign().items() if name in ("base-0", "ddp4-0")}
    (experiment,), rows = compared(made, tmp_path)
    assert list(rows) == ["baseline × 1", "ddp × 4"] and experiment.title.endswith(f", bf16, batch 384, {H100}")


@pytest.mark.parametrize("full, half", [("fp32", "bf16"), ("rows", "rows-bf16")])
def test_only_what_differs_from_the_baseline_is_noted(tmp_path, full, half):
    """The default of an option that baseline.py lacks is no other setting, nor is all of another experiment.

    Of how gradients travel, the type alone counts.
    """
    made = {name: one for name, one in campaign().items() if name in ("base-0", "ddp2-0", "ddp4-0", "lightning")}
    made["ddp2-0"]["arguments"]["reduce"] = full
    made["ddp4-0"]["arguments"]["reduce"] = half
    experiments, _ = compared(made, tmp_path)
    (_, two, four), (far,) = (experiment.rows for experiment in experiments)
    assert two.notes == ["one run alone, so no spread"]
    assert four.notes[-1] == "other settings than its baseline: reduce bf16 against fp32"
    assert len(far.strong.differences) > 3 and not [note for note in far.notes if "baseline" in note]


def test_rows_that_differ_in_a_setting_say_so(tmp_path):
    made = {name: one for name, one in campaign().items() if name in ("base-0", "ddp4-0", "ddp4-1", "ddp4-2")}
    made["ddp4-1"]["arguments"] |= {"zero1": True}
    made["ddp4-2"]["arguments"] |= {"accumulation": 4}
    _, rows = compared(made, tmp_path)
    assert set(rows) == {"baseline × 1", "ddp × 4, accumulation null", "ddp-zero1 × 4", "ddp × 4, accumulation 4"}


def test_faster_than_ideal_is_doubted(tmp_path):
    made = {name: one for name, one in campaign().items() if name in ("base-0", "ddp4-0")}
    made["base-0"]["epochs"][1]["train_seconds"] *= 2
    _, rows = compared(made, tmp_path / "strong")
    assert any(note.startswith("faster than ideal") for note in rows["ddp × 4"].notes)

    made = {"1": record("baseline", 1, batch=48, rate=100.0, **CURVE)}
    for ranks, rate in ((2, 212.0), (4, 416.0)):  # 6 and 4 % above 200 and 400
        made[str(ranks)] = record("ddp", ranks, batch=48 * ranks, rate=rate, **CURVE)
    _, rows = compared(made, tmp_path / "weak")
    doubted = [label for label, row in rows.items() if any(note.startswith("faster than ideal") for note in row.notes)]
    assert doubted == ["ddp × 2, batch 96"]


def test_a_named_baseline(tmp_path):
    made = {name: one for name, one in campaign().items() if name.startswith(("base", "ddp", "fsdp"))}
    _, rows = compared(made, tmp_path / "1", baseline="ddp")
    assert rows["fsdp-zero2 × 4"].strong.base.label == "ddp × 2" and rows["ddp × 4"].strong.base.label == "ddp × 2"
    speedup, efficiency, fraction = rows["ddp × 4"].strong.speedup["training"]
    assert (speedup, efficiency, fraction) == (51 / 25, 51 / 50, None)  # twice the ranks; no serial run to compare with
    _, rows = compared(made, tmp_path / "2", baseline="ddp × 4")
    assert rows["fsdp-zero2 × 4"].strong.speedup["training"] == (25 / 30, 25 / 30, None)
    _, rows = compared(made, tmp_path / "3", baseline="fsdp4-1")
    assert rows["ddp × 4"].strong.base.label == "fsdp-zero2 × 4"
    with pytest.raises(UserError, match=r"--baseline dpp: no finished run of this name; there are: .*ddp × 4"):
        compared(made, tmp_path / "4", baseline="dpp")


def test_seconds_to_a_given_f1(tmp_path):
    made = {name: one for name, one in campaign().items() if name.startswith("base")}
    _, rows = compared(made, tmp_path / "1", f1=80)
    assert rows["baseline × 1"].median("seconds_to_f1") == 140  # the first epoch: 130 + 10
    _, rows = compared(made, tmp_path / "2", f1=88)  # two of three reach it
    assert rows["baseline × 1"].stats["seconds_to_f1"] == grouping.Stat(254, 250, math.inf, 3)
    experiments, _ = compared(made, tmp_path / "3", f1=90)
    assert tables.result_table(experiments[0]).rows[0][5] == "not reached"


# ---------------------------------------------------------------------------------------------------------------------
# Tables and figures


def test_the_tables_show_it(twenty):
    experiments, _ = twenty
    result, throughput, strong, weak = tables.tables(experiments[0])
    assert result.columns == ["", "runs", "F1", "EM", "s an epoch", "s to F1 87", "s whole run"]
    assert result.rows[1] == [
        BASE, "3", "88.00 (87.60–88.40)", "80.00 (79.60–80.40)",
        "110.0 (108.0–112.0)", "250.0 (246.0–254.0)", "400.0 (398.0–402.0)",
    ]  # fmt: skip
    assert [row[1] for row in result.rows if row[0] == f"fsdp-zero2 × 4, {BF16}"] == ["2 of 3"]
    assert throughput.rows[1] == [BASE, "901 (900–902)", "25.0", "10.00", "2.00", "80", "500", "2.50"]
    lines = [row for row in strong.rows if row[0] == f"fsdp-zero2 × 4, {BF16}" or row[0] == ""][-3:]
    assert lines[0][1:] == ["4", BASE, "training", "100.0 → 30.0", "3.33", "83.3", "0.067", ""]
    assert lines[2][1:] == ["", "", "whole run", "400.0 → 200.0", "2.00", "50.0", "0.333", ""]
    refused = {row[0]: row[-1] for row in strong.rows if row[-1]}
    assert refused == {
        f"ddp × 4, {TF32}": "not compared: precision tf32 against bf16",
        OTHER_CARD: f"not compared: card {A100} against {H100}",
    }
    assert [(row[0], row[5]) for row in weak.rows] == [
        (f"ddp × 4, {BF16}", "3.80"),
        (f"fsdp-zero2 × 4, {BF16}", "3.50"),
    ]


def approx(points):
    return [pytest.approx(point) for point in points]


def test_the_speedup_figure_draws_it(twenty):
    experiments, _ = twenty
    figures.load_matplotlib()
    figure = figures.speedup_figure(experiments[0])
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == list(figures.PANELS.values())
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[1].lines}
    assert lines["ideal"] == [[1, 1], [4, 4]]
    assert lines[f"ddp, {BF16}"] == approx([[1, 1], [2, 110 / 61], [4, 110 / 35]])  # from the baseline on
    assert lines[f"fsdp-zero2, {BF16}"] == approx([[1, 1], [4, 2.75]])
    assert not [name for name in lines if "tf32" in name or "A100" in name]
    points = figures.speedup_points(experiments[0], "training").set_index(["series", "ranks"])
    two = points.loc[(f"ddp, {BF16}", 2)]
    assert (two["low"], two["high"]) == pytest.approx((98 / 52, 102 / 50))  # fastest baseline over slowest, and back
    four = figures.speedup_points(experiments[0], "weak").set_index("ranks").loc[4].iloc[0]
    assert (four["low"], four["high"]) == (3.8, 3.8)
    assert [ax.get_ylabel() for ax in figure.axes] == [
        "times as fast as the baseline", "", "", "windows/s over the baseline's"
    ]  # fmt: skip
    weak = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[3].lines}
    assert weak["ddp, bf16, batch 96 per rank"] == approx([[1, 1], [4, 3.8]])
    assert figures.speedup_figure(experiments[1]) is None  # nothing to compare


def test_numbers_of_gpus_are_not_printed_over_each_other(tmp_path):
    curve = {"training": [50.0, 25.0, 25.0], "f1": [80.0, 88.0, 87.0]}
    made = {str(ranks): record("ddp" if ranks > 1 else "baseline", ranks, **curve) for ranks in (1, 2, 4, 8, 16, 64)}
    (experiment,), _ = compared(made, tmp_path)
    figures.load_matplotlib()
    assert figures.speedup_figure(experiment).axes[0].get_xticks().tolist() == [1, 8, 16, 64]


def test_a_panel_has_another_number_of_ranks_than_the_baselines(tmp_path):
    """ddp × 1 at the baseline's batch is none, and the caption names what is shown."""
    made = {"b": record("baseline", 1, batch=48, rate=90.0, total=200.0, **CURVE)}
    made["1"] = record("ddp", 1, batch=48, rate=89.0, total=202.0, **CURVE)
    (experiment,), _ = compared(made, tmp_path / "1")
    figures.load_matplotlib()
    assert figures.speedup_figure(experiment) is None
    made["2"] = record("ddp", 2, batch=96, rate=45.0, total=202.0, **CURVE)
    (experiment,), _ = compared(made, tmp_path / "2")
    (ax,) = figures.speedup_figure(experiment).axes
    assert ax.get_title(loc="left") == figures.PANELS["weak"] and ax.get_ylabel() == "windows/s over the baseline's"
    caption = page.draw(experiment, tmp_path / "figures", "")[0].caption
    said = "Against the number of GPUs: "
    assert caption.startswith(f"{said}windows/s over the baseline's at the same batch per rank (weak scaling). The")
    made = {"4": record("ddp", 4, **CURVE), "2": record("ddp", 2, **SLOW), "1": record("baseline", 1, **SLOW)}
    (experiment,), _ = compared(made, tmp_path / "3", baseline="ddp × 4")
    (ax, _) = figures.speedup_figure(experiment).axes  # all points below 1: the baseline's own is in the picture
    assert ax.get_ylim() == (0, 1.1)
    assert page.draw(experiment, tmp_path / "figures", "")[0].caption.startswith(f"{said}speed-up. The")


def test_weak_scaling_is_one_line(tmp_path):
    """The global batch differs from point to point, that of a rank does not. Names fit below a single panel."""
    curve = {"training": [50.0, 25.0, 25.0], "f1": [80.0, 88.0, 87.0]}
    made = {}
    for strategy, ranks in [("baseline", 1), *((name, ranks) for name in ("ddp", "fsdp-zero2") for ranks in (2, 4))]:
        for precision in ("bf16", "tf32"):
            more = {"batch": 48 * ranks, "precision": precision, "rate": 90.0 * ranks}
            made[f"{strategy}{ranks}{precision}"] = record(strategy, ranks, **more, **curve)
    (experiment,), _ = compared(made, tmp_path)
    figures.load_matplotlib()
    figure = figures.speedup_figure(experiment)
    (ax,) = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
    assert lines["fsdp-zero2, tf32, batch 48 per rank"] == approx([[1, 1], [2, 2], [4, 4]])
    figure.savefig(tmp_path / "figure.png")  # lays it out
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= 0 and legend.x1 <= figure.bbox.width and legend.y1 < ax.get_window_extent().y0


def test_a_single_epoch_is_a_whole_number(tmp_path):
    made = {"one": record("baseline", 1, training=[130.0], f1=[80.0])}
    (experiment,), _ = compared(made, tmp_path)
    figures.load_matplotlib()
    ax = figures.curves_figure(experiment).axes[1]
    assert [tick for tick in ax.get_xticks() if ax.get_xlim()[0] < tick < ax.get_xlim()[1]] == [1]


def test_unlike_runs_are_marked_in_the_figure(tmp_path):
    made = {name: one for name, one in campaign().items() if name in ("sequential", "lightning")}
    experiments, _ = compared(made, tmp_path, allow_unlike=True)
    figures.load_matplotlib()
    labels = [line.get_label() for line in figures.speedup_figure(experiments[0]).axes[0].lines]
    assert "ddp, tf32 †" in labels


def test_the_time_figure_draws_it(twenty):
    experiments, _ = twenty
    figures.load_matplotlib()
    figure = figures.time_figure(experiments[0])
    names = [row.label for row in experiments[0].rows]
    for ax, parts in zip(figure.axes, [(100, 8, 2), (330, 24, 46)], strict=True):  # 400 − 330 − 24
        widths = [[bar.get_width() for bar in container] for container in ax.containers]
        assert [part[names.index(BASE)] for part in widths] == pytest.approx(parts)
        text = ax.texts[names.index(BASE)].get_text()
        assert text == f"{sum(parts):.1f} s"


def test_the_curves_figure_draws_it(twenty):
    experiments, rows = twenty
    figures.load_matplotlib()
    figure = figures.curves_figure(experiments[0])
    place = [row.label for row in experiments[0].rows].index(BASE)
    loss, score = figure.axes[place], figure.axes[4 + place]
    lines = {line.get_label(): line.get_xydata() for ax in (loss, score) for line in ax.lines}
    assert lines["training loss"].tolist() == [[1, 3], [2, 1.5], [3, 1]]
    assert lines["dev loss"].tolist() == [[1, 2], [2, 1.5], [3, 1.75]]
    assert lines["dev F1"].tolist() == [[1, 80], [2, 88], [3, 87]]
    assert lines["dev exact match"].tolist() == [[1, 72], [2, 80], [3, 79]]
    assert lines["lowest dev loss, overfitting after it"][:, 0].tolist() == [2, 2]  # 1.5, then 1.75
    assert figures.overfitting_epoch(rows["ddp × 4, tf32"]) is None  # still falling at its last epoch
    assert figures.curves(rows[BASE])["f1"].loc[2].tolist() == [88.0, 87.6, 88.4]


@pytest.mark.parametrize("losses, epoch", [([2, 1, 1.011], 2), ([2, 1, 1.009], None), ([1, 1.02, 1.0], 1)])
def test_overfitting_is_a_rise_of_the_dev_loss_by_a_per_cent(tmp_path, losses, epoch):
    made = record("baseline", 1, **CURVE)
    for one, loss in zip(made["epochs"], losses, strict=True):
        one["dev_loss"] = loss
    _, rows = compared({"one": made}, tmp_path)
    assert figures.overfitting_epoch(rows["baseline × 1"]) == epoch


def test_the_curves_figure_draws_the_score_of_training_questions(tmp_path):
    made = record("baseline", 1, training=[3.0, 2.0], f1=[80.0, 79.0], train_f1=[85.0, 97.0])
    made["arguments"]["score_train"], made["data"]["seen"] = 500, {"sha256": "t", "cuts": [["first", 500]]}
    (experiment,), _ = compared({"scored": made}, tmp_path)
    figures.load_matplotlib()
    lines = {line.get_label(): line.get_xydata() for line in figures.curves_figure(experiment).axes[1].lines}
    assert lines["training F1"].tolist() == [[1, 85], [2, 97]] and lines["dev F1"].tolist() == [[1, 80], [2, 79]]


def test_scores_of_training_questions_take_time(tmp_path):
    """The whole run's seconds and the epochs' energy have them, so runs with and without are no repeats."""
    plain = {"training": [3.0, 2.0], "f1": [80.0, 79.0], "total": 20.0}
    made = {"old": record("baseline", 1, **plain), "off": record("baseline", 1, seed=1, **plain)}
    made |= {"on": record("ddp", 2, **plain), "also": record("ddp", 2, seed=1, **plain)}
    made["off"]["arguments"]["score_train"] = 0  # the older record knows of no such option
    made["on"]["arguments"]["score_train"], made["on"]["data"]["seen"] = 500, {"sha256": "t", "cuts": [["first", 500]]}
    _, rows = compared(made, tmp_path)
    assert {label: len(row.runs) for label, row in rows.items()} == {
        "baseline × 1": 2,
        "ddp × 2, score_train 500": 1,
        "ddp × 2, score_train 0": 1,
    }
    note = "other settings than its baseline: score_train 500 against 0"
    assert note in rows["ddp × 2, score_train 500"].notes and note not in rows["ddp × 2, score_train 0"].notes
    assert rows["ddp × 2, score_train 500"].strong.speedup["training"][0] == 1


def test_the_legend_of_many_curves_has_even_rows(tmp_path):
    curve = {"training": [3.0, 2.0, 2.0], "f1": [60.0, 70.0, 68.0]}
    for train_f1, columns in (({}, 5), ({"train_f1": [65.0, 85.0, 97.0]}, 3)):
        made = {str(ranks): record("ddp", ranks, **curve, **train_f1) for ranks in (1, 2, 4)}
        (experiment,), _ = compared(made, tmp_path / str(columns))
        figures.load_matplotlib()
        (legend,) = figures.curves_figure(experiment).legends
        assert legend._ncols == columns and len(legend.texts) == 5 + bool(train_f1)


class Checker(html.parser.HTMLParser):
    """Collects addresses that a page loads, and checks that its tags close."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset")]
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(finished process, folder with the report) of the command on the twenty, a damaged record and a copy."""
    folder = tmp_path_factory.mktemp("written")
    made = campaign()
    save(folder / "runs", made)
    save(folder / "more", {"copy": made["base-0"]})
    (folder / "damaged.json").write_text('{"schema": 2, "stat')
    command = [sys.executable, "-m", "tools.report", *(str(folder / name) for name in ("runs", "more", "damaged.json"))]
    command += ["--out", str(folder / "report")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done, folder


def test_the_command_names_what_it_leaves_out(written):
    done, folder = written
    assert done.stderr.splitlines() == [
        f"left out: {folder}/damaged.json: damaged run record: not JSON",
        f"left out: {folder}/more/copy/run.json: a copy of {folder}/runs/base-0/run.json",
    ]
    assert done.stdout.startswith("runs: 20, finished: 18; figures are medians over repeats")
    assert "not compared: precision tf32 against fp32" in done.stdout


def test_the_page_needs_nothing_else(written):
    page = (written[1] / "report" / "report.html").read_text()
    checker = Checker()
    checker.feed(page)
    assert not checker.open and len(checker.addresses) == 5  # three figures and two
    for address in checker.addresses:
        assert base64.b64decode(address.removeprefix("data:image/svg+xml;base64,")).startswith(b"<?xml")
    assert not re.search(r"https?://|@import|url\(|<script", page)
    text = " ".join(checker.text)
    assert (
        "3.14" in text
        and "88.00" in text
        and "87.60–88.40" in text
        and "damaged run record" in text
        and "node down" in text
    )


def test_markdown_csv_and_figures(written):
    folder = written[1] / "report"
    markdown = (folder / "report.md").read_text()
    line = f"| ddp × 4, {BF16} | 4 | {BASE} | training | 100.0 → 25.0 | 4.00 | 100.0 | 0.000 |  |"
    assert line in markdown
    for name in re.findall(r"\]\((figures/\S+)\)", markdown):
        assert (folder / name).is_file() and (folder / name).with_suffix(".png").is_file()
    assert len(list((folder / "figures").iterdir())) == 10
    frame = pd.read_csv(folder / "rows.csv").set_index("row")
    row = frame.loc[f"ddp × 4, {BF16}"]
    assert row["strong_epoch_speedup"] == pytest.approx(110 / 35)
    assert row["strong_run_serial_fraction"] == pytest.approx(0.2)
    assert row["weak_weak_efficiency"] == pytest.approx(0.95) and row["run_seconds_count"] == 3
    assert frame.loc["ddp × 4, tf32", "strong_differences"] == "precision tf32 against fp32"
    assert math.isnan(frame.loc["ddp × 4, tf32", "strong_run_speedup"])


def test_figures_of_an_earlier_report_do_not_stay(tmp_path):
    made, figures_folder = campaign(), tmp_path / "out" / "figures"
    page.report([save(tmp_path / "two", made)], out=tmp_path / "out")
    assert (figures_folder / "1-speedup.png").is_file()
    (figures_folder / "time.png.bak").touch()  # the reader's own
    page.report([save(tmp_path / "one", {"base-0": made["base-0"]})], out=tmp_path / "out")
    names = {f"{name}.{end}" for name in ("time", "curves") for end in ("png", "svg")}
    assert {path.name for path in figures_folder.iterdir()} == names | {"time.png.bak"}


def test_real_records_are_read():
    folder = ROOT / "benchmarks" / "records"
    runs, left_out = page.load([folder])
    texts = [path.read_text() for path in folder.rglob("*.json")]
    found = [json.loads(text) for text in {*texts}]  # a run that belongs to two experiments counts once
    assert len(runs) == sum("schema" in one for one in found if isinstance(one, dict)) >= 10
    others = [line for line in left_out if ": a copy of " not in line]
    assert len(left_out) - len(others) == len(texts) - len({*texts})
    assert all(line.endswith("not a run record (run.json)") for line in others)
    assert max(reading.SCHEMAS) == SCHEMA
    assert {"cluster", "processor"} <= environment.environment().keys()


# ---------------------------------------------------------------------------------------------------------------------
# Hostile input


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "damaged run record: not JSON"),
        ("[" * 100_000, "damaged run record: not JSON"),
        ("\xff", "damaged run record: not JSON"),
        ('{"schema": ' + "9" * 5000 + "}", "damaged run record: not JSON"),
        ("[1, 2]", "not a run record"),
        ("{}", "not a run record"),
        ('{"schema": 99}', "run record of schema 99; known here"),
        ('{"schema": [1]}', "run record of schema"),
        ('{"schema": 2, "status": "failed", "error": "E: x"}', "failed before its training began: E: x"),
        ('{"schema": 2, "status": "finished", "strategy": "evaluate-only"}', "an evaluation, no training"),
        ('{"schema": 2, "status": "finished", "strategy": "ddp"}', "damaged run record: no world_size"),
        ('{"schema": 2, "status": "finished", "strategy": 7}', "damaged run record: strategy is not text"),
    ],
)
def test_damaged_records_give_one_line(tmp_path, capsys, text, said):
    path = tmp_path / "run.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="no training to report on"):
        page.report([path], out=tmp_path / "out")
    assert re.fullmatch(rf"left out: {path}: .*{said}.*\n", capsys.readouterr().err)


def test_wrong_arguments_end_with_status_2(tmp_path):
    for arguments in (["no-such"], [str(tmp_path)], ["benchmarks/records", "--baseline", "x"], ["/dev/zero"]):
        command = [sys.executable, "-m", "tools.report", *arguments, "--out", str(tmp_path / "out")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_links_in_a_circle_are_followed_once(tmp_path):
    save(tmp_path, {"one": campaign()["base-0"]})
    (tmp_path / "again").symlink_to(tmp_path)
    assert reading.find_records([tmp_path, tmp_path / "one", tmp_path / "again"]) == [tmp_path / "one" / "run.json"]


def test_names_from_a_record_reach_page_and_figures_as_text(tmp_path):
    made = campaign()["base-0"]
    made["model"]["name"] = "$a_{b $ <script>alert(1)</script> | \ud800 \x1b[31m \u6f22"
    made["strategy"] = "ba$e_{ <b>|"
    page.report([save(tmp_path / "runs", {"x": made})], out=tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<script>" not in text and "&lt;script&gt;" in text and "\x1b" not in text
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "ba$e_{ &lt;b&gt;\\|" in markdown


HOSTILE = {  # a name: as Markdown
    "[a](http://x.y)": r"\[a\](http\://x.y)",
    "![a](http://x.y/z.png)": r"!\[a\](http\://x.y/z.png)",
    "[a]: HTTPS://x.y": r"\[a\]: HTTPS\://x.y",
    "<http://x.y>": r"&lt;http\://x.y&gt;",
    "WWW.x.y": r"WWW\.x.y",
    "a\\|b|c": r"a\\\|b\|c",  # a backslash of its own must not undo ours
    "a `b": r"a \`b",
    "&lt;b&gt; <!-- c": "&amp;lt;b&amp;gt; &lt;!-- c",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_names_make_no_links_and_no_cells(name):
    """Each form was read by GitHub's own parser: three cells, the name as its text, no link."""
    table = tables.Table("Runs", ["run", "hosts", "code"], [[name, name, "1"]])
    assert page.as_markdown(table).splitlines()[-1] == f"| {HOSTILE[name]} | {HOSTILE[name]} | 1 |"
    assert page.as_markdown([name]) == f"- {HOSTILE[name]}" and page.as_markdown(name) == f"## {HOSTILE[name]}"
    text = page.as_html(table)
    assert f'<td><div class="text">{html.escape(name)}</div></td>' in text and "<a" not in text


@pytest.mark.parametrize("cell", ["88.00", "1e5", "1,234", "0x1F", "007", "nan", "None", "True", "–", "x" * 120])
def test_tables_print_each_cell_as_it_is(cell):
    """Whatever it looks like to pandas and tabulate, however long it is and however many there are."""
    columns = ["", *(f"column {i}" for i in range(30)), "remark"]
    rows = [[str(i), *[cell] * 31] for i in range(120)]
    table = tables.Table("Wide", columns, rows)
    lines = page.as_markdown(table).splitlines()[4:]
    assert [line.strip("| ").split(" | ") for line in lines] == rows
    text = page.as_html(table)
    assert re.findall(r'<td><div class="text">(\d+)</div></td>', text) == [row[0] for row in rows]
    assert text.count(f'<td><div class="number">{cell}</div></td>') == 30 * len(rows)
    assert text.count(f'<td><div class="remark">{cell}</div></td>') == len(rows)


def test_the_spread_stands_under_the_median():
    text = page.as_html(tables.Table("Results", ["", "F1"], [["a (b)", "88.00 (87.60–88.40)"]]))
    assert '<div class="number">88.00<br><small>87.60–88.40</small></div>' in text
    assert '<div class="text">a (b)</div>' in text


@pytest.mark.parametrize("package, said", [("matplotlib", "figures need"), ("tabulate", "report.md needs")])
def test_an_absent_package_is_one_line_and_no_file(tmp_path, monkeypatch, package, said):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"^{said} {package}: `pip install -r requirements-report.txt`$"):
        page.report([save(tmp_path / "runs", {"one": campaign()["base-0"]})], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert re.search(rf"^{package}==", (ROOT / "requirements-report.txt").read_text(), re.M)


def test_a_report_needs_no_torch():
    """Of common/, the package knows the arguments and the errors alone."""
    modules = ", ".join(f"tools.report.{path.stem}" for path in (ROOT / "tools" / "report").glob("*.py"))
    code = f"import sys, {modules}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "transformers", "tensorboard", "tqdm"}
    assert {name for name in loaded if name.split(".")[0] == "common"} == {"common", "common.args", "common.errors"}


VALUES = [None, True, -1, 0, 1e308, float("nan"), 10**400, "", "x" * 1000, "\ud800", [], [None], {}, {"a": []}, 2**70]


def mutate(one, rng):
    """Change a place or two of a record: mostly to another value of its kind, else to any, or to nothing at all."""
    one = copy.deepcopy(one)
    for _ in range(rng.randint(1, 2)):
        place, key = one, rng.choice(list(one))
        while isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.9:
            place = place[key]
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if isinstance(place[key], (int, float)) and rng.random() < 0.6:
            place[key] *= rng.choice([0, 2, 3, 1000, 1e-9])
        elif isinstance(place[key], str) and rng.random() < 0.6:
            place[key] += rng.choice(VALUES[7:10])
        elif rng.random() < 0.3:
            del place[key]
        else:
            place[key] = rng.choice(VALUES)
    return one


def test_changed_records_are_reported_on_or_named(tmp_path):
    assert fuzz(tmp_path, 300) > 90


def fuzz(folder, count, seed=0):
    """Put changed records beside whole ones through all but the drawing; returns how many were accepted."""
    rng, made, accepted = random.Random(seed), campaign(), 0
    names = sorted(made)
    whole = [reading.build_run(one, folder / name / "run.json") for name, one in made.items()]
    path = folder / "run.json"
    for _ in range(count):
        path.write_text(json.dumps(mutate(made[rng.choice(names)], rng)))
        try:
            run = reading.read_run(path)
        except UserError as error:
            assert "\n" not in str(error) and str(path) in str(error)
            continue
        accepted += 1
        experiments = grouping.group([*whole, run])
        comparing.compare(experiments, comparing.choose_bases(experiments), rng.random() < 0.5)
        for experiment in experiments:
            for block in (*tables.tables(experiment), tables.run_table(experiment), tables.notes(experiment)):
                for form in (page.as_text, page.as_markdown, page.as_html):
                    form(block).encode()
        tables.rows_frame(experiments).to_csv()
    return accepted


def test_the_commands_of_its_page_run(tmp_path, monkeypatch, capsys):
    """Those of a campaign without --submit and --local, so that they print."""
    lines = (ROOT / "docs" / "report.md").read_text().splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("python -m tools.")]
    assert len(commands) == 7
    monkeypatch.chdir(ROOT)
    for _, _, module, *arguments in commands:
        arguments = [word for word in arguments if word not in ("--submit", "--local")]
        out = ["--out", str(tmp_path)] if module == "tools.report" else []
        monkeypatch.setattr(sys, "argv", [module, *out, *arguments])
        {"tools.report": command, "tools.sweep": sweep}[module].main()
        assert ("report:" if out else "sbatch --job-name=") in capsys.readouterr().out
