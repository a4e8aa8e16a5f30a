"""Run records, read with checks: what a report needs of each run.

Knows nothing of torch: a report can be made where only pandas, matplotlib and tabulate are installed.
"""

import functools
import json
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from common.args import classes
from common.errors import UserError

SCHEMAS = (1, 2)  # of run.json, see common/run/record.py
REQUIRED = object()

# Arguments that repeats of one setting may differ in, by their class; and those that are compared in another form:
# zero1 and shard as the strategy, others as the facet of their name.
FREE = {name for name, kind in classes().items() if kind in ("input", "bookkeeping")} | {"seed", "device"}
FREE |= {"zero1", "shard", "precision", "batch_size", "epochs", "max_length", "overlap"}
FREE |= {"attention", "compile", "cuda_graphs", "deterministic", "dropout", "attention_dropout"}  # see read_ran
RAN = {  # what must be alike as it ran, whatever was asked for: {facet: its parts}
    "kernels": ("attention", "compile", "graphs", "own kernels", "deterministic", "TF32"),
    "dropout": ("hidden dropout", "attention dropout"),
    "versions": ("torch", "CUDA"),
}
SCORES = ("exact", "f1", "HasAns_f1", "NoAns_f1")  # the measures that do not depend on where and how fast


def find_records(paths):
    """The record files in `paths`, each once and in order. A path is a run folder, a record or a folder of them."""
    found = {}
    for path in map(Path, paths):
        if not os.path.exists(path):  # Path's own test fails on a name too long
            raise UserError(f"{path}: no such file or folder; name run folders, run.json files or folders of them")
        for file in walk(path, set()):
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def walk(path, seen):
    """`path` if it is a file. Of a folder, its run.json, else the JSON files in it and below it."""
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
    """Whether it is a finite number from 0, small enough for arithmetic and figures."""
    return type(value) in (int, float) and 0 <= value < 1e30


KINDS = {
    "text": lambda value: isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
    "a number": is_number,
    "a whole number": lambda value: type(value) is int and 0 <= value < 2**63,
    "an object": lambda value: isinstance(value, dict),
    "a list of objects": lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value),
    "a list of texts": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "a list of numbers": lambda value: isinstance(value, list) and all(map(is_number, value)),
}


def clean(text):
    """Text of a record as one line that any terminal, file and figure can take."""
    text = text.encode(errors="replace").decode()
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= 120 else text[:119] + "…"


def short(value):
    """A value of a record for a message."""
    return clean(value if isinstance(value, str) else json.dumps(value))


def told(value):
    """A value for a message; None is what a record does not have."""
    return "unknown" if value is None else short(value)


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

    facets: what must be alike in a speed-up, {name: (identity, shown)}. The identity of those in RAN is a dict of their
    parts, each None if unknown. arguments: those that are not FREE.
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
    assumed: tuple  # parts of facets in RAN that the record has only as they were asked for
    fallbacks: list  # sentences: what ran instead of what was asked for
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
    def ran(self):
        """{part: value} of all facets in RAN."""
        return {part: value for facet in RAN for part, value in self.facets[facet][0].items()}

    @property
    def key(self):
        """What is equal in repeats of one setting."""
        facets = {name: identity for name, (identity, _) in self.facets.items()}
        return json.dumps([self.strategy, self.ranks, self.nodes, facets, self.arguments], sort_keys=True)


