"""tools.ask as its users run it, on small models: places in the text, abstaining, SQuAD files, hostile input."""

import gzip
import io
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file
from tiny import ROOT, SAMPLE, SAMPLE_V2, minilm_tokenizer, save_network

import baseline
from common.errors import UserError
from tools import ask as tool
from tools.ask import ask, load

SETTINGS = {"version": "1.1", "null_threshold": None, "max_length": 64, "overlap": 16, "max_answer_tokens": 8}
TEXT = (
    "\ufeffThe ferry of Łódź\r\n\r\nIt was built in 1932 by Marta Kowal, a café owner’s daughter – 東京 helped.\r\n"
    "Тогда никто не знал. cafe\u0301 society 🚢🚢 sailed to the island of Ven.\n\n\n* **bold** claims, `code`\n" * 5
)
QUESTIONS = ["Who built the ferry?", "Where did it sail? 🚢", "東京?", "Wer half?"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A small random network with the default tokenizer, saved without settings: somebody else's model."""
    folder = tmp_path_factory.mktemp("plain")
    save_network(folder, num_hidden_layers=2)
    minilm_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(plain, tmp_path_factory):
    """A function that gives a folder of the same network with these settings in its config.json."""

    def make(settings=SETTINGS, **changes):
        folder = tmp_path_factory.mktemp("trained") / "model"
        shutil.copytree(plain, folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"squad": {**settings, **changes} if isinstance(settings, dict) else settings}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture(scope="module")
def v1(trained):
    return trained()


@pytest.fixture(scope="module")
def reader(v1):
    return load(v1, device="cpu")


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.md"
    path.write_bytes(TEXT.encode())
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs the command in this process with `typed` as its stdin and returns what it printed."""

    def call(*arguments, typed=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        tool.main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    return call


def lines_of(out):
    return [json.loads(line) for line in out.splitlines()]


def has_place(entry, text):
    """Assert that an answer stands where it says, in `text`."""
    assert entry["answer"] and text[entry["start"] : entry["end"]] == entry["answer"]
    assert entry["line"] == text[: entry["start"]].count("\n") + 1


# ---------------------------------------------------------------------------------------------------------------------
# Answers and places


def test_answers_stand_where_they_say(run, v1, text_file):
    arguments = ["--model", v1, "--context-file", text_file, "--json", "--n-best", "7"]
    results = lines_of(run(*arguments, *(word for question in QUESTIONS for word in ("--question", question))))
    assert [result["question"] for result in results] == QUESTIONS
    text = text_file.read_bytes().decode("utf-8-sig")
    assert "\r\n" in text
    for result in results:
        assert result["threshold"] is None
        assert len({entry["answer"] for entry in result["n_best"]}) == 7
        scores = [entry["score"] for entry in result["n_best"]]
        assert scores == sorted(scores, reverse=True)
        assert {name: result[name] for name in result["n_best"][0]} == result["n_best"][0]
        for entry in result["n_best"]:
            has_place(entry, text)
            assert 0 < entry["probability"] <= 1


def test_one_question_gives_what_many_give(reader):
    together = ask(reader, TEXT, QUESTIONS)
    for question, result in zip(QUESTIONS, together, strict=True):
        (alone,) = ask(reader, TEXT, [question])
        assert [entry["answer"] for entry in alone["n_best"]] == [entry["answer"] for entry in result["n_best"]]
        assert alone["score"] == pytest.approx(result["score"], abs=1e-4)
    assert ask(reader, TEXT, []) == []


def test_a_probability_does_not_depend_on_how_many_are_shown(trained):
    for settings in ({}, {"version": "2.0", "null_threshold": 0}):
        reader = load(trained(**settings), device="cpu")
        for one, three, many in zip(*(ask(reader, TEXT, QUESTIONS, n_best) for n_best in (1, 3, 100)), strict=True):
            assert one["probability"] == three["probability"] == pytest.approx(many["probability"], rel=1e-6)
            shown = [entry["probability"] for entry in many["n_best"]]
            assert len(shown) == 100 and shown == sorted(shown, reverse=True)
            assert shown[:3] == pytest.approx([entry["probability"] for entry in three["n_best"]], rel=1e-6)


def test_a_question_alone_is_one_question(reader):
    (alone,) = ask(reader, TEXT, QUESTIONS[0])
    assert alone == ask(reader, TEXT, QUESTIONS[:1])[0]
    assert len(ask(reader, TEXT, (question for question in QUESTIONS))) == len(QUESTIONS)
    with pytest.raises(UserError, match="a question is empty"):
        ask(reader, TEXT, "")


def test_a_long_text_takes_many_windows(reader):
    text = "".join(f"Ferry {number} of Ven was built by {number * 7} men.\n" for number in range(300))
    (result,) = ask(reader, text, ["Who built the ferry?"], n_best=60)
    assert len(result["n_best"]) == 60
    for entry in result["n_best"]:
        has_place(entry, text)
    assert len({entry["line"] // 30 for entry in result["n_best"]}) > 3  # a window holds about five lines


def test_places_far_in_a_huge_text(reader):
    """Blanks are no tokens, but they are characters and lines."""
    part = "The ferry sailed again and nobody knew where it went."
    (alone,) = ask(reader, part, ["Where?"])
    (result,) = ask(reader, "\r\n" * 500_000 + part, ["Where?"])
    assert (result["answer"], result["line"]) == (alone["answer"], 500_001)
    assert result["start"] == alone["start"] + 1_000_000


def test_lone_surrogates_are_replaced(reader):
    (result,) = ask(reader, "The ferry \ud800 sank off Ven.", ["Where \udcff did it sink?"])
    assert result["question"] == "Where \ufffd did it sink?"
    has_place(result, "The ferry \ufffd sank off Ven.")


def test_a_text_of_nothing_that_the_tokenizer_knows(reader):
    """Zero-width characters alone: there is no token that could be an answer, even for v1.1."""
    (result,) = ask(reader, "\u200b\u200b", ["What?"])
    assert (result["answer"], result["start"], result["line"]) == ("", None, None)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_a_long_question_is_cut_and_told(reader, capsys):
    (result,) = ask(reader, TEXT, ["why " * 500])
    assert result["answer"] and "1 of 1 questions are too long and were cut" in capsys.readouterr().err


def test_what_a_reader_sees(run, v1, text_file):
    out = run("--model", v1, "--context-file", text_file, "--question", QUESTIONS[0], "--n-best", "3").splitlines()
    assert out[0] == QUESTIONS[0] and len(out) == 4
    form = r" {2}\S.*  \(line \d+, characters \d+-\d+, score -?[\d.]+, probability [\d.]+\)"
    assert re.fullmatch(form, out[1])
    assert all(line.startswith("    or ") for line in out[2:])


# ---------------------------------------------------------------------------------------------------------------------
# No answer


def test_what_a_text_holds_does_not_command_the_terminal(run, v1, tmp_path):
    """Escape sequences and marks that turn a line round are shown as escapes; letters of all scripts stay."""
    path = tmp_path / "text.txt"
    text = "Ferry \x1b]0;owned\x07\x1b[2J\x9b31m\u202eboat\x7f می\u200cخواهم 🏳\ufe0f\u200d🌈"
    path.write_text(text, encoding="utf-8")
    arguments = ["--model", v1, "--context-file", path, "--question", f"Who? {text}", "--n-best", "100"]
    out = run(*arguments)
    assert not set(out) & set("\x1b\x07\x9b\u202e\x7f")
    assert r"Who? Ferry \x1b]0;owned\x07\x1b[2J\x9b31m\u202eboat\x7f می" + "\u200cخواهم 🏳\ufe0f\u200d🌈\n" in out
    assert len([line for line in out.splitlines() if r"\x1b" in line]) > 1  # an answer too
    (result,) = lines_of(run(*arguments, "--json"))
    assert result["question"] == f"Who? {text}" and any("\x1b" in entry["answer"] for entry in result["n_best"])


def test_a_model_of_v1_never_abstains(v1, plain):
    for folder in (v1, plain):
        for result in ask(load(folder, device="cpu"), TEXT, QUESTIONS, n_best=50):
            assert result["threshold"] is None and result["answer"] == result["n_best"][0]["answer"] != ""
            assert all(entry["answer"] for entry in result["n_best"])


def test_a_model_of_v2_abstains_by_its_threshold(trained):
    odds = [r["null_odds"] for r in ask(load(trained(version="2.0", null_threshold=0)), TEXT, QUESTIONS)]
    between = sorted(odds)[1]
    results = ask(load(trained(version="2.0", null_threshold=between)), TEXT, QUESTIONS, n_best=50)
    assert [result["null_odds"] for result in results] == pytest.approx(odds)
    assert sum(result["answer"] == "" for result in results) == 2  # the two above it; not the one that equals it
    for result in results:
        assert result["threshold"] == between
        assert (result["answer"] == "") == (result["null_odds"] > between)
        assert len({entry["answer"] for entry in result["n_best"]}) == 50
        if result["answer"] == "":
            assert result["start"] is result["end"] is result["line"] is None
            assert tool.report(result).startswith("  no answer  (score ")
        else:
            has_place(result, TEXT)


# ---------------------------------------------------------------------------------------------------------------------
# SQuAD files


@pytest.mark.parametrize(
    "sample, settings", [(SAMPLE, {}), (SAMPLE_V2, {"version": "2.0", "null_threshold": 0.25}), (SAMPLE_V2, None)]
)
def test_a_squad_file_gets_the_answers_of_an_evaluation(run, trained, plain, monkeypatch, tmp_path, sample, settings):
    """Byte for byte, over several chunks of windows: for v1.1, v2.0 and somebody else's model on v2.0."""
    folder = plain if settings is None else trained(**settings)
    tree = json.loads((sample / "dev.json").read_text())
    tree["data"] = tree["data"][:2]
    dev = tmp_path / "small.json"
    dev.write_text(json.dumps(tree))
    evaluation = ["--evaluate-only", str(folder), "--dev-file", str(dev), "--eval-tokens", "1000", "--device", "cpu"]
    runs = ["--runs-dir", str(tmp_path), "--run-name", "run", "--cache-dir", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", ["baseline.py", *evaluation, *runs])
    baseline.main()
    expected = (tmp_path / "run" / "predictions.json").read_bytes()

    arguments = ["--model", folder, "--context-file", dev, "--eval-tokens", "1000", "--n-best", "20"]
    run(*arguments, "--predictions", tmp_path / "answers.json")
    assert (tmp_path / "answers.json").read_bytes() == expected
    results = lines_of(run(*arguments, "--json"))
    assert {result["id"]: result["answer"] for result in results} == json.loads(expected)
    for qa in (qa for article in tree["data"] for paragraph in article["paragraphs"] for qa in paragraph["qas"]):
        del qa["answers"]
    dev.write_text(json.dumps(tree))
    run(*arguments, "--predictions", tmp_path / "unlabelled.json")
    assert (tmp_path / "unlabelled.json").read_bytes() == expected
    nbest = json.loads((tmp_path / "run" / "nbest.json").read_text())
    for result in results:
        entries = [(one["text"], pytest.approx(one["probability"], rel=1e-8)) for one in nbest[result["id"]]][:20]
        assert [(entry["answer"], entry["probability"]) for entry in result["n_best"]] == entries
    assert len(expected) > 500


# ---------------------------------------------------------------------------------------------------------------------
# Questions from stdin


def test_piped_questions_are_answered_together(run, v1, text_file, monkeypatch):
    calls = []
    find = tool.find
    monkeypatch.setattr(tool, "find", lambda *arguments: calls.append(1) or find(*arguments))
    typed = "".join(f"  {question}\r\n\n" for question in QUESTIONS)
    results = lines_of(run("--model", v1, "--context-file", text_file, "--json", typed=typed))
    assert [result["question"] for result in results] == QUESTIONS and len(calls) == 1


def test_a_terminal_asks_until_its_end(v1, text_file, monkeypatch, capsys):
    """At a terminal each line is answered before the next is read; a blank line is passed over; Ctrl-D ends."""
    ours, theirs = pty.openpty()
    calls = []
    find = tool.find
    monkeypatch.setattr(tool, "find", lambda *arguments: calls.append(1) or find(*arguments))
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        os.write(ours, f"{QUESTIONS[0]}\n\n \n{QUESTIONS[1]}\n\x04".encode())
        tool.main(["--model", str(v1), "--context-file", str(text_file), "--json"])
    os.close(ours)
    assert [result["question"] for result in lines_of(capsys.readouterr().out)] == QUESTIONS[:2]
    assert len(calls) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Hostile input


def refused(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("binary.bin", bytes(range(256)) * 4, r"binary.bin: not UTF-8 text \(byte 128\)"),
        ("zeros.txt", bytes(1000), r"zeros.txt: holds NUL characters"),
        ("utf16.txt", "Wörter".encode("utf-16"), r"utf16.txt: not UTF-8 text \(byte 0\); save it as UTF-8"),
        ("empty.txt", b"", r"empty.txt: holds no text"),
        ("blank.md", "\ufeff \r\n\t\n".encode(), r"blank.md: holds no text"),
        ("empty.json", b"", r"empty.json: the file is empty"),
        ("other.json", b'{"a": 1}', r"other.json: not SQuAD"),
        ("half.json.gz", b"\x1f\x8b\x08half", r"half.json.gz: truncated or damaged gzip"),
    ],
)
def test_files_that_are_no_text_are_refused(run, v1, tmp_path, name, content, message):
    with pytest.raises(UserError, match=message):
        run("--model", v1, "--context-file", refused(tmp_path, name, content), typed="Who?")


def test_inputs_that_cannot_work_are_refused(run, v1, text_file, tmp_path):
    model, text = ["--model", v1], ["--context-file", text_file]
    dev = ["--context-file", SAMPLE / "dev.json"]
    for arguments, message in (
        ([*model, "--context-file", tmp_path / "none.txt"], r"none.txt: cannot be read: No such file"),
        ([*model, "--context-file", tmp_path / "none.json"], r"none.json: no such file"),
        ([*model, "--context-file", tmp_path], r"cannot be read: Is a directory"),
        ([*model, "--context-file", "x" * 5000], r"cannot be read: File name too long"),
        ([*model, *text, "--question", " \n"], "a question is empty"),
        ([*model, *text], "no question: give --question, or questions on stdin"),
        ([*model, *text, "--n-best", "0"], "--n-best: '0' is not a whole number from 1"),
        ([*model, *text, "--predictions", "x.json"], "--predictions needs a SQuAD file"),
        ([*model, *dev, "--question", "Who?"], r"dev.json: a SQuAD file has its own questions"),
        ([*model, *dev, "--predictions", tmp_path / "none" / "x.json"], r"x.json: no such folder"),
        ([*model, *dev, "--predictions", "x.json", "--json"], "--json: not allowed with argument --predictions"),
        (["--model", v1.parent, *text, "--question", "Who?"], f"is a run's folder; its model is {v1}$"),
        ([*model], "arguments are required: --context-file"),
        (["--model", tmp_path, *text, "--question", "Who?"], "no config.json there; name a model folder"),
        (["--model", "nowhere", *text, "--question", "Who?"], "nowhere: no such folder"),
        (["--model", "m" * 5000, *text, "--question", "Who?"], "no such folder"),
        ([*model, *text, "--question", "Who?", "--precision", "fp16", "--device", "cpu"], "needs a GPU"),
    ):
        with pytest.raises(UserError, match=message) as error:
            run(*arguments)
        assert "\n" not in str(error.value)


def test_predictions_never_replace_the_squad_file(run, v1, tmp_path, monkeypatch):
    """Nor a link to it, nor the name without .gz, under which the predictions would hide it from then on."""
    dev = tmp_path / "d.json"
    content = (SAMPLE / "dev.json").read_bytes()
    dev.write_bytes(content)
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(content))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.json").symlink_to(dev)
    (tmp_path / "hard.json").hardlink_to(dev)
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    pairs = [("d.json", name) for name in ("d.json", dev, "folder/../d.json", "link.json", "hard.json")]
    pairs += [("link.json", "d.json"), ("packed.json", "packed.json"), ("packed.json", "packed.json.gz")]
    for context, predictions in pairs:
        with pytest.raises(UserError, match="is the SQuAD file itself; name another file for --predictions"):
            run("--model", v1, "--context-file", context, "--predictions", predictions)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    "settings",
    [
        {**SETTINGS, "max_length": "abc"},
        {**SETTINGS, "max_length": 0},
        {**SETTINGS, "max_length": 10**30},
        {**SETTINGS, "max_answer_tokens": -1},
        {**SETTINGS, "overlap": -5},
        {**SETTINGS, "overlap": 60},
        {**SETTINGS, "version": "3"},
        {**SETTINGS, "version": None},
        {**SETTINGS, "null_threshold": 0.5},
        {**SETTINGS, "version": "2.0"},
        {**SETTINGS, "version": "2.0", "null_threshold": "0"},
        {**SETTINGS, "version": "2.0", "null_threshold": float("nan")},
        {**SETTINGS, "version": "2.0", "null_threshold": True},
        {},
        [],
        "squad",
        7,
    ],
    ids=str,
)
def test_damaged_settings_are_refused(trained, settings):
    with pytest.raises(UserError, match=r"config\.json: ") as error:
        load(trained(settings), device="cpu")
    assert "\n" not in str(error.value)


