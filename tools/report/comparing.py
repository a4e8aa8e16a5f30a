"""Rows against baselines: speed-ups only between runs that are alike."""

from dataclasses import dataclass

from common.errors import UserError
from tools.report.grouping import Row, experiment_key, name_cards
from tools.report.reading import RAN, known, short, told

SCOPES = ("training", "epoch", "run")  # what a speed-up can be of: the measures SCOPE_seconds


@dataclass
class Comparison:
    """A row against a baseline. differences: sentences, of which any forbids a speed-up without --allow-unlike."""

    base: Row
    differences: list
    speedup: dict  # {scope: (speed-up, efficiency, Karp-Flatt serial fraction), each None where it has no meaning}


def unlike(row, base):
    """{name: what differs} of the differences that forbid a speed-up."""
    found = {}
    for name, (identity, shown) in row.lead.facets.items():
        other, other_shown = base.lead.facets[name]
        if name in RAN:
            differing = [part for part in RAN[name] if identity[part] != other[part]]
            if "precision" in found:
                differing = [part for part in differing if part != "TF32"]  # said already
            if differing:
                found[name] = "; ".join(f"{p} {told(identity[p])} against {told(other[p])}" for p in differing)
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
    """Why the two ran on different machines or clusters; "" if the records show no difference."""
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
    """Names of the other arguments that differ. They forbid nothing but are noted."""
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
    """Sort key: the baseline with the smallest one is the nearest. It counts, in this order:

    the differences that forbid a speed-up; whether the only one still allows weak scaling; the strategy; the other
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
    """Sentences about the differences to the baseline that forbid nothing."""
    found = []
    names = recipe(row, base)
    if names:
        parts = [f"{n} {short(row.lead.arguments.get(n))} against {short(base.lead.arguments.get(n))}" for n in names]
        found.append("other settings than its baseline: " + ", ".join(parts))
    ran, other = row.lead.ran, base.lead.ran
    unknown = [part for part in ran if ran[part] is None and other[part] is None]
    if unknown:
        found.append(f"neither its record nor its baseline's has, so not compared: {', '.join(unknown)}")
    assumed = sorted({*row.lead.assumed, *base.lead.assumed})
    if assumed:
        found.append(f"older records, so compared as asked for and not as it ran: {', '.join(assumed)}")
    for name in ("code", "torch"):
        if set(row.all(name)) != set(base.all(name)) and (name == "code" or ran["torch"] == other["torch"]):
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
