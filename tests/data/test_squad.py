"""SQuAD files: what is read, what is repaired or set aside, what is refused, and how files are split."""

import gzip
import hashlib
import io
import json
import subprocess
import sys

import pytest
from squad_dir import squad_file
from tiny import ROOT, SAMPLE, SAMPLE_V2, save_network, word_tokenizer

from common import errors
from common.data import files, splits, squad, tokenizer, windows
from common.errors import UserError
from tools import audit as tool
from tools.audit import audit

CONTEXT = "The ferry Alma left Brenholm at nine. It reached Torsund at noon."


def question(key="q1", text="Alma", start=10, asked="Which ferry left?", **more):
    return {"id": key, "question": asked, "answers": [{"text": text, "answer_start": start}], **more}


def tree(*questions, context=CONTEXT, title="Ferries", **top):
    return {"version": "1.1", "data": [{"title": title, "paragraphs": [{"context": context, "qas": questions}]}], **top}


def read(value):
    """SquadData of a tree, by way of JSON."""
    return squad.parse_squad("some.json", json.dumps(value).encode())


def without(record, key):
    return {name: value for name, value in record.items() if name != key}


def changed(record, **values):
    return {**record, **values}


def faults(data):
    """[(id, fault)] in the order found."""
    return list(zip(data.faults["id"], data.faults["fault"], strict=True))


def test_what_is_read():
    data = read(tree(question(), question("q2", "noon", 60)))
    assert data.version == "1.1" and not len(data.faults)
    assert list(data.frame.columns) == ["id", "title", "question", "context", "answers", "is_impossible"]
    assert data.frame["id"].tolist() == ["q1", "q2"] and data.frame["title"].tolist() == ["Ferries"] * 2
    assert data.frame["answers"].tolist() == [[("Alma", 10)], [("noon", 60)]]
    assert data.frame["context"].tolist() == [CONTEXT] * 2 and not data.frame["is_impossible"].any()


@pytest.mark.parametrize(
    ("value", "version"),
    [
        (tree(question()), "1.1"),
        (tree(question(), version="v2.0"), "2.0"),
        (tree(question(), version="2.0"), "2.0"),
        (tree(question(), version=2.0), "2.0"),
        (tree(question(is_impossible=False)), "2.0"),
        (without(tree(question()), "version"), "1.1"),
        (without(tree({"id": "a", "question": "?", "is_impossible": True}), "version"), "2.0"),
    ],
)
def test_the_version_is_recognised(value, version):
    assert read(value).version == version


def test_versions_of_the_bundled_data():
    assert squad.read_squad(SAMPLE / "dev.json").version == "1.1"
    data = squad.read_squad(SAMPLE_V2 / "dev.json")
    assert data.version == "2.0" and 0 < data.frame["is_impossible"].sum() < len(data.frame)
    assert all(not answers for answers in data.frame["answers"][data.frame["is_impossible"]])


def test_contexts_are_not_stripped():
    context = " \n\tThe ferry  Alma\r\n\u00a0sank. \u3000"
    assert read(tree(question(start=15), context=context)).frame["context"][0] == context


# ---------------------------------------------------------------------------------------------------------------------
# What is refused

NOT_JSON = {
    "empty": (b"", "empty"),
    "blanks": (b" \r\n\t\n", "empty"),
    "only a byte-order mark": (b"\xef\xbb\xbf", "empty"),
    "empty gzip": (gzip.compress(b""), "empty"),
    "no JSON": (b"hello", "not JSON.*line 1 column 1"),
    "a page": (b"<!DOCTYPE html><html></html>", "not JSON"),
    "cut off": (json.dumps(tree(question())).encode()[:-30], "not JSON.*complete"),
    "NUL bytes": (bytes(100), "not JSON"),
    "a raw NUL in a text": (json.dumps(tree(question())).encode().replace(b"ferry", b"fer\0y"), "not JSON"),
    "two values": (b"{} {}", "not JSON"),
    "UTF-16": (json.dumps(tree(question())).encode("utf-16"), "UTF-8"),
    "Latin-1": ('{"data": "é"}'.encode("latin-1"), "UTF-8"),
    "a raw lone surrogate": (b'{"data": "\xed\xa0\x80"}', "UTF-8"),
    "truncated gzip": (gzip.compress(json.dumps(tree(question())).encode())[:-20], "gzip"),
    "gzip header alone": (b"\x1f\x8b", "gzip"),
    "damaged gzip": (gzip.compress(bytes(1000))[:15] + bytes(20), "gzip"),
    "gzip with a tail": (gzip.compress(b"{}") + b"tail", "gzip"),
    "deeply nested": (b"[" * 200_000, "nested too deeply"),
    "deeply nested inside": (b'{"data": ' + b'{"a": ' * 100_000, "nested too deeply"),
    "a huge number": (b'{"data": [' + b"9" * 10_000 + b"]}", "number|the article"),
}


