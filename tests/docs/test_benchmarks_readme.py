"""The README's performance section is what the command writes from records."""

import json
import shutil
import statistics

import pytest
from test_benchmarks import record_of
from test_scaling import RESULTS
from tiny import ROOT

from benchmarks import compare, readme, scaling
from common.errors import UserError

README = (ROOT / "README.md").read_text()
RUNS = ROOT / "benchmarks" / "records" / "minilm-squad-v1.1"


def write(folder, **records):
    folder.mkdir()
    for name, record in records.items():
        (folder / f"{name}.json").write_text(json.dumps(record))


def test_the_tables_are_what_the_command_writes():
    text = readme.section(shown=readme.SHOWN)
    assert readme.rewrite(README, text) == README, "run `python -m benchmarks.readme`"
    edited = README.replace(readme.END, "a figure typed by hand\n" + readme.END)
    assert readme.rewrite(edited, text) != edited
    performance = (ROOT / "docs" / "performance.md").read_text()
    assert performance == readme.all_tables(), "run `python -m benchmarks.readme`"
    for name in readme.SHOWN:
        assert performance.count(f"`benchmarks/records/{name}`") == 1
        assert text.count(f"`benchmarks/records/{name}`") == (name != "cpu-trainer")  # the other setting is closer


def test_the_cpu_row_of_the_readme_is_the_setting_with_the_smaller_lead():
    folders = [readme.RECORDS / name for name in ("cpu-trainer", "cpu-trainer-no-dropout")]
    assert [f"{readme.smallest_lead(folder):.2f}" for folder in folders] == ["2.72", "1.60"]
    (row,) = (line for line in README.splitlines() if line.startswith("| `hf-trainer-8-dynamic` ") and " 8.3 " in line)
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["fp32", "0", "8.3 (6.8 to 9.4)", "1.60 (1.60)", "–"]


def table_cells(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def test_missing_records_are_told(tmp_path):
    text = readme.section(tmp_path)
    assert text.count("No record yet: `python -m benchmarks.") == text.count("### ") == 5


def test_peers(tmp_path):
    ours = record_of("this-project-8", 100.0, 120.0, 110.0, attention="sdpa")
    theirs, stopped = record_of("hf-trainer-8", 10.0, 9.0, 11.5), record_of("deepspeed-zero2-8")
    equal = record_of("hf-trainer-8", 20.0, dropout="matched")
    stopped |= {"status": "failed", "error": "deepspeed is not installed"}
    write(tmp_path / "peers-here", **{"this-project-8-x1": ours, "hf-trainer-8-x1": theirs, "deepspeed-x1": stopped})
    text = readme.section(tmp_path)
    ours, theirs = table_cells(text)[2:]
    assert ours == ["`this-project-8`", "1", "8", "fp32", "–", "0", "110 (100 to 120)", "1.00", "1.00", "–", "1.0"]
    assert theirs[3:] == ["fp32", "384", "0.1", "10.0 (9.0 to 11.5)", "11.00", "11.00", "–", "1.0"]
    assert "median of 3 turns (least to most) (`benchmarks/records/peers-here`)" in text
    assert "**The peers ran with attention dropout 0.1, this project with 0. No peer here ran with 0.**" in text
    assert "Not measured: deepspeed-zero2-8-own: deepspeed is not installed." in text
    (tmp_path / "peers-here" / "hf-trainer-8-matched-x1.json").write_text(json.dumps(equal))
    text = readme.section(tmp_path)  # both settings
    assert [row[5] for row in table_cells(text)[3:]] == ["0.1", "0"] and "Each peer ran with its own" in text
    text = readme.section(tmp_path, shown=["peers-here"])  # README: the setting in which ours leads by less
    head, _, _, theirs = table_cells(text)
    assert head == ["way", "precision", "attention dropout", "windows/s", "ours ÷ it", "s to equal F1"]
    assert theirs == ["`hf-trainer-8`", "fp32", "0", "20.0 (20.0 to 20.0)", "5.50 (5.50)", "–"]


def test_steps_and_scaling(tmp_path):
    more = {"shape": "bert-base", "precision": "bf16", "attention": "fused", "useful_tflops": 302.4, "device": "a card"}
    lines = [result | more for result in RESULTS]
    (tmp_path / "steps-card").mkdir()
    (tmp_path / "steps-card" / "lines.json").write_text("\n".join(["a log line", *map(json.dumps, lines)]))
    study = {"versions": {"torch": "2.11"}, "results": lines, "rows": scaling.rows(lines, [96], [384])}
    write(tmp_path / "scaling-card", study=study)
    text = readme.section(tmp_path)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "| 4 | ddp | bf16 | fused | 384 | 15,000 (14,990 to 15,010) | 25.6 | 302 | 3.5 |" in rows
    assert scaling.table(study["rows"]) in text and text.count("a card") == 2


def test_quality(tmp_path):
    """Runs of one recipe are one row, with the spread over seeds and the time until all recipes' common F1."""
    shutil.copytree(RUNS, tmp_path / "quality-minilm")
    runs = [json.loads(path.read_text()) for path in sorted(RUNS.glob("*.json"))]
    slow = runs[0] | {"strategy": "hf-trainer", "precision": "fp32", "attention": "padded", "compile": False}
    slow["epochs"] = [epoch | {"f1": 60.0 + i, "train_seconds": 100.0} for i, epoch in enumerate(slow["epochs"])]
    (tmp_path / "quality-minilm" / "slow.json").write_text(json.dumps(slow))
    elsewhere = slow | {"gpus": ["NVIDIA Other"]}  # seconds of two cards are not one figure
    (tmp_path / "quality-minilm" / "other.json").write_text(json.dumps(elsewhere))
    rows = [line for line in readme.section(tmp_path).splitlines() if line.startswith("| ")]
    assert len(rows) == 5 and "| Other " in rows[4]
    ours, theirs = ([cell.strip() for cell in line.split("|")[1:-1]] for line in (rows[2], rows[3]))
    f1 = [max(epoch["f1"] for epoch in run["epochs"]) for run in runs]
    first = statistics.median(run["epochs"][0]["train_seconds"] for run in runs)
    assert ours[:3] == ["baseline", "bf16, compiled, packed, batch 64, 0.0003, 2 epochs", "H100 80GB HBM3"]
    assert (
        ours[3] == "3"
        and ours[5] == f"{statistics.mean(f1):.2f} ± {statistics.stdev(f1):.2f}"
        and ours[-1] == f"{first:.0f}"
    )
    assert theirs[0] == "Hugging Face Trainer" and theirs[5] == "61.00"
    assert theirs[-3:] == ["200 (200 to 200)", "100.0", "200"]


@pytest.mark.parametrize("folder", ["cpu-trainer", "cpu-trainer-no-dropout"])
def test_on_two_cores_in_every_round_a_third_faster_than_the_trainer(folder):
    """Hugging Face Trainer with dynamic padding at batch 8: the same network, threads and minutes."""
    records = compare.read_records(readme.RECORDS / folder)
    ours, theirs = records["this-project-8-x1"], records["hf-trainer-8-dynamic-x1"]
    for name in ("model", "data", "threads", "cpus", "precision", "versions"):
        assert ours[name] == theirs[name]
    pairs = zip(compare.speeds(ours), compare.speeds(theirs), strict=True)
    assert ours["threads"] == 2 and min(a / b for a, b in pairs) > 1.3


def test_without_markers_the_readme_is_left_alone():
    for text in ("no markers", readme.END + readme.BEGIN, README + readme.END):
        with pytest.raises(UserError, match="needs these two lines"):
            readme.rewrite(text, "")
