"""The tables of a report, as texts, and the frame behind rows.csv."""

import datetime
from dataclasses import dataclass

import pandas as pd

from tools.report.grouping import experiment_key

OF = {"training": "training", "epoch": "epoch", "run": "whole run"}

TEXT_COLUMNS = ("", "run", "baseline", "of", "remark", "row", "status", "started (UTC)", "hosts", "code")


@dataclass
class Table:
    title: str
    columns: list
    rows: list  # of lists of texts

    def frame(self):
        """The cells as a frame of texts; none is read as a number."""
        return pd.DataFrame(self.rows, columns=self.columns, dtype=object)


def seconds(value):
    if value == float("inf"):
        return "not reached"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def rate(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def per_cent(value):
    return f"{100 * value:.1f}"


def gigabytes(value):
    return f"{value / 1e9:.2f}"


def spread(stat, form):
    """The median; the minimum and the maximum follow in brackets where they differ."""
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
        "peak memory of a rank in training, GB": ("training_memory", gigabytes),
        "in evaluation, GB": ("evaluation_memory", gigabytes),
        "GPU utilisation, %": ("utilisation", "{:.0f}".format),
        "power per GPU, W": ("power_watts", "{:.0f}".format),
        "energy of an epoch, kJ": ("energy_joules", lambda value: f"{value / 1e3:.2f}"),
    }
    return measured("Throughput, memory and energy", experiment, columns)


def measured(title, experiment, columns):
    """A table of measures, {heading: (measure, format)}, without the columns that no row has."""
    columns = {head: one for head, one in columns.items() if any(row.stats[one[0]] for row in experiment.rows)}
    rows = [[row.label, *(spread(row.stats[name], form) for name, form in columns.values())] for row in experiment.rows]
    return Table(title, ["", *columns], rows)


def strong_table(experiment):
    """One line for each scope of a speed-up, or one line that says why there is none."""
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
    """The tables of an experiment. Empty tables and empty columns of remarks are left out."""
    made = [make(experiment) for make in (result_table, throughput_table, strong_table, weak_table)]
    made = [table for table in made if table.rows and len(table.columns) > 1]
    for table in made:
        if not any(row[-1] for row in table.rows):
            table.columns, table.rows = table.columns[:-1], [row[:-1] for row in table.rows]
    return made


def notes(experiment):
    """Notes, each with its rows. More than two of one kind are merged into one."""
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
    """Rows for a note: up to three labels, else their number."""
    if 1 < len(labels) == count:
        return "all rows"
    return "; ".join(labels) if len(labels) <= 3 else f"{len(labels)} of {count} rows ({labels[0]}, …)"


def rows_frame(experiments):
    """One line for each row: settings, measures with spread and count, comparisons, notes, all in full."""
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