@pytest.mark.parametrize("name", NOT_JSON)
def test_what_is_not_json_is_refused(name):
    raw, message = NOT_JSON[name]
    with pytest.raises(UserError, match=message) as caught:
        squad.parse_squad("some.json", files.unpack("some.json", raw))
    assert str(caught.value).startswith("some.json: ") and "\n" not in str(caught.value)


def test_gzip_truncated_anywhere_is_refused():
    packed = gzip.compress(json.dumps(tree(question())).encode())
    for size in range(2, len(packed)):
        with pytest.raises(UserError, match=r"some\.json: truncated or damaged gzip"):
            files.unpack("some.json", packed[:size])


def test_a_packed_file_is_the_same_data(tmp_path):
    """The same cache, the same experiment in a report, and no other data for a run that goes on."""
    raw = json.dumps(tree(question())).encode()
    for level in 1, 9:
        (tmp_path / f"{level}.json.gz").write_bytes(gzip.compress(raw, level))
    (tmp_path / "plain.json").write_bytes(raw)
    sets = [splits.QuestionSet(path) for path in tmp_path.iterdir()]
    assert len(sets) == 3 and {one.sha256 for one in sets} == {hashlib.sha256(raw).hexdigest()}
    assert len({one.key for one in sets}) == 1 and all(len(one.data.frame) == 1 for one in sets)


