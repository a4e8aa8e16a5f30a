"""Properties that hold for any text, any lengths and any number of ranks."""

import copy
import dataclasses
import json
import unicodedata

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny import SAMPLE, load_small, minilm_tokenizer, pack_share, same_gradients
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from common.data import files, squad
from common.data.packing import capacity, filler_lengths, pack, pack_steps, with_token_ids
from common.data.plan import evaluation_chunks, largest_batch, plan_epoch, split_batch
from common.data.plan import share as share_out
from common.data.windows import Features, build, tidy_spans
from common.model.span import span_loss
from common.scoring.metrics import score_answer
from tools.audit import oracle_predictions

settings.register_profile("quick", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
settings.load_profile("quick")

MARKS = "\u0301\u0308\u0323\u093c\u093f\u0940\u094d\u20dd\ufe0f\u200d\u200b\u00ad\u200e"
BLANKS = " \t\n\r\u00a0\u2003\u3000\u0085\u2028\x1c"
SPECIAL = "aAzé09.,-–“(İıßﬁ½東京한हिΩ🎈👩🏽\0\ufffd\ue000\U000e0041\u0378ſ" + MARKS + BLANKS
anything = st.text(st.one_of(st.sampled_from(SPECIAL), st.characters(exclude_categories=["Cs"])), max_size=60)
words = st.text(st.sampled_from("abcdefé\u0301\u0308東👩🏽\u200d.-"), max_size=8)
sentences = st.lists(st.one_of(words, st.sampled_from(BLANKS), anything), max_size=12).map(" ".join)
texts = st.one_of(anything, sentences)


def byte_level_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(squad.read_squad(SAMPLE / "dev.json").frame["context"], trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


TOKENIZERS = {"wordpiece": minilm_tokenizer, "bytes": byte_level_tokenizer}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def made(contexts, answers):
    """SquadData of one question a context; answers: (begin, end) in it, or None for unanswerable."""
    rows = []
    for i, (context, span) in enumerate(zip(contexts, answers, strict=True)):
        placed = [] if span is None else [(context[span[0] : span[1]], span[0])]
        rows.append((f"q{i}", "t", "what?", context, placed, span is None))
    frame = squad.pd.DataFrame(
        rows, columns=["id", "title", "question", "context", "answers", "is_impossible"], dtype=object
    )
    frame["is_impossible"] = frame["is_impossible"].astype(bool)
    return squad.SquadData("made.json", "2.0", frame, squad.pd.DataFrame([], columns=["id", "fault", "detail"]))


def is_subsequence(needle, text):
    rest = iter(text)
    return all(letter in rest for letter in needle)


def visible(text):
    return "".join(letter for letter in text if not letter.isspace())


# ---------------------------------------------------------------------------------------------------------------------
# Text


@given(contexts=st.lists(texts, min_size=1, max_size=4, unique=True))
@settings(max_examples=250)
@example(contexts=["a", "\u0301\u0301", "\u0302b"])
@example(contexts=["\0", "a \0\0", " "])
def test_spans_rise_and_hold_all_visible_text(tokenizer, contexts):
    """Spans never fall, have no blanks at their ends, and each visible character that touches a token is in a span."""
    built = build(made(contexts, [None] * len(contexts)), tokenizer, 384, 128)
    assert len(built.question) == len(contexts)
    for row, context in enumerate(contexts):
        first, count = int(built.first_token[row]), int(built.context_tokens[row])
        start, end = (a[first : first + count].tolist() for a in (built.char_start, built.char_end))
        assert start == sorted(start) and end == sorted(end)
        assert all(0 <= place <= len(context) for place in (*start, *end))
        pieces = [context[b:e] for b, e in zip(start, end, strict=True)]
        assert pieces == [piece.strip() for piece in pieces]
        covered = np.zeros(len(context), bool)
        for b, e in zip(start, end, strict=True):
            covered[b:e] = True
        position = 0
        for run in visible_runs(context):  # of each run of visible characters all are covered, or none
            position = context.index(run, position)
            assert covered[position : position + len(run)].all() or not covered[position : position + len(run)].any()
            if not covered[position]:  # the tokenizer dropped all of it
                assert all(unicodedata.category(c)[0] in "CM" or c == "\ufffd" for c in run)
            position += len(run)


def visible_runs(text):
    """The runs of characters that are not blank."""
    return "".join(c if not c.isspace() else " " for c in text).split()


@given(
    text=texts,
    cuts=st.lists(st.integers(0, 60), max_size=12),
)
@settings(max_examples=200)
def test_tidy_spans_of_any_rising_spans_rise(text, cuts):
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    start, end = np.array(cuts[::2][: len(cuts) // 2], np.int64), np.array(cuts[1::2], np.int64)
    tidy_start, tidy_end = tidy_spans(text, start, end)
    assert (np.diff(tidy_start) >= 0).all() and (np.diff(tidy_end) >= 0).all()
    assert all(0 <= place <= len(text) for place in (*tidy_start, *tidy_end))
    for old, new in zip(zip(start, end, strict=True), zip(tidy_start, tidy_end, strict=True), strict=True):
        assert visible(text[old[0] : old[1]]) in visible(text[new[0] : new[1]])  # no visible character is lost
    again = tidy_spans(text, tidy_start, tidy_end)
    assert np.array_equal(again[0], tidy_start) and np.array_equal(again[1], tidy_end)


@given(context=texts, data=st.data())
@settings(max_examples=250)
def test_answers_at_token_boundaries_round_trip(tokenizer, context, data):
    spans = build(made([context], [None]), tokenizer, 384, 128)
    tokens = int(spans.context_tokens[0])
    if not tokens:
        return
    first = data.draw(st.integers(0, tokens - 1))
    last = data.draw(st.integers(first, tokens - 1))
    begin, end = int(spans.char_start[first]), int(spans.char_end[last])
    answer = context[begin:end]
    if not answer:  # a token of blanks alone
        return
    question = made([context], [(begin, end)])
    predictions, unlabelled = oracle_predictions(build(question, tokenizer, 384, 128), question.frame)
    assert not unlabelled
    assert predictions["q0"] == answer
    for rule in ("1.1", "2.0"):
        assert score_answer(predictions["q0"], [answer], rule)[0] == 1


@given(context=texts, data=st.data())
@settings(max_examples=250)
def test_decoded_text_holds_any_answer(tokenizer, context, data):
    begin = data.draw(st.integers(0, len(context)))
    end = data.draw(st.integers(begin, len(context)))
    if not context[begin:end].strip():
        return
    question = made([context], [(begin, end)])
    built = build(question, tokenizer, 384, 128)
    predictions, unlabelled = oracle_predictions(built, question.frame)
    if unlabelled:  # nothing of the answer is left to the tokenizer
        assert set(built.start.tolist()) == {-1}
        start, past = built.char_start, built.char_end
        covered = {place for b, e in zip(start, past, strict=True) for place in range(b, e)}
        assert not covered & {i for i in range(begin, end) if not context[i].isspace()}
        return
    decoded = predictions["q0"]
    assert decoded in context and decoded == decoded.strip()
    if is_held(built, begin, end, context):
        assert is_subsequence(visible(context[begin:end]), decoded)


def is_held(built, begin, end, context):
    """Whether each visible character of the answer is in some token."""
    covered = {place for b, e in zip(built.char_start, built.char_end, strict=True) for place in range(b, e)}
    return all(i in covered or context[i].isspace() for i in range(begin, end))


@given(contexts=st.lists(st.tuples(texts, st.integers(0, 60), st.integers(1, 20)), min_size=2, max_size=6))
@settings(max_examples=60)
def test_windows_of_many_questions_hold_the_same_labels_as_of_one(tokenizer, contexts):
    """Questions are built together; each must come out as it does alone, also where contexts repeat."""
    spans = [(b, b + size) if context[b : b + size].strip() else None for context, b, size in contexts]
    only = [context for context, _, _ in contexts]
    together = build(made(only, spans), tokenizer, 32, 8)
    for row in range(len(only)):
        alone = build(made(only[row : row + 1], spans[row : row + 1]), tokenizer, 32, 8)
        windows = np.flatnonzero(together.question == row)
        assert len(windows) == len(alone.question)
        for one, w in enumerate(windows):
            for name in ("start", "end", "context_at", "context_tokens"):
                assert getattr(together, name)[w] == getattr(alone, name)[one]
            ids = [f.input_ids[f.offsets[i] : f.offsets[i + 1]].tolist() for f, i in ((together, w), (alone, one))]
            assert ids[0] == ids[1]


@given(text=texts, start=st.integers(-5, 70), data=st.data())
@settings(max_examples=300)
def test_locate_finds_the_nearest_place(text, start, data):
    begin = data.draw(st.integers(0, len(text)))
    answer = text[begin : begin + data.draw(st.integers(0, 4))]
    places = [i for i in range(len(text) + 1) if text.startswith(answer, i)]
    found = squad.locate(answer, start, text)
    if not answer.strip():
        assert found == -1
    else:
        assert text.startswith(answer, found) and abs(found - start) == min(abs(i - start) for i in places)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | texts,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "version",
                        "data",
                        "title",
                        "paragraphs",
                        "context",
                        "qas",
                        "id",
                        "question",
                        "answers",
                        "text",
                        "answer_start",
                        "is_impossible",
                    ]
                ),
                inner,
                max_size=6,
            )
        ),
        max_leaves=25,
    )
)
@settings(max_examples=300)
def test_any_json_is_read_or_refused_in_one_line(value):
    try:
        data = squad.parse_squad("some.json", json.dumps({"data": value}).encode())
    except squad.UserError as error:
        assert str(error).startswith("some.json: ") and "\n" not in str(error)
    else:
        assert len(data.frame)


