"""Group runs into rows of repeats and rows into experiments, and note what a reader must know of each row."""

import itertools
import json
import math
import statistics
from collections import Counter
from dataclasses import dataclass, field

from tools.report.reading import known, seconds_to, short


@dataclass(frozen=True)
class Stat:
    """Median, minimum and maximum of a measure, and the number of finished runs that have it."""

    median: float
    low: float
    high: float
    count: int


def stat(values):
    values = known(values)
    return Stat(statistics.median(values), min(values), max(values), len(values)) if values else None


@dataclass(eq=False)
class Row:
    """Repeats of one setting. Figures are those of the finished runs; `strong` and `weak` come from `compare`.

    machines: what their cards tell of the machines they ran on, each as the set of its cards (see `join_cards`).
    """

    runs: list
    machines: set = field(default_factory=set)
    label: str = ""
    series: str = ""  # the label without the number of ranks
    weak_series: str = ""  # the same with the batch of a rank, which weak scaling keeps
    stats: dict = field(default_factory=dict)
    strong: object = None  # comparing.Comparison
    weak: object = None
    notes: list = field(default_factory=list)

    def __post_init__(self):
        self.finished = [run for run in self.runs if run.status == "finished"]
        for name in self.lead.measures:
            self.stats[name] = stat([run.measures[name] for run in self.finished])

    @property
    def lead(self):
        """The first run that counts."""
        return (self.finished or self.runs)[0]

    def all(self, name):
        """The distinct values of an attribute over the finished runs, or over all runs if none finished."""
        return list(dict.fromkeys(getattr(run, name) for run in self.finished or self.runs))

    def median(self, name):
        """The median of a measure; None where no finished run has it."""
        return self.stats[name].median if self.stats[name] else None


@dataclass
class Experiment:
    """Rows of the same model, data and number of epochs."""

    title: str
    rows: list
    unit: str  # what there are many of: "GPUs" or "ranks"
    target: float | None = None  # the F1 of seconds_to_f1

    def several(self, facet):
        return len({row.lead.facets[facet][1] for row in self.rows}) > 1


def group(runs, target=None):
    """Group runs into experiments. target: the F1 of `seconds_to_f1`; None: the highest whole F1 that all runs reach.

    Rows are in the order of strategy (the baseline first), precision, batch and ranks.
    """
    rows = {}
    for run in sorted(runs, key=lambda run: (run.started, str(run.path))):
        rows.setdefault(run.key, []).append(run)
    order = sorted(map(Row, rows.values()), key=lambda row: row_order(row.lead))
    experiments, joined, crowded = {}, join_cards(runs), find_crowded(runs)
    for row in order:
        row.machines = {joined[card] for cards in row.all("uuids") for card in cards}
        names = [run.name for run in row.finished if run.path in crowded]
        if names:
            row.notes.append(f"ran beside another run on a host of the same name: {', '.join(names)}")
        experiments.setdefault(experiment_key(row), []).append(row)
    return [build_experiment(rows, target) for rows in experiments.values()]


def join_cards(runs):
    """{card: the cards of its machine}. Two cards share a machine if runs used them together, directly or in a chain.

    This separates machines of equal names ("vm"). Cards that no run joins may be on one machine or on two.
    """
    joined = {}
    for run in runs:
        together = run.uuids.union(*(joined.get(card, ()) for card in run.uuids))
        joined |= dict.fromkeys(together, together)
    return joined


def find_crowded(runs):
    """Paths of the runs that overlapped in time with another run on a host of the same name."""
    crowded = set()
    for one, other in itertools.combinations([run for run in runs if run.spans], 2):
        # Equal times belong to one attempt, which both runs record.
        crosses = any(a < d and c < b and (a, b) != (c, d) for a, b in one.spans for c, d in other.spans)
        if crosses and {*one.hosts} & {*other.hosts}:
            crowded |= {one.path, other.path}
    return crowded


def experiment_key(row):
    """What is equal in the rows of one experiment."""
    return json.dumps([row.lead.facets[name][0] for name in ("model", "data", "epochs")])


def row_order(run):
    return (run.strategy != "baseline", run.strategy, run.facets["precision"][1], run.batch, run.ranks, run.nodes)


