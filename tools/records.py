"""Run records for a report: read with checks, put together as rows of repeats, compared like with like.

Knows nothing of torch: a report can be made where only pandas and matplotlib are installed.
"""

import functools
import itertools
import json
import math
import os
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import UserError

SCHEMAS = (1, 2)  # of run.json, see common/record.py
REQUIRED = object()

# Arguments that repeats of one setting may differ in, and those that are compared in another form: files by what is in
# them, zero1 and shard as the strategy, others as the facet of their name.
FREE = {"seed", "run_name", "runs_dir", "cache_dir", "log_every", "device"}
FREE |= {"train_file", "dev_file", "data_name", "model", "model_path", "model_name", "score_untrained"}
FREE |= {"zero1", "shard", "precision", "batch_size", "epochs", "max_length", "overlap"}
FREE |= {"resume", "save_steps", "save_epochs", "save_minutes", "save_in_background", "hang_minutes"}
KERNELS = ("attention", "compile", "cuda_graphs", "deterministic")
SCOPES = ("training", "epoch", "run")  # what a speed-up can be of: the measures SCOPE_seconds
SCORES = ("exact", "f1", "HasAns_f1", "NoAns_f1")  # the measures that do not depend on where and how fast


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def find_records(paths):
    """The record files that `paths` stand for, each once: run folders, records, folders of either, in order."""
    found = {}
    for path in map(Path, paths):
        if not os.path.exists(path):  # Path's own test fails on a name too long
            raise UserError(f"{path}: no such file or folder; name run folders, run.json files or folders of them")
        for file in walk(path, set()):
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def walk(path, seen):
    """`path` itself or, if it is a folder, its run.json or else the JSON files in it and in its folders."""
    if not path.is_dir():
        return [path]
    if os.path.realpath(path) in seen:  # a link back
        return []
    seen.add(os.path.realpath(path))
    if os.path.exists(path / "run.json"):
        return [path / "run.json"]
    try:
        inside = sorted(child for child in path.iterdir() if not child.name.startswith("."))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return [file for child in inside if child.is_dir() or child.suffix == ".json" for file in walk(child, seen)]


def is_number(value):
    """A finite number from 0 of a size that arithmetic and figures can take."""
    return type(value) in (int, float) and 0 <= value < 1e30


KINDS = {
    "text": lambda value: isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
    "a number": is_number,
    "a whole number": lambda value: type(value) is int and 0 <= value < 2**63,
    "an object": lambda value: isinstance(value, dict),
    "a list of objects": lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value),
    "a list of texts": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "a number or a list of numbers": lambda value: all(map(is_number, value if isinstance(value, list) else [value])),
}


def clean(text):
    """Text of a record as one line that any terminal, file and figure can take."""
    text = text.encode(errors="replace").decode()
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= 120 else text[:119] + "…"


def short(value):
    """A value of a record for a message."""
    return clean(value if isinstance(value, str) else json.dumps(value))


def take(record, path, name, kind, default=REQUIRED):
    """The value at `name` ("model.parameters") of a record, which must be of this kind; null counts as absent."""
    value = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        if default is REQUIRED:
            raise UserError(f"{path}: damaged run record: no {name}")
        return default
    if not KINDS[kind](value):
        raise UserError(f"{path}: damaged run record: {name} is not {kind}")
    if kind == "text":
        return clean(value)
    return [clean(one) for one in value] if kind == "a list of texts" else value


@dataclass(frozen=True)
class Run:
    """What a report needs of one run.json.

    facets: what must be alike in a speed-up, {name: (identity, shown)}. arguments: the others that are not FREE.
    """

    path: Path
    name: str
    status: str
    error: str
    started: float
    strategy: str
    seed: int | None
    ranks: int
    gpus: int
    nodes: int
    batch: int
    epochs_wanted: int | None
    facets: dict
    arguments: dict
    epochs: list
    measures: dict
    cluster: str | None
    hosts: tuple
    uuids: frozenset
    processor: str | None
    threads: int | None  # of a rank, where no GPU does the work
    shared: bool
    attempts: int
    begun_as: str  # the strategy and ranks of earlier attempts, where they were others; then only the scores are kept
    spans: list  # (begun, ended) of the attempts that say both, in seconds since 1970
    code: str
    torch: str

    @property
    def key(self):
        """What is equal in repeats of one setting."""
        facets = {name: identity for name, (identity, _) in self.facets.items()}
        return json.dumps([self.strategy, self.ranks, self.nodes, facets, self.arguments], sort_keys=True)


