"""Windows, labels at every edge, and the cache."""

import json
import multiprocessing
import os
import shutil
import time

import numpy as np
import pytest
from squad_dir import squad_file
from tiny import SAMPLE, SAMPLE_V2, minilm_tokenizer, word_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from common.data import cache as cache_module
from common.data import splits, squad, windows
from common.data.cache import prepare, read_cache
from common.data.tokenizer import load_tokenizer, question_limit
from common.data.windows import build
from common.errors import UserError
from common.scoring.evaluation import gold_texts, official
from tools.audit import audit, oracle_predictions


@pytest.fixture(scope="session")
def minilm():
    return minilm_tokenizer()


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory):
    """A tokenizer like RoBERTa's: byte-level BPE whose tokens carry the blank before them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(set(squad.read_squad(SAMPLE / "train.json").frame["context"]), trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    folder = tmp_path_factory.mktemp("bytes")
    fast.save_pretrained(folder)
    return load_tokenizer(str(folder))


def one_question(context, *answers, question="what?", impossible=False):
    """SquadData of one question; an answer is a text (its first place is taken) or (text, start)."""
    placed = [a if isinstance(a, tuple) else (a, context.index(a)) for a in answers]
    row = ("q", "t", question, context, placed, impossible)
    frame = squad.pd.DataFrame([row], columns=["id", "title", "question", "context", "answers", "is_impossible"])
    faults = squad.pd.DataFrame([], columns=["id", "fault", "detail"])
    return squad.SquadData("made.json", "2.0" if impossible else "1.1", frame, faults)


def decoded(data, tokenizer, max_length=384, overlap=128):
    """The text of the label of a question's first labelled window, None if there is no such window."""
    built = build(data, tokenizer, max_length, overlap)
    predictions, unlabelled = oracle_predictions(built, data.frame)
    return None if unlabelled else predictions["q"]


# ---------------------------------------------------------------------------------------------------------------------
# Labels


@pytest.mark.parametrize(
    ("context", "answer", "expected"),
    [
        ("The ferry Alma sank.", "The", "The"),  # first token
        ("The ferry Alma sank.", ".", "."),  # last token
        ("The ferry Alma sank", "sank", "sank"),
        ("The ferry Alma sank.", "The ferry Alma sank.", "The ferry Alma sank."),
        ("The ferry Alma sank.", " Alma ", "Alma"),  # stray blanks
        ("The ferry\u00a0 \nAlma\u3000 sank.", "\u00a0 \nAlma\u3000 ", "Alma"),
        ("  The ferry Alma sank.  ", "  The ferry", "The ferry"),
        ("  The ferry Alma sank.  ", "sank.  ", "sank."),
        ("In 1990s towns", "1990", "1990s"),  # ends inside a token
        ("It was unrecognizable then", "recognizable", "unrecognizable"),  # begins inside a word
        ("It was unrecognizable then", "cogniz", "unrecognizable"),
        ("the ferries sank", "err", "ferries"),
        ("pre-war towns", "war", "war"),
        ("(Alma)", "Alma", "Alma"),
        ("$5.25 each", "5.25", "5.25"),
        ("a b c d", "b c", "b c"),
        ("a  b", "a  b", "a  b"),
        ("tabs\tand\r\nlines", "and\r\nlines", "and\r\nlines"),
    ],
)
def test_labels_at_edges(minilm, context, answer, expected):
    got = decoded(one_question(context, answer), minilm)
    if expected != got:  # WordPiece may cut a word where the answer begins or ends: then less is enough
        assert answer.strip() in got and got in expected


