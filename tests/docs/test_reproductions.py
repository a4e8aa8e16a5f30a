"""docs/reproductions.md: its tables are the records', and the script that makes the records gives valid commands."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from test_report import record
from tiny import ROOT

from benchmarks import reproductions
from benchmarks.reproductions import REPORTS
from common.args import build_parser
from common.errors import UserError
from common.run.settings import check_combinations


def write(folder, **runs):
    folder.mkdir(parents=True)
    for name, run in runs.items():
        (folder / f"{name}.json").write_text(json.dumps(run))


def test_the_page_is_what_the_records_give():
    tables = {
        number: reproductions.table(lines, reproductions.load_rows(reproductions.RECORDS / f"report-{number}"))
        for number, lines in REPORTS.items()
    }
    page = reproductions.PAGE.read_text()
    assert reproductions.fill(page, tables) == page


def test_figures_beside_the_reports(tmp_path):
    """Two repeats on one GPU, four GPUs in like and in unlike precision, a setting that no report has."""
    curves = [{"training": [10.0, 8.0 + seed], "f1": [50.0, 60.0 + seed]} for seed in (0, 1)]
    one = [record("baseline", 1, i, precision="fp32", evaluation=1.0, **curve) for i, curve in enumerate(curves)]
    four = record("ddp", 4, precision="tf32", training=[3.0, 2.0], f1=[50.0, 61.0], evaluation=1.0)
    like = record("ddp", 4, precision="fp32", training=[3.0, 2.125], f1=[50.0, 61.0], evaluation=1.0)
    for run in (*one, four, like):
        run["arguments"]["epochs"] = 2
    write(tmp_path / "report-2", a=one[0], b=one[1], c=four, d=like)
    lines = reproductions.table(REPORTS[2], reproductions.load_rows(tmp_path / "report-2")).splitlines()
    # 10 + 8 + 2 evaluations, and 1 s more: the median is 20.5
    assert lines[2] == "| 1 GPU, sequential loop | 3,828 | – | baseline × 1, fp32 (2 runs) | 20.5 | – | 60.50 |"
    assert lines[3] == "| 4 GPUs, DDP, tensor cores | 482 | 7.94 | ddp × 4, tf32 | 7.0 | not compared | 61.00 |"
    assert lines[4].endswith("| 5.74 | not run yet |  |  |  |")
    assert lines[6] == "| – (stage 1) | – | – | not run yet |  |  |  |"
    assert lines[7] == "| – | – | – | ddp × 4, fp32 | 7.1 | 4.00 | 61.00 |"  # 8.5 s (the median) / 2.125 s
    assert lines[9].startswith("Here: NVIDIA H100 80GB HBM3; bert-base (110 M parameters) on squad (87,599 questions")


def test_a_batch_that_grew_is_weak_scaling(tmp_path):
    runs = {}
    for name, strategy, ranks, rate in (("a", "baseline", 1, 100.0), ("b", "ddp", 4, 350.0)):
        runs[name] = record(
            strategy, ranks, batch=4 * ranks, precision="fp32", training=[4.0 / ranks] * 3, f1=[50.0] * 3, rate=rate
        )
        runs[name]["arguments"]["epochs"] = 4
    write(tmp_path / "report-4", **runs)
    text = reproductions.table(REPORTS[4], reproductions.load_rows(tmp_path / "report-4"))
    assert "| 4 GPUs, DDP | 286 | 2.72 | ddp × 4, fp32 | 27.0 | weak: 3.50 | 50.00 |" in text


def test_two_settings_for_one_line_are_refused(tmp_path):
    runs = [record("baseline", 1, batch=batch, training=[4.0], f1=[50.0]) for batch in (4, 8)]
    write(tmp_path / "report-4", a=runs[0], b=runs[1])
    with pytest.raises(UserError, match="several settings"):
        reproductions.load_rows(tmp_path / "report-4")


def test_the_reports_speedups_follow_from_their_seconds():
    for number, lines in REPORTS.items():
        for line in lines:
            if line.speedup is not None and number != 1:
                assert line.speedup == pytest.approx(lines[0].seconds / line.seconds, abs=0.01)
    one, ddp, fsdp = REPORTS[1][3:]
    assert ddp.speedup == pytest.approx(one.seconds / ddp.seconds, abs=0.01)
    assert fsdp.speedup == pytest.approx(one.seconds / fsdp.seconds, abs=0.01)


@pytest.mark.parametrize("gpus, runs", [("1", 2 + 2 + 10), ("2", 10), ("4", 4 + 9 + 20)])
def test_the_script_gives_valid_commands_and_collects_records(tmp_path, gpus, runs):
    fake = tmp_path / "python"  # notes its arguments and leaves a record, as a run would
    fake.write_text(
        '#!/bin/bash\nprintf "%q " "$@" >> "$LOG"; echo >> "$LOG"\n'
        "while (($#)); do [[ $1 == --runs-dir ]] && runs=$2; [[ $1 == --run-name ]] && name=$2; shift; done\n"
        'mkdir -p "$runs/$name"; echo "{}" > "$runs/$name/run.json"\n'
    )
    fake.chmod(0o755)
    log = tmp_path / "log"
    environment = os.environ | {"PYTHON": str(fake), "LOG": str(log), "MODEL": "a model", "SQUAD": "squad"}
    script = ROOT / "benchmarks" / "reproductions.sh"
    done = subprocess.run(["bash", script, tmp_path / "out", gpus], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in log.read_text().splitlines()]
    assert len(commands) == runs
    for words in commands:
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        assert (ROOT / words[at]).is_file()
        assert ("--standalone" in words) == words[at].startswith("distributed") >= (gpus != "1")
        parser = build_parser("")
        parser.add_argument("--shard")
        parser.add_argument("--zero1", action="store_true")
        args = parser.parse_args(words[at + 1 :])
        check_combinations(args)
        assert args.model == "a model" and args.precision in ("fp32", "tf32")
    found = {str(path.relative_to(tmp_path / "out")) for path in tmp_path.glob("out/report-*/*.json")}
    longer = "report-3/ddp-5-epochs.json" in found
    assert len([name for name in found if name.split("/")[0][-1] in "124"]) + longer == runs
    assert longer == (gpus == "4")
    assert ("report-5/baseline-fp32.json" in found) == (gpus == "1")
    assert any(name.startswith("report-3/") and name.endswith("-fp32.json") for name in found) == (gpus != "2")


@pytest.mark.parametrize(
    "gpus, reports, status", [("1", [], 1), ("2", ["1"], 2), ("3", ["4"], 2), ("1", ["5"], 2), ("four", [], 2)]
)
def test_the_script_says_what_it_did_not_run(tmp_path, gpus, reports, status):
    environment = os.environ | {"PYTHON": "false"}  # each run fails
    command = ["bash", ROOT / "benchmarks" / "reproductions.sh", tmp_path / "out", gpus, *reports]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == status and "error: " in done.stderr
    assert not list(tmp_path.glob("out/*"))


def test_the_command_prints_the_tables():
    done = subprocess.run([sys.executable, "-m", "benchmarks.reproductions"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("| the report |") == 5
