"""Hostile input: valid files and command lines, changed at random, given to the functions that users' input meets.

    python -m tests.fuzz --count 20000 --seed 0                  all kinds, a process each; docs/fuzzing.md has results
    python -m tests.fuzz --kind squad-v2.0 --only 1234           one input again, with its traceback

Each input must be accepted, or end with one line and status 2; nothing else may happen: no traceback, no hang, no
memory out of proportion, no code run out of a file. An input that fails is kept in the folder --out.

A new kind is a function in KINDS: it writes an input into `folder`, calls `past()` once the reader has taken it, and
goes on to use what was read.
"""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as pytest has it
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read at import
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import tiny
import torch
from mutate import PLAIN, bend_text, command_line, damage, dump, mutate, safetensors, write_json

import baseline
import distributed_ddp
import distributed_fsdp
from benchmarks import reproductions, scaling, steps
from common import errors, metrics
from common.data import data, splits, squad
from common.data.cache import prepare, read_cache
from common.data.tokenizer import load_tokenizer, vocabulary_size
from common.data.windows import ARRAYS
from common.model import loading
from common.run import checkpoint, environment, resume
from common.run import run as run_module
from tools import allreduce, ask, audit, fetch, sweep
from tools.report import __main__ as report
from tools.report import page

SECONDS = 20  # for one input; most take milliseconds
MEGABYTES = 256  # for one input, beside what its size allows: a tenfold of the gzip bomb's file is far below
WINDOW, OVERLAP = 128, 32  # tokens, which are single letters here
RECORDS = tiny.ROOT / "benchmarks" / "records" / "h100x4-minilm-batch192"


class Hang(BaseException):
    """Raised by the alarm; no `except Exception` may hide it."""


class Stop(BaseException):
    """The command line was taken: what would follow is work, not reading."""


def run_main(main, *argv):
    """Call a program's `main` as the shell would."""
    with mock.patch.object(sys, "argv", [f"{main.__module__}.py", *map(str, argv)]):
        main()


# ---------------------------------------------------------------------------------------------------------------------
# Valid inputs, made once a process


@functools.cache
def small_files():
    """{version: SQuAD tree of a few questions}, from the bundled samples."""
    trees = {}
    for version, folder in (("1.1", tiny.SAMPLE), ("2.0", tiny.SAMPLE_V2)):
        tree = json.loads((folder / "dev.json").read_text(encoding="utf-8"))
        paragraphs = [p for article in tree["data"] for p in article["paragraphs"]][:3]
        for paragraph in paragraphs:  # an answer past the end of a cut context would be a fault
            qas = [qa for qa in paragraph["qas"] if len(qa["question"]) < 60]
            qas = [qa for qa in qas if all(a["answer_start"] < 350 for a in qa["answers"])]
            paragraph["context"], paragraph["qas"] = paragraph["context"][:400], qas[:4]
        articles = [{"title": f"town {i}", "paragraphs": [paragraph]} for i, paragraph in enumerate(paragraphs)]
        trees[version] = {"version": version, "data": articles}
    return trees


