"""From logits to answers, against plain searches, and over any number of ranks."""

import json
import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tiny import SAMPLE_V2, load_small, minilm_tokenizer, sample_features

from common.data.packing import pack
from common.data.plan import evaluation_chunks
from common.data.squad import parse_squad
from common.data.windows import build
from common.run.world import World
from common.scoring import answers
from common.scoring.answers import best_spans, decide, n_best_list, pool
from common.scoring.evaluation import Evaluation, find_answers, official, predict
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
            score, first, last = best_spans(start, end, bounds[:, 0], bounds[:, 1], width, n_best)
            assert score.shape == first.shape == last.shape == (windows, n_best)
            for row in range(windows):
                begin, finish = bounds[row].tolist()
                expected = brute_force(start[row], end[row], begin, finish, width, n_best)
                found = score[row].isfinite()
                assert found.tolist() == [i < len(expected) for i in range(n_best)]
                got = zip(score[row].tolist(), first[row].tolist(), last[row].tolist(), strict=True)
                assert list(got) == expected + [(-math.inf, 0, 0)] * (n_best - len(expected))


def test_best_spans_of_a_window_without_context():
    score, first, last = best_spans(torch.zeros(1, 8), torch.zeros(1, 8), torch.tensor([4]), torch.tensor([4]), 3, 5)
    assert (score == -math.inf).all() and first.shape == last.shape == (1, 5)


def test_best_spans_never_take_the_cls_token_or_the_question():
    start, end = torch.zeros(2, 1, 10)
    start[0, 0] = end[0, 0] = start[0, 2] = end[0, 2] = 100.0
    end[0, 9] = 100.0  # [SEP] at the end
    score, first, last = best_spans(start, end, torch.tensor([4]), torch.tensor([9]), 30, 50)
    valid = score[0].isfinite()
    assert valid.sum() == 15 and score[0][valid].max() == 0
    assert first[0][valid].min() >= 4 and last[0][valid].max() <= 8 and (first <= last)[0][valid].all()


# ---------------------------------------------------------------------------------------------------------------------
# Pooling

CONTEXT = "one two three two one"
WORDS = {"one": (0, 3), "two": (4, 7), "three": (8, 13), "two again": (14, 17), "one again": (18, 21)}


def spans_of(*windows):
    """Span arrays of windows, each a list of (word, start logit, end logit), filled up as best_spans does."""
    width = max(map(len, windows))
    arrays = {name: np.zeros((len(windows), width)) for name in ("start_logit", "end_logit")}
    arrays |= {name: np.zeros((len(windows), width), np.int64) for name in ("first", "past")}
    arrays["score"] = np.full((len(windows), width), -math.inf)
    for row, spans in enumerate(windows):
        for column, (word, start, end) in enumerate(spans):
            arrays["first"][row, column], arrays["past"][row, column] = WORDS.get(word, (3, 3))
            arrays["start_logit"][row, column], arrays["end_logit"][row, column] = start, end
            arrays["score"][row, column] = start + end
    return arrays


def pooled(windows, null, can_abstain=True, n_best=20, question=None, contexts=(CONTEXT,)):
    ids = [f"q{i}" for i in range(len(contexts))]
    question = np.zeros(len(windows), np.int64) if question is None else np.array(question)
    return pool(ids, list(contexts), question, np.array(null, float), spans_of(*windows), can_abstain, n_best)


def test_the_best_span_of_all_windows_wins():
    found = pooled([[("two", 1, 2), ("one", 1, 1)], [("three", 2, 2)], [("one", 0, 0)]], [[0, 0]] * 3)["q0"]
    assert found["text"] == "three"
    assert [entry["text"] for entry in found["nbest"]] == ["three", "two", "one", ""]
    assert (found["nbest"][0]["start_logit"], found["nbest"][0]["end_logit"]) == (2, 2)


def test_texts_are_listed_once_with_their_best_logits():
    windows = [[("two", 1, 2), ("one", 0, 1)], [("two again", 3, 4), ("one again", 0, 0)], [("two", 5, 1)]]
    found = pooled(windows, [[-1, -1]] * 3)["q0"]
    texts = [entry["text"] for entry in found["nbest"]]
    assert texts == ["two", "one", ""]
    assert (found["nbest"][0]["start_logit"], found["nbest"][0]["end_logit"]) == (3, 4)