def read_run(path):
    """One record as a Run; UserError with one line for what is none, or damaged, or tells of no training."""
    path = Path(path)
    try:
        if not path.is_file():
            raise UserError(f"{path}: not a file")
        record = json.loads(path.read_bytes())
        if not isinstance(record, dict) or "schema" not in record:
            raise UserError(f"{path}: not a run record (run.json)")
        if record["schema"] not in SCHEMAS:
            raise UserError(f"{path}: run record of schema {short(record['schema'])}; known here: {SCHEMAS}")
        return build_run(record, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: damaged run record: not JSON") from None


def build_run(record, path):
    """A Run from a parsed record."""
    get = functools.partial(take, record, path)
    status, error = get("status", "text"), get("error", "text", "")
    if record.get("strategy") is None:
        raise UserError(f"{path}: {status} before its training began" + (f": {error}" if error else ""))
    strategy = get("strategy", "text")
    if strategy == "evaluate-only":
        raise UserError(f"{path}: an evaluation, no training")
    ranks, batch = get("world_size", "a whole number"), get("arguments.batch_size", "a whole number")
    if not ranks or not batch:
        raise UserError(f"{path}: damaged run record: world_size or arguments.batch_size is 0")
    given = {clean(name): value for name, value in get("arguments", "an object").items() if value is not False}
    if given.get("zero1"):
        strategy += "-zero1"
    given.setdefault("reduce", "fp32")  # baseline.py has no such option: it reduces nothing
    given.setdefault("score_train", 0)  # of records from before there was one
    places, hosts = get("ranks", "a list of objects", []), get("hosts", "a list of texts", [])
    processor = get("processor", "text", None)
    on_gpus = get("gpus", "a list of texts", [])
    names = on_gpus or [take(place, path, "name", "text", "") for place in places] or [get("device", "text", "CPU")]
    cards = ", ".join(sorted(set(names)))
    commit = get("git_commit", "text", None)
    epochs = [build_epoch(epoch, f"{path}, epoch {i}") for i, epoch in enumerate(get("epochs", "a list of objects"), 1)]
    epochs_wanted = get("arguments.epochs", "a whole number", None)
    kernels = {name: given.get(name) or False for name in KERNELS}
    facets = {
        "precision": (get("precision", "text"),) * 2,
        "model": model_facet(get),
        "data": data_facet(get, given),
        "global batch": (batch, str(batch)),
        "epochs": (epochs_wanted, str(epochs_wanted)),
        "card": (cards, cards),
        "kernels": (kernels, ", ".join(f"{name} {short(value)}" for name, value in kernels.items())),
    }
    attempts = get("attempts", "a list of objects", [])
    spans = [[take(one, path, name, "a number", None) for name in ("started", "seconds")] for one in attempts]
    memory = get("peak_memory_bytes", "a number or a list of numbers", None)
    total = get("seconds.total", "a number", None)
    if len(attempts) > 1:  # the total is that of the last process
        parts = [take(attempt, path, "seconds", "a number", None) for attempt in attempts]
        total = None if None in parts else sum(parts)
    measures = measure(epochs) | {
        "run_seconds": total,
        "peak_memory_bytes": max(memory, default=None) if isinstance(memory, list) else memory,
    }
    ways = dict.fromkeys(attempt_way(one, path, (strategy, ranks)) for one in attempts)
    begun_as = ", ".join(f"{name} × {count}" for name, count in ways if (name, count) != (strategy, ranks))
    if begun_as:
        measures = {name: value if name in SCORES else None for name, value in measures.items()}
    if not epochs:  # benchmarks time steps without an epoch around them
        measures["windows_per_second"] = get("windows_per_second", "a number", None)
    return Run(
        path=path,
        name=clean(path.parent.resolve().name if path.name == "run.json" else path.stem),
        status=status,
        error=error,
        started=get("started", "a number", 0.0),
        strategy=strategy,
        seed=get("arguments.seed", "a whole number", None),
        ranks=ranks,
        gpus=len(on_gpus),
        nodes=get("nodes", "a whole number", 1),
        batch=batch,
        epochs_wanted=epochs_wanted,
        facets=facets,
        arguments={name: value for name, value in given.items() if name not in {*FREE, *KERNELS}},
        epochs=epochs,
        measures=measures,
        cluster=get("cluster", "text", None),
        hosts=tuple(dict.fromkeys(hosts or [get("host", "text", "?")])),
        uuids=frozenset(take(place, path, "uuid", "text", "") for place in places) - {""},
        processor=processor,
        shared=any(
            take(place, path, "node_shared", "true or false", False)
            or take(place, path, "other_processes", "a whole number", 0)
            for place in places
        ),
        threads=None if on_gpus else get("threads", "a whole number", None),
        attempts=len(attempts),
        begun_as=begun_as,
        spans=[(begun, begun + lasted) for begun, lasted in spans if None not in (begun, lasted)],
        code=(commit[:7] if commit else "unknown")
        + (" with uncommitted changes" if get("git_dirty", "true or false", False) else ""),
        torch=get("versions.torch", "text", "unknown"),
    )


def attempt_way(attempt, path, own):
    """(strategy, ranks) of an attempt; own: those of its record, for attempts of before they said so."""
    strategy = take(attempt, path, "strategy", "text", None)
    if strategy is None:
        return own
    if take(attempt, path, "zero1", "true or false", False):
        strategy += "-zero1"
    return strategy, take(attempt, path, "world_size", "a whole number", own[1])


def model_facet(get):
    """(identity, shown) of the model that training started from."""
    name, parameters = get("model.name", "text"), get("model.parameters", "a whole number")
    return [get("model.sha256", "text", name), parameters], f"{name} ({parameters / 1e6:.0f} M parameters)"


def data_facet(get, arguments):
    """(identity, shown) of the questions trained and evaluated on, and of the windows made of them."""
    sets = {name: part for name, part in get("data", "an object").items() if isinstance(part, dict)}
    sets.pop("seen", None)  # part of what was trained on
    parts = {name: [part.get(key) for key in ("sha256", "cuts", "questions", "windows")] for name, part in sets.items()}
    cut = [arguments.get("max_length"), arguments.get("overlap")]
    questions = get("data.train.questions", "a whole number")
    return [parts, cut], f"{get('data.name', 'text')} ({questions:,} questions, windows of {short(cut[0])})"


def build_epoch(record, path):
    """An epoch's figures, checked; what a record does not have is None."""
    get = functools.partial(take, record, path)
    figures = ("train_loss", "train_seconds", "f1", "exact")
    more = ("dev_loss", "evaluation_seconds", "checkpoint_seconds", "windows_per_second", "share_of_peak")
    epoch = {name: get(name, "a number") for name in figures}
    epoch |= {name: get(name, "a number", None) for name in (*more, "train_f1", "HasAns_f1", "NoAns_f1")}
    epoch["best"] = get("best", "true or false", False)
    cards = list(get("hardware", "an object", {}).values())
    sampled = min((take(card, path, "seconds", "a number", math.inf) for card in cards), default=math.inf)
    for name in ("utilisation", "power_watts", "energy_joules", "energy_counter_joules"):
        values = [take(card, path, name, "a number", None) for card in cards]
        if "energy" in name and sampled < 0.8 * epoch_seconds(epoch):  # of an epoch that another start had begun
            values = []
        epoch[name] = sum(values) if values and None not in values else None  # over the cards
    epoch["cards"] = len(cards)
    return epoch


def known(values):
    return [value for value in values if value is not None]


def median(values):
    """The median of the values that are known; None if none is."""
    return statistics.median(known(values)) if known(values) else None


def epoch_seconds(epoch):
    """Training, evaluation and saving; what was not timed by itself was part of another."""
    return epoch["train_seconds"] + (epoch["evaluation_seconds"] or 0) + (epoch["checkpoint_seconds"] or 0)


def measure(epochs):
    """A run's figures from its epochs.

    Those of 'an epoch' are the median over the epochs after the first, which compiles and warms up (the first if it
    is alone). exact and f1 are those of the best epoch, whose model was kept.
    """
    later = epochs[1:] or epochs
    kept = ([epoch for epoch in epochs if epoch["best"]] or epochs or [{}])[-1]

    def rate(name):  # an epoch of a few steps may have none
        found = median([epoch[name] for epoch in later])
        return median([epoch[name] for epoch in epochs]) if found is None else found

    energy = [epoch["energy_counter_joules"] or epoch["energy_joules"] for epoch in later]
    per_card = {
        name: median([epoch[name] / epoch["cards"] for epoch in later if epoch[name] is not None])
        for name in ("utilisation", "power_watts")
    }
    return {
        **{name: kept.get(name) for name in SCORES},
        **{name: rate(name) for name in ("windows_per_second", "share_of_peak")},
        "training_seconds": median([epoch["train_seconds"] for epoch in later]),
        "evaluation_seconds": median([epoch["evaluation_seconds"] for epoch in later]),
        "epoch_seconds": median([epoch_seconds(epoch) for epoch in later]),
        "run_training_seconds": sum(epoch["train_seconds"] for epoch in epochs) if epochs else None,
        "run_evaluation_seconds": sum(epoch["evaluation_seconds"] or 0 for epoch in epochs) if epochs else None,
        **per_card,
        "energy_joules": median(energy),
    }


def seconds_to(run, target):
    """Seconds of training, evaluation and saving to the end of the first epoch with this F1; inf if there is none.

    None for a run that was begun as another.
    """
    if run.begun_as:
        return None
    seconds = 0.0
    for epoch in run.epochs:
        seconds += epoch_seconds(epoch)
        if epoch["f1"] >= target:
            return seconds
    return math.inf


# ---------------------------------------------------------------------------------------------------------------------
# Rows and experiments


@dataclass(frozen=True)
class Stat:
    """Median, least and most of a figure over the finished runs that have it, and how many they are."""

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
    strong: "Comparison | None" = None
    weak: "Comparison | None" = None
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
        """All values of an attribute over the finished runs, or all if there are none, each once."""
        return list(dict.fromkeys(getattr(run, name) for run in self.finished or self.runs))

    def median(self, name):
        """The median of a measure; None where no finished run has it."""
        return self.stats[name].median if self.stats[name] else None


@dataclass
class Experiment:
    """Rows of the same model, data and number of epochs, the only ones that a reader would look at side by side."""

    title: str
    rows: list
    unit: str  # what there are many of: "GPUs" or "ranks"
    target: float | None = None  # the F1 of seconds_to_f1

    def several(self, facet):
        return len({row.lead.facets[facet][1] for row in self.rows}) > 1


def group(runs, target=None):
    """Experiments of rows of runs. target: the F1 of `seconds_to_f1`; None: the most, in whole numbers, that all reach.

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
    """{card: the cards that are of its machine, since runs had them together, one with the other or by a third}.

    Machines of equal names ("vm") are told apart by them. Where nothing joins two cards, they may be of one or not.
    """
    joined = {}
    for run in runs:
        together = run.uuids.union(*(joined.get(card, ()) for card in run.uuids))
        joined |= dict.fromkeys(together, together)
    return joined


def find_crowded(runs):
    """Paths of the runs that had another beside them: at the same time, on a host of the same name."""
    crowded = set()
    for one, other in itertools.combinations([run for run in runs if run.spans], 2):
        # Equal times are of one attempt, which the other run has taken over.
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
    # What differs stands in the rows' labels, what they share in the title.
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
    # As many ranks on one node and on several are two lines of a figure.
    places = Counter((series, ranks) for series, ranks, _ in {(r.series, r.lead.ranks, r.lead.nodes) for r in rows})
    crossing = {series for (series, _), count in places.items() if count > 1}
    for row in rows:
        if row.series in crossing and row.lead.nodes > 1:
            more = f", {row.lead.nodes} nodes"
            row.series, row.weak_series = row.series + more, row.weak_series + more
    for same in [[row for row in rows if row.label == label] for label in {row.label for row in rows}]:
        if len(same) > 1:
            settings = [row.lead.arguments | row.lead.facets["kernels"][0] for row in same]
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
        row.notes += notes(row, most)
    return experiment


def notes(row, most):
    """What a reader must know of a row beside its figures, a sentence each."""
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
    """Machines by the beginnings of their cards' UUIDs, for a message."""
    return " | ".join(sorted(", ".join(sorted(card[:8] for card in cards)) for cards in machines))


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


@dataclass
class Comparison:
    """A row against a baseline. differences: sentences; with any, there is a speed-up only if that was allowed."""

    base: Row
    differences: list
    speedup: dict  # {scope: (speed-up, efficiency, Karp-Flatt serial fraction), each None where it has no meaning}


def unlike(row, base):
    """{name: what differs} that forbids to call a ratio of times a speed-up."""
    found = {}
    for name, (identity, shown) in row.lead.facets.items():
        other, other_shown = base.lead.facets[name]
        if name == "kernels" and identity != other:
            differing = [kernel for kernel in KERNELS if identity[kernel] != other[kernel]]
            found[name] = "; ".join(f"{k} {short(identity[k])} against {short(other[k])}" for k in differing)
        elif identity != other:
            what = f"{shown} against {other_shown}" if shown != other_shown else f"{shown}, but not the same"
            found[name] = f"{name} {what}"
    machine = other_machine(row, base)
    if machine:
        found["machine"] = f"another machine: {machine}"
    trained = [{len(run.epochs) for run in one.finished} for one in (row, base)]
    if "epochs" not in found and trained[0] and trained[0] != trained[1]:
        found["epochs"] = f"epochs {against(*map(sorted, trained))}"
    return found


def against(values, others):
    """The values of a row and those of its baseline, for a message."""
    return " against ".join(
        ", ".join("unknown" if value is None else str(value) for value in some) for some in (values, others)
    )


def other_machine(row, base):
    """Why the two did not run on the same machine or cluster; "" if they did, as far as records can tell."""
    if set(row.all("cluster")) != set(base.all("cluster")):
        return against(row.all("cluster"), base.all("cluster"))
    if row.lead.cluster is None:  # on a cluster, jobs run on whichever nodes are free
        hosts = [sorted(set().union(*one.all("hosts"))) for one in (row, base)]
        if not all(set(own) & set(other) for own in row.all("hosts") for other in base.all("hosts")):
            return against(*hosts)
        if row.machines and base.machines and not row.machines & base.machines:
            return f"{', '.join(hosts[0])} with other cards"
    processors = [sorted(known(one.all("processor"))) for one in (row, base)]
    return against(*processors) if all(processors) and processors[0] != processors[1] else ""


def recipe(row, base):
    """Names of the other arguments that differ; they forbid nothing, but a reader is told."""
    own, other = row.lead.arguments, base.lead.arguments
    return sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))