@functools.cache
def base_folder():
    """A folder of valid inputs: m/ (a model), 1.1.json, 2.0.json, text.txt, cache/ (the features of 1.1.json)."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-base-"))
    files = small_files()
    for version, tree in files.items():
        (folder / f"{version}.json").write_text(json.dumps(tree), encoding="utf-8")
    for name in ("train-v1.1.json", "dev-v1.1.json"):  # the default data of `SQUAD_DIR`
        shutil.copy(folder / "1.1.json", folder / name)
    text = files["1.1"]["data"][0]["paragraphs"][0]["context"]
    (folder / "text.txt").write_text(text, encoding="utf-8")
    tokenizer = tiny.word_tokenizer(folder / "m", [json.dumps(files)])
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with contextlib.redirect_stderr(io.StringIO()):
        tiny.save_network(folder / "m", max_position_embeddings=WINDOW, vocab_size=len(tokenizer), **sizes)
    config = json.loads((folder / "m" / "config.json").read_text())
    config["squad"] = {
        "version": "2.0",
        "null_threshold": 0.0,
        "max_length": WINDOW,
        "overlap": OVERLAP,
        "max_answer_tokens": 9,
    }
    (folder / "m" / "config.json").write_text(json.dumps(config))
    features(folder / "1.1.json", folder / "cache")
    return folder


@functools.cache
def small_tokenizer():
    return load_tokenizer(str(base_folder() / "m"))


@functools.cache
def small_reader():
    return ask.load(str(base_folder() / "m"), device="cpu")


def features(file, cache):
    tokenizer = load_tokenizer(str(Path(file).parent / "m"))
    return prepare(splits.QuestionSet(Path(file)), tokenizer, WINDOW, OVERLAP, cache, log=lambda text: None)


# ---------------------------------------------------------------------------------------------------------------------
# The kinds


def fuzz_squad(version, rng, folder, past):
    """A SQuAD file: audited, and now and then made into cached features."""
    path = write_json(rng, folder, "file", small_files()[version])
    more = ["--json"] if rng.random() < 0.5 else []
    with (
        mock.patch.object(audit, "load_tokenizer", lambda _: small_tokenizer()),
        mock.patch.object(audit, "load_config", lambda _: small_reader().model.network.config),
        mock.patch.object(audit, "read_squad", before(past, audit.read_squad)),
    ):
        run_main(audit.main, path, "--model", base_folder() / "m", "--max-length", WINDOW, "--overlap", OVERLAP, *more)
    if rng.random() < 0.2:
        sets = splits.question_sets(path, path, dev_fraction=0.5, split_by=rng.choice(["article", "question"]))
        for questions in sets.values():
            prepare(questions, small_tokenizer(), WINDOW, OVERLAP, folder / "cache", log=print)


def before(past, reader):
    """`reader`, and then past(), where the input is what it wants."""

    def read(*arguments):
        data = reader(*arguments)
        past()
        return data

    return read


def fuzz_predictions(rng, folder, past):
    """A predictions file and a file of no-answer scores, scored."""
    version = rng.choice(["1.1", "2.0"])
    rows = [qa for article in small_files()[version]["data"] for p in article["paragraphs"] for qa in p["qas"]]
    texts = {qa["id"]: (qa["answers"] or [{"text": ""}])[0]["text"] for qa in rows}
    path = write_json(rng, folder, "predictions", texts, harsh=0.15)
    options = []
    if rng.random() < 0.5:
        odds = write_json(rng, folder, "odds", {key: rng.uniform(-5, 5) for key in texts}, harsh=0.15)
        options = ["--na-probs", odds, "--rule", "2.0", "--na-threshold", rng.choice(["0", "1e308", "-inf", "-3.5"])]
        metrics.read_na_probs(odds)
    metrics.read_predictions(path)
    past()
    metrics.main([str(word) for word in (base_folder() / f"{version}.json", path, *options)])


def fuzz_records(rng, folder, past):
    """Run records: reported on, with figures now and then, and met by a campaign."""
    names = rng.sample(["baseline-0", "baseline-1", "ddp-0", "fsdp-zero2-0"], 2)
    for name in names:
        tree = json.loads((RECORDS / f"{name}.json").read_text())
        (folder / "runs" / name).mkdir(parents=True)
        write_json(rng, folder / "runs" / name, "run", tree, gz=False, harsh=0.1)
    if rng.random() < 0.2:  # a campaign looks at the folders of its runs
        job = folder / "runs" / "baseline-1x1-auto-seed0"
        (folder / "runs" / names[0]).rename(job)
        if rng.random() < 0.5:
            lock = {"host": "n1", "pid": rng.choice([1, 10**9]), "job_id": rng.choice([None, "12"])}
            (job / "lock").write_bytes(dump(rng, mutate(rng, lock)))
        run_main(sweep.main, "--runs-dir", folder / "runs", "--strategies", "baseline", "--repeats", 1)
    figures = contextlib.nullcontext() if rng.random() < 0.004 else mock.patch.object(page, "draw", return_value=[])
    options = rng.choice([[], ["--allow-unlike"], ["--f1", "80"], ["--baseline", "baseline"]])
    with figures, mock.patch.object(page, "group", before(past, page.group)):  # there are runs to group
        run_main(report.main, folder / "runs", *options, "--out", folder / "report")


class Spy:
    """Pickled into a model folder: whoever unpickles it makes a folder named `executed`."""

    def __init__(self, folder):
        self.path = str(folder / "executed")

    def __reduce__(self):
        return os.mkdir, (self.path,)


def fuzz_model(rng, folder, past):
    """A model folder: loaded for answering or for training, and asked; no code in it may run."""
    place = folder / "m"
    shutil.copytree(base_folder() / "m", place)
    for _ in range(rng.choice([1, 1, 1, 2])):
        name = rng.choice(
            ["config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
        )
        path = place / name
        if not path.exists():
            continue
        if rng.random() < 0.03:
            path.unlink()
        elif name == "model.safetensors":
            path.write_bytes(safetensors(rng, (base_folder() / "m" / name).read_bytes()))
        else:
            tree = json.loads((base_folder() / "m" / name).read_text(encoding="utf-8"))
            data = dump(rng, mutate(rng, tree, harsh=0.2))
            path.write_bytes(damage(rng, data) if rng.random() < 0.05 else data)
    if rng.random() < 0.1:
        plant(rng, folder, place)
    try:
        if rng.random() < 0.3:  # as the training scripts do
            tokenizer = load_tokenizer(str(place))
            loading.load_model(str(place), dropout=0.1, vocabulary=vocabulary_size(tokenizer))
            past()
        else:
            reader = ask.load(str(place), device="cpu")
            past()
            text = (base_folder() / "text.txt").read_text(encoding="utf-8")
            for result in ask.ask(reader, text, ["Who was it?", "東京 e\u0301"]):
                print(ask.report(result), json.dumps(result))
    finally:
        assert not (folder / "executed").exists(), "code from the model folder was executed"


def plant(rng, folder, place):
    """Put code into a model folder by all the ways that libraries have run some."""
    code = f"import os\nos.mkdir({str(folder / 'executed')!r})\n"
    for name in ("modeling_spy.py", "configuration_spy.py", "tokenization_spy.py", "__init__.py"):
        (place / name).write_text(code)
    classes = {"AutoConfig": "configuration_spy.C", "AutoTokenizer": ["tokenization_spy.T", None]}
    classes["AutoModelForQuestionAnswering"] = "modeling_spy.M"
    for name in ("config.json", "tokenizer_config.json"):
        with contextlib.suppress(ValueError, OSError, RecursionError, TypeError):
            tree = json.loads((place / name).read_text(encoding="utf-8"))
            tree |= {"auto_map": classes, "chat_template": "{{ ''.__class__.__mro__ }}", "custom_pipelines": classes}
            if rng.random() < 0.3:
                tree["model_type"] = "spy"
            (place / name).write_text(json.dumps(tree), encoding="utf-8")
    for name in ("pytorch_model.bin", "training_args.bin", "tokenizer.pkl"):
        (place / name).write_bytes(pickle.dumps(Spy(folder)))
    if rng.random() < 0.3:
        (place / "model.safetensors").unlink(missing_ok=True)
    elif rng.random() < 0.3:
        (place / "model.safetensors").write_bytes(pickle.dumps(Spy(folder)))


def fuzz_cache(rng, folder, past):
    """A cache of features: whatever is done to it, the features are those of an undamaged one."""
    cache = folder / "cache"
    shutil.copytree(base_folder() / "cache", cache)
    place = next(cache.iterdir())
    name = rng.choice(["meta.json", "meta.json", *(f"{array}.npy" for array in ARRAYS)])
    path, data = place / name, (place / name).read_bytes()
    if name == "meta.json" and rng.random() < 0.8:
        data = dump(rng, mutate(rng, json.loads(data)))
    elif name.endswith(".npy") and rng.random() < 0.7:
        data = change_array(rng, folder, data)
    else:
        data = damage(rng, data)
    if rng.random() < 0.03:
        path.unlink()
    else:
        path.write_bytes(data)
    with contextlib.suppress(Exception):  # numpy and json take it: what is wrong is the content
        json.loads((place / "meta.json").read_bytes())
        np.load(path) if name.endswith(".npy") else None
        past()
    found = features(base_folder() / "1.1.json", cache)
    wanted = read_cache(next((base_folder() / "cache").iterdir()))
    assert found.meta == wanted.meta and found.max_length == wanted.max_length
    assert (found.token_type, found.pad_id) == (wanted.token_type, wanted.pad_id)
    for array in ARRAYS:
        assert np.array_equal(getattr(found, array), getattr(wanted, array)), array
    assert not (folder / "executed").exists(), "the cache was unpickled"


def change_array(rng, folder, data):
    """A .npy file with other numbers, of another shape or type, or with a pickled object in it."""
    array = np.load(io.BytesIO(data))
    kind = rng.randrange(6)
    out = io.BytesIO()
    if kind == 0:
        array = array.copy()
        array[rng.randrange(len(array))] += rng.choice([1, -1, 2**30])
    elif kind == 1:
        array = array[: rng.randrange(len(array))]
    elif kind == 2:
        array = array.astype(rng.choice([np.float32, np.int16, "S3", np.uint64, "datetime64[s]"]))
    elif kind == 3:
        array = array.reshape(rng.choice([(-1, 1), (1, -1)]))
    elif kind == 4:
        array = np.array([Spy(folder)], object)
    if kind == 5:
        np.savez(out, array)
    else:
        np.save(out, array, allow_pickle=True)
    return out.getvalue()


def training():
    """Arguments of a training that takes a second."""
    base = base_folder()
    data = ["--train-file", base / "1.1.json", "--dev-file", base / "1.1.json", "--cache-dir", base / "c"]
    size = ["--max-length", WINDOW, "--overlap", OVERLAP, "--batch-size", 8, "--epochs", 1, "--log-every", 1]
    return [*data, *size, "--model", base / "m", "--device", "cpu", "--learning-rate", "1e-3"]


@functools.cache
def finished_run():
    """The folder of such a training, with its checkpoints."""
    run_main(baseline.main, *training(), "--runs-dir", base_folder() / "runs", "--run-name", "r", "--save-steps", 1)
    return base_folder() / "runs" / "r"


def fuzz_checkpoint(rng, folder, past):
    """A checkpoint, signed anew by its manifest or not: a run goes on from it, now and then to its end."""
    shutil.copytree(finished_run() / "checkpoints", folder / "r" / "checkpoints")
    older, place = sorted((folder / "r" / "checkpoints").iterdir())
    if rng.random() < 0.8:
        shutil.rmtree(older)
    name = rng.choice(["state.json", "state.json", "model.safetensors", "optimizer.safetensors", "manifest.json"])
    if name == "state.json":
        state = json.loads((place / name).read_text())
        experiment = state.pop("experiment")
        if rng.random() < 0.1:
            experiment = mutate(rng, experiment)
        state = mutate(rng, state)
        (place / name).write_bytes(dump(rng, state | {"experiment": experiment} if isinstance(state, dict) else state))
    elif name == "manifest.json":
        (place / name).write_bytes(dump(rng, mutate(rng, json.loads((place / name).read_text()))))
    else:
        (place / name).write_bytes(safetensors(rng, (place / name).read_bytes()))
    if rng.random() < 0.05:
        (place / name).write_bytes(damage(rng, (place / name).read_bytes()))
    if name != "manifest.json" and rng.random() < 0.9:
        sizes = {file: (place / file).stat().st_size for file in checkpoint.FILES}
        manifest = {file: {"bytes": size, "sha256": checkpoint.digest(place / file)} for file, size in sizes.items()}
        (place / "manifest.json").write_text(json.dumps(manifest))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(resume, "read", before(past, resume.read)))
        stack.enter_context(mock.patch.object(data, "load_tokenizer", lambda _: small_tokenizer()))
        stack.enter_context(mock.patch.object(environment, "git_state", lambda: (None, None)))
        if rng.random() > 0.03:
            stack.enter_context(mock.patch.object(baseline, "seed_dropout", stop))  # before the first step
            stack.enter_context(mock.patch.object(run_module, "Curves"))
        with contextlib.suppress(Stop):
            run_main(baseline.main, *training(), "--runs-dir", folder / "runs", "--resume", folder / "r")


def stop(*_, **__):
    raise Stop


def fuzz_ask(rng, folder, past):
    """tools.ask: a text or a SQuAD file, and questions as arguments or on stdin."""
    argv, questions = [], "Who was it?\nWhen?\n"
    if rng.random() < 0.4:
        path = write_json(rng, folder, "context", small_files()[rng.choice(["1.1", "2.0"])], harsh=0.15)
        squad.read_squad(path)
        if rng.random() < 0.3:
            argv += ["--predictions", folder / "out.json"]
    else:
        path = folder / rng.choice(["text.txt", "Notes.md", "x"])
        text = (base_folder() / "text.txt").read_text(encoding="utf-8")
        for _ in range(rng.randrange(4)):
            text = bend_text(rng, text)
        data = text[:5000].encode("utf-8", "surrogatepass")  # more is work, as it should be
        path.write_bytes(damage(rng, data) if rng.random() < 0.15 else data)
        ask.read_text(path)
        questions = bend_text(rng, questions)[:200] if rng.random() < 0.7 else questions
        if rng.random() < 0.4:
            argv += [f"--question={os.fsdecode(questions.replace(chr(0), '').encode('utf-8', 'surrogatepass'))}"]
    past()
    argv += rng.choice([[], ["--json"], ["--n-best", "50"], ["--n-best", "1", "--json"]])
    stdin = io.TextIOWrapper(io.BytesIO(questions.encode("utf-8", "surrogatepass")), encoding="utf-8")
    reader = small_reader()
    with mock.patch.object(ask, "load", lambda *_, **__: reader), mock.patch.object(sys, "stdin", stdin):
        ask.main(["--model", str(base_folder() / "m"), "--context-file", str(path), *map(str, argv)])


def programs():
    """{name: (main, valid arguments)} of all scripts and tools."""
    base = base_folder()
    trained = [*training(), "--runs-dir", "runs"]
    predictions = base / "p.json"
    predictions.write_text("{}")
    asked = ["--model", base / "m", "--context-file", base / "text.txt", "--question", "who?", "--device", "cpu"]
    found = {
        "baseline": (baseline.main, trained),
        "ddp": (distributed_ddp.main, [*trained, "--zero1"]),
        "fsdp": (distributed_fsdp.main, [*trained, "--shard", "zero2"]),
        "evaluate": (
            baseline.main,
            ["--evaluate-only", base / "m", "--dev-file", base / "2.0.json", "--runs-dir", "r"],
        ),
        "ask": (ask.main, asked),
        "audit": (audit.main, [base / "2.0.json", "--model", base / "m", "--max-length", WINDOW, "--overlap", OVERLAP]),
        "fetch": (fetch.main, ["squad-v1.1", "owner/name", "--to", "data", "--timeout", 3]),
        "report": (report.main, [RECORDS, "--baseline", "baseline", "--f1", 80, "--out", "report"]),
        "sweep": (sweep.main, ["--gpus", 2, "1x4", "--repeats", 2, "--runs-dir", "runs", "--", "--epochs", 2]),
        "reproductions": (reproductions.main, ["--records", RECORDS.parent / "reproductions"]),
        "metrics": (metrics.main, [base / "2.0.json", predictions, "--na-threshold", 0.5, "--rule", "2.0"]),
        "allreduce": (allreduce.main, ["--shape", "minilm", "--repeats", 3, "--types", "fp32", "--device", "cpu"]),
        "scaling": (scaling.main, ["out.json", "--gpus", 1, 2, "--weak", 96, "--strong", 384]),
        "steps": (steps.main, ["--batch-size", 8, "--shape", "tiny", "--device", "cpu", "--steps", 2]),
    }
    return {name: (main, list(map(str, argv))) for name, (main, argv) in found.items()}


@functools.cache
def flags(main):
    """{flag: values that fit it} of a program, read off its --help."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        run_main(main, "--help")
    found = {}
    for line in re.findall(r"^  (--.*)", text.getvalue(), re.MULTILINE):
        words, choices = line.split("  ")[0], re.search(r"\{(.*?)\}", line.split("  ")[0])
        for name in re.findall(r"--[a-z0-9-]+", words):
            found[name] = choices[1].split(",") if choices else PLAIN if re.search(" [A-Z]", words) else []
    return found


