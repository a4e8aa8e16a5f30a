"""Hostile input: a little of `python -m tests.fuzz`, what chance seldom makes, and whether the fuzzer would notice."""

import gzip
import json
import pickle
import random
import shutil
import sys
import time
import tracemalloc

import fuzz
import mutate
import pytest
from tiny import ROOT

from common import errors, metrics
from common.data import squad
from common.data.tokenizer import load_tokenizer
from common.errors import Parser, UserError
from common.model.loading import load_model
from tools import ask
from tools.report import reading

COUNTS = {"predictions": 400, "arguments": 300, "records": 100}  # the slow ones fewer; 150 of the others


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_hostile_input_is_accepted_or_refused_in_one_line(kind, tmp_path):
    results = []
    for index in range(COUNTS.get(kind, 150)):
        folder = tmp_path / str(index)
        folder.mkdir()
        results.append(fuzz.attempt(kind, 1, index, folder))
    faults = [f"--kind {kind} --seed 1 --only {r['index']}: {r['fault']}" for r in results if r["fault"]]
    assert not faults, "\n".join(faults)
    assert sum(r["past"] for r in results) > 0.2 * len(results), "the inputs do not reach what comes after the reader"


def failing(what):
    """The fault that the fuzzer finds in a kind of input that does `what`."""

    def kind(rng, folder, past):
        past()
        what(folder)

    return kind


def two_lines(folder):
    print("error: this", file=sys.stderr)
    raise UserError("and that")


@pytest.mark.parametrize(
    "what, fault",
    [
        (lambda folder: 1 / 0, "ZeroDivisionError"),
        (lambda folder: time.sleep(5), "Hang"),
        (lambda folder: exec("try:\n while True: pass\nexcept Exception: pass"), "Hang"),
        (lambda folder: print("\ud800"), None),  # a terminal would not take it, errors.run sees to that
        (lambda folder: sys.exit(1), "status 1"),
        (lambda folder: print("error: half", file=sys.stderr), "and yet"),
        (two_lines, "not one clear line"),
        (lambda folder: bytearray(b"x" * (400 << 20)), "MB of memory"),
    ],
)
def test_the_fuzzer_notices(what, fault, tmp_path, monkeypatch):
    monkeypatch.setitem(fuzz.KINDS, "made", failing(what))
    monkeypatch.setattr(fuzz, "SECONDS", 0.5)
    found = fuzz.attempt("made", 0, 0, tmp_path)["fault"]
    assert fault in found if fault else found is None


def test_the_same_seed_gives_the_same_input(tmp_path):
    tree = fuzz.small_files()["2.0"]
    made = [mutate.dump(random.Random(5), mutate.mutate(random.Random(5), tree)) for _ in range(2)]
    assert made[0] == made[1] != json.dumps(tree).encode()


def test_a_small_gzip_file_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(mutate.bomb())
    assert path.stat().st_size < 2 << 20
    for read in (squad.read_squad, metrics.read_predictions):
        tracemalloc.start()
        with pytest.raises(UserError, match=r"bomb.json.gz: unpacks to more than 100 times its size"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 500 << 20
        tracemalloc.stop()


def test_what_repeats_itself_is_no_bomb(tmp_path):
    """Many questions about one text compress well, by less than the limit or to less than 64 MiB."""
    path = tmp_path / "file.json.gz"
    path.write_bytes(gzip.compress(json.dumps({str(i): "the same text " * 50 for i in range(20000)}).encode(), 9))
    assert len(metrics.read_predictions(path)) == 20000


@pytest.mark.parametrize(
    "text", ["[" * 100_000 + "]" * 100_000, '{"schema":' * 100_000, '{"schema": ' + "9" * 5001 + "}", "9" * 10**6]
)
def test_deep_nesting_and_endless_numbers_are_one_line(text, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(text)
    for read in (squad.read_squad, metrics.read_predictions, metrics.read_na_probs, reading.read_run):
        with pytest.raises(UserError, match=r"file.json: "):
            read(path)


def test_a_device_is_no_file():
    for read in (metrics.read_predictions, ask.read_text):
        with pytest.raises(UserError, match="/dev/zero: is a device"):
            read("/dev/zero")


@pytest.mark.parametrize("seed", range(12))
def test_no_code_in_a_model_folder_is_executed(seed, tmp_path):
    """auto_map with modules beside it, pickles under the names that libraries look for, a pickle as safetensors."""
    shutil.copytree(fuzz.base_folder() / "m", tmp_path / "m")
    fuzz.plant(random.Random(seed), tmp_path, tmp_path / "m")
    for load in (load_model, load_tokenizer, ask.load):
        try:
            load(str(tmp_path / "m"))
        except UserError as error:
            assert str(error).startswith(f"{tmp_path}/m: ")
    assert not (tmp_path / "executed").exists()
    pickle.loads((tmp_path / "m" / "training_args.bin").read_bytes())  # the trap is one
    assert (tmp_path / "executed").exists()


def test_pickled_weights_alone_are_refused(tmp_path):
    shutil.copytree(fuzz.base_folder() / "m", tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"m: no model.safetensors; other weight formats can execute code"):
        load_model(str(tmp_path / "m"))


@pytest.mark.parametrize(
    "change, line",
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_labels": 10**7}, "num_labels is 10000000"),
        ({"vocab_size": 10**12}, "the weights hold"),
        ({"max_position_embeddings": 10**9}, "the weights hold"),
        ({"hidden_size": 80_000}, "the weights hold"),
        ({"model_type": "roberta", "vocab_size": 30_000}, "the weights hold"),
    ],
)
def test_a_config_that_means_more_than_the_weights_hold_builds_nothing(change, line, tmp_path):
    shutil.copytree(fuzz.base_folder() / "m", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    memory = fuzz.peak_megabytes(anew=True)
    with pytest.raises(UserError, match=line):
        load_model(str(tmp_path / "m"))
    assert fuzz.peak_megabytes() - memory < 100


def test_a_message_is_one_line(capsys):
    def main():
        raise UserError("a\nb\x1b[31m\u202e" + "x" * 10_000 + " end")

    with pytest.raises(SystemExit) as end:
        errors.run(main)
    told = capsys.readouterr().err
    assert end.value.code == 2 and told.startswith("error: a\\nb\\x1b[31m\\u202exx") and told.endswith(" end\n")
    assert len(told) < 2100 and told.count("\n") == 1


@pytest.mark.parametrize("words, line", [(["--n=--"], "--n=--: -- is no value"), (["--n", "x"], "argument --n: inv")])
def test_arguments_end_in_one_line(words, line):
    parser = Parser(prog="python -m tools.x")
    parser.add_argument("--n", type=int)
    with pytest.raises(UserError, match=rf"^{line}.*\(`python -m tools.x --help` explains all options\)$"):
        parser.parse_args(words)


def test_nothing_serves_but_tensorboard_on_loopback():
    """The one server that the project starts is told to listen on loopback; no Python file opens one."""
    (started,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "/tensorboard " in line]
    assert started.endswith("--host 127.0.0.1")
    for folder in ("", "common", "tools", "benchmarks"):
        for path in (ROOT / folder).glob("*.py"):
            assert not any(word in path.read_text() for word in ("http.server", "socketserver", ".listen(")), path