@given(raw=st.binary(max_size=80))
@settings(max_examples=200)
@example(raw=b"\x1f\x8b\x08\x04\xff\xff")
def test_any_bytes_are_refused_in_one_line(raw):
    for content in (raw, b"\x1f\x8b" + raw, b"\xef\xbb\xbf" + raw, b'{"data": ' + raw):
        with pytest.raises(squad.UserError) as caught:
            squad.parse_squad("some.json", files.unpack("some.json", content))
        assert str(caught.value).startswith("some.json: ") and "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def windows_of(lengths, max_length, seed=0):
    """Features of windows with these lengths and random tokens; each has at least 4."""
    generator = np.random.default_rng(seed)
    lengths = np.array(lengths, np.int64)
    context_at = np.minimum(3, lengths - 1)
    label = np.where(generator.random(len(lengths)) < 0.3, 0, context_at)
    return Features(
        input_ids=generator.integers(1, 200, lengths.sum(), np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        question=np.arange(len(lengths), dtype=np.int32),
        context_at=context_at.astype(np.int32),
        context_tokens=(lengths - context_at - 1).astype(np.int32),
        first_token=np.zeros(len(lengths), np.int64),
        start=label.astype(np.int32),
        end=label.astype(np.int32),
        char_start=np.zeros(1, np.int32),
        char_end=np.zeros(1, np.int32),
        token_type=1,
        pad_id=0,
        max_length=max_length,
        meta={},
    )


@pytest.fixture(scope="module")
def network():
    return load_small(vocab_size=200, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)


@given(lengths=st.lists(st.integers(4, 48), min_size=1, max_size=7), seed=st.integers(0, 99), filled=st.booleans())
@settings(max_examples=15)
def test_a_packed_batch_equals_the_padded_reference(network, lengths, seed, filled):
    features = windows_of(lengths, 48, seed)
    numbers = np.random.default_rng(seed).permutation(len(lengths))
    batch = pack_share(features, [numbers], 0, fixed_shapes=filled)
    network.zero_grad()
    reference = copy.deepcopy(network.network)
    reference.set_attn_implementation("eager")
    start_logits, end_logits = network(batch)
    loss = span_loss(start_logits, end_logits, batch) / len(numbers)
    loss.backward()

    longest = max(lengths)
    ids = torch.zeros(len(numbers), longest, dtype=torch.long)
    types, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, w in enumerate(numbers):
        tokens = torch.from_numpy(features.input_ids[features.offsets[w] : features.offsets[w + 1]].astype("int64"))
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        types[row, int(features.context_at[w]) : len(tokens)] = 1
    out = reference(input_ids=ids, token_type_ids=types, attention_mask=mask)
    label = torch.from_numpy(features.start[numbers].astype("int64"))
    columns = [logits.masked_fill(mask == 0, -torch.inf) for logits in (out.start_logits, out.end_logits)]
    expected = sum(F.cross_entropy(column, label) for column in columns) / 2
    expected.backward()
    assert torch.isclose(loss, expected, rtol=2e-6, atol=1e-7)
    for row, (begin, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        if row < len(numbers):
            assert torch.allclose(start_logits[begin:end], out.start_logits[row, : end - begin], atol=1e-5)
    same_gradients(dict(network.network.named_parameters()), dict(reference.named_parameters()), 1e-5)


@given(
    lengths=st.one_of(
        st.just([]),
        st.lists(st.integers(1, 32), max_size=40),
        st.lists(st.just(32), min_size=1, max_size=3),
        st.tuples(st.integers(1, 512), st.integers(1, 900)).map(lambda pair: [pair[0]] * pair[1]),
    ),
    max_length=st.sampled_from([32, 33, 64, 384, 512]),
)
@settings(max_examples=120)
@example(lengths=[], max_length=32)
@example(lengths=[1], max_length=512)
@example(lengths=[384], max_length=384)
@example(lengths=[1] * 2000, max_length=384)
@example(lengths=[384] * 700, max_length=384)
@example(lengths=[32] * 4096, max_length=32)
def test_filled_batches_always_fit(lengths, max_length):
    lengths = [min(length, max_length) for length in lengths]
    features = windows_of([max(length, 1) for length in lengths] or [1], max_length)
    numbers = np.arange(len(lengths))
    batch = pack_share(features, [numbers], 0, fixed_shapes=True)
    tokens = sum(lengths)
    size = capacity([tokens], [len(lengths)], max_length)
    assert (len(batch.input_ids), len(batch.window)) == size
    inside = batch.cu_seqlens.diff()
    assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == size[0]
    assert inside.min() >= 1 and inside.max() <= max_length == batch.longest
    assert inside[: len(lengths)].tolist() == lengths
    assert batch.window.tolist() == [*numbers, *[-1] * (size[1] - len(lengths))]
    assert not batch.weight[len(lengths) :].any()
    assert torch.equal(batch.input_ids[:tokens], torch.from_numpy(features.input_ids[:tokens].astype("int64")))
    assert not batch.input_ids[tokens:].any() and not batch.token_type_ids[tokens:].any()
    starts = batch.cu_seqlens[:-1].long()
    assert (batch.start >= starts).all() and (batch.start < starts + inside).all()
    assert torch.equal(batch.position_ids, torch.arange(size[0]) - starts.repeat_interleave(inside.long()))
    assert size[0] <= max(1.2 * tokens + 600, 1.2 * tokens + 40 * 16 + 2 * max_length)  # little is filled up


def test_capacities_recur():
    """Random global batches of ordinary windows meet few distinct shapes."""
    generator = np.random.default_rng(0)
    shapes = set()
    for _ in range(500):
        lengths = generator.integers(60, 384, 32)
        shapes.add(capacity([int(lengths.sum())], [32], 384))
    assert len(shapes) <= 32


@given(
    lengths=st.lists(st.integers(1, 384), min_size=1, max_size=200),
    world_size=st.integers(1, 8),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_all_ranks_get_one_shape(lengths, world_size, seed):
    features = windows_of(lengths, 384, seed)
    (shares,) = split_batch(np.arange(len(lengths)), features.lengths, world_size, 1)
    batches = [pack_share(features, shares, rank, fixed_shapes=True) for rank in range(world_size)]
    assert len({(len(batch.input_ids), len(batch.window)) for batch in batches}) == 1
    assert sorted(int(w) for batch in batches for w in batch.window if w >= 0) == list(range(len(lengths)))
    for batch in batches:
        assert batch.cu_seqlens.diff().min() >= 1 and batch.cu_seqlens.diff().max() <= 384


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60),
    world_size=st.integers(2, 5),
    accumulation=st.integers(1, 3),
    fixed_shapes=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_all_ranks_know_the_token_ids_of_all(lengths, world_size, accumulation, fixed_shapes, seed):
    features = windows_of(lengths, 64, seed)
    plan = plan_epoch(np.arange(len(lengths)), 7, seed, 1)[-1:]
    split = world_size, accumulation, None, fixed_shapes
    ranks = [
        next(with_token_ids(pack_steps(features, plan, rank, *split), features, plan, fixed_shapes))
        for rank in range(world_size)
    ]
    batches = [batch for share in ranks for batch in share]
    met = {features.pad_id, *(int(word) for batch in batches for word in batch.input_ids)}
    for batch in batches:
        assert torch.equal(batch.token_ids, batches[0].token_ids)
    ids = batches[0].token_ids.tolist()
    assert len(ids) == len(set(ids)) == (1024 if fixed_shapes else len(met))
    assert set(ids[: len(met)]) == met and max(ids[len(met) :], default=0) < 1024


@given(
    lengths=st.lists(st.integers(1, 64), min_size=8, max_size=60),
    world_size=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    max_tokens=st.integers(64, 300),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_the_largest_batch_has_the_largest_micro_batch(lengths, world_size, accumulation, max_tokens, seed):
    features = windows_of(lengths, 64, seed)
    plan = plan_epoch(np.arange(len(lengths)), 8, seed, 1)

    def most(windows):
        steps = split_batch(windows, features.lengths, world_size, accumulation, max_tokens)
        return max(int(features.lengths[share].sum()) for shares in steps for share in shares)

    chosen = largest_batch(features, plan, world_size, accumulation, max_tokens)
    assert most(chosen) == max(map(most, plan))
    total = largest_batch(features, plan, world_size, accumulation)
    assert features.lengths[total].sum() == max(features.lengths[windows].sum() for windows in plan)


@given(windows=st.integers(1, 300), max_length=st.integers(1, 64), data=st.data())
def test_filler_lengths(windows, max_length, data):
    tokens = data.draw(st.integers(windows, windows * max_length))
    lengths = filler_lengths(tokens, windows, max_length)
    assert lengths.sum() == tokens and lengths.min() >= 1 and lengths.max() <= max_length and len(lengths) == windows
    assert lengths.max() - lengths.min() <= 1
    for impossible in (windows - 1, windows * max_length + 1):
        with pytest.raises(ValueError, match="do not fit"):
            filler_lengths(impossible, windows, max_length)


def test_filler_of_nothing():
    assert filler_lengths(0, 0, 8).tolist() == []


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60),
    world_size=st.integers(1, 9),
    accumulation=st.integers(1, 5),
    max_tokens=st.none() | st.integers(64, 300),
    seed=st.integers(0, 9),
)
@settings(max_examples=300)
def test_shares_hold_every_window_once(lengths, world_size, accumulation, max_tokens, seed):
    lengths = np.array([*lengths, *[7] * 5], np.int64)
    windows = np.random.default_rng(seed).permutation(len(lengths))[: len(lengths) - 5]
    steps = split_batch(windows, lengths, world_size, accumulation, max_tokens)
    assert len(steps) >= accumulation and all(len(step) == world_size for step in steps)
    everything = [int(window) for step in steps for one in step for window in one]
    assert sorted(everything) == sorted(windows.tolist())
    if max_tokens:
        assert max(int(lengths[one].sum()) for step in steps for one in step) <= max_tokens
    else:
        assert len(steps) == accumulation
    again = split_batch(windows, lengths, world_size, accumulation, max_tokens)
    assert all(np.array_equal(a, b) for x, y in zip(steps, again, strict=True) for a, b in zip(x, y, strict=True))


@given(lengths=st.lists(st.integers(1, 384), min_size=1, max_size=80), parts=st.integers(1, 8))
def test_shares_are_balanced(lengths, parts):
    lengths = np.array(lengths, np.int64)
    loads = [int(lengths[one].sum()) for one in share_out(np.arange(len(lengths)), lengths, parts)]
    assert sum(loads) == lengths.sum() and max(loads) - min(loads) <= lengths.max()


@given(count=st.integers(0, 200), batch_size=st.integers(1, 50), seed=st.integers(0, 2**31), epoch=st.integers(1, 20))
def test_the_plan_is_a_permutation(count, batch_size, seed, epoch):
    windows = np.arange(count) * 3 + 1
    plan = plan_epoch(windows, batch_size, seed, epoch)
    order = np.concatenate([*plan, np.empty(0, np.int64)]).astype(np.int64)
    assert sorted(order.tolist()) == windows.tolist()
    assert [len(batch) for batch in plan[:-1]] == [batch_size] * (len(plan) - 1) and all(len(batch) for batch in plan)
    again = plan_epoch(windows, batch_size, seed, epoch)
    assert all(np.array_equal(a, b) for a, b in zip(plan, again, strict=True))
    if count > 20:
        for change in ((seed, epoch + 1), (seed + 1, epoch)):
            other = plan_epoch(windows, batch_size, *change)
            assert not np.array_equal(np.concatenate(other), order)


@given(lengths=st.lists(st.integers(1, 384), max_size=120), max_tokens=st.integers(1, 3000))
@settings(max_examples=200)
def test_chunks_cover_all_windows_once_and_depend_on_lengths_alone(lengths, max_tokens):
    lengths = np.array(lengths, np.int64)
    chunks = evaluation_chunks(lengths, max_tokens)
    everything = [int(window) for chunk in chunks for window in chunk]
    assert sorted(everything) == list(range(len(lengths))) and all(len(chunk) for chunk in chunks)
    assert all(lengths[chunk].sum() <= max_tokens or len(chunk) == 1 for chunk in chunks)
    assert lengths[everything].tolist() == sorted(lengths.tolist())  # windows of like length together
    again = evaluation_chunks(lengths.copy(), max_tokens)
    assert all(np.array_equal(a, b) for a, b in zip(chunks, again, strict=True))


@given(
    lengths=st.lists(st.integers(4, 48), min_size=1, max_size=9), seed=st.integers(0, 9), world_size=st.integers(1, 4)
)
@settings(max_examples=6)
def test_the_loss_does_not_depend_on_how_a_batch_is_shared_out(network, lengths, seed, world_size):
    features = windows_of(lengths, 48, seed)
    windows = np.arange(len(lengths))
    with torch.no_grad():
        whole = span_loss(*network(pack(features, windows)), pack(features, windows))
        parts = [
            span_loss(*network(batch), batch)
            for step in split_batch(windows, features.lengths, world_size, 2)
            for batch in (pack_share(features, step, rank, fixed_shapes=False) for rank in range(world_size))
        ]
    assert torch.isclose(sum(parts), whole, rtol=1e-5)


def test_a_batch_knows_all_its_tensors():
    batch = dataclasses.replace(pack(windows_of([5, 9], 48), [1, 0]), token_ids=torch.arange(3))
    moved = batch.map(lambda tensor: tensor + 1)
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        expected = value + 1 if isinstance(value, torch.Tensor) else value
        assert torch.equal(torch.as_tensor(getattr(moved, field.name)), torch.as_tensor(expected))