def test_n_best_counts_texts_after_pooling():
    windows = [[("two", 9, 0), ("one", 5, 0)], [("two again", 8, 0), ("three", 1, 0)]]
    found = pooled(windows, [[0, 0]] * 2, n_best=2, can_abstain=False)["q0"]
    assert [entry["text"] for entry in found["nbest"]] == ["two", "one"]
    found = pooled(windows, [[0, 0]] * 2, n_best=3, can_abstain=False)["q0"]
    assert [entry["text"] for entry in found["nbest"]] == ["two", "one", "three"]


def test_the_null_score_is_the_smallest_cls_sum():
    windows = [[("two", 1, 2)], [("three", 2, 3)], [("one", 0, 0)]]
    found = pooled(windows, [[4, 4], [9, -6], [-1, 5]])["q0"]  # sums 8, 3, 4
    assert found["null_odds"] == 3 - 5
    null = next(entry for entry in found["nbest"] if not entry["text"])
    assert (null["start_logit"], null["end_logit"]) == (9, -6)


def test_questions_keep_their_own_windows_in_any_order():
    windows = [[("two", 1, 0)], [("one", 7, 0)], [("three", 5, 0)], [("two", 9, 0)]]
    null = [[1, 0], [2, 0], [3, 0], [4, 0]]
    found = pooled(windows, null, question=[1, 0, 1, 2], contexts=[CONTEXT, CONTEXT, "xxx yyy " * 3])
    assert [found[f"q{i}"]["text"] for i in range(3)] == ["one", "three", "yyy"]  # each read from its own context
    assert [found[f"q{i}"]["null_odds"] for i in range(3)] == [2 - 7, 1 - 5, 4 - 9]


@pytest.mark.parametrize("can_abstain", [False, True])
def test_a_question_without_any_span_is_answered_by_nothing(can_abstain):
    found = pooled([[], [("two", 1, 1)]], [[1, 2], [0, 0]], can_abstain, question=[0, 1], contexts=["  ", CONTEXT])
    assert found["q0"]["text"] == "" and [entry["text"] for entry in found["q0"]["nbest"]] == [""]
    assert found["q0"]["nbest"][0]["probability"] == 1
    for threshold in (None, 0.0, -50.0, 50.0):
        assert decide(found, threshold)["q0"] == ""
    json.loads(json.dumps(found, allow_nan=False))  # JSON knows no infinity


def test_tokens_without_text_are_no_answer():
    """Byte-level tokenizers have tokens for blanks alone."""
    found = pooled([[("blank", 9, 9), ("two", 1, 1)]], [[-3, -3]])["q0"]
    assert found["text"] == "two" and found["null_odds"] == -6 - 2
    assert [entry["text"] for entry in found["nbest"]] == ["two", ""]
    assert found["nbest"][1]["start_logit"] == -3
    found = pooled([[("blank", 9, 9)]], [[-3, -3]], can_abstain=False)["q0"]
    assert found["text"] == "" and len(found["nbest"]) == 1


def test_without_abstaining_the_null_answer_is_not_listed():
    found = pooled([[("two", -9, -9), ("one", -8, -8)]], [[9, 9]], can_abstain=False)["q0"]
    assert [entry["text"] for entry in found["nbest"]] == ["one", "two"]
    assert found["null_odds"] == 18 + 16


def test_decide():
    found = {key: {"text": key, "null_odds": odds} for key, odds in (("a", -1.0), ("b", 0.0), ("c", 2.5))}
    assert decide(found, None) == {"a": "a", "b": "b", "c": "c"}
    assert decide(found, 0.0) == {"a": "a", "b": "b", "c": ""}  # above the threshold, not at it
    assert decide(found, -2) == {"a": "", "b": "", "c": ""}
    assert decide(found, 3) == {"a": "a", "b": "b", "c": "c"}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
def test_probabilities_are_a_softmax_of_the_scores(scale):
    generator = np.random.default_rng(3)
    found = {str(i): pair for i, pair in enumerate(generator.normal(size=(20, 2)) * scale)}
    entries = n_best_list(found)
    probabilities = [entry["probability"] for entry in entries]
    assert sum(probabilities) == pytest.approx(1) and probabilities == sorted(probabilities, reverse=True)
    scores = torch.tensor([entry["start_logit"] + entry["end_logit"] for entry in entries], dtype=torch.float64)
    assert probabilities == pytest.approx(scores.softmax(0).tolist(), abs=1e-12)
    assert all(left >= right for left, right in pairwise(scores.tolist()))