def fuzz_arguments(rng, folder, past):
    """A command line of any script or tool, up to where its work would begin; trainings now and then to their end."""
    name = rng.choice(sorted(programs()))
    main, argv = programs()[name]
    argv = command_line(rng, argv, flags(main))
    (folder / "argv.json").write_text(json.dumps([name, *argv]))
    (folder / "page.md").write_text("")
    whole = name in ("baseline", "evaluate") and rng.random() < 0.05

    with contextlib.ExitStack() as stack:
        if not whole:
            for script in (baseline, distributed_ddp, distributed_fsdp):
                stack.enter_context(mock.patch.object(script, "Data", stop))
        for module, what in (
            (steps, "load_windows"),
            (fetch, "fetch"),
            (scaling, "measure"),
            (allreduce, "measure"),
            (allreduce.World, "connect"),
            (page, "draw"),
        ):
            stack.enter_context(mock.patch.object(module, what, stop))
        stack.enter_context(mock.patch.object(sweep, "run_here", stop))
        stack.enter_context(mock.patch.object(reproductions, "PAGE", folder / "page.md"))
        stack.enter_context(mock.patch.object(ask, "compile_layers"))  # compiling takes seconds
        stack.enter_context(mock.patch.dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2"))
        stack.enter_context(mock.patch.dict(os.environ, SQUAD_DIR=str(base_folder())))
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        try:
            if "--epochs" in argv and whole:
                argv += ["--epochs", "1"]  # more is no hang, but long
            run_main(main, *argv)
            past()
        except Stop:
            past()
        except errors.UserError as error:
            if "explains all options" not in str(error):
                past()
            raise


KINDS = {
    "squad-v1.1": functools.partial(fuzz_squad, "1.1"),
    "squad-v2.0": functools.partial(fuzz_squad, "2.0"),
    "predictions": fuzz_predictions,
    "records": fuzz_records,
    "model": fuzz_model,
    "cache": fuzz_cache,
    "checkpoint": fuzz_checkpoint,
    "ask": fuzz_ask,
    "arguments": fuzz_arguments,
}


# ---------------------------------------------------------------------------------------------------------------------
# One input


def fault_of(status, told):
    """What is wrong with how a program ended, None if nothing: its exit status, and what it said on stderr."""
    lines = [line for line in told.splitlines() if line.startswith(("error", "Traceback"))]
    if status in (None, 0):
        return None if not lines else f"status 0, and yet: {lines[0]}"
    if status != 2:
        return f"status {status!r}: {told[-500:]}"
    if len(lines) != 1 or not told.endswith(lines[0] + "\n") or not lines[0].startswith("error: "):
        return f"not one clear line: {told[-2000:]}"
    return None


def attempt(kind, seed, index, folder):
    """Make input number `index` in `folder` and run it: a dict of its status, fault, and whether it got past."""
    rng = random.Random(f"{kind} {seed} {index}")
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)  # as strict as a terminal
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    passed, fault, status = [], None, None
    base_folder()  # not on this input's time
    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    clock, memory = time.perf_counter(), peak_megabytes(anew=True)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO())),
        ):
            errors.run(lambda: KINDS[kind](rng, folder, lambda: passed.append(True)))
    except SystemExit as end:
        status = end.code
    except BaseException:
        fault = traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds, grown = time.perf_counter() - clock, peak_megabytes() - memory
    fault = fault or fault_of(status, err.buffer.getvalue().decode())
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    if not fault and grown > MEGABYTES + 100 * size:
        fault = f"took {grown:.0f} MB of memory for {size:.1f} MB of input"
    told = err.buffer.getvalue().decode().strip().splitlines()
    return {
        "index": index,
        "past": bool(passed),
        "accepted": status in (None, 0) and not fault,
        "fault": fault,
        "said": told[-1] if told else "",
        "seconds": seconds,
    }