Q = question()
WRONG_SHAPES = {
    "a list": ([], "not SQuAD.*articles"),
    "a number": (7, "not SQuAD"),
    "null": (None, "not SQuAD"),
    "a text": ("data", "not SQuAD"),
    "no data": ({"version": "1.1"}, "not SQuAD"),
    "data is an object": ({"data": {}}, "not SQuAD"),
    "no articles": ({"data": []}, "no questions"),
    "no paragraphs": ({"data": [{"title": "t", "paragraphs": []}]}, "no questions"),
    "no questions": (tree(), "no questions"),
    "article is a text": ({"data": ["t"]}, "article 0.*is text; expected an object"),
    "article is null": ({"data": [None]}, "article 0.*is null"),
    "title is a number": (tree(Q, title=3), "article 0: title is a whole number; expected text"),
    "title is null": (tree(Q, title=None), "article 0: title is null; expected text"),
    "no paragraphs key": ({"data": [{"title": "t"}]}, "article 0: has no 'paragraphs'"),
    "paragraphs is an object": ({"data": [{"paragraphs": {}}]}, "article 0: paragraphs is an object; expected a list"),
    "paragraph is a list": ({"data": [{"paragraphs": [[]]}]}, "article 0, paragraph 0: the paragraph is a list"),
    "no context": ({"data": [{"paragraphs": [{"qas": [Q]}]}]}, "paragraph 0: has no 'context'"),
    "context is null": (tree(Q, context=None), "paragraph 0: context is null; expected text"),
    "no qas": ({"data": [{"paragraphs": [{"context": "c"}]}]}, "paragraph 0: has no 'qas'"),
    "qas is text": ({"data": [{"paragraphs": [{"context": "c", "qas": "q"}]}]}, "qas is text; expected a list"),
    "question is a text": (tree("q"), "a question is text; expected an object"),
    "no id": (tree(without(Q, "id")), "article 0, paragraph 0: has no 'id'"),
    "id is a number": (tree(changed(Q, id=5)), "article 0, paragraph 0: id is a whole number; expected text"),
    "id with half a character": (tree(changed(Q, id="a\ud800")), r"question 'a\\ud800': the id holds a lone surrogate"),
    "no question": (tree(without(Q, "question")), "question 'q1': has no 'question'"),
    "question is a list": (tree(changed(Q, question=[])), "question 'q1': question is a list; expected text"),
    "no answers key": (tree(without(Q, "answers")), "question 'q1': has no 'answers'"),
    "no answers in v1.1": (tree(changed(Q, answers=[])), "question 'q1': has no answers; v1.1 needs one"),
    "answers is an object": (tree(changed(Q, answers={})), "question 'q1': answers is an object; expected a list"),
    "answers is null": (tree(changed(Q, answers=None)), "question 'q1': answers is null"),
    "answer is a text": (tree(changed(Q, answers=["Alma"])), "question 'q1': an answer is text; expected an object"),
    "no text": (tree(changed(Q, answers=[{"answer_start": 1}])), "question 'q1': has no 'text'"),
    "text is a number": (tree(question(text=1945)), "question 'q1': text is a whole number; expected text"),
    "no answer_start": (tree(changed(Q, answers=[{"text": "Alma"}])), "question 'q1': has no 'answer_start'"),
    "answer_start is a text": (tree(question(start="10")), "answer_start is text; expected a whole number"),
    "answer_start is 10.0": (tree(question(start=10.0)), "answer_start is a number; expected a whole number"),
    "answer_start is infinite": (tree(question(start=float("inf"))), "answer_start is a number; expected a whole"),
    "answer_start is not a number": (tree(question(start=float("nan"))), "answer_start is a number; expected a whole"),
    "answer_start is true": (tree(question(start=True)), "answer_start is true or false; expected a whole number"),
    "is_impossible is a text": (tree(changed(Q, is_impossible="no")), "question 'q1': is_impossible is text; expected"),
    "is_impossible is 0": (tree(changed(Q, is_impossible=0)), "question 'q1': is_impossible is a whole number"),
    "an id twice": (tree(Q, Q), "question 'q1': the id occurs twice; ids must be unique"),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_wrong_shapes_are_refused(name):
    value, message = WRONG_SHAPES[name]
    with pytest.raises(UserError, match=message) as caught:
        read(value)
    assert str(caught.value).startswith("some.json: ") and "\n" not in str(caught.value)


def test_an_id_twice_in_different_articles_is_refused():
    value = tree(question())
    value["data"] += tree(question())["data"]
    with pytest.raises(UserError, match="'q1': the id occurs twice"):
        read(value)


def test_messages_stay_on_one_bearable_line():
    with pytest.raises(UserError) as caught:
        read(tree(changed(question(), id="line\nend" * 10_000, question=None)))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    data = read(tree(question(start=10**4000), question("q2", "gone " * 1000, 10**4000)))
    assert faults(data) == [("q1", "misaligned"), ("q2", "unusable")]
    assert data.faults["detail"].map(len).max() < 200


@pytest.mark.parametrize("name", ["absent.json", "absent.json.gz", "folder/absent.json", "x" * 5000, "nul\0", "a/b/c"])
def test_a_missing_file(tmp_path, name):
    with pytest.raises(UserError, match=r"no such file; .*tools\.fetch"):
        squad.read_squad(tmp_path / name)


@pytest.mark.parametrize("name", ["", ".", "folder.json"])
def test_a_folder(tmp_path, name):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UserError, match="is a folder; name a SQuAD file"):
        squad.read_squad(tmp_path / name)


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "some.json"
    path.write_bytes(b"{}")

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    with pytest.raises(UserError, match=r"some\.json: cannot be read: Permission denied; check"):
        squad.read_squad(path)


# ---------------------------------------------------------------------------------------------------------------------
# What is repaired or set aside


def test_byte_order_mark_and_line_ends_do_no_harm():
    plain = json.dumps(tree(question()), indent=1)
    for raw in ("\ufeff" + plain, plain.replace("\n", "\r\n"), "\ufeff\r\n" + plain.replace("\n", "\r\n") + "\r\n"):
        data = squad.parse_squad("some.json", raw.encode())
        assert data.frame["answers"][0] == [("Alma", 10)] and not len(data.faults)


