"""The official scores: by hand, by an independent rewriting, by published predictions, and on the command line."""

import gzip
import hashlib
import json
import math
import string
import subprocess
import sys
import time
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from squad_dir import ROOT, squad_file

from common.errors import UserError
from common.metrics import main
from common.scoring.metrics import best_threshold, evaluate, missing_ids, normalize_answer, score_answer

# Answers by hand.


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Denver  Broncos.", "denver broncos"),
        ("a an the", ""),
        ("The", ""),
        ("", ""),
        (" \t\n", ""),
        ("A.B.C.", "abc"),  # punctuation goes before articles do
        ("a-b", "ab"),
        ("the-end", "theend"),
        ("théâtre", "théâtre"),  # é is a letter: no article there
        ("Theatre and banana", "theatre and banana"),
        ("$1,000", "1000"),
        ("“quoted” – dash", "“quoted” – dash"),  # only ASCII punctuation is dropped
        ("'quoted' - dash", "quoted dash"),
        ("a\u00a0b", "b"),  # a no-break space parts words
        ("a\u200bb", "\u200bb"),  # a zero-width space is no blank, and no letter either
        ("ΑΘΗΝΑ", "αθηνα"),
        ("İstanbul", "i̇stanbul"),
        ("東京 the 塔", "東京 塔"),
        ("東京the塔", "東京the塔"),
        ("_the_", ""),
    ],
)
def test_normalize_by_hand(text, normal):
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "golds", "rule_1", "rule_2"),
    [
        ("Denver Broncos", ["the Denver Broncos!"], (1, 1.0), (1, 1.0)),
        ("The", ["the"], (1, 0), (1, 1)),  # nothing is left of either
        ("", ["Denver"], (0, 0), (0, 0)),
        ("the", ["Denver"], (0, 0), (0, 0)),
        ("red blue", ["blue"], (0, 2 / 3), (0, 2 / 3)),  # precision 1/2, recall 1
        ("x x y", ["x y y"], (0, 2 / 3), (0, 2 / 3)),  # words count as often as both sides have them
        ("north west", ["north", "west north", "north west"], (1, 1.0), (1, 1.0)),
        ("one two", ["two", "one two three four"], (0, 2 / 3), (0, 2 / 3)),
        ("one", ["two", "three"], (0, 0), (0, 0)),
        ("Cafe", ["Café"], (0, 0), (0, 0)),  # accents count
        ("東京 塔", ["東京"], (0, 2 / 3), (0, 2 / 3)),
        ("…", ["..."], (0, 0), (0, 0)),
        ("", ["..."], (1, 0), (1, 1)),
        ("blue", ["the", "blue"], (1, 1.0), (1, 1.0)),
        ("the", ["a", "blue"], (1, 0), (0, 0)),  # rule 2.0 drops the gold `a`, since another stays
        ("", [], (0, 0), (1, 1)),
        ("The.", [], (0, 0), (1, 1)),
        ("blue", [], (0, 0), (0, 0)),
    ],
)
def test_score_by_hand(prediction, golds, rule_1, rule_2):
    assert score_answer(prediction, golds, "1.1") == rule_1
    assert score_answer(prediction, golds, "2.0") == rule_2


GOLD = {"q1": ["blue"], "q2": ["red car", "car"], "q3": [], "q4": []}


def test_evaluate_by_hand():
    answerable = {"q1": ["blue"], "q2": ["red car"]}
    result = evaluate(answerable, {"q1": "Blue!", "q2": "car"}, "1.1")
    assert list(result.items()) == [("exact_match", 50.0), ("f1", 100 * (1 + 2 / 3) / 2)]
    result = evaluate(GOLD, {"q1": "blue", "q2": "a red car", "q3": "", "q4": "green"}, "2.0")
    assert list(result.items()) == [
        ("exact", 75.0),
        ("f1", 75.0),
        ("total", 4),
        ("HasAns_exact", 100.0),
        ("HasAns_f1", 100.0),
        ("HasAns_total", 2),
        ("NoAns_exact", 50.0),
        ("NoAns_f1", 50.0),
        ("NoAns_total", 2),
    ]


