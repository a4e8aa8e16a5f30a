"""The figures of a report: speed-up against ranks, where the time went, curves by epoch. Needs matplotlib."""

import base64
import io
import math
import textwrap
import warnings

import pandas as pd

from common.errors import UserError

STYLE = {
    "svg.hashsalt": "report",  # equal figures are equal files
    "text.parse_math": False,  # a $ in a name is a $
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.edgecolor": "#8a8f98",
    "axes.labelcolor": "#3b4048",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e7e9ec",
    "xtick.color": "#3b4048",
    "ytick.color": "#3b4048",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
}
COLOURS = ["#2f6db3", "#d9822b", "#3a9188", "#a8518a", "#7a7f3a", "#6b5bb0", "#b5473c", "#59636e"]
PARTS = {"training": "#2f6db3", "evaluation": "#e0a458", "the rest": "#c3c8cf"}
PANELS = {
    "training": "Training of an epoch",
    "epoch": "Whole epoch",
    "run": "Whole run",
    "weak": "Weak scaling: windows/s",
}


def load_matplotlib():
    """matplotlib, drawing to files only; UserError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("figures need matplotlib: `pip install -r requirements-report.txt`") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE)
    warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script that the font does not have
    warnings.filterwarnings("ignore", message="constrained_layout not applied")  # a figure with absurd numbers
    return matplotlib


def speedup_points(experiment, panel):
    """A frame of what a panel shows: series, ranks, base (its ranks), speedup and its low and high.

    These are the row's slowest repeat against the baseline's fastest, and the other way round.
    """
    points = []
    for row in experiment.rows:
        comparison = row.weak if panel == "weak" else row.strong
        ratio = comparison.speedup[panel][0] if comparison else None
        if ratio is None:
            continue
        name = "windows_per_second" if panel == "weak" else f"{panel}_seconds"
        above, below = row.stats[name], comparison.base.stats[name]
        if panel != "weak":  # seconds: the fewer, the faster
            above, below = below, above
        points.append(
            {
                "series": (row.weak_series if panel == "weak" else row.series)
                + (" †" if comparison.differences else ""),
                "ranks": row.lead.ranks,
                "base": comparison.base.lead.ranks,
                "speedup": ratio,
                "low": above.low / below.high,
                "high": above.high / below.low if below.low else math.inf,
            }
        )
    return pd.DataFrame(points)


def speedup_panels(experiment):
    """{panel: its points} of the panels that have a number of ranks other than the baseline's."""
    panels = {name: speedup_points(experiment, name) for name in PANELS}
    return {
        name: points for name, points in panels.items() if len(points) and (points["ranks"] != points["base"]).any()
    }