def read_run(path):
    """One record as a Run.

    UserError, one line, for a file that is no record, is damaged or has no training.
    """
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
    given = read_arguments(get)
    if given.get("zero1"):
        strategy += "-zero1"
    on_gpus = get("gpus", "a list of texts", [])
    epochs = [build_epoch(epoch, f"{path}, epoch {i}") for i, epoch in enumerate(get("epochs", "a list of objects"), 1)]
    attempts = get("attempts", "a list of objects", [])
    ways = dict.fromkeys(attempt_way(one, path, (strategy, ranks)) for one in attempts)
    begun_as = ", ".join(f"{name} × {count}" for name, count in ways if (name, count) != (strategy, ranks))
    spans = [[take(one, path, name, "a number", None) for name in ("started", "seconds")] for one in attempts]
    ran, assumed = read_ran(get, bool(on_gpus))
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
        epochs_wanted=get("arguments.epochs", "a whole number", None),
        facets=read_facets(get, given, path) | ran,
        assumed=assumed,
        fallbacks=get("fallbacks", "a list of texts", []),
        arguments={name: value for name, value in given.items() if name not in FREE},
        epochs=epochs,
        measures=read_measures(get, epochs, attempts, begun_as, path),
        threads=None if on_gpus else get("threads", "a whole number", None),
        attempts=len(attempts),
        begun_as=begun_as,
        spans=[(begun, begun + lasted) for begun, lasted in spans if None not in (begun, lasted)],
        **read_place(get, path),
    )


def read_arguments(get):
    """{name: value} of the arguments of a record that are set, under their current names."""
    given = {clean(name): value for name, value in get("arguments", "an object").items() if value is not False}
    given.setdefault("reduce", "fp32")  # baseline.py has no such option: it reduces nothing
    if isinstance(given["reduce"], str):
        given["reduce"] = {"rows": "fp32", "rows-bf16": "bf16"}.get(given["reduce"], given["reduce"])  # the type alone
    given.setdefault("score_train", 0)  # of records from before there was one
    return given


def read_facets(get, given, path):
    """What must be alike in a speed-up beside RAN, {name: (identity, shown)}."""
    places, on_gpus = get("ranks", "a list of objects", []), get("gpus", "a list of texts", [])
    names = on_gpus or [take(place, path, "name", "text", "") for place in places] or [get("device", "text", "CPU")]
    cards = ", ".join(sorted(set(names)))
    epochs, batch = get("arguments.epochs", "a whole number", None), get("arguments.batch_size", "a whole number")
    return {
        "precision": (get("precision", "text"),) * 2,
        "model": model_facet(get),
        "data": data_facet(get, given),
        "global batch": (batch, str(batch)),
        "epochs": (epochs, str(epochs)),
        "card": (cards, cards),
    }


def read_ran(get, on_gpus):
    """(the facets in RAN, names of those parts that older records have only as they were asked for)."""
    asked, kernels, products = get("arguments", "an object"), get("kernels", "a list of texts", None), {}
    for name in ("matmul", "cudnn"):
        products[name] = get(f"tf32.{name}", "true or false", None)
    ran = {name: get(name, "true or false", None) for name in ("compile", "graphs", "deterministic")}
    ran["attention"] = get("attention", "text", None)
    ran["own kernels"] = None if kernels is None else ", ".join(kernels) or "none"
    if None not in products.values():
        ran["TF32"] = " and ".join(name for name, is_on in products.items() if is_on) or "off"
    for name in ("hidden", "attention"):
        ran[f"{name} dropout"] = get(f"dropout.{name}", "a number", None)
    stand_in = {
        "attention": asked.get("attention"),
        "compile": asked.get("compile"),
        "graphs": asked.get("cuda_graphs"),
    }
    stand_in["deterministic"] = asked.get("deterministic", False)
    stand_in["TF32"] = "matmul and cudnn" if get("precision", "text") == "tf32" else "off"
    own = get("model.dropout", "a number", None)
    stand_in["hidden dropout"] = own if asked.get("dropout") is None else asked["dropout"]
    stand_in["attention dropout"] = asked.get("attention_dropout")
    assumed = [name for name, value in stand_in.items() if ran.get(name) is None and value is not None]
    ran |= {name: stand_in[name] for name in assumed}
    if ran["own kernels"] is None and ran["attention"] not in ("fused", None):
        ran["own kernels"] = "none"  # only this backend has any
    ran["torch"] = minor(get("versions.torch", "text", None))
    ran["CUDA"] = minor(get("versions.cuda", "text", None)) if on_gpus else "none"
    facets = {}
    for facet, parts in RAN.items():
        identity = {name: ran.get(name) for name in parts}
        facets[facet] = identity, ", ".join(f"{name} {told(value)}" for name, value in identity.items())
    return facets, tuple(assumed)