def test_groups_without_a_question_are_left_out():
    assert "NoAns_total" not in evaluate({"q1": ["blue"]}, {"q1": ""}, "2.0")
    assert "HasAns_total" not in evaluate({"q3": []}, {"q3": ""}, "2.0")


@pytest.mark.parametrize("rule", ["1.1", "2.0"])
def test_missing_ids_score_0_and_count_extra_ids_do_not(rule):
    gold = {"q1": ["blue"], "q2": ["red"], "q3": ["green"], "q4": ["white"]}
    predictions = {"q1": "blue", "other": "red", "q3": "grey"}
    result = evaluate(gold, predictions, rule)
    assert (result.get("exact_match", result.get("exact")), result["f1"]) == (25.0, 25.0)
    assert result.get("total", 4) == 4
    assert missing_ids(gold, predictions) == (["q2", "q4"], ["other"])


def test_threshold_by_hand():
    predictions = {"q1": "blue", "q2": "car", "q3": "green", "q4": "green"}
    na_probs = {"q1": 0.1, "q3": 0.3, "q2": 0.5, "q4": 0.9}
    result = evaluate(GOLD, predictions, "2.0", na_probs, na_threshold=0.3)  # empties q2 and q4; 0.3 is not above 0.3
    assert (result["exact"], result["HasAns_exact"], result["NoAns_exact"]) == (50.0, 50.0, 50.0)
    assert list(result.items())[-4:] == [  # from the lowest: 2 + 1, - 1, + 1, - 1: the first best one stays
        ("best_exact", 75.0),
        ("best_exact_thresh", 0.1),
        ("best_f1", 75.0),
        ("best_f1_thresh", 0.1),
    ]


def test_a_missing_unanswerable_question_has_no_share_in_the_best_score():
    result = evaluate(GOLD, {"q1": "blue", "q3": ""}, "2.0", {"q1": 0.1, "q3": 0.2})
    assert result["best_exact"] == 50.0  # q1 and q3


def test_a_question_without_no_answer_score_is_named():
    with pytest.raises(UserError, match='question "q2" has a prediction and no no-answer score'):
        evaluate(GOLD, {"q1": "blue", "q2": "car"}, "2.0", {"q1": 0.5})


def test_best_threshold_for_tuning_attains_what_it_promises():
    # Answering nothing is best; all scores are negative, so that the official 0.0 would answer everything.
    assert best_threshold([False, False], [0, 0], [-3.0, -2.0]) == (2, -4.0)
    assert best_threshold([False, False], [0, 0], [-3.0, -2.0], official=True) == (2, 0.0)
    # Two questions of one score cannot be parted, though the official search does.
    assert best_threshold([True, False], [1, 0], [0.5, 0.5], official=True) == (2, 0.5)
    assert best_threshold([True, False], [1, 0], [0.5, 0.5]) == (1, -0.5)
    assert best_threshold([True, True, False], [0.5, 1, 0], [2, -1, 5]) == (2.5, 2)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0, 0.25, 0.5, 1]), st.integers(-4, 4)), min_size=1))
def test_best_threshold_is_the_best_of_all(rows):
    def total(threshold):
        return sum((score if has else 0) if na <= threshold else (not has) for has, score, na in rows)

    best, threshold = best_threshold(*(list(column) for column in zip(*rows, strict=True)))
    assert total(threshold) == best == max(total(t) for t in range(-6, 6))


# Against an independent, slower rewriting of the rules.


def slow_words(text):
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    runs = ["".join(run) for _, run in groupby(kept, key=str.isalnum)]
    return "".join(" " if run in ("a", "an", "the") else run for run in runs).split()