@pytest.mark.parametrize(
    ("context", "answer"),
    [
        ("the caf\u00e9 here", "caf\u00e9"),  # composed
        ("the cafe\u0301 here", "cafe\u0301"),  # decomposed: the tokenizer drops the mark
        ("the cafe\u0301", "cafe\u0301"),  # at the end of the text
        ("cafe\u0301, here", "cafe\u0301"),
        ("cafe\u0301\u0323\u0308s here", "cafe\u0301\u0323\u0308s"),
        ("u\u0308ber alles", "u\u0308ber"),
        ("\u0301acute first", "\u0301acute"),  # a mark that follows nothing
        ("so \u0301acute it is", "\u0301acute"),
        ("शहर हिन्दी में", "हिन्दी"),  # ends in a vowel sign
        ("यह विश्वविद्यालय् है", "विश्वविद्यालय्"),  # ends in a virama
        ("a 👩‍👩‍👧 family", "👩‍👩‍👧"),
        ("a ❤️ heart", "❤️"),
        ("a 👍🏽 thumb", "👍🏽"),
        ("in 東京都 now", "東京都"),
        ("東京都は日本", "京"),
        ("한국어 문장", "한국어"),
        ("the \u1112\u1161\u11ab\u1100\u116e\u11a8 here", "\u1112\u1161\u11ab\u1100\u116e\u11a8"),  # loose letters
        ("Ελλάδα και Ἀθῆναι", "Ἀθῆναι"),
        ("soft hy\u00adphen", "hy\u00adphen"),
        ("word\ufffd next", "word\ufffd"),
        ("nul\0 next", "nul\0"),
        ("private \ue000x use", "\ue000x"),
        ("İstanbul is", "İstanbul"),
        ("ﬁne ligature", "ﬁne"),
        ("10–12 “years”", "10–12"),
    ],
)
def test_decoded_labels_keep_what_the_tokenizer_drops(minilm, byte_level, context, answer):
    for tokenizer in (minilm, byte_level):
        got = decoded(one_question(context, answer), tokenizer)
        assert got == answer or (tokenizer is byte_level and answer in got and got in context)
    assert decoded(one_question(context, answer), minilm) == answer


def test_dropped_characters_do_not_cross_to_another_context(tmp_path):
    """The last token of one context, then a context of which the tokenizer keeps nothing, then another."""
    tokenizer = word_tokenizer(tmp_path, ["ab"])
    contexts = ["a", "\u0301\u0301", "\u0302b"]
    frame = squad.pd.concat([one_question(c, c).frame for c in contexts], ignore_index=True)
    frame["id"] = ["q0", "q1", "q2"]
    data = squad.SquadData("made.json", "1.1", frame, one_question("a", "a").faults)
    built = build(data, tokenizer, 32, 4)
    assert built.char_start.tolist() == [0, 0] and built.char_end.tolist() == [1, 2]
    assert built.context_tokens.tolist() == [1, 0, 1]
    assert built.start.tolist() == [built.context_at[0], -1, built.context_at[2]]


def test_an_answer_in_the_first_and_last_token_of_windows(tmp_path):
    """Each token of a long context as the answer: labelled in exactly the windows that hold it, at its place."""
    context = " ".join("abcdefgh"[i % 8] for i in range(90))
    tokenizer = word_tokenizer(tmp_path, [context, "what?"])
    for width in (1, 3):
        for token in range(90 - width + 1):
            answer = (context[2 * token : 2 * (token + width) - 1], 2 * token)
            built = build(one_question(context, answer), tokenizer, 32, 8)
            room = 32 - 3 - 5
            assert built.context_at.tolist() == [7] * len(built.start)
            for window in range(len(built.start)):
                first = token - window * (room - 8)  # where the answer begins in the window's context
                inside = first >= 0 and first + width <= built.context_tokens[window]
                expected = (7 + first, 7 + first + width - 1) if inside else (0, 0)
                assert (built.start[window], built.end[window]) == expected
            assert (built.start > 0).any()
            labelled = np.flatnonzero(built.start > 0)
            begin, end = built.characters(labelled, built.start[labelled], built.end[labelled])
            assert {context[b:e] for b, e in zip(begin, end, strict=True)} == {answer[0]}