def test_line_ends_within_a_context_are_kept():
    context = "First line.\r\nThe ferry Alma.\r\n"
    data = read(tree(question(start=context.index("Alma")), context=context))
    assert data.frame["context"][0] == context and not len(data.faults)


@pytest.mark.parametrize("start", [0, 9, 11, 63, 64, 65, 10**6, 10**30, -1, -(10**30)])
def test_an_answer_elsewhere_is_moved_to_the_nearest_place(start):
    data = read(tree(question(start=start)))
    assert data.frame["answers"][0] == [("Alma", 10)]
    assert faults(data) == [("q1", "misaligned")] and "found at 10" in data.faults["detail"][0]


@pytest.mark.parametrize(("start", "found"), [(1, 0), (2, 0), (3, 5), (4, 5), (6, 5), (8, 10), (9, 10), (99, 10)])
def test_the_nearest_of_several_places(start, found):
    assert squad.locate("ab", start, "ab__.ab__.ab_") == found


def test_overlapping_places():
    assert squad.locate("aa", 1, "baaab") == 1 and squad.locate("aa", 0, "baaab") == 1
    assert squad.locate("aa", 4, "baaab") == 2


@pytest.mark.parametrize("text", ["Torsund at noon. And", "alma", "", "  ", "\u200b"])
def test_an_answer_that_is_nowhere_or_blank_is_set_aside(text):
    data = read(tree(question(text=text), question("q2")))
    assert faults(data) == [("q1", "unusable")]
    assert data.frame["answers"].tolist() == [[(text, -1)], [("Alma", 10)]]  # still gold, for scoring


def test_another_answer_of_the_question_is_used_where_the_first_cannot_be():
    several = question()
    several["answers"] = [{"text": "Elma", "answer_start": 10}, *several["answers"]]
    data = read(tree(several))
    assert data.frame["answers"][0] == [("Elma", -1), ("Alma", 10)] and faults(data) == [("q1", "unusable")]


def test_lone_surrogates_are_replaced_and_counted():
    context = "The \ud800 ferry Alma\udfff."
    odd = question(text="Alma\udfff", start=12, asked="Which \udc00?")
    data = read(tree(odd, question("q2", "ferry", 6), context=context, title="\ud801"))
    row = data.frame.iloc[0]
    assert row["context"] == "The \ufffd ferry Alma\ufffd." and row["question"] == "Which \ufffd?"
    assert row["title"] == "\ufffd" and row["answers"] == [("Alma\ufffd", 12)]
    details = data.faults.groupby("id")["detail"].apply(sorted).to_dict()
    assert details == {"q1": ["answer", "context", "question", "title"], "q2": ["context", "title"]}
    assert set(data.faults["fault"]) == {"surrogate"}


def test_a_surrogate_pair_is_a_character():
    raw = json.dumps(tree(question(text="🎈", start=0), context="🎈 rose")).encode()
    assert b"\\ud83c" in raw
    data = squad.parse_squad("some.json", raw)
    assert data.frame["answers"][0] == [("🎈", 0)] and not len(data.faults)


def test_nul_in_a_text_is_kept():
    data = read(tree(question(text="Al\0ma", start=4), context="The Al\0ma."))
    assert data.frame["answers"][0] == [("Al\0ma", 4)] and not len(data.faults)


@pytest.mark.parametrize("context", ["", "   ", "\n\t\u3000\u00a0"])
def test_a_context_of_blanks(context):
    data = read(tree(question(), context=context))
    assert faults(data) == [("q1", "blank context"), ("q1", "unusable")]
    data = read(tree({"id": "a", "question": "?", "answers": [], "is_impossible": True}, context=context))
    assert faults(data) == [("a", "blank context")]


def test_an_impossible_question_with_answers():
    data = read(tree(question(is_impossible=True), question("q2")))
    assert faults(data) == [("q1", "contradiction")]
    assert data.frame["answers"][0] == [] and data.frame["is_impossible"].tolist() == [True, False]