def slow_score(prediction, golds, rule):
    predicted = slow_words(prediction)
    golds = [slow_words(gold) for gold in golds]
    if rule == "2.0":
        golds = [gold for gold in golds if gold != []]
        if not golds:
            golds = [[]]
    scores = [(0, 0.0)]
    for gold in golds:
        rest, shared = list(gold), 0
        for word in predicted:
            if word in rest:
                rest.remove(word)
                shared += 1
        f1 = 2 * shared / max(len(predicted) + len(gold), 1)
        if rule == "2.0" and predicted == gold == []:
            f1 = 1.0
        scores.append((1 if " ".join(predicted) == " ".join(gold) else 0, f1))
    return max(exact for exact, _ in scores), max(f1 for _, f1 in scores)


def slow_evaluate(gold, predictions, na_probs, na_threshold):
    """Rule 2.0, for predictions of all questions."""
    result = {}
    for prefix, wanted in (("", (True, False)), ("HasAns_", (True,)), ("NoAns_", (False,))):
        ids = [question for question in gold if bool(gold[question]) in wanted]
        kept = {q: slow_score(predictions[q], gold[q], "2.0") for q in ids}
        kept |= {q: (1 - bool(gold[q]), 1 - bool(gold[q])) for q in ids if na_probs[q] > na_threshold}
        if ids:
            result[f"{prefix}exact"] = 100 * math.fsum(kept[q][0] for q in ids) / len(ids)
            result[f"{prefix}f1"] = 100 * math.fsum(kept[q][1] for q in ids) / len(ids)
            result[f"{prefix}total"] = len(ids)
    order = sorted(na_probs, key=na_probs.get)
    for number, name in ((0, "exact"), (1, "f1")):
        # The score when the first 0, 1, 2, ... questions of the order are answered and the rest are not. An
        # unanswerable question is lost when a text, be it only `the`, is given for it.
        totals = []
        for answered in range(len(order) + 1):
            total = 0
            for place, q in enumerate(order):
                if gold[q]:
                    total += slow_score(predictions[q], gold[q], "2.0")[number] if place < answered else 0
                else:
                    total += place >= answered or predictions[q] == ""
            totals.append(total)
        best = max(totals)
        first = next(place for place, total in enumerate(totals) if total > best - 1e-9)
        result[f"best_{name}"] = 100 * best / len(gold)
        result[f"best_{name}_thresh"] = na_probs[order[first - 1]] if first else 0.0
    return result


pieces = st.sampled_from(["the", "The", "a", "an", "red", "Blue", "blue", "1,0", "-", ".", "…", "_", "é", "東京", "🙂"])
blanks = st.sampled_from(["", " ", "  ", "\u00a0", "\u3000", "\n"])
texts = st.one_of(st.lists(st.tuples(pieces, blanks), max_size=6).map(lambda p: "".join(map("".join, p))), st.text())


@given(texts, st.lists(texts, max_size=4), st.sampled_from(["1.1", "2.0"]))
@settings(max_examples=500, deadline=None)
def test_score_equals_the_rewriting(prediction, golds, rule):
    exact, f1 = score_answer(prediction, golds, rule)
    assert (exact, pytest.approx(f1, rel=1e-12)) == slow_score(prediction, golds, rule)
    assert exact <= f1 or rule == "1.1"


rows = st.tuples(st.lists(texts, max_size=3), texts, st.one_of(st.integers(-3, 3), st.floats(-3, 3)))


@given(st.lists(rows, min_size=1, max_size=10), st.floats(-3, 3), st.randoms())
@settings(max_examples=200, deadline=None)
def test_evaluate_equals_the_rewriting(questions, na_threshold, shuffler):
    gold = {f"q{number}": row[0] for number, row in enumerate(questions)}
    predictions = {f"q{number}": row[1] for number, row in enumerate(questions)}
    na_probs = [(f"q{number}", row[2]) for number, row in enumerate(questions)]
    shuffler.shuffle(na_probs)
    na_probs = dict(na_probs)
    result = evaluate(gold, predictions, "2.0", na_probs, na_threshold)
    slow = slow_evaluate(gold, predictions, na_probs, na_threshold)
    assert list(result) == list(slow)
    assert result == pytest.approx(slow, rel=1e-9)


