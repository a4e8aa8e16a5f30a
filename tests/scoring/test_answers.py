"""From logits to answers, against plain searches, and over any number of ranks."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tiny import SAMPLE_V2, load_small, minilm_tokenizer, sample_features

from common.data.packing import pack
from common.data.plan import evaluation_chunks
from common.data.squad import parse_squad
from common.data.windows import build
from common.run.results import n_best_lines, write_results
from common.run.world import World
from common.scoring.answers import NO_SPAN_ODDS, Answers, best_spans, decide, probabilities
from common.scoring.evaluation import Evaluation, evaluate, find_answers, official, predict
from common.scoring.metrics import score_answer
from common.scoring.selection import tune_threshold

CPU = torch.device("cpu")


def brute_force(start, end, begin, finish, width, n_best):
    """All valid spans of one window as (score, start, end), highest first, at most n_best."""
    spans = [(float(start[i] + end[j]), i, j) for i in range(begin, finish) for j in range(i, min(i + width, finish))]
    return sorted(spans, key=lambda span: -span[0])[:n_best]


@pytest.mark.parametrize("seed", range(12))
def test_best_spans_are_those_of_a_plain_search(seed):
    generator = torch.Generator().manual_seed(seed)
    windows, length = 7, [1, 2, 5, 9, 17, 40][seed % 6]
    start, end = torch.randn(2, windows, length, generator=generator)
    bounds = torch.randint(0, length + 1, (windows, 2), generator=generator).sort(dim=1).values
    for width in (1, 2, 3, length, length + 5):
        for n_best in (1, 3, 20, length * length + 4):
            first, last, exists = best_spans(start, end, bounds[:, 0], bounds[:, 1], width, n_best)
            assert exists.shape == first.shape == last.shape == (windows, n_best)
            score = (start.gather(1, first) + end.gather(1, last)).masked_fill(~exists, -math.inf)
            for row in range(windows):
                begin, finish = bounds[row].tolist()
                expected = brute_force(start[row], end[row], begin, finish, width, n_best)
                assert exists[row].tolist() == [i < len(expected) for i in range(n_best)]
                got = zip(score[row].tolist(), first[row].tolist(), last[row].tolist(), strict=True)
                assert list(got) == expected + [(-math.inf, 0, 0)] * (n_best - len(expected))


def test_best_spans_of_a_window_without_context():
    first, last, exists = best_spans(torch.zeros(1, 8), torch.zeros(1, 8), torch.tensor([4]), torch.tensor([4]), 3, 5)
    assert not exists.any() and first.shape == last.shape == (1, 5)


def test_best_spans_never_take_the_cls_token_or_the_question():
    start, end = torch.zeros(2, 1, 10)
    start[0, 0] = end[0, 0] = start[0, 2] = end[0, 2] = 100.0
    end[0, 9] = 100.0  # [SEP] at the end
    first, last, exists = best_spans(start, end, torch.tensor([4]), torch.tensor([9]), 30, 50)
    valid = exists[0]
    assert valid.sum() == 15 and not start[0][first[0][valid]].any() and not end[0][last[0][valid]].any()
    assert first[0][valid].min() >= 4 and last[0][valid].max() <= 8 and (first <= last)[0][valid].all()


# ---------------------------------------------------------------------------------------------------------------------
# Pooling

CONTEXT = "one two three two one"
WORDS = {"one": (0, 3), "two": (4, 7), "three": (8, 13), "two again": (14, 17), "one again": (18, 21)}


def found_in(windows, null, question=None, contexts=(CONTEXT,)):
    """Answers of windows, each a list of (word, start logit, end logit), filled up as `find_answers` does."""
    shape = len(windows), max(map(len, windows))
    question = np.zeros(len(windows), np.int64) if question is None else np.array(question)
    start, end = np.full((2, *shape), -math.inf, np.float32)
    first, past = np.zeros((2, *shape), np.int64)
    for row, spans in enumerate(windows):
        for column, (word, *logits) in enumerate(spans):
            first[row, column], past[row, column] = WORDS.get(word, (3, 3))
            start[row, column], end[row, column] = logits
    ids = [f"q{i}" for i in range(len(contexts))]
    return Answers(ids, list(contexts), question, np.array(null, np.float32), start, end, first, past)


def listed(answers, can_abstain=True, n_best=20):
    """{id: [(text, start logit, end logit)]} of n-best lists."""
    return {key: [entry[:3] for entry in entries] for key, entries in answers.n_best(n_best, can_abstain)}


def texts_of(entries):
    return [entry[0] for entry in entries]


def test_the_best_span_of_all_windows_wins():
    answers = found_in([[("two", 1, 2), ("one", 1, 1)], [("three", 2, 2)], [("one", 0, 0)]], [[0, 0]] * 3)
    assert answers.best["q0"] == ("three", -4)
    assert listed(answers)["q0"] == [("three", 2, 2), ("two", 1, 2), ("one", 1, 1), ("", 0, 0)]


def test_texts_are_listed_once_with_their_best_logits():
    windows = [[("two", 1, 2), ("one", 0, 1)], [("two again", 3, 4), ("one again", 0, 0)], [("two", 5, 1)]]
    entries = listed(found_in(windows, [[-1, -1]] * 3))["q0"]
    assert entries == [("two", 3, 4), ("one", 0, 1), ("", -1, -1)]


def test_n_best_counts_texts_after_pooling():
    windows = [[("two", 9, 0), ("one", 5, 0)], [("two again", 8, 0), ("three", 1, 0)]]
    answers = found_in(windows, [[0, 0]] * 2)
    assert texts_of(listed(answers, can_abstain=False, n_best=2)["q0"]) == ["two", "one"]
    assert texts_of(listed(answers, can_abstain=False, n_best=3)["q0"]) == ["two", "one", "three"]
    fewer = answers.of_each_window(1)
    assert texts_of(listed(fewer, can_abstain=False)["q0"]) == ["two"] and fewer.best == answers.best


def test_the_null_score_is_the_smallest_cls_sum():
    windows = [[("two", 1, 2)], [("three", 2, 3)], [("one", 0, 0)]]
    answers = found_in(windows, [[4, 4], [9, -6], [-1, 5]])  # sums 8, 3, 4
    assert answers.best["q0"] == ("three", 3 - 5)
    assert ("", 9, -6) in listed(answers)["q0"]


def test_of_equal_scores_the_first_window_and_the_first_span_win():
    windows = [[("two", 1, 1)], [("one", 2, 1), ("two", 1, 2)], [("three", 3, 0)]]
    answers = found_in(windows, [[1, 1], [0, 2], [2, 0]])
    assert answers.best["q0"] == ("one", 2 - 3)
    assert listed(answers)["q0"] == [("one", 2, 1), ("two", 1, 2), ("three", 3, 0), ("", 1, 1)]


def test_questions_keep_their_own_windows_in_any_order():
    windows = [[("two", 1, 0)], [("one", 7, 0)], [("three", 5, 0)], [("two", 9, 0)]]
    null = [[1, 0], [2, 0], [3, 0], [4, 0]]
    answers = found_in(windows, null, question=[1, 0, 1, 2], contexts=[CONTEXT, CONTEXT, "xxx yyy " * 3])
    assert answers.best == {"q0": ("one", 2 - 7), "q1": ("three", 1 - 5), "q2": ("yyy", 4 - 9)}  # each of its context
    assert [texts_of(entries) for entries in listed(answers, False).values()] == [["one"], ["three", "two"], ["yyy"]]


@pytest.mark.parametrize("can_abstain", [False, True])
def test_a_question_without_any_span_is_answered_by_nothing(can_abstain):
    answers = found_in([[], [("two", 1, 1)]], [[1, 2], [0, 0]], question=[0, 1], contexts=["  ", CONTEXT])
    assert answers.best["q0"] == ("", NO_SPAN_ODDS)
    assert listed(answers, can_abstain)["q0"] == [("", 1, 2)]
    for threshold in (None, 0.0, -50.0, 50.0):
        assert decide(answers.best, threshold)["q0"] == ""
    lines = "".join(n_best_lines(answers.n_best(20, can_abstain)))
    assert json.loads(lines)["q0"] == [{"text": "", "probability": 1, "start_logit": 1, "end_logit": 2}]


def test_tokens_without_text_are_no_answer():
    """Byte-level tokenizers have tokens for blanks alone."""
    answers = found_in([[("blank", 9, 9), ("two", 1, 1)]], [[-3, -3]])
    assert answers.best["q0"] == ("two", -6 - 2)
    assert listed(answers)["q0"] == [("two", 1, 1), ("", -3, -3)]
    answers = found_in([[("blank", 9, 9)]], [[-3, -3]])
    assert answers.best["q0"][0] == "" and listed(answers, can_abstain=False)["q0"] == [("", -3, -3)]


def test_without_abstaining_the_null_answer_is_not_listed():
    answers = found_in([[("two", -9, -9), ("one", -8, -8)]], [[9, 9]])
    assert texts_of(listed(answers, can_abstain=False)["q0"]) == ["one", "two"]
    assert answers.best["q0"][1] == 18 + 16


def test_decide():
    best = {key: (key, odds) for key, odds in (("a", -1.0), ("b", 0.0), ("c", 2.5))}
    assert decide(best, None) == {"a": "a", "b": "b", "c": "c"}
    assert decide(best, 0.0) == {"a": "a", "b": "b", "c": ""}  # above the threshold, not at it
    assert decide(best, -2) == {"a": "", "b": "", "c": ""}
    assert decide(best, 3) == {"a": "a", "b": "b", "c": "c"}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
def test_probabilities_are_a_softmax_of_the_scores(scale):
    logits = np.random.default_rng(3).normal(size=(20, 2)) * scale
    entries = sorted((("text", *pair) for pair in logits), key=lambda entry: -(entry[1] + entry[2]))
    shares = probabilities(entries)
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
    scores = torch.tensor([start + end for _, start, end in entries], dtype=torch.float64)
    assert shares == pytest.approx(scores.softmax(0).tolist(), abs=1e-12)


def test_an_n_best_file_is_json_that_gives_fp32_logits_back():
    """Texts with quotes, line ends and any script; logits to the last bit."""
    texts = ['say "no"', "a\\b\n\tc", "naïve 東京 \U0001f40d", "</script>\u2028"]
    context = " ".join(texts)
    at = [context.index(text) for text in texts]
    logits = np.random.default_rng(0).normal(size=(2, 1, 4)).astype(np.float32) * [[[1e-6, 1, 30, 1e4]]]
    logits = -np.sort(-logits.astype(np.float32), axis=2)
    spans = np.array([at]), np.array([[place + len(text) for place, text in zip(at, texts, strict=True)]])
    answers = Answers(['q"1'], [context], np.zeros(1, int), np.zeros((1, 2), np.float32), *logits, *spans)
    lists = json.loads("".join(n_best_lines(answers.n_best(20, False))))
    assert list(lists) == ['q"1'] and {entry["text"] for entry in lists['q"1']} == set(texts)
    for entry in lists['q"1']:
        column = texts.index(entry["text"])
        assert [np.float32(entry[name]) for name in ("start_logit", "end_logit")] == logits[:, 0, column].tolist()


def test_a_threshold_tuned_on_questions_is_as_good_as_any():
    generator = np.random.default_rng(0)
    gold = {f"q{i}": ["two"] if i % 3 else [] for i in range(60)}
    windows = [[("two" if generator.random() < 0.7 else "one", 0, 0)] for _ in gold]
    null = [[float(generator.normal(-1 if texts else 1)), 0] for texts in gold.values()]
    answers = found_in(windows, null, range(60), [CONTEXT] * 60)
    texts = decide(answers.best, None)
    scores = {key: score_answer(texts[key], gold[key], "2.0") for key in gold}
    best = tune_threshold(Evaluation({}, {}, answers, gold, scores))
    reached = official(gold, decide(answers.best, best), "2.0")["f1"]
    candidates = [None, *(odds for _, odds in answers.best.values())]
    assert reached == max(official(gold, decide(answers.best, one), "2.0")["f1"] for one in candidates)
    assert reached > official(gold, texts, "2.0")["f1"]


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


@pytest.fixture(scope="module")
def model():
    return load_small(num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_attention_heads=2)


@pytest.fixture(scope="module")
def hard():
    """Features and data with contexts of several windows and unanswerable questions."""
    return sample_features(10, 160, 48, file=SAMPLE_V2 / "dev.json")


class Limits(NamedTuple):
    eval_tokens: int
    max_answer_tokens: int
    n_best: int


def predict_alone(model, features, chunk_tokens, max_answer_tokens=30, n_best=20, **more):
    """The outputs of a single process."""
    return predict(model, features, Limits(chunk_tokens, max_answer_tokens, n_best), World("cpu"), **more)


def on_ranks(size, function):
    """What function(world) returns on each of `size` ranks, which run as threads."""
    meeting, values = threading.Barrier(size, timeout=60), [None] * size

    def run(rank):
        world = World("cpu")
        world.rank, world.size = rank, size

        def gather(value):
            values[rank] = value
            meeting.wait()
            gathered = list(values)
            meeting.wait()
            return gathered

        world.gather = gather
        return function(world)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def predict_on(model, features, world_size, chunk_tokens=600):
    """The outputs of each of `world_size` ranks, and the part that each gives."""
    parts = {}

    def run(world):
        gather = world.gather

        def capture(part):
            parts[world.rank] = part
            return gather(part)

        world.gather = capture
        return predict(model, features, Limits(chunk_tokens, 30, 20), world)

    return on_ranks(world_size, run), list(parts.values())


def test_predictions_are_equal_to_the_bit_on_any_number_of_ranks(model, hard):
    features, _ = hard
    chunks = evaluation_chunks(features.lengths, 600)
    assert len(chunks) > 4 and any(len(chunk) > 1 for chunk in chunks)
    alone = predict_alone(model, features, 600)
    assert alone["start"].shape == (len(features.question), 20) and "window" not in alone
    for world_size in (1, 2, 3, 4):
        outputs, parts = predict_on(model, features, world_size)
        windows = np.concatenate([part["window"] for part in parts])
        assert sorted(windows.tolist()) == list(range(len(features.question)))
        for output in outputs:
            assert output.keys() == alone.keys()
            assert all(np.array_equal(output[name], alone[name], equal_nan=True) for name in alone)


def test_more_ranks_than_windows(model):
    features, data = sample_features(3)
    alone = predict_alone(model, features, 384)
    outputs, parts = predict_on(model, features, 6, chunk_tokens=384)
    assert min(len(part["window"]) for part in parts) == 0
    for output in outputs:
        assert all(np.array_equal(output[name], alone[name], equal_nan=True) for name in alone)
    assert list(find_answers(alone, features, data.frame).best) == list(data.frame["id"])


def test_predictions_are_those_of_each_window_alone(model, hard):
    """Spans and null scores of packed chunks against one window at a time and a plain search."""
    features, _ = hard
    outputs = predict_alone(model, features, 2000, 5, 4)
    for window in range(0, len(features.question), 5):
        with torch.no_grad():
            start, end = model.eval()(pack(features, [window]))
        assert outputs["null"][window] == pytest.approx([float(start[0]), float(end[0])], abs=1e-5)
        begin = int(features.context_at[window])
        finish = begin + int(features.context_tokens[window])
        expected = brute_force(start, end, begin, finish, 5, 4)
        sums = outputs["start_logit"][window] + outputs["end_logit"][window]
        assert sums == pytest.approx([span[0] for span in expected], abs=1e-4)
        best = outputs["start"][window][0], outputs["end"][window][0]
        assert float(start[best[0]] + end[best[1]]) == pytest.approx(expected[0][0], abs=1e-4)
        labels = int(features.start[window]), int(features.end[window])
        losses = [logits.logsumexp(0) - logits[place] for logits, place in zip((start, end), labels, strict=True)]
        assert outputs["loss"][window] == pytest.approx(float(sum(losses)) / 2, abs=1e-4)


def test_predicted_texts_stand_in_their_contexts(model, hard):
    features, data = hard
    outputs = predict_alone(model, features, 2000)
    answers = find_answers(outputs, features, data.frame)
    scores = (outputs["start_logit"] + outputs["end_logit"]).max(1)
    rows = zip(answers.n_best(20, True), data.frame["context"], strict=True)
    for row, ((key, entries), context) in enumerate(rows):
        texts = texts_of(entries)
        assert 2 < len(texts) == len(set(texts)) <= 21 and texts.count("") == 1
        assert all(text in context and text == text.strip() for text in texts)
        assert all(context[entry[3] : entry[4]] == entry[0] for entry in entries if entry[0])
        assert sum(probabilities(entries)) == pytest.approx(1)
        text, odds = answers.best[key]
        assert text == next(text for text in texts if text)
        windows = np.flatnonzero(features.question == row)
        assert odds == pytest.approx(float(outputs["null"][windows].sum(1).min() - scores[windows].max()), abs=1e-4)


def test_a_blank_context_is_answered_by_nothing(model, tmp_path):
    value = {"data": [{"paragraphs": []}]}
    for number, context in enumerate(("   ", "The ferry sank.", "\n")):
        qas = [{"id": f"q{number}", "question": "What?", "is_impossible": True, "answers": []}]
        value["data"][0]["paragraphs"].append({"context": context, "qas": qas})
    data = parse_squad("made.json", json.dumps(value).encode())
    features = build(data, minilm_tokenizer(), 384, 128)
    outputs = predict_alone(model, features, 384)
    best = find_answers(outputs, features, data.frame).best
    for threshold in (None, -1e6, 0.0, 1e6):
        predictions = decide(best, threshold)
        assert predictions["q0"] == predictions["q2"] == ""
    assert decide(best, None)["q1"] and best["q0"][1] == NO_SPAN_ODDS


def test_the_model_is_left_training(model):
    predict_alone(model, sample_features(2)[0], 384)
    assert model.training


@pytest.mark.parametrize("threshold", [None, 0.0, -1.0])
def test_an_evaluation_is_equal_to_the_digit_on_any_number_of_ranks(model, hard, threshold):
    """Each rank scores its share of the questions; figures, predictions and answers are those of one rank."""
    features, data = hard
    limits = Limits(600, 30, 20)
    alone = evaluate(model, features, data, limits, World("cpu"), threshold)
    for size in (2, 3, 11):  # the last leaves ranks without a question
        results = on_ranks(size, lambda world: evaluate(model, features, data, limits, world, threshold))
        for result in results:
            assert result.figures == alone.figures and list(result.figures) == list(alone.figures)
            assert result.predictions == alone.predictions and result.scores == alone.scores
            assert result.answers.best == alone.answers.best
            assert list(result.answers.n_best(20, True)) == list(alone.answers.n_best(20, True))


def test_a_broken_model_still_leaves_json(hard, tmp_path):
    """Logits that are no numbers give no answers, and files that JSON readers take."""
    features, data = hard
    broken = load_small(num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2)
    broken.network.qa_outputs.bias.data.fill_(math.nan)
    result = evaluate(broken, features, data, Limits(600, 30, 20), World("cpu"), 0.0)
    write_results(tmp_path, result, 20)
    assert set(result.predictions.values()) == {""}
    for name in ("predictions.json", "nbest.json", "null_odds.json"):
        json.loads((tmp_path / name).read_text(), parse_constant=pytest.fail)