def test_an_answerable_question_without_answers_in_version_2():
    data = read(tree(changed(question(), answers=[]), question("q2"), version="v2.0"))
    assert faults(data) == [("q1", "no answers")]


@pytest.mark.parametrize("answers", [{}, {"answers": []}, {"answers": None}])
def test_an_impossible_question_needs_no_answers(answers):
    data = read(tree({"id": "a", "question": "?", "is_impossible": True, **answers}))
    assert data.frame["answers"][0] == [] and not len(data.faults)


def test_every_fault_has_a_rule_and_is_counted():
    many = [question(f"q{i}") for i in range(40)]
    many[3]["answers"][0]["answer_start"] = 11
    many[7]["answers"][0]["text"] = "Elma"
    data = read(tree(*many))
    assert set(data.faults["fault"]) <= set(squad.FAULTS)
    assert squad.fault_counts(data.faults) == {"misaligned": 1, "unusable": 1}
    line = squad.check_faults("some.json", len(data.frame), data.faults)
    assert "2 of 40 questions faulty (1 misaligned, 1 unusable), first: question 'q3'" in line and "\n" not in line
    assert squad.check_faults("some.json", 40, data.faults.iloc[:0]) is None


def test_a_file_with_too_many_faults_is_refused():
    many = [question(f"q{i}", start=11 if i < 5 else 10) for i in range(40)]
    data = read(tree(*many))
    with pytest.raises(UserError, match=r"5 of 40 questions faulty.*'q0'.*too many.*mend the file"):
        squad.check_faults("some.json", 40, data.faults)
    assert squad.check_faults("some.json", 50, data.faults)  # a tenth is tolerated


def test_too_many_long_questions_get_fitting_advice():
    rows = [(f"q{i}", "long question", "90 tokens, 40 used") for i in range(20)]
    frame = squad.pd.DataFrame(rows, columns=["id", "fault", "detail"])
    with pytest.raises(UserError, match=r"too many.*--max-length"):
        squad.check_faults("some.json", 100, frame)


def test_strings_that_differ_after_a_nul_are_different(tmp_path):
    """pandas 2 takes them for equal when it numbers or counts them."""
    tokenizer = word_tokenizer(tmp_path, ["abcdefgh"])
    contexts = ["ab\0 cd", "ab\0 efgh", "ab"]
    ids = [f"q\0{i}" for i in range(3)]
    asked = [question(name, "ab", 1) for name in ids]  # the answer is one place off: a fault each
    articles = [
        tree(q, context=c, title=f"t\0{i}")["data"][0] for i, (q, c) in enumerate(zip(asked, contexts, strict=True))
    ]
    data = read({"data": articles})
    built = windows.build(data, tokenizer, 32, 4)
    assert built.context_tokens.tolist() == [4, 6, 2]
    figures = audit(data, tokenizer, 32, 4)
    assert (figures["contexts"], figures["articles"]) == (3, 3)
    assert figures["fault_ids"] == {"misaligned": ids}
    kept, drawn = splits.split_frame(data.frame, 0.34, "article")
    assert len(kept) == 2 and len(drawn) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Through the command line


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model folder."""
    folder = tmp_path_factory.mktemp("model")
    texts = [CONTEXT + "Whichferleft?"]
    word_tokenizer(folder, texts)
    save_network(folder, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    return folder


def command(*arguments, **more):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=100, **more
    )


def assert_one_error_line(result, *parts):
    lines = result.stderr.splitlines()
    assert result.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert all(part in lines[0] for part in parts), lines[0]


def test_the_audit_names_faults(tmp_path, model, capsys, monkeypatch):
    path = tmp_path / "some.json"
    odd = [question(start=11), question("q2", "Elma"), question("q3", "Alma", asked="left " * 400), question("q4")]
    path.write_text(json.dumps(tree(*odd)))
    monkeypatch.setattr(sys, "argv", ["audit", str(path), "--model", str(model), "--json"])
    tool.main()
    figures = json.loads(capsys.readouterr().out)
    assert figures["questions"] == 4 and figures["unanswerable"] == 0 and figures["windows"] == 4
    assert figures["misaligned"] == 1 and figures["unusable"] == 1 and figures["repaired"] == 2
    assert figures["fault_ids"] == {"misaligned": ["q1"], "unusable": ["q2"], "long question": ["q3"]}
    assert figures["unlabelled_ids"] == ["q2"]
    assert figures["oracle_exact"] == 75 and figures["oracle_f1"] == 75
    monkeypatch.setattr(sys, "argv", ["audit", str(path), "--model", str(model)])
    tool.main()
    table = capsys.readouterr().out
    assert "unusable (" in table and "'q2'" in table and "75.000" in table


def run_main(main, arguments, monkeypatch, capsys):
    """What errors.run does around `main` with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        errors.run(main)
    return subprocess.CompletedProcess(arguments, caught.value.code, *capsys.readouterr())