def test_sums_are_taken_from_left_to_right_without_compensation():
    # F1 1/3, 4/7, 3/4 and again: the naive sum of these differs in the last digits from the exact one.
    gold = {f"q{number}": ["one two three four five"] for number in range(10_000)}
    predictions = {f"q{number}": " ".join(["one", "two", "three"][: 1 + number % 3]) for number in range(10_000)}
    total = 0.0
    for number in range(10_000):
        total += score_answer(predictions[f"q{number}"], gold[f"q{number}"], "1.1")[1]
    assert total != math.fsum(score_answer(predictions[q], gold[q], "1.1")[1] for q in gold)
    assert evaluate(gold, predictions, "1.1")["f1"] == 100.0 * total / 10_000


# Published predictions on SQuAD itself.


def read_gold(path):
    articles = json.loads(gzip.decompress(path.read_bytes()))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    return {qa["id"]: [answer["text"] for answer in qa["answers"]] for p in paragraphs for qa in p["qas"]}


@pytest.mark.parametrize(("name", "rule"), [("v1.1-bert-ensemble", "1.1"), ("v2.0-bert-single", "2.0")])
def test_published_predictions_score_as_published(name, rule):
    expected = json.loads(squad_file("reference/scores.json").read_text())[name]
    gold = read_gold(squad_file(expected.pop("data")))
    predictions = json.loads(gzip.decompress(squad_file(f"reference/{name}.predictions.json.gz").read_bytes()))
    started = time.perf_counter()
    result = evaluate(gold, predictions, rule)
    print(f"{len(gold):,} questions scored in {time.perf_counter() - started:.2f} s")
    if rule == "1.1":
        expected = {"exact_match": expected["exact"], "f1": expected["f1"]}
    assert list(result.items()) == list(expected.items())  # no tolerance: the same floats in the same order


def test_the_command_line_on_published_predictions():
    scores = json.loads(squad_file("reference/scores.json").read_text())["v2.0-bert-single"]
    data = squad_file(scores.pop("data"))
    done = command(data, squad_file("reference/v2.0-bert-single.predictions.json.gz"))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == scores


def no_answer_score(question):
    """A number from 0 to 1 for an id, often the same for two: larger where the question has no answer, mostly."""
    digest = hashlib.sha256(question.encode()).digest()
    return (digest[0] + digest[1] + 128 * (question > "58")) / 638  # ids without an answer start with 5a, others 56, 57


def test_no_answer_scores_on_published_predictions():
    """Against figures of a plain program of evaluate-v2.0.py's rules, once computed: no tolerance."""
    gold = read_gold(squad_file("dev-v2.0.json.gz"))
    path = squad_file("reference/v2.0-bert-single.predictions.json.gz")
    predictions = json.loads(gzip.decompress(path.read_bytes()))
    na_probs = {question: no_answer_score(question) for question in gold}
    assert list(evaluate(gold, predictions, "2.0", na_probs, na_threshold=0.6).items()) == [
        ("exact", 78.30371430977848),
        ("f1", 80.86042094842266),
        ("total", 11873),
        ("HasAns_exact", 64.81106612685561),
        ("HasAns_f1", 69.93181139011834),
        ("HasAns_total", 5928),
        ("NoAns_exact", 91.75777964676199),
        ("NoAns_f1", 91.75777964676199),
        ("NoAns_total", 5945),
        ("best_exact", 79.93767371346753),
        ("best_exact_thresh", 0.7664576802507836),
        ("best_f1", 82.96004146594059),
        ("best_f1_thresh", 0.7711598746081505),
    ]


# The command line.


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "common.metrics", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )


def squad_json(version, questions):
    """A SQuAD file of one paragraph; questions: {id: gold texts, all to be found in it}."""
    context = "A blue boat met a red car and a green tram."
    qas = []
    for question, texts in questions.items():
        answers = [{"text": text, "answer_start": context.index(text)} for text in texts]
        qas.append({"id": question, "question": f"What is {question}?", "answers": answers})
        if version == "v2.0":
            qas[-1]["is_impossible"] = not texts
    return json.dumps({"version": version, "data": [{"title": "T", "paragraphs": [{"context": context, "qas": qas}]}]})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "v1.json").write_text(squad_json("1.1", {"q1": ["blue boat", "boat"], "q2": ["red car"]}))
    (tmp_path / "v2.json").write_text(squad_json("v2.0", {"q1": ["blue boat"], "q2": ["red car"], "q3": []}))
    (tmp_path / "good.json").write_text('{"q1": "boat", "q2": "car", "q3": ""}')
    return tmp_path


def test_the_rule_follows_the_data(folder):
    done = command(folder / "v1.json", folder / "good.json")
    f1 = 100 * (1 + 2 / 3) / 2
    assert done.stdout == f'{{\n  "exact_match": 50.0,\n  "f1": {f1}\n}}\n'
    assert done.stderr.count("\n") == 1 and done.stderr.endswith('v1.json, ignored: 1 ("q3")\n')
    done = command(folder / "v2.json", folder / "good.json")
    assert (json.loads(done.stdout)["total"], done.stderr, done.returncode) == (3, "", 0)
    done = command(folder / "v1.json", folder / "good.json", "--rule", "2.0")
    assert json.loads(done.stdout)["HasAns_total"] == 2
    done = command(folder / "v2.json", folder / "good.json", "--rule", "1.1")
    assert list(json.loads(done.stdout)) == ["exact_match", "f1"] and "gold answer, each scores 0 under" in done.stderr


def test_missing_predictions_are_counted_and_named(folder):
    (folder / "few.json").write_text('{"q3": ""}')
    done = command(folder / "v2.json", folder / "few.json")
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert 'questions without a prediction, each scores 0: 2 of 3 ("q1", "q2")' in done.stderr
    assert json.loads(done.stdout)["exact"] == 100 / 3


def test_no_answer_scores_and_threshold(folder):
    (folder / "na.json").write_text('{"q1": 0.2, "q2": 0.9, "q3": 0.8, "more": 1}')
    arguments = [folder / "v2.json", folder / "good.json", "--na-probs", folder / "na.json"]
    done = command(*arguments, "--na-threshold", "0.5")
    result = json.loads(done.stdout)
    assert list(result)[-4:] == ["best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"]
    assert (result["best_f1_thresh"], result["HasAns_f1"]) == (0.9, 100 * (2 / 3) / 2)
    assert 'ignored: 1 ("more")' in done.stderr
    assert command(*arguments, "--na-threshold", "nan").returncode == 2


BAD = {  # content of a predictions file, and what the message must say
    "not JSON": (b"q1: blue", "not JSON: Expecting value at line 1"),
    "empty": (b"", "the file is empty"),
    "truncated": (b'{"q1": "blue"', "not JSON"),
    "a byte-order mark alone": (b"\xef\xbb\xbf", "the file is empty"),
    "UTF-16": ('{"q1": "blue"}'.encode("utf-16"), "not UTF-8 text (byte 0)"),
    "Latin-1": ('{"q1": "café"}'.encode("latin-1"), "not UTF-8"),
    "a list": (b'["blue"]', "holds a list"),
    "a text": (b'"blue"', "holds a text"),
    "null": (b"null", "holds null"),
    "a number for an answer": (b'{"q1": 3}', 'question "q1" is a number'),
    "null for an answer": (b'{"q1": null}', 'question "q1" is null'),
    "a list for an answer": (b'{"q1": ["blue"]}', 'question "q1" is a list'),
    "an object for an answer": (b'{"q1": {"text": "blue"}}', 'question "q1" is an object'),
    "an id twice": (b'{"q1": "blue", "q2": "", "q1": "red"}', 'id "q1" is there twice'),
    "an id twice, gzipped": (gzip.compress(b'{"q1": "blue", "q1": "blue"}'), 'id "q1" is there twice'),
    "an id twice after a byte-order mark": (b'\xef\xbb\xbf{"q\xc3\xa9": "", "q\xc3\xa9": ""}', "is there twice"),
    "a lone surrogate": (b'{"q1": "\\ud83d"}', "lone surrogate"),
    "a lone surrogate in an id": (b'{"q\\udc00": "blue"}', "lone surrogate"),
    "NaN": (b'{"q1": NaN}', 'question "q1" is a number'),
    "NaN alone": (b"NaN", "holds a number"),
    "nesting": (b"[" * 200_000, "nested too deeply"),
    "nested objects": (b'{"a":' * 200_000, "nested too deeply"),
    "a long number": (b'{"q1": ' + b"9" * 6000 + b"}", "number"),
}