def choose_bases(experiments, name=None):
    """The rows that others may be compared with; name: a strategy, a row's label or a run's name.

    In each experiment: of that name, those of the fewest ranks. Without a name: those of baseline.py; if there are
    none, those of one rank.
    """
    rows, bases = [], []
    for experiment in experiments:
        finished = [row for row in experiment.rows if row.finished]
        rows += finished
        if name is None:
            found = [row for row in finished if row.lead.ranks == 1]
            bases += [row for row in found if row.lead.strategy == "baseline"] or found
        else:
            found = [r for r in finished if name in (r.lead.strategy, r.label, *(run.name for run in r.runs))]
            bases += [row for row in found if row.lead.ranks == min(one.lead.ranks for one in found)]
    if name is not None and not bases:
        names = sorted({row.lead.strategy for row in rows} | {row.label for row in rows})
        raise UserError(f"--baseline {name}: no finished run of this name; there are: {'; '.join(names)}")
    return bases


def compare(experiments, bases, allow_unlike=False):
    """Give each row its comparisons: `strong` at the same global batch, `weak` at the same batch per rank.

    Each is with the baseline that is nearest to the row, of its own experiment if that has any. A row that is like
    none keeps the nearest as `strong`, with the differences named and without a speed-up, unless that is allowed.
    """
    for row in [row for experiment in experiments for row in experiment.rows]:
        others = [base for base in bases if experiment_key(base) == experiment_key(row)] or bases
        if not others or row in bases or not row.finished:
            continue
        found = {id(base): unlike(row, base) for base in others}
        near = sorted(others, key=lambda base: distance(row, base, found[id(base)]))
        base = near[0]
        differences = list(found[id(base)].values())
        allowed = not differences or (allow_unlike and not is_weak(row, base))
        speedup = {}
        for scope in SCOPES:
            ratio = quotient(base.median(f"{scope}_seconds"), row.median(f"{scope}_seconds"))
            speedup[scope] = scaled(row, base, ratio if allowed else None, serial=True)
        row.strong = Comparison(base, differences, speedup)
        doubt = "faster than ideal: find out why (a busy machine, a slow baseline) before it is reported"
        if not differences and max((one[1] or 0 for one in speedup.values()), default=0) > 1.05:
            row.notes.append(doubt)
        if allowed or experiment_key(row) == experiment_key(base):
            row.notes += versus(row, base)
        for base in [base for base in near if is_weak(row, base)][:1]:
            others = [what for name, what in found[id(base)].items() if name != "global batch"]
            if not others or (allow_unlike and differences):
                ratio = quotient(row.median("windows_per_second"), base.median("windows_per_second"))
                row.weak = Comparison(base, others, {"weak": scaled(row, base, ratio)})
                also = [doubt] if not others and (row.weak.speedup["weak"][1] or 0) > 1.05 else []
                row.notes += [note for note in also + versus(row, base) if note not in row.notes]