def test_models_that_cannot_answer_are_refused(plain, tmp_path):
    weights = load_file(plain / "model.safetensors")
    for name, change, message in (
        ("headless", lambda: {k: v for k, v in weights.items() if not k.startswith("qa_outputs.")}, "no trained span"),
        ("hollow", lambda: {k: v for k, v in weights.items() if "layer.1." not in k}, "is it whole"),
    ):
        shutil.copytree(plain, tmp_path / name)
        save_file(change(), tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=f"{name}: .*{message}"):
            load(tmp_path / name, device="cpu")
    shutil.copytree(plain, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 1000)
    with pytest.raises(UserError, match="cut: cannot be loaded"):
        load(tmp_path / "cut", device="cpu")
    (tmp_path / "cut" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="no usable tokenizer"):
        load(tmp_path / "cut", device="cpu")


def test_a_model_of_short_windows_gets_short_windows(tmp_path):
    save_network(tmp_path, max_position_embeddings=128)
    minilm_tokenizer().save_pretrained(tmp_path)
    reader = load(tmp_path, device="cpu")
    assert (reader.max_length, reader.overlap) == (128, 42)
    has_place(ask(reader, TEXT, QUESTIONS[:1])[0], TEXT)


def test_an_expected_error_is_one_line_and_status_2(tmp_path):
    command = [sys.executable, "-m", "tools.ask", "--model", "x", "--context-file", str(tmp_path / "none.txt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "none.txt" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# The documentation


def test_documented_commands_parse():
    text = (ROOT / "docs" / "ask.md").read_text()
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, flags=re.S | re.M)).replace("\\\n", " ")
    commands = [line for line in blocks.splitlines() if "python -m tools.ask" in line]
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command.split("python -m tools.ask")[1].split(" < ")[0].split(" | ")[0], comments=True)
        tool.build_parser().parse_args(words)


def test_the_documented_function_works(reader):
    text = (ROOT / "docs" / "ask.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M)
    names = {"load": lambda name: reader, "text": TEXT}
    exec(block.replace("from tools.ask import ask, load", "from tools.ask import ask"), names)
    has_place(names["results"][0], TEXT)