def test_the_audit_refuses_in_one_line(tmp_path, model, capsys, monkeypatch):
    path = tmp_path / "some.json"
    raws = {name: raw for name, (raw, _) in NOT_JSON.items()}
    raws |= {name: json.dumps(value).encode() for name, (value, _) in WRONG_SHAPES.items()}
    for raw in raws.values():
        path.write_bytes(raw)
        assert_one_error_line(run_main(tool.main, [path, "--model", model], monkeypatch, capsys), str(path))
    for missing in (tmp_path / "absent.json", tmp_path):
        assert_one_error_line(run_main(tool.main, [missing, "--model", model], monkeypatch, capsys), str(missing))
    path.write_text(json.dumps(tree(question())))
    good = [path, "--model", model]
    for more, part in (
        (["--overlap", 380], "use an overlap of at most 284"),
        (["--overlap", -1], "--overlap -1"),
        (["--max-length", 8], "--max-length 32"),
        (["--max-length", 1000], "512 tokens"),
        (["--model", tmp_path / "absent"], "absent"),
    ):
        assert_one_error_line(run_main(tool.main, [*good, *more], monkeypatch, capsys), part)
    assert run_main(tool.main, good, monkeypatch, capsys).returncode in (0, None)


def test_a_damaged_tokenizer_is_one_line(tmp_path, model):
    word_tokenizer(tmp_path, ["abc"])
    for damage in ("", "{", '{"version": "1.0"}', "[]", "\0" * 50):
        (tmp_path / "tokenizer.json").write_text(damage)
        with pytest.raises(UserError, match="no usable tokenizer") as caught:
            tokenizer.load_tokenizer(str(tmp_path))
        assert "\n" not in str(caught.value)


def test_the_commands_themselves_end_with_one_line_and_status_2(tmp_path, model):
    path = tmp_path / "some.json"
    path.write_text(json.dumps(tree(Q, Q)))
    result = command("-m", "tools.audit", path, "--model", model)
    assert_one_error_line(result, str(path), "'q1'", "rename")
    assert not result.stdout
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(gzip.compress(json.dumps(tree(question())).encode())[:-9])
    result = command(
        *("baseline.py", "--train-file", SAMPLE / "train.json", "--dev-file", cut, "--model", model),
        *("--run-name", "x", "--runs-dir", tmp_path / "runs", "--cache-dir", tmp_path / "cache", "--epochs", 1),
        *("--device", "cpu", "--max-train-examples", 20),
    )
    assert_one_error_line(result, str(cut), "gzip")
    assert not (tmp_path / "runs" / "x").exists()


