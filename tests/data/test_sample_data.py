"""The bundled sample data: what data/README.md says about it is true."""

import calendar
import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
SETS = {"sample": "make_sample.py", "sample-v2": "make_sample_v2.py"}
FILES = [(name, split) for name in SETS for split in ("train", "dev")]
CALENDAR = {*calendar.month_name, *calendar.day_name}


def load(name, split):
    return json.loads((DATA / name / f"{split}.json").read_text(encoding="utf-8"))


def paragraphs(name, split):
    return [paragraph for article in load(name, split)["data"] for paragraph in article["paragraphs"]]


def questions(name, split):
    """All (context, qa) pairs of one file."""
    return [(paragraph["context"], qa) for paragraph in paragraphs(name, split) for qa in paragraph["qas"]]


def pieces(text):
    """Roughly the tokens of a BERT tokenizer, and never more than it makes: words and single punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", text)


def names(context, qa):
    """The answers to `qa` that contain a name: a capital letter that neither starts a sentence nor a date."""
    for answer in qa["answers"]:
        text, start = answer["text"], answer["answer_start"]
        if start == 0 or context[:start].endswith((". ", ".\n")):
            text = text[1:]
        if set(re.findall(r"\b[A-Z]\w*", text)) - CALENDAR:
            yield answer["text"]


@pytest.mark.parametrize("name", SETS)
def test_regenerating_gives_the_same_bytes(name, tmp_path):
    script = DATA / name / SETS[name]
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True, capture_output=True)
    for split in ("train", "dev"):
        assert (tmp_path / f"{split}.json").read_bytes() == (DATA / name / f"{split}.json").read_bytes()


@pytest.mark.parametrize("name, split", FILES)
def test_answers_stand_where_they_say(name, split):
    for context, qa in questions(name, split):
        for answer in qa["answers"] + qa.get("plausible_answers", []):
            text, start = answer["text"], answer["answer_start"]
            assert text and text == text.strip(), qa["id"]
            assert context[start : start + len(text)] == text, qa["id"]


def test_ids_are_unique_across_all_files():
    ids = [qa["id"] for name, split in FILES for _, qa in questions(name, split)]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"(v2-)?(train|dev)-\d+", identity) for identity in ids)


@pytest.mark.parametrize("name, split", FILES)
def test_format(name, split):
    made = load(name, split)
    assert made["version"] == ("v2.0" if name == "sample-v2" else "1.1")
    for context, qa in questions(name, split):
        assert context and qa["question"].endswith("?"), qa["id"]
        assert ("is_impossible" in qa) == (name == "sample-v2"), qa["id"]
        if not qa.get("is_impossible"):
            assert qa["answers"] and "plausible_answers" not in qa, qa["id"]
        if split == "train":
            assert len(qa["answers"]) <= 1, qa["id"]
        spans = [(answer["text"], answer["answer_start"]) for answer in qa["answers"]]
        assert len(spans) == len(set(spans)), qa["id"]


def test_sample_sizes():
    assert 600 <= len(questions("sample", "train")) <= 2500
    assert 250 <= len(questions("sample", "dev")) <= 320
    assert (DATA / "sample" / "train.json").stat().st_size < 700_000
    for split in ("train", "dev"):
        for paragraph in paragraphs("sample", split):
            assert 35 <= len(paragraph["context"].split()) <= 70, paragraph["context"]
            assert 3 <= len(paragraph["qas"]) <= 6, paragraph["context"]
            assert len({qa["question"] for qa in paragraph["qas"]}) == len(paragraph["qas"])


def test_sample_asks_every_kind_of_question():
    starts = ["Who", "What", "When", "Where", "Which", "How many", "How much", "How long", "How old", "Why"]
    starts += ["In what year", "What colour", "By whom"]
    for split in ("train", "dev"):
        asked = [qa["question"] for _, qa in questions("sample", split)]
        assert not [start for start in starts if not any(q.startswith(start + " ") for q in asked)], split


def test_sample_dev_has_several_gold_answers():
    several = [len(qa["answers"]) > 1 for _, qa in questions("sample", "dev")]
    assert 0.25 <= sum(several) / len(several) <= 0.4
    assert {len(qa["answers"]) for _, qa in questions("sample", "dev")} == {1, 2, 3}


def test_sample_has_no_template_left_over():
    for split in ("train", "dev"):
        text = (DATA / "sample" / f"{split}.json").read_text(encoding="utf-8")
        for paragraph in paragraphs("sample", split):
            shown = paragraph["context"] + " ".join(qa["question"] for qa in paragraph["qas"])
            assert not re.search(r"[{}\[\]*|]|  |\ba [aeiou]|\ban [^aeiou\W]|\.\.| ,| \.", shown), shown
        assert "||" not in text


def test_sample_questions_mention_only_names_of_their_paragraph():
    for split in ("train", "dev"):
        for context, qa in questions("sample", split):
            mentioned = re.findall(r"\b[A-Z]\w+", qa["question"].split(" ", 1)[1])
            assert set(mentioned) <= set(re.findall(r"\w+", context)), (qa, context)


@pytest.mark.parametrize("name", SETS)
def test_dev_shares_nothing_with_train(name):
    train, dev = load(name, "train"), load(name, "dev")
    assert not {a["title"] for a in train["data"]} & {a["title"] for a in dev["data"]}
    assert not {c for c, _ in questions(name, "train")} & {c for c, _ in questions(name, "dev")}
    assert not {q["question"] for _, q in questions(name, "train")} & {q["question"] for _, q in questions(name, "dev")}
    text = "\n".join(p["context"] for p in paragraphs(name, "train"))
    found = {answer for context, qa in questions(name, "dev") for answer in names(context, qa)}
    assert len(found) > (100 if name == "sample" else 8)
    assert not [answer for answer in found if re.search(rf"\b{re.escape(answer)}\b", text)]


@pytest.mark.parametrize("split", ["train", "dev"])
def test_v2_unanswerable(split):
    asked = [qa for _, qa in questions("sample-v2", split)]
    impossible = [qa for qa in asked if qa["is_impossible"]]
    assert 0.17 <= len(impossible) / len(asked) <= 0.25
    assert all(qa["answers"] == [] and qa["plausible_answers"] for qa in impossible)


@pytest.mark.parametrize("split", ["train", "dev"])
def test_v2_long_contexts(split):
    long = [p for p in paragraphs("sample-v2", split) if 450 <= len(p["context"].split()) <= 700]
    assert len(long) >= 2
    for paragraph in long:
        late = [
            answer
            for qa in paragraph["qas"]
            for answer in qa["answers"]
            if len(pieces(paragraph["context"][: answer["answer_start"]])) > 400
        ]
        assert late


@pytest.mark.parametrize("split", ["train", "dev"])
@pytest.mark.parametrize(
    "what",
    [
        "GREEK SMALL",
        "CJK UNIFIED",
        "DEVANAGARI LETTER",
        "DEVANAGARI VOWEL SIGN",
        "COMBINING",
        "ZERO WIDTH JOINER",
        "EN DASH",
        "LEFT DOUBLE QUOTATION MARK",
        "RIGHT SINGLE QUOTATION MARK",
        "NO-BREAK SPACE",
        "WITH ACUTE",
    ],
)
def test_v2_characters(split, what):
    text = "".join(p["context"] for p in paragraphs("sample-v2", split))
    assert any(what in unicodedata.name(character, "") for character in text)


@pytest.mark.parametrize("split", ["train", "dev"])
@pytest.mark.parametrize("what", ["GREEK", "CJK UNIFIED", "DEVANAGARI", "COMBINING", "EN DASH", "NO-BREAK SPACE"])
def test_v2_answers_have_them_too(split, what):
    text = "".join(answer["text"] for _, qa in questions("sample-v2", split) for answer in qa["answers"])
    assert any(what in unicodedata.name(character, "") for character in text)