def test_an_answer_longer_than_the_overlap_may_be_in_no_window(tmp_path):
    context = " ".join("abcdefgh"[i % 8] for i in range(90))
    tokenizer = word_tokenizer(tmp_path, [context, "what?"])
    built = build(one_question(context, (context, 0)), tokenizer, 32, 8)
    assert set(built.start.tolist()) == {0}  # no window holds all of it: no answer here


def test_labels_of_questions_without_a_usable_answer(tmp_path):
    context = "a b c d e f g h " * 10
    tokenizer = word_tokenizer(tmp_path, [context, "what?"])
    for answers in ([], [("zzz", -1)], [("zzz", -1), ("yyy", -1)]):
        built = build(one_question(context, *answers), tokenizer, 32, 8)
        assert len(built.start) > 3 and set(built.start.tolist()) == set(built.end.tolist()) == {-1}
    built = build(one_question(context, impossible=True), tokenizer, 32, 8)
    assert set(built.start.tolist()) == set(built.end.tolist()) == {0}
    built = build(one_question(context, ("zzz", -1), ("c d", 4), ("a", 0)), tokenizer, 32, 8)
    assert (built.start[0], built.end[0]) == (7 + 2, 7 + 3)  # the first that can be used
    built = build(one_question("   ", ("a", -1)), tokenizer, 32, 8)
    assert built.context_tokens.tolist() == [0] and built.start.tolist() == [-1]


@pytest.mark.parametrize("name", ["train", "dev"])
def test_byte_level_labels_round_trip(byte_level, minilm, name):
    """Every answer of the hard sample, also with tokens of several bytes a character and of blanks alone."""
    data = squad.read_squad(SAMPLE_V2 / f"{name}.json")
    for tokenizer in (byte_level, minilm):
        predictions, unlabelled = oracle_predictions(build(data, tokenizer, 384, 128), data.frame)
        figures = official(gold_texts(data.frame), predictions, data.version)
        assert not unlabelled and figures["exact"] == 100, tokenizer


def test_tokens_of_blanks_alone_label_nothing(byte_level):
    context = "Some   wide    gaps here \n\n  and  there  "
    for word in context.split():
        got = decoded(one_question(context, f" {word} " if f" {word} " in context else word), byte_level)
        assert got == word


def test_leading_blanks_of_tokens_are_not_part_of_answers(byte_level):
    data = splits.QuestionSet(SAMPLE / "train.json", (("first", 40),)).data
    built = build(data, byte_level, 384, 128)
    assert built.token_type == 0 and built.input_ids[0] == 0 and built.pad_id == 1
    middle = built.context_at[0] - 2
    assert built.input_ids[middle : middle + 2].tolist() == [2, 2]  # </s></s> between question and context
    joined = "\n".join(dict.fromkeys(data.frame["context"]))
    texts = [joined[b:e] for b, e in zip(built.char_start[:50], built.char_end[:50], strict=True)]  # first context
    assert texts == [text.strip() for text in texts]


# ---------------------------------------------------------------------------------------------------------------------
# Windows


def reference_windows(tokenizer, frame, max_length, overlap):
    """Token ids, types and context offsets of all windows as the Hugging Face tokenizer cuts them."""
    encoded = tokenizer(
        list(frame["question"]),
        list(frame["context"]),
        truncation="only_second",
        max_length=max_length,
        stride=overlap,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )
    tokenizer.backend_tokenizer.no_truncation()
    sides = [encoding.sequence_ids for encoding in encoded.encodings]
    return encoded, sides