def test_the_audit_speaks_ascii_terminals_too(tmp_path, model, monkeypatch):
    path = tmp_path / "some.json"
    path.write_text(json.dumps(tree(question("fråga", "Elma"), question("q2"))))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["audit", str(path), "--model", str(model)])
    monkeypatch.setattr(errors.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        errors.run(tool.main)
    assert not end.value.code
    out.flush()
    assert rb"fr\xe5ga" in out.buffer.getvalue()


# ---------------------------------------------------------------------------------------------------------------------
# Parts of files


@pytest.fixture(scope="module")
def frame():
    return squad.read_squad(SAMPLE / "train.json").frame


@pytest.mark.parametrize("by", ["article", "question"])
@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 0.9])
def test_splits(frame, by, fraction):
    kept, drawn = splits.split_frame(frame, fraction, by)
    assert sorted([*kept["id"], *drawn["id"]]) == sorted(frame["id"])
    slack = frame["title"].value_counts().max() if by == "article" else 1
    assert abs(len(drawn) - fraction * len(frame)) <= slack
    if by == "article":
        assert not set(kept["title"]) & set(drawn["title"])
    else:
        assert set(kept["title"]) & set(drawn["title"])
    again = splits.split_frame(frame, fraction, by)
    assert again[0].equals(kept) and again[1].equals(drawn)
    positions = {key: i for i, key in enumerate(frame["id"])}
    for part in (kept, drawn):  # in the order of the file, numbered anew
        assert [positions[key] for key in part["id"]] == sorted(positions[key] for key in part["id"])
        assert part.index.tolist() == list(range(len(part)))


def test_splits_of_real_data_by_article():
    frame = squad.read_squad(squad_file("dev-v1.1.json.gz")).frame
    kept, drawn = splits.split_frame(frame, 0.2, "article")
    assert not set(kept["title"]) & set(drawn["title"])
    assert abs(len(drawn) / len(frame) - 0.2) < 0.01


def articles(*sizes):
    rows = [
        (f"{t}-{i}", f"title {t}", "?", "c", [("c", 0)], False) for t, size in enumerate(sizes) for i in range(size)
    ]
    return squad.pd.DataFrame(rows, columns=["id", "title", "question", "context", "answers", "is_impossible"])


@pytest.mark.parametrize(
    ("sizes", "fraction", "drawn"),
    [
        ((1000, 5), 0.2, 5),
        ((5, 1000), 0.2, 5),
        ((500, 500), 0.1, 500),
        ((10, 10, 10, 10), 0.25, 10),
        ((3, 3), 0.99, 3),
        ((1000, 1, 1, 1), 0.001, 1),
    ],
)
def test_splits_by_article_come_as_near_as_articles_allow(sizes, fraction, drawn):
    assert len(splits.split_frame(articles(*sizes), fraction, "article")[1]) == drawn


@pytest.mark.parametrize(
    ("sizes", "fraction", "by", "message"),
    [
        ((9,), 0.2, "article", "single article.*--split-by question"),
        ((2, 2), 0.001, "question", "one side empty; change --dev-fraction"),
        ((2, 2), 0.999, "question", "one side empty"),
        ((2, 2), 0.001, "article", "one side empty"),
    ],
)
def test_splits_that_cannot_be_made(sizes, fraction, by, message):
    with pytest.raises(UserError, match=message):
        splits.split_frame(articles(*sizes), fraction, by)


def test_articles_without_a_title_are_articles():
    value = {"data": [without(tree(question(f"q{i}"))["data"][0], "title") for i in range(4)]}
    kept, drawn = splits.split_frame(read(value).frame, 0.25, "article")
    assert len(kept) == 3 and len(drawn) == 1


def ids(questions):
    return questions.data.frame["id"].tolist()


def test_question_sets(frame):
    everything = frame["id"].tolist()
    train, dev = SAMPLE / "train.json", SAMPLE / "dev.json"
    sets = splits.question_sets(train, dev, max_train=50, max_dev=7)
    assert list(sets) == ["train", "dev"]
    assert ids(sets["train"]) == everything[:50]
    assert ids(sets["dev"]) == squad.read_squad(dev).frame["id"].tolist()[:7]
    assert list(splits.question_sets(None, dev)) == ["dev"]
    assert ids(splits.question_sets(None, dev, max_dev=3)["dev"]) == squad.read_squad(dev).frame["id"].tolist()[:3]

    sets = splits.question_sets(train, "not looked at", dev_fraction=0.2, max_train=200, split_by="question")
    assert sorted(ids(sets["train"]) + ids(sets["dev"])) == sorted(everything[:200])
    assert len(ids(sets["dev"])) == 40
    shorter = splits.question_sets(train, None, dev_fraction=0.2, max_train=200, split_by="question", max_dev=9)
    assert ids(shorter["dev"]) == ids(sets["dev"])[:9] and ids(shorter["train"]) == ids(sets["train"])

    sets = splits.question_sets(train, dev, tune_fraction=0.1)
    assert sorted(ids(sets["train"]) + ids(sets["tune"])) == sorted(everything)
    assert not set(sets["train"].data.frame["title"]) & set(sets["tune"].data.frame["title"])