def minor(version):
    """The first two numbers of a version, as 2.13 of 2.13.0+cpu; None if there is no version."""
    return version and ".".join(version.split("+")[0].split(".")[:2])


def read_measures(get, epochs, attempts, begun_as, path):
    """A run's measures. If it began under another strategy or number of ranks, it has only its scores."""
    memory = get("peak_memory", "an object", {})  # older records have one figure, which evaluation may have set
    phases = ("training", "evaluation")
    peaks = {phase: take(memory, path, phase, "a list of numbers", []) for phase in phases}
    total = get("seconds.total", "a number", None)
    if len(attempts) > 1:  # the total is that of the last process
        parts = [take(attempt, path, "seconds", "a number", None) for attempt in attempts]
        total = None if None in parts else sum(parts)
    measures = measure(epochs) | {
        "run_seconds": total,
        **{f"{phase}_memory": max(peaks[phase], default=None) for phase in phases},
    }
    if begun_as:
        measures = {name: value if name in SCORES else None for name, value in measures.items()}
    if not epochs:  # benchmarks time steps without an epoch around them
        measures["windows_per_second"] = get("windows_per_second", "a number", None)
    return measures


def read_place(get, path):
    """The machine and the code of a run: the fields of Run from `cluster` to `shared`, `code` and `torch`."""
    places, hosts = get("ranks", "a list of objects", []), get("hosts", "a list of texts", [])
    commit = get("git_commit", "text", None)
    changed = " with uncommitted changes" if get("git_dirty", "true or false", False) else ""
    return {
        "cluster": get("cluster", "text", None),
        "hosts": tuple(dict.fromkeys(hosts or [get("host", "text", "?")])),
        "uuids": frozenset(take(place, path, "uuid", "text", "") for place in places) - {""},
        "processor": get("processor", "text", None),
        "shared": any(
            take(place, path, "node_shared", "true or false", False)
            or take(place, path, "other_processes", "a whole number", 0)
            for place in places
        ),
        "code": (commit[:7] if commit else "unknown") + changed,
        "torch": get("versions.torch", "text", "unknown"),
    }


def attempt_way(attempt, path, own):
    """(strategy, ranks) of an attempt. own: those of its record, for old records whose attempts have none."""
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
    """(identity, shown) of the data: the questions of each set, and how they were cut into windows."""
    sets = {name: part for name, part in get("data", "an object").items() if isinstance(part, dict)}
    sets.pop("seen", None)  # part of what was trained on
    parts = {name: [part.get(key) for key in ("sha256", "cuts", "questions", "windows")] for name, part in sets.items()}
    cut = [arguments.get("max_length"), arguments.get("overlap")]
    questions = get("data.train.questions", "a whole number")
    return [parts, cut], f"{get('data.name', 'text')} ({questions:,} questions, windows of {short(cut[0])})"


def build_epoch(record, path):
    """An epoch's measures, checked. A measure that the record lacks is None."""
    get = functools.partial(take, record, path)
    figures = ("train_loss", "train_seconds", "f1", "exact")
    more = ("dev_loss", "evaluation_seconds", "checkpoint_seconds", "tail_seconds")
    more += ("windows_per_second", "share_of_peak")
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
    """Seconds from the first step to the next epoch's, or to the end of the run.

    Older records have no tail: then training, evaluation and saving, as far as each has a time of its own.
    """
    known = (epoch["evaluation_seconds"] or 0) + (epoch["checkpoint_seconds"] or 0)
    return epoch["train_seconds"] + (known if epoch["tail_seconds"] is None else epoch["tail_seconds"])


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