def distance(row, base, differences):
    """What makes a baseline nearer than another, in this order.

    Few differences that forbid a speed-up; if it is one alone, that it leaves weak scaling; the strategy; few other
    arguments that differ.
    """
    weak = set(differences) == {"global batch"} and is_weak(row, base)
    return len(differences), not weak, row.lead.strategy != base.lead.strategy, len(recipe(row, base))


def is_weak(row, base):
    """Whether the global batch grew in proportion to the ranks."""
    run, other = row.lead, base.lead
    return run.ranks != other.ranks and run.batch * other.ranks == other.batch * run.ranks


def quotient(above, below):
    return above / below if above is not None and below else None


def scaled(row, base, ratio, serial=False):
    """(speed-up, efficiency, Karp-Flatt serial fraction); the last needs one rank against several of the same work."""
    if ratio is None:
        return None, None, None
    ranks = row.lead.ranks / base.lead.ranks
    fraction = None
    if serial and base.lead.ranks == 1 and ranks > 1 and ratio > 0:
        fraction = (1 / ratio - 1 / ranks) / (1 - 1 / ranks)
    return ratio, ratio / ranks, fraction


def versus(row, base):
    """Differences to the baseline that forbid nothing, a sentence each."""
    found = []
    names = recipe(row, base)
    if names:
        parts = [f"{n} {short(row.lead.arguments.get(n))} against {short(base.lead.arguments.get(n))}" for n in names]
        found.append("other settings than its baseline: " + ", ".join(parts))
    for name in ("code", "torch"):
        if set(row.all(name)) != set(base.all(name)):
            found.append(f"other {name} than its baseline: {against(row.all(name), base.all(name))}")
    if set(row.all("threads")) != set(base.all("threads")):
        found.append(f"threads a rank, other than its baseline's: {against(row.all('threads'), base.all('threads'))}")
    seeds = [{run.seed for run in one.finished if run.seed is not None} for one in (row, base)]
    if seeds[0] - seeds[1] and seeds[1] - seeds[0]:  # fewer alone are told as missing or repeated
        found.append(f"other seeds than its baseline: {against(*map(sorted, seeds))}")
    if row.lead.cluster is None and row.machines & base.machines and row.machines ^ base.machines:
        cards = f"{name_cards(row.machines)} against {name_cards(base.machines)}"
        found.append(f"perhaps not all on the machine of its baseline, with cards that no run joins: {cards}")
    return found