@pytest.mark.parametrize(
    ("which", "max_length", "overlap"),
    [("dev", 384, 128), ("dev", 128, 32), ("long", 384, 128), ("long", 200, 0), ("long", 64, 17)],
)
@pytest.mark.parametrize("kind", ["minilm", "byte_level"])
def test_windows_are_the_hugging_face_tokenizers(request, kind, which, max_length, overlap):
    tokenizer = request.getfixturevalue(kind)
    if which == "dev":
        data = splits.QuestionSet(squad_file("dev-v1.1.json.gz"), (("first", 600),)).data
    else:
        data = squad.read_squad(SAMPLE_V2 / "train.json")
    built = build(data, tokenizer, max_length, overlap)
    used = np.diff(built.offsets)
    assert used.max() <= max_length
    kept = [i for i, _ in enumerate(data.frame["id"]) if data.frame["id"][i] not in long_questions(built)]
    encoded, sides = reference_windows(tokenizer, data.frame.iloc[kept], max_length, overlap)
    windows = np.flatnonzero(np.isin(built.question, kept))
    assert len(windows) == len(encoded["input_ids"])
    assert len(windows) > len(kept) or max_length > 200  # several windows a question
    place = {row: i for i, row in enumerate(kept)}
    for i, w in enumerate(windows):
        ids = built.input_ids[built.offsets[w] : built.offsets[w + 1]].tolist()
        assert ids == encoded["input_ids"][i]
        assert place[int(built.question[w])] == encoded["overflow_to_sample_mapping"][i]
        types = [built.token_type if j >= built.context_at[w] else 0 for j in range(len(ids))]
        if kind == "minilm":
            assert types == encoded["token_type_ids"][i]
        context = [j for j, side in enumerate(sides[i]) if side == 1]
        assert context[0] == built.context_at[w] and len(context) == built.context_tokens[w]
        if kind == "minilm":  # spans hold those of the tokenizer, or extend over what it dropped
            offsets = np.array(encoded["offset_mapping"][i])[context]
            first = built.first_token[w]
            begin, end = (a[first : first + len(context)] for a in (built.char_start, built.char_end))
            assert (begin <= offsets[:, 0]).all() and (end >= offsets[:, 1]).all()
            assert (begin == offsets[:, 0]).mean() > 0.95 and (end == offsets[:, 1]).mean() > 0.9


def long_questions(built):
    return {key for key, fault, _ in built.meta["faults"] if fault == "long question"}


def test_a_tokenizer_that_comes_with_a_truncation_cuts_nothing(minilm, tmp_path):
    minilm.backend_tokenizer.enable_truncation(16)
    minilm.backend_tokenizer.enable_padding(length=16)
    minilm.save_pretrained(tmp_path)
    minilm.backend_tokenizer.no_truncation()
    minilm.backend_tokenizer.no_padding()
    assert '"max_length": 16' in (tmp_path / "tokenizer.json").read_text()
    built = build(one_question("word " * 300, "word"), load_tokenizer(str(tmp_path)), 384, 128)
    assert built.context_tokens.tolist() == [300]


def test_a_question_longer_than_the_window_is_cut_and_counted(tmp_path):
    context = " ".join("abcdefgh"[i % 8] for i in range(40))
    tokenizer = word_tokenizer(tmp_path, [context, "what?"])
    limit = question_limit(32, 8, 3)
    data = one_question(context, ("c d", 4), question="w h a t ? " * 100)
    built = build(data, tokenizer, 32, 8)
    assert built.meta["faults"] == [["q", "long question", f"500 tokens, {limit} used"]]
    assert set(built.context_at.tolist()) == {limit + 2} and built.lengths.max() == 32
    assert decoded(data, tokenizer, 32, 8) == "c d"
    assert len(data.faults) == 0  # the data itself is not changed
    fitting = build(one_question(context, ("c d", 4), question="w " * limit), tokenizer, 32, 8)
    assert fitting.meta["faults"] == []


