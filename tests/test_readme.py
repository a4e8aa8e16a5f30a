"""The README's figures are the records', and its commands parse."""

import json
import re
import shlex
import statistics

import pytest
from tiny import ROOT

from common.args import build_parser

README = (ROOT / "README.md").read_text()
RECORDS = ROOT / "benchmarks" / "records"


def last_epochs(name):
    return [json.loads(path.read_text())["epochs"][-1] for path in sorted((RECORDS / name).glob("*.json"))]


@pytest.mark.parametrize(
    "row, name", [("batch 64, 3e-4", "minilm-squad-v1.1"), ("large batch: 192, 4e-4", "minilm-squad-v1.1-batch192")]
)
def test_gpu_results_are_the_records(row, name):
    epochs = last_epochs(name)
    cells = [f"{epoch['exact']:.2f} / {epoch['f1']:.2f}" for epoch in epochs]
    spread = [
        f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
        for values in ([epoch["exact"] for epoch in epochs], [epoch["f1"] for epoch in epochs])
    ]
    assert f"| {row} | {' | '.join(cells)} | {' / '.join(spread)} |" in README


def test_cpu_results_are_the_records():
    for path in [*sorted((RECORDS / "sample").glob("*.json")), RECORDS / "minilm-cpu-2000" / "seed0.json"]:
        run = json.loads(path.read_text())
        epoch = run["epochs"][-1]
        assert f"| {epoch['exact']:.2f} / {epoch['f1']:.2f}" in README, path
        assert f"| {run['seconds']['total']:.0f} |" in README, path
        assert run["status"] == "finished" and run["git_commit"] and not run["git_dirty"]


def test_the_sample_teaches_on_three_seeds():
    """The figures that the bundled default must reach: F1 of 25 at least, rising, under four minutes, few empty."""
    runs = [json.loads(path.read_text()) for path in sorted((RECORDS / "sample").glob("*.json"))]
    assert sorted(run["arguments"]["seed"] for run in runs) == [0, 1, 2]
    for run in runs:
        first, second = run["epochs"]
        assert second["f1"] > first["f1"] and second["f1"] >= 25 and second["empty"] < second["questions"] / 2
        assert run["seconds"]["total"] < 240


def commands():
    """The command lines of the README's code blocks, continued lines joined."""
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", README, flags=re.S | re.M)).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in blocks.splitlines()]


def test_commands_parse():
    seen = 0
    for line in commands():
        words = shlex.split(line) if line.startswith(("python ", "torchrun ", "sbatch ")) else []
        scripts = [word for word in words if word.endswith((".py", ".sh"))]
        if not scripts:
            continue
        assert (ROOT / scripts[0]).is_file(), line
        arguments = [word for word in words[words.index(scripts[0]) + 1 :] if word not in ("ddp", "fsdp")]
        parser = build_parser("")
        parser.add_argument("--shard")
        parser.parse_args(arguments)
        seen += 1
    assert seen >= 8


def test_targets_and_modules_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z]+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
    for package, module in re.findall(r"python -m (common|tools)\.(\w+)", README):
        assert (ROOT / package / f"{module}.py").is_file()
    for path in re.findall(r"`((?:common|data|slurm|benchmarks|tests)/[\w./-]*)`", README):
        assert (ROOT / path).exists() or path.startswith("data/squad"), path
