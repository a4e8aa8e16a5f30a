"""Writes the README's performance section and docs/performance.md from the committed records: no figure is typed.

    python -m benchmarks.readme

The README has the tables of the records in SHOWN, between two marker lines, docs/performance.md those of all. Of each
peer the README shows the setting of attention dropout in which this project leads by less. A test asserts that both are
what this command would write.
"""

import json
import statistics

from benchmarks import compare, scaling
from common import ROOT, errors
from common.errors import UserError

BEGIN = "<!-- written by `python -m benchmarks.readme` from benchmarks/records -->\n"
END = "<!-- end of what benchmarks.readme writes -->\n"
RECORDS = ROOT / "benchmarks" / "records"
SHOWN = ("peers-h100", "cpu-trainer", "cpu-trainer-no-dropout", "steps-h100", "scaling-h200x4", "quality-minilm")
ALL = """# Performance

The tables of all records, by `python -m benchmarks.readme`. [benchmarks/README.md](../benchmarks/README.md) says how
each comes about, and where; [benchmarks/NOTES.md](../benchmarks/NOTES.md) what they mean.
"""


def section(records=RECORDS, shown=None):
    """For each kind of record its tables, or a line that says there is none; shown: names of records, None for all."""
    parts = []
    for title, pattern, tell, command in (
        ("This project and others, on the same windows", "peers-*", peers, "compare"),
        ("The same on a CPU", "cpu-trainer*", peers, "compare"),
        ("Training steps", "steps-*", steps, "steps"),
        ("Scaling", "scaling-*", scaled, "scaling"),
        ("Quality against time", "*-minilm*", quality, "quality"),
    ):
        folders = sorted(one for one in records.glob(pattern) if one.is_dir() and one.name in (shown or [one.name]))
        if shown and tell is peers:
            folders, tell = sorted(folders, key=smallest_lead)[:1], peers_in_brief
        told = [tell(folder) for folder in folders]
        missing = f"No record yet: `python -m benchmarks.{command}` makes one."
        parts.append(f"### {title}\n\n" + ("\n\n".join(told) or missing))
    return "\n" + "\n\n".join(parts) + "\n\n"


def all_tables():
    """The text of docs/performance.md."""
    return ALL + section().replace("### ", "## ").rstrip() + "\n"


def read(path):
    """The JSON in a file, or of each of its lines that holds an object."""
    text = path.read_text()
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def read_folder(folder):
    return [record for path in sorted(folder.iterdir()) if path.is_file() for record in read(path)]


def each(values):
    """Different values in one text, in order."""
    return ", ".join(dict.fromkeys(map(str, values)))


def spread(median, least, most, form=compare.speed_text):
    return f"{form(median)} ({form(least)} to {form(most)})"


def caption(folder, model, device, torch, what):
    setting = ", ".join(filter(None, (model, device, torch and f"torch {torch}")))
    return f"{'; '.join(filter(None, (setting, what)))} (`benchmarks/records/{folder.name}`).\n\n"


def measured_peers(records):
    return [one for one in records.values() if one["rounds"] and not one["way"].startswith("this-project")]


def smallest_lead(folder):
    """The least times that this project is as fast as a peer of compare's folder."""
    records = compare.read_records(folder)
    found = (compare.leads(records, one)[0] for one in measured_peers(records))
    return min(filter(None, found), default=float("inf"))


def dropout_text(records, brief):
    """Which settings of attention dropout the records of compare have, in sentences."""
    settings = {}
    for one in measured_peers(records):
        settings.setdefault(f"`{one['way']}`", set()).add(one["arguments"]["attention_dropout"])
    own = [way for way, values in settings.items() if 0 not in values]
    if not settings:
        return "No peer was measured."
    if own == list(settings):
        values = each(sorted(set.union(*settings.values())))
        return f"**The peers ran with attention dropout {values}, this project with 0. No peer here ran with 0.**"
    if max(map(len, settings.values())) == 1 and not own:
        return "Attention dropout was 0 in all ways."
    text = "Each peer ran with its own attention dropout and with 0, which this project has."
    text += " Its row here is the setting in which this project leads by less." if brief else ""
    return text + (f" **Not measured with 0: {', '.join(own)}.**" if own else "")


def peers_in_brief(folder):
    """compare's table for README: of each peer one setting, and six columns."""
    return peers(folder, brief=True)


def peers(folder, brief=False):
    """compare's table."""
    records = compare.read_records(folder)
    measured = [one for one in records.values() if one["rounds"]]
    rounds = each(len(one["rounds"]) for one in measured)
    found = []
    for row in compare.rows(compare.closest(records) if brief else records):
        row["windows/s"] = f"{row['windows/s']} ({row.pop('least')} to {row.pop('most')})"
        row["way"] = f"`{row['way']}`"
        if brief:
            row["ours ÷ it"] += f" ({row['at its precision']})"
            columns = ("way", "precision", "attention dropout", "windows/s", "ours ÷ it", "s to equal F1")
            row = {name: row[name] for name in columns}
        found.append(row)
    trained = each(one["whole_run"]["model"]["name"] for one in measured if "epochs" in one.get("whole_run", {}))
    text = caption(
        folder,
        each(one["model"]["name"] for one in measured),
        each(name for one in measured for name in (one["gpus"] or [f"{one['device']}, {one['threads']} threads"])),
        each(one["versions"]["torch"] for one in measured),
        f"all ways in turn, median of {rounds} turns (least to most)"
        + (f"; seconds to equal F1: {trained}" if trained else ""),
    )
    text += dropout_text(records, brief) + "\n\n"
    missing = dict.fromkeys(
        f"{one['strategy']}: {one['error']}" for one in records.values() if one["status"] == "failed"
    )
    return text + compare.table(found) + (f"\n\nNot measured: {'; '.join(missing)}." if missing else "")