def alarm(*_):
    raise Hang(f"no end after {SECONDS} s")


def peak_megabytes(anew=False):
    """The most memory that this process has held; anew: from now on, so that what earlier tests held hides nothing."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


# ---------------------------------------------------------------------------------------------------------------------
# Many inputs, in a process of their own


def work(kind, seed, start, stop, out, pipe):
    """Run the inputs start, …, stop - 1 and send what came of each; what fails stays in the folder `out`."""
    log = open(out / f"{kind}.native.log", "a+b")  # noqa: SIM115 what libraries write past Python, such as a panic in Rust
    os.dup2(log.fileno(), 2)
    os.dup2(log.fileno(), 1)
    torch.set_num_threads(1)
    for index in range(start, stop):
        pipe.send(index)
        folder = out / f"{kind}-{seed}-{index}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        begin = log.seek(0, os.SEEK_END)
        result = attempt(kind, seed, index, folder)
        log.seek(begin)
        if b"panicked" in (native := log.read()):
            result["fault"] = f"{result['fault'] or ''}\n{native.decode(errors='replace')}"
        if result["fault"]:
            (folder / "fault.txt").write_text(result["fault"], encoding="utf-8", errors="backslashreplace")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        pipe.send(result)
    shutil.rmtree(base_folder())


def run_kind(kind, seed, count, out):
    """The results of `count` inputs; an input that ends the process, or hangs beyond Python's reach, is a failure."""
    context, results, index = multiprocessing.get_context("spawn"), [], 0
    while index < count:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(kind, seed, index, count, out, sender))
        process.start()
        sender.close()
        fault = None
        while index < count:
            try:
                if not receiver.poll(180):
                    fault = "hung beyond the reach of the alarm"
                    break
                message = receiver.recv()
            except EOFError:
                process.join()
                fault = f"the process died (status {process.exitcode})"
                break
            if isinstance(message, dict):
                results.append(message)
                index += 1
        if fault:
            process.kill()
            results.append({"index": index, "past": False, "accepted": False, "fault": fault, "said": "", "seconds": 0})
            index += 1
        process.join()
    return results