def test_what_is_seen_is_of_the_training_questions():
    sets = splits.question_sets(SAMPLE / "train.json", None, dev_fraction=0.2, tune_fraction=0.2, seen=30)
    assert ids(sets["seen"]) == ids(sets["train"])[:30]
    assert [name for name, questions in sets.items() if questions.part] == ["seen"]


def test_three_parts_are_disjoint(frame):
    sets = splits.question_sets(SAMPLE / "train.json", None, dev_fraction=0.2, tune_fraction=0.2)
    parts = {name: set(one.data.frame["title"]) for name, one in sets.items()}
    assert not parts["train"] & parts["dev"] and not parts["train"] & parts["tune"] and not parts["dev"] & parts["tune"]
    assert sum(len(ids(one)) for one in sets.values()) == len(frame)


def test_first_answer_only():
    dev = SAMPLE / "dev.json"
    full = splits.question_sets(None, dev)["dev"].data.frame["answers"]
    first = splits.question_sets(None, dev, first_answer=True)["dev"].data.frame["answers"]
    assert max(map(len, full)) > 1
    assert [answers[:1] for answers in full] == first.tolist()
    sets = splits.question_sets(dev, None, dev_fraction=0.2, first_answer=True)
    assert all(len(answers) == 1 for one in sets.values() for answers in one.data.frame["answers"])


def test_the_faults_of_a_part_are_its_own(tmp_path):
    path = tmp_path / "some.json"
    path.write_text(json.dumps(tree(*(question(f"q{i}", start=9) for i in range(6)))))
    data = splits.QuestionSet(path, (("first", 2),)).data
    assert data.faults["id"].tolist() == ["q0", "q1"]


def test_plain_and_gzipped_are_equal(tmp_path):
    raw = (SAMPLE_V2 / "dev.json").read_bytes()
    (tmp_path / "plain.json").write_bytes(raw)
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "misnamed.json").write_bytes(gzip.compress(raw))
    plain = squad.read_squad(tmp_path / "plain.json")
    for name in ("packed.json.gz", "misnamed.json", "packed.json"):  # the last is found by its twin's name
        other = squad.read_squad(tmp_path / name)
        assert other.frame.equals(plain.frame) and other.version == plain.version
    assert files.find_file(tmp_path / "plain.json.gz") == tmp_path / "plain.json"


def test_the_key_of_a_set_is_its_content(tmp_path):
    raw = (SAMPLE / "dev.json").read_bytes()
    for name, content in (("a.json", raw), ("b.json", raw), ("c.json", raw + b" ")):
        (tmp_path / name).write_bytes(content)
    keys = [splits.QuestionSet(tmp_path / name).key for name in ("a.json", "b.json", "c.json")]
    assert keys[0] == keys[1] != keys[2]
    assert splits.QuestionSet(tmp_path / "a.json", (("first", 3),)).key != keys[0]


def test_default_files(tmp_path, monkeypatch):
    monkeypatch.setenv("SQUAD_DIR", str(tmp_path))
    train, dev, name = files.default_files()
    assert name == "sample" and train == SAMPLE / "train.json" and dev == SAMPLE / "dev.json"
    (tmp_path / "train-v1.1.json.gz").touch()
    assert files.default_files()[2] == "sample"  # both are needed
    monkeypatch.setenv("SQUAD_DIR", "long" * 100)  # for a file's name
    assert files.default_files()[2] == "sample"
    monkeypatch.setenv("SQUAD_DIR", str(tmp_path))
    (tmp_path / "dev-v1.1.json.gz").touch()
    expected = (tmp_path / "train-v1.1.json.gz", tmp_path / "dev-v1.1.json.gz", "SQuAD v1.1")
    assert files.default_files() == expected
    monkeypatch.delenv("SQUAD_DIR")
    assert files.squad_folder() == ROOT / "data" / "squad"
