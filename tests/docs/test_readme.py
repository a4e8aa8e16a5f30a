"""The figures of README.md and docs/results.md are the records'."""

import json
import statistics

import pytest
from tiny import ROOT

from tools.report.grouping import group
from tools.report.reading import read_run

README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
RECORDS = ROOT / "benchmarks" / "records"


H100X4 = RECORDS / "h100x4-minilm-batch192"


def read(paths):
    return [json.loads(path.read_text()) for path in sorted(paths)]


@pytest.mark.parametrize(
    "row, paths",
    [
        ("batch 64, 3e-4", (RECORDS / "minilm-squad-v1.1").glob("*.json")),
        ("large batch: 192, 4e-4", H100X4.glob("baseline-*.json")),
    ],
)
def test_gpu_results_are_the_records(row, paths):
    epochs = [run["epochs"][-1] for run in read(paths)]
    cells = [f"{epoch['exact']:.2f} / {epoch['f1']:.2f}" for epoch in epochs]
    spread = [
        f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
        for values in ([epoch["exact"] for epoch in epochs], [epoch["f1"] for epoch in epochs])
    ]
    assert f"| {row} | {' | '.join(cells)} | {' / '.join(spread)} |" in RESULTS


@pytest.mark.parametrize(
    "script, name", [("baseline", "baseline"), ("distributed_ddp", "ddp"), ("distributed_fsdp", "fsdp")]
)
def test_four_gpus_give_the_baselines_f1(script, name):
    """The same recipe and seeds: F1 within 0.5 of the baseline's, and the row in docs/results.md."""
    runs = read(H100X4.glob(f"{name}-*.json"))
    epochs = [run["epochs"][-1] for run in runs]
    joules = [sum(card["energy_counter_joules"] for card in epoch["hardware"].values()) for epoch in epochs]
    cells = [f"{epoch['exact']:.2f} / {epoch['f1']:.2f}" for epoch in epochs] + ["–"] * (3 - len(epochs))
    cells += [
        f"{statistics.median(epoch['train_seconds'] for epoch in epochs):.1f}",
        f"{statistics.median(joules):,.0f}",
    ]
    row = next(line for line in RESULTS.splitlines() if line.startswith(f"| `{script}.py`, "))
    assert row.endswith(f"| {' | '.join(cells)} |")
    for run in runs:
        alone = json.loads((H100X4 / f"baseline-{run['arguments']['seed']}.json").read_text())
        assert abs(run["epochs"][-1]["f1"] - alone["epochs"][-1]["f1"]) <= 0.5
        assert run["world_size"] == (1 if name == "baseline" else 4) and run["precision"] == "bf16"
        assert run["data"] == alone["data"] and run["model"]["sha256"] == alone["model"]["sha256"]


def test_the_loss_on_four_gpus_keeps_to_the_one_gpu_curve():
    """In bf16, runs of one seed on one and four GPUs lie closer together than the baseline's own seeds do."""
    curves = json.loads((H100X4 / "curves.json").read_text())
    seeds = [curves[f"baseline-{seed}"] for seed in range(3)]
    spread = statistics.mean(max(part) - min(part) for part in list(zip(*seeds, strict=True))[2:])  # after warm-up
    for name, curve in curves.items():
        alone = curves[f"baseline-{name[-1]}"]
        assert len(curve) == len(alone) == 20
        assert statistics.mean(abs(a - b) for a, b in zip(curve, alone, strict=True)) < spread / 2
    between = statistics.mean(abs(a - b) for a, b in zip(seeds[0], seeds[1], strict=True))
    assert between > spread / 2  # another seed's curve would not pass


def test_energy_is_the_power_over_time():
    """Sampled power, integrated, agrees with the card's own energy counter within 5 % in every epoch on every card."""
    cards = [
        card for run in read(H100X4.glob("*-?.json")) for epoch in run["epochs"] for card in epoch["hardware"].values()
    ]
    assert len(cards) == 2 * (3 + 4 * 4)
    for card in cards:
        assert card["energy_joules"] == pytest.approx(card["energy_counter_joules"], rel=0.05)


def test_cpu_results_are_the_records():
    for path in [*sorted((RECORDS / "sample").glob("*.json")), RECORDS / "minilm-cpu-2000" / "seed0.json"]:
        run = json.loads(path.read_text())
        epoch = run["epochs"][-1]
        assert f"| {epoch['exact']:.2f} / {epoch['f1']:.2f}" in RESULTS, path
        assert f"| {run['seconds']['total']:.0f} |" in RESULTS, path
        assert run["status"] == "finished" and run["git_commit"] and not run["git_dirty"]


def test_the_readmes_run_of_the_sample_is_the_records():
    run, readme = json.loads((RECORDS / "sample" / "seed0.json").read_text()), (ROOT / "README.md").read_text()
    for epoch in run["epochs"]:
        line = f"epoch {epoch['epoch']}: train loss {epoch['train_loss']:.4f} in {epoch['train_seconds']:.1f} s"
        assert line in readme and f"dev EM {epoch['exact']:.2f}, F1 {epoch['f1']:.2f}, loss" in readme


def test_one_seed_on_another_card_is_the_records():
    runs = read([RECORDS / "minilm-squad-v1.1" / "seed0.json", RECORDS / "quality-minilm" / "b64-0.json"])
    recipe = [[run["arguments"][name] for name in ("batch_size", "learning_rate", "epochs", "seed")] for run in runs]
    assert recipe[0] == recipe[1] and [run["gpus"][0] for run in runs] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    epoch = runs[1]["epochs"][-1]
    text = " ".join(RESULTS.split())
    assert f"batch 64 with seed 0 gave {epoch['exact']:.2f} / {epoch['f1']:.2f} on an H200" in text
    assert f"it has {runs[0]['data']['train']['questions']:,} questions" in text


def test_the_sample_teaches_on_three_seeds():
    """The figures that the bundled default must reach: F1 of 25 at least, rising, under four minutes, few empty."""
    runs = [json.loads(path.read_text()) for path in sorted((RECORDS / "sample").glob("*.json"))]
    assert sorted(run["arguments"]["seed"] for run in runs) == [0, 1, 2]
    for run in runs:
        first, second = run["epochs"]
        assert second["f1"] > first["f1"] and second["f1"] >= 25 and second["empty"] < second["questions"] / 2
        assert run["seconds"]["total"] < 240


def test_the_figure_shows_the_records():
    """What stands below docs/results.png: medians of F1 and of an epoch's seconds, as tools.report gives them."""
    (experiment,) = group([read_run(path) for path in sorted(H100X4.glob("*-?.json"))])
    assert [row.lead.strategy for row in experiment.rows] == ["baseline", "ddp", "fsdp-zero2"]
    f1 = [f"{row.median('f1'):.2f}" for row in experiment.rows]
    seconds = [f"{row.median('epoch_seconds'):.1f}" for row in experiment.rows]
    text = " ".join(README.split())
    assert f"the same F1 ({f1[0]} on one, {f1[1]} and {f1[2]} on four)" in text
    assert f"an epoch in {seconds[0]} s on one GPU and in {seconds[1]} and {seconds[2]} s on four" in text