def build_parser():
    parser = errors.Parser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--count", type=int, default=20000, help="inputs of each kind (default: 20000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other inputs (default: 0)")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--only", type=int, metavar="INDEX", help="this input alone, in this process")
    parser.add_argument(
        "--out", type=Path, default=Path(tempfile.gettempdir()) / "fuzz", help="where failures are kept"
    )
    return parser


def main():
    args = build_parser().parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only is not None:
        folder = args.out / f"{args.kind[0]}-{args.seed}-{args.only}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        result = attempt(args.kind[0], args.seed, args.only, folder)
        print(f"{folder}\n{json.dumps(result, indent=1)}\n{result['fault'] or 'no fault'}")
        return bool(result["fault"])
    print(
        "| kind | inputs | past the reader | accepted | failures | slowest, s | seconds |\n| --- |" + " ---: |" * 6,
        flush=True,
    )
    failed = 0
    for kind in args.kind:
        clock = time.perf_counter()
        results = run_kind(kind, args.seed, args.count, args.out)
        faults = [result for result in results if result["fault"]]
        failed += len(faults)
        past, accepted = (sum(result[name] for result in results) / len(results) for name in ("past", "accepted"))
        cells = [kind, f"{len(results):,}", f"{past:.0%}", f"{accepted:.0%}", len(faults)]
        cells += [f"{max(result['seconds'] for result in results):.1f}", f"{time.perf_counter() - clock:.0f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        for result in faults[:20]:
            last = (result["fault"].strip().splitlines() or [""])[-1][:160]
            print(f"  --kind {kind} --seed {args.seed} --only {result['index']}: {last}", file=sys.stderr, flush=True)
    if failed:
        raise errors.UserError(f"{failed} inputs failed; they and what happened are in {args.out}")


if __name__ == "__main__":
    errors.run(main)