@pytest.mark.parametrize(
    ("max_length", "overlap", "positions", "message"),
    [
        (384, 300, None, "use an overlap of at most 285"),
        (384, 384, None, "no room.*overlap of at most"),
        (384, 10**9, None, "overlap of at most"),
        (384, -1, None, "--overlap -1"),
        (513, 128, 512, "--max-length 513 is more than the 512"),
        (31, 0, None, "use at least --max-length 32"),
        (0, 0, None, "use at least --max-length 32"),
        (-5, 0, None, "use at least --max-length 32"),
        (64, 48, None, "overlap of at most 45"),
    ],
)
def test_impossible_settings(max_length, overlap, positions, message):
    with pytest.raises(UserError, match=message):
        question_limit(max_length, overlap, 3, positions)


@pytest.mark.parametrize("max_length", [32, 33, 64, 100, 384, 512])
@pytest.mark.parametrize("specials", [2, 3, 4])
def test_every_setting_that_is_let_through_works(max_length, specials):
    """The largest overlap that is let through is the one that the error recommends."""
    largest = max_length - specials - 2 * (max_length // 8)
    for overlap in (0, largest // 2, largest):
        limit = question_limit(max_length, overlap, specials, 512)
        assert limit >= max_length // 8
        assert max_length - specials - limit - overlap >= max_length // 8  # new context in each window
    with pytest.raises(UserError, match=f"at most {largest}"):
        question_limit(max_length, largest + 1, specials, 512)


def test_a_tokenizer_without_special_tokens_is_refused():
    backend = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    plain = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(UserError, match="does not begin a pair with a special token"):
        build(one_question("a", "a"), plain, 32, 4)


# ---------------------------------------------------------------------------------------------------------------------
# The cache


@pytest.fixture
def questions():
    return splits.QuestionSet(SAMPLE_V2 / "dev.json")


def same(left, right):
    arrays = all(np.array_equal(getattr(left, name), getattr(right, name)) for name in windows.ARRAYS)
    rest = ("token_type", "pad_id", "max_length", "meta")
    return arrays and all(getattr(left, name) == getattr(right, name) for name in rest)


def silent(text):
    pass


def test_a_second_call_does_not_tokenise(questions, minilm, tmp_path, monkeypatch):
    lines = []
    first = prepare(questions, minilm, 384, 128, tmp_path, lines.append)
    assert any("tokenising" in line for line in lines) and any("cached in" in line for line in lines)
    assert same(first, build(questions.data, minilm, 384, 128))
    monkeypatch.setattr(cache_module, "build", None)
    again = splits.QuestionSet(questions.path)
    monkeypatch.setattr(splits, "parse_squad", None)
    lines.clear()
    second = prepare(again, minilm, 384, 128, tmp_path, lines.append)
    assert same(first, second) and not lines
    assert isinstance(second.input_ids, np.memmap) and not second.input_ids.flags.writeable


def test_the_key_of_the_cache(minilm, tmp_path):
    raw = (SAMPLE_V2 / "dev.json").read_bytes()
    (tmp_path / "a.json").write_bytes(raw)
    (tmp_path / "renamed.json").write_bytes(raw)
    (tmp_path / "changed.json").write_bytes(raw.replace(b"the", b"thy", 1))
    cache = tmp_path / "cache"
    letters = word_tokenizer(tmp_path / "letters", [raw.decode()])
    cased = word_tokenizer(tmp_path / "cased", [raw.decode()], lowercase=False)

    def folders(name, tokenizer=letters, max_length=384, overlap=128, cuts=()):
        prepare(splits.QuestionSet(tmp_path / name, cuts), tokenizer, max_length, overlap, cache, silent)
        return len(list(cache.iterdir()))

    assert folders("a.json") == 1
    assert folders("a.json") == folders("renamed.json") == 1
    assert folders("changed.json") == 2
    assert folders("a.json", cased) == 3
    assert folders("a.json", max_length=383) == 4
    assert folders("a.json", overlap=127) == 5
    assert folders("a.json", cuts=(("first", 30),)) == 6
    assert folders("a.json", cuts=(("first", 31),)) == 7
    assert folders("a.json", cuts=(("split", 0.2, "question", 0),)) == 8
    assert folders("a.json", cuts=(("split", 0.2, "question", 1),)) == 9
    assert folders("a.json") == 9 and not list(cache.glob("*.tmp"))


def damage_truncate(folder):
    path = folder / "input_ids.npy"
    path.write_bytes(path.read_bytes()[:-8])


def damage_empty(folder):
    (folder / "offsets.npy").write_bytes(b"")


def damage_missing(folder):
    (folder / "char_end.npy").unlink()


def damage_zeros(folder):
    path = folder / "start.npy"
    path.write_bytes(bytes(path.stat().st_size))


def damage_type(folder):
    np.save(folder / "end.npy", np.load(folder / "end.npy").astype(np.float64))


def damage_shape(folder):
    np.save(folder / "end.npy", np.load(folder / "end.npy")[:-1])


def damage_all(folder):
    for path in folder.iterdir():
        path.unlink()


def damage_meta(content):
    def damage(folder):
        (folder / "meta.json").write_bytes(content)

    return damage


DAMAGES = [
    *(damage_truncate, damage_empty, damage_missing, damage_zeros, damage_type, damage_shape, damage_all),
    *(damage_meta(content) for content in (b"", b"{", b"[]", b"3", b'"x"', b"{}", b"null", b"\xff", b'{"shapes": 3}')),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_built_anew(questions, minilm, tmp_path, damage):
    first = prepare(questions, minilm, 384, 128, tmp_path, silent)
    arrays = {name: np.array(getattr(first, name)) for name in windows.ARRAYS}
    (folder,) = tmp_path.iterdir()
    damage(folder)
    assert read_cache(folder) is None
    second = prepare(questions, minilm, 384, 128, tmp_path, silent)
    assert all(np.array_equal(array, getattr(second, name)) for name, array in arrays.items())
    assert read_cache(folder) is not None and list(tmp_path.iterdir()) == [folder]
    assert not (folder / "damaged").exists()


def test_the_cache_holds_contexts_without_tokens(tmp_path):
    tokenizer = word_tokenizer(tmp_path / "letters", ["ab"])
    value = {"data": [{"paragraphs": [{"context": " ", "qas": [{"id": "a", "question": "b", "is_impossible": True}]}]}]}
    (tmp_path / "blank.json").write_text(json.dumps(value))
    questions = splits.QuestionSet(tmp_path / "blank.json")
    with pytest.raises(UserError, match="1 blank context"):
        prepare(questions, tokenizer, 32, 4, tmp_path / "cache", silent)
    (folder,) = (tmp_path / "cache").iterdir()
    built = read_cache(folder)
    assert len(built.char_start) == 0 and built.context_tokens.tolist() == [0] and built.lengths.tolist() == [4]


def prepare_apart(barrier, folder, results):
    """What each of several processes does."""
    tokenizer = load_tokenizer(str(folder / "letters"))
    questions = splits.QuestionSet(SAMPLE_V2 / "dev.json")
    barrier.wait()
    built = prepare(questions, tokenizer, 384, 128, folder / "cache", silent)
    results.put((os.getpid(), int(np.array(built.input_ids, np.int64).sum()), built.meta["windows"]))


@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_start_together_share_one_good_folder(tmp_path, damaged):
    texts = list(squad.read_squad(SAMPLE_V2 / "dev.json").frame["context"])
    tokenizer = word_tokenizer(tmp_path / "letters", texts)
    if damaged:
        prepare(splits.QuestionSet(SAMPLE_V2 / "dev.json"), tokenizer, 384, 128, tmp_path / "cache", silent)
        (folder,) = (tmp_path / "cache").iterdir()
        damage_truncate(folder)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(6), context.Queue()
    processes = [context.Process(target=prepare_apart, args=(barrier, tmp_path, results)) for _ in range(6)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len({result[1:] for result in found}) == 1 and len({result[0] for result in found}) == 6
    (folder,) = (tmp_path / "cache").iterdir()
    assert read_cache(folder) is not None


def test_losing_the_race_is_no_error(questions, minilm, tmp_path, monkeypatch):
    """Another process puts its folder there between the look and the rename."""
    good = prepare(questions, minilm, 384, 128, tmp_path / "good", silent)
    (folder,) = (tmp_path / "good").iterdir()
    target = tmp_path / "cache" / folder.name
    rename = type(folder).rename

    def late(self, destination):
        if destination == target and not target.exists():
            shutil.copytree(folder, target)
        return rename(self, destination)

    monkeypatch.setattr(type(folder), "rename", late)
    built = prepare(questions, minilm, 384, 128, tmp_path / "cache", silent)
    assert same(built, good) and list((tmp_path / "cache").iterdir()) == [target]


def test_an_unwritable_cache_is_one_error_before_any_work(questions, minilm, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(cache_module, "build", None)
    for place in ("file", "file/below"):
        with pytest.raises(UserError, match=r"cannot write the cache: .*; name another --cache-dir") as caught:
            prepare(questions, minilm, 384, 128, tmp_path / place, silent)
        assert str(tmp_path / place) in str(caught.value) and "\n" not in str(caught.value)


def test_a_full_disk_is_one_error_and_leaves_nothing(questions, minilm, tmp_path, monkeypatch):
    def full(path, array):
        raise OSError("1000 requested and 0 written")  # as numpy says it: without an errno

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(UserError, match=r"cannot write the cache: 1000 requested.*--cache-dir"):
        prepare(questions, minilm, 384, 128, tmp_path, silent)
    assert not list(tmp_path.iterdir())


def test_faults_are_told_from_the_cache_too(tmp_path):
    raw = json.loads((SAMPLE / "dev.json").read_text())
    qa = raw["data"][0]["paragraphs"][0]["qas"][0]
    qa["answers"][0]["answer_start"] += 1
    (tmp_path / "odd.json").write_text(json.dumps(raw))
    tokenizer = word_tokenizer(tmp_path / "letters", ["abc"])
    for _ in range(2):
        lines = []
        prepare(splits.QuestionSet(tmp_path / "odd.json"), tokenizer, 384, 128, tmp_path / "cache", lines.append)
        warning = [line for line in lines if line.startswith("warning: ")]
        assert len(warning) == 1 and "1 misaligned" in warning[0] and repr(qa["id"]) in warning[0]


# ---------------------------------------------------------------------------------------------------------------------
# On SQuAD itself


def test_label_oracle_on_dev(minilm):
    figures = audit(squad.read_squad(squad_file("dev-v1.1.json.gz")), minilm, 384, 128)
    assert figures["questions"] == 10570 and figures["unlabelled"] == figures["unusable"] == 0
    assert figures["oracle_exact"] >= 99.7 and figures["oracle_f1"] >= 99.8


def test_label_oracle_on_train(minilm, tmp_path, capsys, monkeypatch):
    questions = splits.QuestionSet(squad_file("train-v1.1.json.gz"))
    built = prepare(questions, minilm, 384, 128, tmp_path, silent)
    monkeypatch.setattr("tools.audit.build", lambda *arguments: built)
    figures = audit(questions.data, minilm, 384, 128)
    assert figures["questions"] > 87_000 and figures["unlabelled"] <= 10
    assert figures["oracle_exact"] >= 99.2 and figures["oracle_f1"] >= 99.6
    monkeypatch.setattr(cache_module, "build", None)
    started = time.perf_counter()
    again = prepare(splits.QuestionSet(questions.path), minilm, 384, 128, tmp_path, silent)
    seconds = time.perf_counter() - started
    with capsys.disabled():
        print(f" [{len(again.start):,} windows read in {seconds:.2f} s] ", end="")
    assert len(again.start) == figures["windows"]