def speedup_figure(experiment):
    """Speed-up against the number of ranks, with the ideal line, a panel for each scope; None without data."""
    from matplotlib.figure import Figure

    panels = speedup_panels(experiment)
    if not panels:
        return None
    series = list(dict.fromkeys(name for points in panels.values() for name in points["series"]))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(series)}
    width = max(4.8, 1 + 2.75 * len(panels))
    across = max(1, min(4, int(width / (0.6 + 0.072 * max(map(len, series))))))  # names side by side, by their inches
    figure = Figure(figsize=(width, 3.1 + 0.17 * -(-(1 + len(series)) // across)))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (panel, points) in zip(axes, panels.items(), strict=True):
        base, most = points["base"].min(), points["ranks"].max()
        ends = pd.Series([1, most / base], index=[base, most])
        ends.plot(ax=ax, color="#8a8f98", linestyle="--", linewidth=1, label="ideal")
        for name, own in points.groupby("series", sort=False):
            own = own.sort_values("ranks")
            start = base if own["ranks"].min() > base and own["base"].eq(base).all() else None
            line = pd.Series(own["speedup"].to_numpy(), index=own["ranks"])
            if start is not None:  # from the baseline itself
                line = pd.concat([pd.Series([1.0], index=[start]), line])
            line.plot(ax=ax, color=colours[name], label=name)
            error = [own["speedup"] - own["low"], own["high"] - own["speedup"]]
            style = {"fmt": "o", "color": colours[name], "capsize": 3, "elinewidth": 1}
            style |= {"markerfacecolor": "white"} if name.endswith("†") else {}
            ax.errorbar(own["ranks"], own["speedup"], yerr=error, **style)
        ax.plot([base], [1], "o", color="#3b4048", zorder=5)
        ax.set_title(PANELS[panel], loc="left")
        ax.set_xlabel(experiment.unit)
        ticks = [base]
        for ranks in sorted({*points["ranks"]}):
            if ranks - ticks[-1] > 0.05 * most:  # closer labels would overlap
                ticks.append(ranks)
        ax.set_xticks(ticks)
        ax.set_xlim(left=min(base, points["ranks"].min()) - 0.04 * most - 0.1)
        ax.set_ylim(0, max(1.1, ax.get_ylim()[1]))
        if ax is axes[0] or panel == "weak":
            ax.set_ylabel("windows/s over the baseline's" if panel == "weak" else "times as fast as the baseline")
    handles = {label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(across, len(handles)))
    return figure


def time_parts(experiment, whole_run):
    """A frame of seconds by row: training, evaluation and other, of a median epoch or of the whole run."""
    prefix, total = ("run_", "run_seconds") if whole_run else ("", "epoch_seconds")
    rows = [row for row in experiment.rows if row.stats[total] and row.stats["training_seconds"]]
    frame = pd.DataFrame(index=[row.label for row in rows], columns=list(PARTS), dtype=float)
    for row in rows:
        training, evaluation = row.median(f"{prefix}training_seconds"), row.median(f"{prefix}evaluation_seconds") or 0
        frame.loc[row.label] = [training, evaluation, max(0.0, row.median(total) - training - evaluation)]
    return frame


def time_figure(experiment):
    """Seconds of an epoch and of the whole run, split into parts; None without data."""
    from matplotlib.figure import Figure

    frames = {"An epoch": time_parts(experiment, False), "Whole run": time_parts(experiment, True)}
    frames = {title: frame for title, frame in frames.items() if not frame.empty}
    if not frames:
        return None
    rows = max(map(len, frames.values()))
    figure = Figure(figsize=(10, 1.3 + 0.34 * rows))
    axes = figure.subplots(1, len(frames), squeeze=False)[0]
    for i, (ax, (title, frame)) in enumerate(zip(axes, frames.items(), strict=True)):
        frame.plot.barh(stacked=True, ax=ax, color=list(PARTS.values()), legend=False, width=0.62)
        total = frame.sum(axis=1)
        for y, seconds in enumerate(total):
            ax.annotate(
                f"{seconds:,.1f} s", (seconds, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
            )
        ax.invert_yaxis()
        ax.set_title(title, loc="left")
        ax.set_xlabel("seconds")
        ax.set_xlim(0, total.max() * 1.18)
        ax.grid(axis="y", visible=False)
        if i and list(frame.index) == list(frames["An epoch"].index):
            ax.set_yticklabels([])
            ax.tick_params(axis="y", length=0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def curves(row):
    """{figure: frame of median, min and max by epoch} over a row's finished runs."""
    epochs = pd.DataFrame(
        [{"epoch": i, **epoch} for run in row.finished for i, epoch in enumerate(run.epochs, 1)],
    )
    names = ["train_loss", "dev_loss", "train_f1", "f1", "exact"]
    return {name: epochs.astype({name: float}).groupby("epoch")[name].agg(["median", "min", "max"]) for name in names}


def overfitting_epoch(row):
    """The epoch of the lowest median dev loss; None if it rose by less than 1 % after it, which may be noise."""
    loss = curves(row)["dev_loss"]["median"].dropna()
    return int(loss.idxmin()) if len(loss) and loss[loss.idxmin() :].max() >= 1.01 * loss.min() > 0 else None


def curves_figure(experiment, across=4):
    """Loss, F1 and exact match by epoch, a pair of panels for each row; None without any epochs."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = [row for row in experiment.rows if any(run.epochs for run in row.finished)]
    if not rows:
        return None
    across = min(across, len(rows))
    bands = -(-len(rows) // across)
    figure = Figure(figsize=(max(4.5, 2.6 * across), 3.9 * bands + 0.4))
    axes = figure.subplots(2 * bands, across, squeeze=False)
    lines = {
        "train_loss": (0, "training loss", COLOURS[0]),
        "dev_loss": (0, "dev loss", COLOURS[1]),
        "train_f1": (1, "training F1", COLOURS[4]),
        "f1": (1, "dev F1", COLOURS[2]),
        "exact": (1, "dev exact match", COLOURS[3]),
    }
    limits = [[], []]
    for i, row in enumerate(rows):
        pair = axes[2 * (i // across) : 2 * (i // across) + 2, i % across]
        for name, frame in curves(row).items():
            place, label, colour = lines[name]
            frame = frame.dropna()
            if frame.empty:
                continue
            style = "--" if name == "exact" else "-"  # its colour is dev F1's to some eyes
            frame["median"].plot(ax=pair[place], color=colour, linestyle=style, marker="o", markersize=3.5, label=label)
            pair[place].fill_between(frame.index, frame["min"], frame["max"], color=colour, alpha=0.18, linewidth=0)
            limits[place] += [frame["min"].min(), frame["max"].max()]
        epoch = overfitting_epoch(row)
        if epoch is not None:
            for ax in pair:
                ax.axvline(
                    epoch, color="#b5473c", linestyle=":", linewidth=1.2, label="lowest dev loss, overfitting after it"
                )
        pair[0].set_title(textwrap.fill(row.label, 28), loc="left")
        pair[1].set_xlabel("epoch")
        pair[0].set_xlabel("")
        for ax in pair:
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            ax.tick_params(labelbottom=ax is pair[1])
    for i, ax in enumerate(axes.flat):
        used = (i // across) // 2 * across + i % across < len(rows)
        ax.set_visible(used)
        values = limits[(i // across) % 2]
        if used and values:  # the same scale everywhere
            margin = 0.06 * (max(values) - min(values)) or 0.5
            ax.set_ylim(min(values) - margin, max(values) + margin)
    for ax, text in zip(axes[:, 0], ["loss", "per cent"] * bands, strict=True):
        ax.set_ylabel(text)
    handles = {label: line for ax in axes.flat for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    ncols = 2 if across <= 2 else 5 if len(handles) <= 5 else 3  # in even rows
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=ncols)
    return figure


def save(figure, path):
    """Write a figure as PATH.png and PATH.svg; returns the SVG as a data address for an HTML page."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path.with_suffix(".png"), dpi=200)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        path.with_suffix(".svg").write_bytes(buffer.getvalue())
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; name another --out") from None
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
