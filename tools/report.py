"""Tables, figures and a page to hand in, from run records alone.

    python -m tools.report RUNS... [--baseline NAME] [--f1 80] [--allow-unlike] [--out report]

RUNS are run folders, run.json files, or folders of either. A ratio of times is called a speed-up only between runs
alike in precision, model, data, global batch, epochs, card, kernels and machine. Written are OUT/report.html, which
needs no other file, OUT/report.md, OUT/rows.csv and OUT/figures/ (PNG and SVG).
"""

import datetime
import html
import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common import errors
from common.errors import UserError
from tools import figures
from tools.records import choose_bases, compare, experiment_key, find_records, group, read_run

OF = {"training": "training", "epoch": "epoch", "run": "whole run"}

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


TEXT_COLUMNS = ("", "run", "baseline", "of", "remark", "row", "status", "started (UTC)", "hosts", "code")
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
class Table:
    title: str
    columns: list
    rows: list  # of lists of texts


@dataclass
class Picture:
    name: str
    file: str  # without the end: there are NAME.png and NAME.svg
    address: str  # the SVG as a data address
    caption: str


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def seconds(value):
    if value == float("inf"):
        return "not reached"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def rate(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def per_cent(value):
    return f"{100 * value:.1f}"


def spread(stat, form):
    """Median and, in brackets, least and most, where they differ."""
    if stat is None:
        return "–"
    middle, low, high = form(stat.median), form(stat.low), form(stat.high)
    return middle if low == high else f"{middle} ({low}–{high})"


def result_table(experiment):
    columns = {
        "F1": ("f1", "{:.2f}".format),
        "EM": ("exact", "{:.2f}".format),
        "F1 with answer": ("HasAns_f1", "{:.2f}".format),
        "F1 without": ("NoAns_f1", "{:.2f}".format),
        "s an epoch": ("epoch_seconds", seconds),
        f"s to F1 {experiment.target}": ("seconds_to_f1", seconds),
        "s whole run": ("run_seconds", seconds),
    }
    table = measured("Results and time", experiment, columns)
    table.columns.insert(1, "runs")
    for row, cells in zip(experiment.rows, table.rows, strict=True):
        done, of = len(row.finished), len(row.runs)
        cells.insert(1, str(done) if done == of else f"{done} of {of}")
    return table


def throughput_table(experiment):
    columns = {
        "windows/s": ("windows_per_second", rate),
        "share of peak, %": ("share_of_peak", per_cent),
        "peak memory per rank, GB": ("peak_memory_bytes", lambda value: f"{value / 1e9:.2f}"),
        "GPU utilisation, %": ("utilisation", "{:.0f}".format),
        "power per GPU, W": ("power_watts", "{:.0f}".format),
        "energy of an epoch, kJ": ("energy_joules", lambda value: f"{value / 1e3:.2f}"),
    }
    return measured("Throughput, memory and energy", experiment, columns)


def measured(title, experiment, columns):
    """A table of measures, {heading: (measure, format)}; a column that nobody has is left out."""
    columns = {head: one for head, one in columns.items() if any(row.stats[one[0]] for row in experiment.rows)}
    rows = [[row.label, *(spread(row.stats[name], form) for name, form in columns.values())] for row in experiment.rows]
    return Table(title, ["", *columns], rows)


def strong_table(experiment):
    """A line for each thing that a speed-up can be of, or one with the reason why there is none."""
    columns = ["", experiment.unit, "baseline", "of", "seconds"]
    columns += ["speed-up", "efficiency, %", "serial fraction", "remark"]
    table = Table("Speed-up at the same global batch (strong scaling)", columns, [])
    for row in [row for row in experiment.rows if row.strong]:
        base, differences = row.strong.base, "; ".join(row.strong.differences)
        mark = " †" if differences else ""
        lines = []
        for scope, (ratio, efficiency, fraction) in row.strong.speedup.items():
            if ratio is not None:
                before, after = base.median(f"{scope}_seconds"), row.median(f"{scope}_seconds")
                figures_of = [f"{seconds(before)} → {seconds(after)}", f"{ratio:.2f}{mark}", per_cent(efficiency)]
                lines.append([OF[scope], *figures_of, "–" if fraction is None else f"{fraction:.3f}", ""])
        if lines:
            lines[0][-1] = f"† {differences}" if mark else ""
        elif differences and experiment_key(row) != experiment_key(base):
            lines = [[*["–"] * 5, "no baseline of this model, data and number of epochs"]]
        else:
            below = row.weak and row.weak.base is base
            why = differences + (": weak scaling, below" if below else "") if differences else "no times recorded"
            lines = [[*["–"] * 5, f"not compared: {why}"]]
        near = base.label if lines[0][0] != "–" or experiment_key(row) == experiment_key(base) else "–"
        names = [[row.label, str(row.lead.ranks), near], *[["", "", ""]] * (len(lines) - 1)]
        table.rows += [name + line for name, line in zip(names, lines, strict=True)]
    return table


def weak_table(experiment):
    columns = ["", experiment.unit, "baseline", "batch per rank", "windows/s", "ratio", "efficiency, %", "remark"]
    table = Table("Throughput at the same batch per rank (weak scaling)", columns, [])
    for row in [row for row in experiment.rows if row.weak and row.weak.speedup["weak"][0] is not None]:
        ratio, efficiency, _ = row.weak.speedup["weak"]
        base, differences = row.weak.base, "; ".join(row.weak.differences)
        rates = f"{rate(base.median('windows_per_second'))} → {rate(row.median('windows_per_second'))}"
        line = [row.label, str(row.lead.ranks), base.label, f"{row.lead.batch / row.lead.ranks:g}", rates]
        mark = " †" if differences else ""
        table.rows.append([*line, f"{ratio:.2f}{mark}", per_cent(efficiency), f"† {differences}" if mark else ""])
    return table


def run_table(experiment):
    table = Table("Runs", ["run", "row", "status", "seed", "started (UTC)", "hosts", "code"], [])
    for row in experiment.rows:
        for run in sorted(row.runs, key=lambda run: run.seed or 0):
            date = datetime.datetime.fromtimestamp(min(run.started, 2e11), datetime.timezone.utc)
            line = [run.name, row.label, run.status, "–" if run.seed is None else str(run.seed)]
            table.rows.append([*line, f"{date:%Y-%m-%d %H:%M}", ", ".join(run.hosts), run.code])
    return table


def tables(experiment):
    """The tables of an experiment without those, and without the remarks, in which nothing stands."""
    made = [make(experiment) for make in (result_table, throughput_table, strong_table, weak_table)]
    made = [table for table in made if table.rows and len(table.columns) > 1]
    for table in made:
        if not any(row[-1] for row in table.rows):
            table.columns, table.rows = table.columns[:-1], [row[:-1] for row in table.rows]
    return made


def notes(experiment):
    """Sentences with the rows that they are about; one for all of a kind that has more than two."""
    kinds = {}
    for row in experiment.rows:
        for note in row.notes:
            kinds.setdefault(note.split(": ")[0], {}).setdefault(note, []).append(row.label)
    lines = []
    for kind, found in kinds.items():
        if len(found) > 2:
            labels = dict.fromkeys(label for some in found.values() for label in some)
            found = {f"{kind} (each in rows.csv)": list(labels)}
        lines += [f"{name_rows(labels, len(experiment.rows))}: {note}" for note, labels in found.items()]
    return lines


def name_rows(labels, count):
    """Rows for a note; most of many are only counted."""
    if 1 < len(labels) == count:
        return "all rows"
    return "; ".join(labels) if len(labels) <= 3 else f"{len(labels)} of {count} rows ({labels[0]}, …)"


def rows_frame(experiments):
    """One line a row with everything in full: settings, measures with spread and count, comparisons, notes."""
    lines = []
    for experiment in experiments:
        for row in experiment.rows:
            run = row.lead
            line = {"experiment": experiment.title, "row": row.label, "strategy": run.strategy, "ranks": run.ranks}
            line |= {"nodes": run.nodes, "batch_per_rank": run.batch / run.ranks, "f1_target": experiment.target}
            line |= {name.replace(" ", "_"): shown for name, (_, shown) in run.facets.items()}
            line |= {"runs": len(row.runs), "finished": len(row.finished)}
            for name, stat in row.stats.items():
                line |= {name: stat and stat.median, f"{name}_low": stat and stat.low}
                line |= {f"{name}_high": stat and stat.high, f"{name}_count": stat and stat.count}
            for kind, comparison in (("strong", row.strong), ("weak", row.weak)):
                if comparison:
                    line[f"{kind}_baseline"] = comparison.base.label
                    line[f"{kind}_differences"] = "; ".join(comparison.differences)
                    for scope, values in comparison.speedup.items():
                        names = [f"{kind}_{scope}_{name}" for name in ("speedup", "efficiency", "serial_fraction")]
                        line |= dict(zip(names, values, strict=True))
            lines.append(line | {"notes": "; ".join(row.notes)})
    return pd.DataFrame(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Terminal, Markdown, HTML: each turns a title, a table, a list of sentences or a picture into text


def as_text(block):
    if isinstance(block, Table):
        lines = [block.columns, *block.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        pads = [str.ljust if name in TEXT_COLUMNS else str.rjust for name in block.columns]
        cells = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in lines]
        return "\n".join([block.title, *("  " + "  ".join(line).rstrip() for line in cells)])
    return "\n".join(f"note: {line}" for line in block) if isinstance(block, list) else block


def as_markdown(block):
    def plain(text):
        return html.escape(text, quote=False).replace("|", "\\|")

    if isinstance(block, Table):
        lines = [block.columns, ["---"] * len(block.columns), *block.rows]
        table = ["| " + " | ".join(map(plain, line)) + " |" for line in lines]
        return "\n".join([f"### {block.title}", "", *table])
    if isinstance(block, list):
        return "\n".join(f"- {plain(line)}" for line in block)
    if isinstance(block, Picture):
        return f"![{block.name}](figures/{block.file}.svg)\n\n{plain(block.caption)}"
    return f"## {plain(block)}"


def as_html(block):
    if isinstance(block, Table):

        def cells(line, tag):
            text = ""
            for name, cell in zip(block.columns, map(html.escape, line), strict=True):
                kind = WRAPPED.get(name) or ("text" if name in TEXT_COLUMNS else "number")
                if kind == "number" and tag == "td":  # the spread under the median
                    cell = re.sub(r" \((.*)\)$", r"<br><small>\1</small>", cell)
                text += f'<{tag} class="{kind}">{cell}</{tag}>'
            return f"<tr>{text}</tr>\n"

        body = "".join(cells(row, "td") for row in block.rows)
        table = f"<table><thead>\n{cells(block.columns, 'th')}</thead><tbody>\n{body}</tbody></table>"
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
th.number {{ white-space: normal }}
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


# ---------------------------------------------------------------------------------------------------------------------
# The report


def load(paths):
    """(runs, lines about records that are left out): damaged ones, and copies of a run that is there already."""
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
    """Write the figures of an experiment that it has anything for; returns its Pictures."""
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
    """Remove the figures of an earlier report, which may have had others: nobody shall hand in one of those."""
    try:
        for path in folder.iterdir() if folder.is_dir() else []:
            if re.fullmatch(rf"(\d+-)?({'|'.join(CAPTIONS)})\.(png|svg)", path.name):
                path.unlink()
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}; name another --out") from None


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


def main():
    parser = errors.Parser(prog="python -m tools.report", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run folders, run.json files, or folders of either")
    parser.add_argument("--baseline", metavar="NAME", help="a strategy, a row or a run (default: baseline.py's)")
    parser.add_argument("--f1", type=int, choices=range(101), metavar="F1", help="give the seconds to this dev F1")
    parser.add_argument("--allow-unlike", action="store_true", help="give ratios of unlike runs too, marked with †")
    parser.add_argument("--out", default="report", metavar="DIR", help="folder to write into (default: report)")
    args = parser.parse_args()
    report(args.runs, args.baseline, args.f1, args.allow_unlike, args.out)


if __name__ == "__main__":
    errors.run(main)