def one_line(done, path, said):
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert str(path) in done.stderr and said in done.stderr


def from_main(*arguments):
    """As the command line, without a process of its own: the message of the UserError."""
    with pytest.raises(UserError) as raised:
        main([str(argument) for argument in arguments])
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("fault", BAD)
def test_bad_predictions(folder, fault):
    content, said = BAD[fault]
    (folder / "bad.json").write_bytes(content)
    message = from_main(folder / "v2.json", folder / "bad.json")
    assert str(folder / "bad.json") in message and said in message


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("NaN", "is nan: write a finite number"),
        ("-Infinity", "is -inf: write a finite number"),
        ("1e999", "is inf"),
        ('"0.5"', "is a text"),
        ("true", "is true"),
        ("null", "is null"),
        ("9" * 400, "is 999"),
    ],
)
def test_bad_no_answer_scores(folder, value, said):
    (folder / "na.json").write_text(f'{{"q1": {value}, "q2": 0, "q3": 0}}')
    message = from_main(folder / "v2.json", folder / "good.json", "--na-probs", folder / "na.json")
    assert str(folder / "na.json") in message and said in message


def test_no_answer_scores_that_do_not_fit(folder):
    (folder / "na.json").write_text('{"q1": 0}')
    arguments = [folder / "good.json", "--na-probs", folder / "na.json"]
    message = from_main(folder / "v2.json", *arguments)
    assert message.startswith(str(folder / "na.json")) and '"q2"' in message
    assert "--rule 2.0" in from_main(folder / "v1.json", *arguments)


def test_files_that_cannot_be_read_end_with_one_line_and_status_2(folder):
    one_line(command(folder / "v2.json", folder / "absent.json"), folder / "absent.json", "No such file")
    one_line(command(folder / "v2.json", folder), folder, "directory")
    one_line(command(folder / "absent.json", folder / "good.json"), folder / "absent.json", "")
    (folder / "cut.json.gz").write_bytes(gzip.compress(b'{"q1": "blue"}' * 99)[:-12])
    assert "truncated or damaged gzip" in from_main(folder / "v2.json", folder / "cut.json.gz")


def test_predictions_are_read_as_the_data_is(folder, capsys):
    """Gzipped or not, whatever the name, with or without a byte-order mark."""
    plain = (folder / "good.json").read_bytes()
    main([str(folder / "v2.json"), str(folder / "good.json")])
    expected = capsys.readouterr()
    assert json.loads(expected.out)["total"] == 3
    for name, content in (
        ("zipped.json.gz", gzip.compress(plain)),
        ("zipped.json", gzip.compress(plain)),
        ("plain.json.gz", plain),
        ("marked.json", b"\xef\xbb\xbf" + plain),
        ("marked.json.gz", gzip.compress(b"\xef\xbb\xbf" + plain)),
    ):
        (folder / name).write_bytes(content)
        main([str(folder / "v2.json"), str(folder / name)])
        assert capsys.readouterr() == expected, name


def test_a_wrong_squad_dir_fails_rather_than_skips(monkeypatch, tmp_path):
    monkeypatch.setenv("SQUAD_DIR", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="SQUAD_DIR"):
        squad_file("dev-v1.1.json.gz")
    monkeypatch.setenv("SQUAD_DIR", "")
    with pytest.raises(pytest.skip.Exception, match="set SQUAD_DIR"):
        squad_file("there-is-no-such-file")
