"""The tables of docs/reproductions.md: what five course reports measured, and what was measured here.

    python -m benchmarks.reproductions            # print them
    python -m benchmarks.reproductions --write    # put them into docs/reproductions.md

Ours come from the run records below benchmarks/records/reproductions/report-N/ alone; where there is none, the table
says so. A speed-up stands there only where tools.report would give one.
"""

import os
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, errors
from common.errors import UserError
from tools.report.comparing import choose_bases, compare
from tools.report.grouping import group
from tools.report.reading import find_records, read_run

RECORDS = ROOT / "benchmarks" / "records" / "reproductions"
PAGE = ROOT / "docs" / "reproductions.md"


@dataclass(frozen=True)
class Line:
    """A setting of a report and its figures; None where the report has none, or where its setting is not ours."""

    setting: str
    seconds: float | None
    speedup: float | None  # as the report gives it, or from its seconds
    strategy: str | None  # what is nearest here
    ranks: int = 1
    precision: str = "fp32"
    epochs: int = 2


REPORTS = {
    1: [
        Line("1 GPU", 497, None, "baseline", epochs=10),
        Line("4 GPUs, DDP", 151, 3.29, "ddp", 4, epochs=10),
        Line("4 GPUs, FSDP", 167, 2.98, "fsdp-zero3", 4, epochs=10),
        Line("1 GPU, tensor cores", 170, None, "baseline", 1, "tf32", 10),
        Line("4 GPUs, DDP, tensor cores", 71, 2.39, "ddp", 4, "tf32", 10),
        Line("4 GPUs, FSDP, tensor cores", 90, 1.89, "fsdp-zero3", 4, "tf32", 10),
    ],
    2: [
        Line("1 GPU, sequential loop", 3828, None, "baseline"),
        Line("4 GPUs, DDP, tensor cores", 482, 7.94, "ddp", 4, "tf32"),
        Line("4 GPUs, FSDP, tensor cores", 667, 5.74, "fsdp-zero3", 4, "tf32"),
        Line("4 GPUs, DeepSpeed, tensor cores", 741, 5.17, "fsdp-zero2", 4, "tf32"),
        Line("– (stage 1)", None, None, "ddp-zero1", 4, "tf32"),
    ],
    3: [
        Line("1 GPU, sequential loop", 5109, None, "baseline"),
        Line("“2 GPUs”, dp", 5252, 0.97, None),
        Line("“2 GPUs”, ddp", 997, 5.12, "ddp", 4),
        Line("“2 GPUs”, fsdp", 1046, 4.88, "fsdp-zero3", 4),
        Line("“2 GPUs”, deepspeed", 1074, 4.76, "fsdp-zero2", 4),
        Line("“2 GPUs”, ddp, 5 epochs", 2501, None, "ddp", 4, epochs=5),
    ],
    4: [
        Line("1 GPU, Hugging Face Trainer", 779, None, "baseline", epochs=4),
        Line("1 GPU, DDP", 826, 0.94, "ddp", 1, epochs=4),
        Line("2 GPUs, DDP", 467, 1.67, "ddp", 2, epochs=4),
        Line("4 GPUs, DDP", 286, 2.72, "ddp", 4, epochs=4),
        Line("2 GPUs, FSDP", 599, 1.30, "fsdp-zero3", 2, epochs=4),
        Line("4 GPUs, FSDP", 266, 2.92, "fsdp-zero3", 4, epochs=4),
    ],
    5: [Line("1 GPU, sequential loop", 495, None, "baseline", epochs=10)],
}


def key(row):
    run = row.lead
    return run.strategy, run.ranks, run.facets["precision"][1], run.epochs_wanted


def load_rows(folder):
    """{(strategy, ranks, precision, epochs): Row} of a folder's finished runs, compared; {} if there is none."""
    if not os.path.exists(folder):  # Path's own test fails on a name too long
        return {}
    experiments = group([read_run(file) for file in find_records([folder])])
    compare(experiments, choose_bases(experiments))
    rows = [row for experiment in experiments for row in experiment.rows if row.finished]
    if len({key(row) for row in rows}) < len(rows):
        raise UserError(f"{folder}: several settings for one line of the table; keep one of them")
    return {key(row): row for row in rows}


def speedup(row):
    """The speed-up of a row in words: of the training of an epoch, or of windows/s where the batch grew."""
    if row.strong is None:
        return "–"
    if row.strong.speedup["training"][0] is not None:
        return f"{row.strong.speedup['training'][0]:.2f}"
    if row.weak and row.weak.speedup["weak"][0] is not None:
        return f"weak: {row.weak.speedup['weak'][0]:.2f}"
    return "not compared"


def cells(row):
    """What was measured here: setting, seconds of training and evaluation, speed-up, F1."""
    seconds = [run.measures["run_training_seconds"] + run.measures["run_evaluation_seconds"] for run in row.finished]
    strategy, ranks, precision, _ = key(row)
    setting = f"{strategy} × {ranks}, {precision}" + (f" ({len(seconds)} runs)" if len(seconds) > 1 else "")
    return [setting, f"{statistics.median(seconds):.1f}", speedup(row), f"{row.median('f1'):.2f}"]


def table(lines, rows):
    """Markdown: a report's lines beside the rows that match them, then the rows that match none."""
    text = ["| the report | seconds | speed-up | here | seconds | speed-up | F1 |"]
    text.append("| --- | --- | --- | --- | --- | --- | --- |")
    left = dict(rows)
    for line in lines:
        row = left.pop((line.strategy, line.ranks, line.precision, line.epochs), None)
        ours = cells(row) if row else ["not run yet" if line.strategy else "not in this project", "", "", ""]
        claimed = "–" if line.speedup is None else f"{line.speedup:.2f}"
        took = "–" if line.seconds is None else f"{line.seconds:,}"
        text.append(f"| {line.setting} | {took} | {claimed} | {' | '.join(ours)} |")
    text += [f"| – | – | – | {' | '.join(cells(row))} |" for row in left.values()]
    cards = sorted({row.lead.facets["card"][1] for row in rows.values()})
    models = sorted({f"{row.lead.facets['model'][1]} on {row.lead.facets['data'][1]}" for row in rows.values()})
    if rows:
        text += ["", f"Here: {', '.join(cards)}; {'; '.join(models)}."]
    return "\n".join(text)


def fill(page, tables):
    """The page's text with each table between its two marks, <!-- report N --> and <!-- end -->."""
    for number, text in tables.items():
        mark = rf"(<!-- report {number} -->\n).*?(<!-- end -->)"
        page, count = re.subn(mark, lambda found, text=text: f"{found[1]}\n{text}\n\n{found[2]}", page, flags=re.S)
        if count != 1:
            raise UserError(f"{PAGE}: has {count} places for report {number}, not one")
    return page


def main():
    about = __doc__.split("\n")[0]
    parser = errors.Parser(prog="python -m benchmarks.reproductions", description=about, allow_abbrev=False)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/reproductions.md")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder with report-1/, report-2/, …")
    args = parser.parse_args()
    tables = {number: table(lines, load_rows(args.records / f"report-{number}")) for number, lines in REPORTS.items()}
    if args.write:
        PAGE.write_text(fill(PAGE.read_text(), tables))
    else:
        print("\n\n".join(f"report {number}\n\n{text}" for number, text in tables.items()))


if __name__ == "__main__":
    errors.run(main)