def build_experiment(rows, target):
    """Name the rows so that each differs from the others, and add the figures that depend on all of them."""
    facets = rows[0].lead.facets
    wanted = rows[0].lead.epochs_wanted
    title = f"{facets['model'][1]} on {facets['data'][1]}"
    if wanted is not None:
        title += f", {wanted} epoch" + ("s" if wanted > 1 else "")
    unit = "GPUs" if all(row.lead.gpus for row in rows) else "ranks"
    experiment = Experiment(title, rows, unit)
    usual = statistics.mode(row.lead.facets["card"] for row in rows)
    # Labels say what differs between rows, the title what they share.
    shared = [] if experiment.several("precision") else [facets["precision"][1]]
    shared += [] if experiment.several("global batch") else [f"batch {facets['global batch'][1]}"]
    shared += [usual[1] + (" where a row names no other" if experiment.several("card") else "")]
    experiment.title = ", ".join([title, *shared])
    for row in rows:
        run = row.lead
        extra = [run.facets["precision"][1]] if experiment.several("precision") else []
        extra += [f"batch {run.batch}"] if experiment.several("global batch") else []
        extra += [run.facets["card"][1].replace("NVIDIA ", "")] if run.facets["card"] != usual else []
        row.series = ", ".join([run.strategy, *extra])
        row.weak_series = row.series.replace(f"batch {run.batch}", f"batch {run.batch / run.ranks:g} per rank")
        nodes = f" on {run.nodes} nodes" if run.nodes > 1 else ""
        row.label = ", ".join([f"{run.strategy} × {run.ranks}{nodes}", *extra])
    # The same number of ranks on one node and on several makes two lines of a figure.
    places = Counter((series, ranks) for series, ranks, _ in {(r.series, r.lead.ranks, r.lead.nodes) for r in rows})
    crossing = {series for (series, _), count in places.items() if count > 1}
    for row in rows:
        if row.series in crossing and row.lead.nodes > 1:
            more = f", {row.lead.nodes} nodes"
            row.series, row.weak_series = row.series + more, row.weak_series + more
    for same in [[row for row in rows if row.label == label] for label in {row.label for row in rows}]:
        if len(same) > 1:
            settings = [row.lead.arguments | row.lead.ran for row in same]
            names = sorted(name for name in set().union(*settings) if len({short(s.get(name)) for s in settings}) > 1)
            for number, (row, setting) in enumerate(zip(same, settings, strict=True), 1):
                more = ", ".join(f"{name} {short(setting.get(name))}" for name in names) or f"no. {number}"
                row.label, row.series = f"{row.label}, {more}", f"{row.series}, {more}"
                row.weak_series = f"{row.weak_series}, {more}"
    finished = [run for row in rows for run in row.finished if run.epochs]
    best = [run.measures["f1"] for run in finished]
    experiment.target = target if target is not None else math.floor(min(best)) if best else None
    for row in rows:
        seconds = [seconds_to(run, experiment.target) for run in row.finished if run.epochs]
        row.stats["seconds_to_f1"] = stat(seconds)
    most = max(len(row.finished) for row in rows)
    for row in rows:
        row.notes += row_notes(row, most)
    return experiment


def row_notes(row, most):
    """Sentences that a reader needs to judge the measures of a row."""
    found = []
    for run in row.runs:
        if run.status != "finished":
            how = "running, or killed" if run.status == "running" else run.status
            found.append(f"{run.name} is left out: {how}" + (f" ({run.error})" if run.error else ""))
        elif run.begun_as:
            found.append(f"{run.name} was begun as {run.begun_as}, so that its scores alone count, and no times")
        elif run.attempts > 1:
            timed = run.measures["run_seconds"] is not None
            whole = "its whole run is their sum" if timed else "one was killed, so the whole run's time is not known"
            whole += "; each warmed up, so an epoch after the first may hold a warm-up"
            found.append(f"{run.name} took {run.attempts} attempts; {whole}")
    for line in dict.fromkeys(line for run in row.finished for line in run.fallbacks):
        found.append(f"fell back: {line}")
    if 0 < len(row.finished) < most:
        found.append(f"repeats missing: {len(row.finished)} where another row has {most}")
    if len(row.finished) == 1:
        found.append("one run alone, so no spread")
    if len(row.all("code")) > 1:
        found.append(f"mixed code versions: {'; '.join(row.all('code'))}")
    elif row.lead.code == "unknown" or " " in row.lead.code:
        found.append(f"uncertain code version: {row.lead.code}")
    if len(row.all("torch")) > 1:
        found.append(f"mixed torch versions: {', '.join(row.all('torch'))}")
    if len(row.all("threads")) > 1:
        found.append(f"repeats with {', '.join(str(n or 'unknown') for n in row.all('threads'))} threads a rank")
    seeds = [run.seed for run in row.finished if run.seed is not None]
    if len(seeds) > len(set(seeds)):
        told = ", ".join(map(str, sorted(set(seeds))))
        found.append(f"{len(seeds)} runs with seed {told}, so their spread is not that of as many seeds")
    if any(row.all("shared")):
        found.append("shared node: other jobs may have used it at the same time")
    if len(row.all("cluster")) > 1 or (row.lead.cluster is None and len(row.all("hosts")) > 1):
        found.append(f"repeats on several machines: {', '.join(sorted(set().union(*row.all('hosts'))))}")
    elif row.lead.cluster is None and len(row.machines) > 1:
        found.append(f"repeats on cards that no run joins, so perhaps on several machines: {name_cards(row.machines)}")
    counts = sorted({len(run.epochs) for run in row.finished})
    if row.lead.epochs_wanted and counts and counts != [row.lead.epochs_wanted]:
        found.append(f"stopped early: {', '.join(map(str, counts))} of {row.lead.epochs_wanted} epochs")
    if counts == [1]:
        found.append("one epoch alone, so its warm-up counts")
    return found


def name_cards(machines):
    """Machines, named by the first digits of their cards' UUIDs."""
    return " | ".join(sorted(", ".join(sorted(card[:8] for card in cards)) for cards in machines))