def test_a_threshold_tuned_on_questions_is_as_good_as_any():
    generator = np.random.default_rng(0)
    gold = {f"q{i}": ["two"] if i % 3 else [] for i in range(60)}
    found = {}
    for key, texts in gold.items():
        text = "two" if generator.random() < 0.7 else "one"
        found[key] = {"text": text, "null_odds": float(generator.normal(-1 if texts else 1))}
    best = tune_threshold(Evaluation({}, {}, found, gold))
    reached = official(gold, decide(found, best), "2.0")["f1"]
    candidates = [None, *(answer["null_odds"] for answer in found.values())]
    assert reached == max(official(gold, decide(found, one), "2.0")["f1"] for one in candidates)
    assert reached > official(gold, decide(found, None), "2.0")["f1"]


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


def predict_on(model, features, world_size, chunk_tokens=600):
    """The outputs of each of `world_size` ranks: each runs alone first to give its part, then again with all parts."""

    def run(rank, gather):
        world = World("cpu")
        world.rank, world.size, world.gather = rank, world_size, gather
        return predict(model, features, Limits(chunk_tokens, 30, 20), world)

    parts = []

    def capture(part):
        parts.append(part)
        return [part]

    for rank in range(world_size):
        run(rank, capture)
    return [run(rank, lambda part: parts) for rank in range(world_size)], parts


def test_predictions_are_equal_to_the_bit_on_any_number_of_ranks(model, hard):
    features, _ = hard
    chunks = evaluation_chunks(features.lengths, 600)
    assert len(chunks) > 4 and any(len(chunk) > 1 for chunk in chunks)
    alone = predict_alone(model, features, 600)
    assert alone["score"].shape == (len(features.question), 20) and "window" not in alone
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
    found = find_answers(alone, features, data.frame, False, 20)
    assert list(found) == list(data.frame["id"])


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
        assert outputs["score"][window] == pytest.approx([span[0] for span in expected], abs=1e-4)
        sums = outputs["start_logit"][window] + outputs["end_logit"][window]
        assert sums == pytest.approx(outputs["score"][window], abs=1e-5)
        best = outputs["start"][window][0], outputs["end"][window][0]
        assert float(start[best[0]] + end[best[1]]) == pytest.approx(expected[0][0], abs=1e-4)
        labels = int(features.start[window]), int(features.end[window])
        losses = [logits.logsumexp(0) - logits[place] for logits, place in zip((start, end), labels, strict=True)]
        assert outputs["loss"][window] == pytest.approx(float(sum(losses)) / 2, abs=1e-4)


def test_predicted_texts_stand_in_their_contexts(model, hard):
    features, data = hard
    outputs = predict_alone(model, features, 2000)
    found = find_answers(outputs, features, data.frame, True, 20)
    for key, context in zip(data.frame["id"], data.frame["context"], strict=True):
        texts = [entry["text"] for entry in found[key]["nbest"]]
        assert 2 < len(texts) == len(set(texts)) <= 21 and texts.count("") == 1
        assert all(text in context and text == text.strip() for text in texts)
        assert sum(entry["probability"] for entry in found[key]["nbest"]) == pytest.approx(1)
        windows = np.flatnonzero(features.question == list(data.frame["id"]).index(key))
        assert found[key]["null_odds"] == pytest.approx(
            float(outputs["null"][windows].sum(1).min() - outputs["score"][windows].max()), abs=1e-4
        )


def test_a_blank_context_is_answered_by_nothing(model, tmp_path):
    value = {"data": [{"paragraphs": []}]}
    for number, context in enumerate(("   ", "The ferry sank.", "\n")):
        qas = [{"id": f"q{number}", "question": "What?", "is_impossible": True, "answers": []}]
        value["data"][0]["paragraphs"].append({"context": context, "qas": qas})
    data = parse_squad("made.json", json.dumps(value).encode())
    features = build(data, minilm_tokenizer(), 384, 128)
    outputs = predict_alone(model, features, 384)
    for can_abstain in (False, True):
        found = find_answers(outputs, features, data.frame, can_abstain, 20)
        for threshold in (None, -1e6, 0.0, 1e6):
            predictions = decide(found, threshold)
            assert predictions["q0"] == predictions["q2"] == ""
        assert decide(found, None)["q1"] and found["q0"]["null_odds"] == answers.NO_SPAN_ODDS


def test_the_model_is_left_training(model):
    predict_alone(model, sample_features(2)[0], 384)
    assert model.training