def steps(folder):
    """Lines of benchmarks.steps as a table."""
    order = ("shape", "ranks", "strategy", "batch_size", "precision", "attention")
    lines = sorted(read_folder(folder), key=lambda one: [one[name] for name in order])
    found = []
    for one in lines:
        row = {"model": one["shape"]} if len({line["shape"] for line in lines}) > 1 else {}
        row |= {"GPUs": str(one["ranks"]), "strategy": one["strategy"]}
        row |= {"precision": one["precision"], "attention": one["attention"]}
        row |= {"batch": str(one["batch_size"]), "windows/s": spread(*one["windows_per_second"])}
        row |= {"ms a step": f"{one['ms_a_step']:.1f}", "useful TFLOP/s": f"{one['useful_tflops']:.0f}"}
        found.append(row | {"GB a GPU": f"{one['peak_memory_gb']:.1f}"})
    device = each(one["device"] for one in lines if "device" in one)
    what = "median of the repeats (least to most), useful: real tokens alone"
    if not all(one.get("steady") for one in lines):  # older ones do not say
        what += "; a repeat may hold the making of a graph"
    versions = each(one["torch"] for one in lines if "torch" in one)
    return caption(folder, each(one["shape"] for one in lines), device, versions, what) + compare.table(found)


def scaled(folder):
    """scaling's table."""
    studies = read_folder(folder)
    results = [one for study in studies for one in study["results"]]
    rows = [row for study in studies for row in study["rows"]]
    device = each(one["device"] for one in results if "device" in one)
    versions = each(study["versions"]["torch"] for study in studies)
    what = "speed-up over one GPU, weak: the same windows per GPU, strong: in all"
    return caption(folder, each(one["shape"] for one in results), device, versions, what) + scaling.table(rows)


def quality(folder):
    """F1 and seconds of training of whole runs, by recipe, as a table."""
    runs = [run for run in read_folder(folder) if "epochs" in run]
    recipes = {}
    for run in runs:
        arguments = run["arguments"]
        strategy = "Hugging Face Trainer" if run["strategy"] == "hf-trainer" else run["strategy"]
        trained_by = f"{strategy} × {run['world_size']}" if run["world_size"] > 1 else strategy
        key = (trained_by, run["precision"], run["attention"], arguments["batch_size"], arguments["learning_rate"])
        compiled = run["compile"] and run["attention"] != "fused"  # which earlier records called compiled too
        card = each(run["gpus"]).replace("NVIDIA ", "")
        recipes.setdefault((*key, arguments["epochs"], compiled, card), []).append(run)
    target = min(max(epoch["f1"] for epoch in run["epochs"]) for run in runs)
    found = []
    for key in sorted(recipes, key=lambda key: (key[0].lower(), *key[1:])):
        (trained_by, precision, attention, batch, rate, epochs, compiled, card), same = key, recipes[key]
        best = [max(run["epochs"], key=lambda epoch: epoch["f1"]) for run in same]
        seconds = [sum(epoch["train_seconds"] for epoch in run["epochs"]) for run in same]
        found.append(
            {
                "trained by": trained_by,
                "recipe": f"{precision}{', compiled' if compiled else ''}, "
                f"{'padded' if attention == 'padded' else 'packed'}, batch {batch}, {rate:g}, {epochs} epochs",
                "card": card,
                "seeds": str(len(same)),
                "EM": mean(epoch["exact"] for epoch in best),
                "F1": mean(epoch["f1"] for epoch in best),
                "seconds of training": spread(statistics.median(seconds), min(seconds), max(seconds), "{:.0f}".format),
                "last epoch": f"{statistics.median(run['epochs'][-1]['train_seconds'] for run in same):.1f}",
                f"seconds to F1 {target:.2f}": f"{statistics.median(seconds_to(run, target) for run in same):.0f}",
            }
        )
    model = each(run["model"]["name"] for run in runs) + " on " + each(run["data"]["name"] for run in runs)
    device, versions = (
        each(run["gpus"][0] for run in runs if run["gpus"]),
        each(run["versions"]["torch"] for run in runs),
    )
    what = "mean ± standard deviation over the seeds; seconds of training alone, with what compiles in the first epoch"
    return caption(folder, model, device, versions, what) + compare.table(found)


def mean(values):
    values = list(values)
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def seconds_to(run, target):
    """Seconds of training to the end of the first epoch with this F1, which the run reaches."""
    seconds = 0.0
    for epoch in run["epochs"]:
        seconds += epoch["train_seconds"]
        if epoch["f1"] >= target:
            break
    return seconds


def rewrite(text, new):
    """The README's text with `new` between the markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise UserError(f"README.md: needs these two lines, once each and in this order:\n{BEGIN}{END}".rstrip())
    return text[: text.index(BEGIN)] + BEGIN + new + text[text.index(END) :]


def main():
    path = ROOT / "README.md"
    path.write_text(rewrite(path.read_text(), section(shown=SHOWN)))
    (ROOT / "docs" / "performance.md").write_text(all_tables())


if __name__ == "__main__":
    errors.run(main)
