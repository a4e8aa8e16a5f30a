"""Print a report on the terminal and write it as HTML, Markdown, CSV and figures."""

import functools
import html
import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common import errors
from common.errors import UserError
from tools.report import figures
from tools.report.comparing import choose_bases, compare
from tools.report.grouping import group
from tools.report.reading import find_records, read_run
from tools.report.tables import TEXT_COLUMNS, Table, notes, rows_frame, run_table, tables

DEFINITIONS = """\
A row is one setting. Its figures are medians over its finished runs, with the least and the most in brackets.
A whole epoch is training, evaluation and saving. Its seconds are the median over a run's epochs after the \
first, which compiles and warms up. The whole run is from the start of the process to its end, with everything in it \
but what srun and torchrun take before and after.
F1 and EM are those of the epoch whose model was kept, on the dev set.
Seconds to an F1 are training, evaluation and saving from the first step to the end of the first epoch that has it.
Windows/s are of the same epochs; of a single one, after its first ten steps. Share of peak sets the arithmetic on \
real tokens against the card's dense peak at the run's precision.
Speed-up is the baseline's median time divided by the row's. Efficiency is the speed-up divided by the number of ranks \
over the baseline's.
The serial fraction is Karp and Flatt's, (1/S − 1/p) / (1 − 1/p), the part of the work that p ranks did not \
share, as if all of the loss were of that kind. It is constant in p if it is, and grows with p if communication costs; \
above 1, p ranks were slower than one, and below 0, more than p times as fast.
Strong scaling keeps the global batch and so the experiment. Weak scaling keeps the windows per rank and step: fewer, \
larger steps make an epoch, which is another experiment, so its throughput is compared and not its time to a result.
Utilisation and power are means over samples of each second, per GPU; energy is that of an epoch on all GPUs.
A † marks a ratio of unlike runs, which --allow-unlike asked for: it is not a speed-up.
Overfitting begins after the epoch of the lowest dev loss, if that rose by 1 % or more later.""".splitlines()
WRAPPED = {"baseline": "wrapped", "remark": "remark", "hosts": "wrapped"}  # their classes on the page
WHAT = {"strong": "speed-up", "weak": "windows/s over the baseline's at the same batch per rank (weak scaling)"}
CAPTIONS = {
    "speedup": "Against the number of {unit}: {what}. The dashed line is the ideal; bars go from the slowest repeat "
    "against the baseline's fastest to the fastest against its slowest.",
    "time": "Where the time went: medians, with the rest (start, data, loading, compiling, saving, scores of training "
    "questions) as what remains.",
    "curves": "Loss and scores by epoch: medians, the band from least to most. The dotted line marks the lowest dev "
    "loss, if it rose by 1 % or more after it: overfitting.",
}


@dataclass
class Picture:
    name: str
    file: str  # without the end: there are NAME.png and NAME.svg
    address: str  # the SVG as a data address
    caption: str


def as_text(block):
    if isinstance(block, Table):
        lines = [block.columns, *block.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        pads = [str.ljust if name in TEXT_COLUMNS else str.rjust for name in block.columns]
        cells = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in lines]
        return "\n".join([block.title, *("  " + "  ".join(line).rstrip() for line in cells)])
    return "\n".join(f"note: {line}" for line in block) if isinstance(block, list) else block


def plain(text):
    """Text as Markdown that makes no HTML, no image, no further cell and no link but to an e-mail address."""
    text = re.sub(r"[\\|`\[\]]", r"\\\g<0>", html.escape(text, quote=False))
    return re.sub(r"(?i):(?=//)|(?<=www)\.", r"\\\g<0>", text)  # GitHub makes links of bare addresses


def as_markdown(block):
    if isinstance(block, Table):
        frame = block.frame().map(plain).rename(columns=plain)
        # Numbers are formatted already ("88.00"), and padding to the longest remark would fill the file.
        table = frame.to_markdown(index=False, disable_numparse=True, stralign=None)
        return f"### {block.title}\n\n{table}"
    if isinstance(block, list):
        return "\n".join(f"- {plain(line)}" for line in block)
    if isinstance(block, Picture):
        return f"![{block.name}](figures/{block.file}.svg)\n\n{plain(block.caption)}"
    return f"## {plain(block)}"


def html_cell(kind, text):
    """Text as HTML for a cell. pandas gives cells no class, so each holds a block of this class."""
    text = html.escape(text)
    if kind == "number":  # the spread under the median
        text = re.sub(r" \((.*)\)$", r"<br><small>\1</small>", text)
    return f'<div class="{kind}">{text}</div>'


def as_html(block):
    if isinstance(block, Table):
        kinds = [WRAPPED.get(name) or ("text" if name in TEXT_COLUMNS else "number") for name in block.columns]
        frame = block.frame()
        frame.columns = list(map(html_cell, kinds, block.columns))
        formatters = [functools.partial(html_cell, kind) for kind in kinds]  # which escape
        table = frame.to_html(index=False, border=0, escape=False, formatters=formatters)
        return f'<h3>{html.escape(block.title)}</h3>\n<div class="scroll">{table}</div>'
    if isinstance(block, list):
        return "<ul>\n" + "".join(f"<li>{html.escape(line)}</li>\n" for line in block) + "</ul>"
    if isinstance(block, Picture):
        caption = html.escape(block.caption)
        return f'<figure><img alt="{block.name}" src="{block.address}"><figcaption>{caption}</figcaption></figure>'
    return f"<h2>{html.escape(block)}</h2>"


PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Training runs: speed-up and scores</title>
<style>
body {{ font: 15px/1.5 system-ui, "Segoe UI", "Liberation Sans", sans-serif; color: #22262c; background: #fff;
  max-width: 74rem; margin: 2.5rem auto 4rem; padding: 0 1.5rem }}
h1 {{ font-size: 1.7rem; margin: 0 0 .3rem }}
h2 {{ font-size: 1.25rem; margin: 2.8rem 0 .4rem; padding-top: 1.2rem; border-top: 1px solid #d9dce1 }}
h3 {{ font-size: 1rem; margin: 1.8rem 0 .5rem }}
p, li {{ max-width: 52rem }}
.muted, li {{ color: #4a505a; font-size: .9rem }}
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums }}
th, td {{ padding: .3rem .8rem .3rem 0; vertical-align: top; border-bottom: 1px solid #eceef1 }}
th {{ font-weight: 600; color: #4a505a; border-bottom: 1px solid #aab0b8; vertical-align: bottom }}
.text, .wrapped, .remark {{ text-align: left }}
.text {{ white-space: nowrap }}
.wrapped {{ min-width: 8rem }}
.remark {{ min-width: 13rem }}
small {{ color: #6a717c; font-size: .8em }}
.number {{ text-align: right; white-space: nowrap }}
th .number {{ white-space: normal }}
figure {{ margin: 1.8rem 0 }}
figure img {{ max-width: 100% }}
figcaption {{ color: #4a505a; font-size: .88rem; max-width: 52rem }}
ul {{ padding-left: 1.2rem }}
@media print {{ body {{ margin: 0; max-width: none }} figure, tr {{ break-inside: avoid }}
  .scroll {{ overflow: visible }} table {{ font-size: .7rem }} }}
</style>
</head>
<body>
<h1>Training runs</h1>
<p class="muted">{summary}</p>
{body}
</body>
</html>
"""


def load(paths):
    """(runs, lines about records that are left out). Damaged records and copies of other records are left out."""
    runs, left_out, seen = [], [], {}
    for file in find_records(paths):
        try:
            run = read_run(file)
        except UserError as error:
            left_out.append(str(error))
            continue
        seen.setdefault((run.started, run.hosts, run.key, run.seed), []).append(run)
    for copies in seen.values():  # of a run that was copied while it went on, the furthest one
        run = max(copies, key=lambda run: (run.status == "finished", len(run.epochs)))
        runs.append(run)
        left_out += [f"{copy.path}: a copy of {run.path}" for copy in copies if copy is not run]
    return runs, left_out


def draw(experiment, folder, prefix):
    """Write the figures that an experiment has data for; returns its Pictures."""
    made, panels = [], figures.speedup_panels(experiment)
    shown = [WHAT["strong"]] * any(name != "weak" for name in panels) + [WHAT["weak"]] * ("weak" in panels)
    for name, caption in CAPTIONS.items():
        figure = getattr(figures, f"{name}_figure")(experiment)
        if figure is not None:
            address = figures.save(figure, folder / f"{prefix}{name}")
            caption = caption.format(what=" and ".join(shown), unit=experiment.unit)
            made.append(Picture(name, f"{prefix}{name}", address, caption))
    return made


def remove_figures(folder):
    """Remove the figures of an earlier report, so that none of them is handed in by mistake."""
    try:
        for path in folder.iterdir() if folder.is_dir() else []:
            if re.fullmatch(rf"(\d+-)?({'|'.join(CAPTIONS)})\.(png|svg)", path.name):
                path.unlink()
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}; name another --out") from None


def check_tabulate():
    """UserError where pandas finds no tabulate, which it needs for Markdown."""
    try:
        pd.DataFrame().to_markdown()
    except ImportError:
        raise UserError("report.md needs tabulate: `pip install -r requirements-report.txt`") from None


def write(path, text):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; name another --out") from None


def report(paths, baseline=None, f1=None, allow_unlike=False, out="report"):
    """Read records, print the tables and write the report into the folder `out`."""
    runs, left_out = load(paths)
    for line in left_out:
        errors.tell(f"left out: {line}")
    if not runs:
        raise UserError(f"no training to report on in {', '.join(map(str, paths))}")
    experiments = group(runs, f1)
    bases = choose_bases(experiments, baseline)
    compare(experiments, bases, allow_unlike)
    finished = sum(run.status == "finished" for run in runs)
    summary = f"runs: {len(runs)}, finished: {finished}; figures are medians over repeats (least–most)."
    if not bases:
        summary += " No speed-up: no finished run on one rank is among them; --baseline can name another."
    print(summary)
    for experiment in experiments:
        found = notes(experiment)
        blocks = [f"\n{experiment.title}", *tables(experiment), *([found] if found else [])]
        print("\n\n".join(map(as_text, blocks)))

    out = Path(out)
    figures.load_matplotlib()
    check_tabulate()
    remove_figures(out / "figures")
    blocks = []
    for i, experiment in enumerate(experiments, 1):
        pictures = draw(experiment, out / "figures", f"{i}-" if len(experiments) > 1 else "")
        found = notes(experiment)
        blocks += [experiment.title, *tables(experiment), *([found] if found else []), *pictures, run_table(experiment)]
    blocks += ["Left out", left_out] if left_out else []
    blocks += ["How to read this", DEFINITIONS]
    page = PAGE.format(summary=html.escape(summary), body="\n".join(map(as_html, blocks)))
    write(out / "report.html", page)
    write(out / "report.md", "\n\n".join(["# Training runs", summary, *map(as_markdown, blocks)]) + "\n")
    write(out / "rows.csv", rows_frame(experiments).to_csv(index=False))
    print(f"\nreport: {out / 'report.html'} (and report.md, rows.csv, figures/)")
