"""tools.fetch against a server on 127.0.0.1 that behaves well and badly; nothing here leaves the machine."""

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from squad_dir import ROOT

from common.errors import UserError
from tools import fetch

TRAIN = bytes(range(256)) * 1000
DEV = b"dev " * 5000


class Server:
    """A web server with some files. What it does with a request can be spoilt by the attributes below."""

    def __init__(self):
        self.files = {}  # path: content
        self.etags = {}  # path: ETag
        self.moved = {}  # path: (status, location)
        self.ranges = True  # whether Range requests are honoured
        self.stop_after = None  # close the connection after so many bytes of a body
        self.stall_after = None  # or go silent there
        self.length = True  # whether Content-Length is sent
        self.content_type = "application/octet-stream"
        self.status = None  # answer this and nothing else
        self.requests = []  # (path, Range header, status sent)
        self.awake = threading.Event()
        handler = type("Handler", (Handler,), {"owner": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def close(self):
        self.awake.set()
        self.http.shutdown()
        self.http.server_close()


class Handler(BaseHTTPRequestHandler):
    owner: Server

    def do_GET(self):
        server, asked = self.owner, self.headers.get("Range")
        content = server.files.get(self.path)
        if self.path in server.moved:
            status, location = server.moved[self.path]
            return self.answer(status, b"", asked, {"Location": location})
        if server.status or content is None:
            return self.answer(server.status or 404, b"nothing to see", asked)
        etag, start = server.etags.get(self.path), 0
        condition = self.headers.get("If-Range")
        if asked and server.ranges and (condition is None or (condition == etag and not etag.startswith("W/"))):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
        headers = {"Content-Type": server.content_type} | ({"ETag": etag} if etag else {})
        if start >= len(content) > 0:
            return self.answer(416, b"", asked)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.answer(206 if start else 200, content[start:], asked, headers)

    def answer(self, status, body, asked, headers=None):
        server = self.owner
        server.requests.append((self.path, asked, status))
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if server.length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if server.stall_after is not None:
            self.wfile.write(body[: server.stall_after])
            self.wfile.flush()
            server.awake.wait(20)
        else:
            self.wfile.write(body[: server.stop_after])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "SQUAD_URL", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    server.files = {"/train-v1.1.json": TRAIN, "/dev-v1.1.json": DEV}
    yield server
    server.close()


@pytest.fixture
def squad(monkeypatch):
    """squad-v1.1 with the sizes and checksums of TRAIN and DEV."""
    files = tuple(
        fetch.File(name, len(content), hashlib.sha256(content).hexdigest())
        for name, content in (("train-v1.1.json", TRAIN), ("dev-v1.1.json", DEV))
    )
    monkeypatch.setitem(fetch.SQUAD, "squad-v1.1", files)


def get(server, to, *arguments):
    fetch.main([*(arguments or ["squad-v1.1"]), "--to", str(to), "--squad-url", server.url, "--hub-url", server.url])


def fails(server, to, *arguments):
    with pytest.raises(UserError) as raised:
        get(server, to, *arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


BOTH = ["squad/dev-v1.1.json", "squad/train-v1.1.json"]


def test_plain_download(server, squad, tmp_path, capsys):
    get(server, tmp_path)
    assert names(tmp_path) == BOTH  # no .part, no .etag left
    assert (tmp_path / "squad/train-v1.1.json").read_bytes() == TRAIN
    assert (tmp_path / "squad/dev-v1.1.json").read_bytes() == DEV
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].endswith("train-v1.1.json: 256,000 bytes, checksum right")


def test_what_is_there_and_right_is_skipped(server, squad, tmp_path, capsys):
    get(server, tmp_path)
    asked = len(server.requests)
    get(server, tmp_path)
    assert len(server.requests) == asked
    assert capsys.readouterr().out.splitlines()[-1].endswith("already there, checksum right")
    get(server, tmp_path, "squad-v1.1", "--force")
    assert len(server.requests) == asked + 2 and names(tmp_path) == BOTH


@pytest.mark.parametrize("content", [TRAIN[:-1], TRAIN[:-1] + b"?"])
def test_what_is_there_and_wrong_is_not_overwritten_unasked(server, squad, tmp_path, content):
    path = tmp_path / "squad/train-v1.1.json"
    path.parent.mkdir()
    path.write_bytes(content)
    message = fails(server, tmp_path)
    assert str(path) in message and "--force" in message
    assert path.read_bytes() == content and not server.requests
    get(server, tmp_path, "squad-v1.1", "--force")
    assert path.read_bytes() == TRAIN


@pytest.mark.parametrize("etag", ['"v1"', None, 'W/"v1"'])
def test_a_broken_download_goes_on_where_it_stopped(server, squad, tmp_path, etag):
    if etag:
        server.etags["/train-v1.1.json"] = etag
    server.stop_after = 100_000
    message = fails(server, tmp_path)
    assert "broke after 100,000 of 256,000 bytes" in message and "again" in message
    assert not (tmp_path / "squad/train-v1.1.json").exists()
    assert (tmp_path / "squad/train-v1.1.json.part").read_bytes() == TRAIN[:100_000]
    server.stop_after = None
    get(server, tmp_path)
    assert server.requests[1] == ("/train-v1.1.json", "bytes=100000-", 206)
    assert (tmp_path / "squad/train-v1.1.json").read_bytes() == TRAIN
    assert names(tmp_path) == BOTH


def test_a_server_without_ranges_sends_all_of_it_again(server, squad, tmp_path):
    server.stop_after = 100_000
    fails(server, tmp_path)
    server.stop_after, server.ranges = None, False
    get(server, tmp_path)
    assert server.requests[1] == ("/train-v1.1.json", "bytes=100000-", 200)
    assert (tmp_path / "squad/train-v1.1.json").read_bytes() == TRAIN


def test_a_file_that_changed_meanwhile_is_fetched_from_the_start(server, tmp_path):
    server.files = {f"/owner/name/resolve/main/{name}": TRAIN for name in ("config.json", "tokenizer.json")}
    weights = "/owner/name/resolve/main/model.safetensors"
    server.files[weights], server.etags[weights] = b"old" * 50_000, '"old"'
    server.stop_after = len(TRAIN)  # nothing is cut but what is longer
    server.files[weights] += b"." * len(TRAIN)
    assert "broke after" in fails(server, tmp_path, "owner/name")
    server.stop_after = None
    server.files[weights], server.etags[weights] = b"new" * 50_000 + b"." * len(TRAIN), '"new"'
    get(server, tmp_path, "owner/name")
    assert server.requests[-1] == (weights, "bytes=256000-", 200)
    assert (tmp_path / "models/owner/name/model.safetensors").read_bytes() == server.files[weights]


def test_without_etag_and_checksum_nothing_is_resumed(server, tmp_path):
    file, path = fetch.File("x", None, None), tmp_path / "x"
    server.files["/x"] = TRAIN
    (tmp_path / "x.part").write_bytes(b"of who knows what")
    fetch.fetch(file, f"{server.url}/x", path)
    assert server.requests == [("/x", None, 200)] and path.read_bytes() == TRAIN


@pytest.mark.parametrize("stale", [b"not the start of it", b"?" * len(TRAIN), b"?" * (len(TRAIN) + 5), b"", TRAIN])
def test_a_stale_part_does_no_harm(server, squad, tmp_path, stale):
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad/train-v1.1.json.part").write_bytes(stale)
    (tmp_path / "squad/train-v1.1.json.part.etag").write_bytes(b"\xff\xfe no tag of this server")
    get(server, tmp_path)
    assert (tmp_path / "squad/train-v1.1.json").read_bytes() == TRAIN
    assert names(tmp_path) == BOTH
    asked = [path for path, _, _ in server.requests]
    assert asked.count("/train-v1.1.json") == (0 if stale == TRAIN else 1)  # a whole one needs a check only


def test_a_stale_part_without_etag_is_found_out_by_the_checksum(server, squad, tmp_path):
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad/train-v1.1.json.part").write_bytes(b"not the start of it")
    get(server, tmp_path)
    assert [(asked, status) for _, asked, status in server.requests[:2]] == [("bytes=19-", 206), (None, 200)]
    assert (tmp_path / "squad/train-v1.1.json").read_bytes() == TRAIN


def test_a_part_longer_than_the_servers_file(server, tmp_path):
    server.files["/x"] = DEV
    (tmp_path / "x.part").write_bytes(DEV + b"more")
    file = fetch.File("x", None, hashlib.sha256(DEV).hexdigest())  # the size is not known
    fetch.fetch(file, f"{server.url}/x", tmp_path / "x")
    assert [status for _, _, status in server.requests] == [416, 200] and (tmp_path / "x").read_bytes() == DEV


def test_a_wrong_checksum_keeps_nothing(server, squad, tmp_path):
    server.files["/train-v1.1.json"] = b"!" + TRAIN[1:]
    message = fails(server, tmp_path)
    assert "sha256" in message and "nothing kept" in message and "train-v1.1.json" in message
    assert names(tmp_path) == []


def test_a_wrong_size_is_not_even_fetched(server, squad, tmp_path):
    server.files["/train-v1.1.json"] = TRAIN + b"!"
    assert "has 256,001 bytes, the published one 256,000" in fails(server, tmp_path)
    server.length = False  # then it is found out afterwards
    assert "256,001" in fails(server, tmp_path)
    assert names(tmp_path) == []


def test_a_web_page_is_not_taken_for_the_file(server, tmp_path):
    server.files["/x"], server.content_type = b"<html>Log in</html>", "text/html; charset=utf-8"
    with pytest.raises(UserError, match="log-in"):
        fetch.fetch(fetch.File("x"), f"{server.url}/x", tmp_path / "x")
    assert names(tmp_path) == []


@pytest.mark.parametrize(("status", "said"), [(404, "no such file"), (401, "name"), (429, "later"), (503, "later")])
def test_http_errors(server, squad, tmp_path, status, said):
    server.status = status
    message = fails(server, tmp_path)
    assert f"HTTP {status}" in message and said in message and "/train-v1.1.json" in message
    assert names(tmp_path) == []


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_followed_with_the_range(server, squad, tmp_path, status):
    server.files["/elsewhere"] = server.files.pop("/train-v1.1.json")
    server.moved["/train-v1.1.json"] = (status, f"{server.url}/elsewhere")
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad/train-v1.1.json.part").write_bytes(TRAIN[:5])
    get(server, tmp_path)
    assert server.requests[1] == ("/elsewhere", "bytes=5-", 206)
    assert (tmp_path / "squad/train-v1.1.json").read_bytes() == TRAIN


def test_a_server_that_falls_silent(server, squad, tmp_path):
    server.stall_after = 1000
    started = time.monotonic()
    message = fails(server, tmp_path, "squad-v1.1", "--timeout", "0.3")
    assert "nothing arrived for 0.3 s" in message and time.monotonic() - started < 10
    assert (tmp_path / "squad/train-v1.1.json.part").read_bytes() == TRAIN[:1000]


def test_a_server_that_never_answers(squad, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match=r"no answer for 0\.3 s"):
            fetch.main(["squad-v1.1", "--to", str(tmp_path), "--squad-url", url, "--timeout", "0.3"])


@pytest.fixture
def nobody():
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def command(*arguments):
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(
        [sys.executable, "-m", "tools.fetch", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_no_network_is_one_line_and_status_2(nobody, tmp_path):
    done = command("squad-v1.1", "--to", tmp_path, "--squad-url", nobody)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "cannot be reached" in done.stderr and "refused" in done.stderr


def test_another_file_than_the_official_one_is_refused_on_the_command_line(server, tmp_path):
    done = command("squad-v1.1", "--to", tmp_path, "--squad-url", server.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "30,288,272" in done.stderr


def test_a_folder_that_cannot_be_written(server, squad, tmp_path):
    (tmp_path / "file").write_text("in the way")  # not a chmod: root may write anywhere
    message = fails(server, tmp_path / "file")
    assert str(tmp_path / "file") in message and "--to DIR" in message
    assert not server.requests


def test_a_full_disk(server, squad, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full (Linux)")
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad/train-v1.1.json.part").symlink_to("/dev/full")
    message = fails(server, tmp_path)
    assert "No space left" in message and "make room" in message
    assert not (tmp_path / "squad/train-v1.1.json").exists()


def test_two_targets_in_one_call(server, squad, tmp_path):
    for name, content in {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": DEV}.items():
        server.files[f"/owner/some-model.v2/resolve/main/{name}"] = content
    server.files["/owner/some-model.v2/resolve/main/pytorch_model.bin"] = b"never asked for"
    get(server, tmp_path, "squad-v1.1", "owner/some-model.v2")
    model = [f"models/owner/some-model.v2/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")]
    assert names(tmp_path) == sorted(BOTH + model)
    assert not any(path.endswith(".bin") for path, _, _ in server.requests)
    assert server.requests[-1][0].endswith("model.safetensors")  # the weights come last

    server.status = 503  # all that is needed is there: nobody is asked
    get(server, tmp_path, "squad-v1.1", "owner/some-model.v2")


def test_an_unknown_checksum_is_said(server, tmp_path, capsys):
    for name in ("config.json", "tokenizer.json", "vocab.txt", "model.safetensors"):
        server.files[f"/owner/name/resolve/main/{name}"] = b"{}"
    get(server, tmp_path, "owner/name")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(line.endswith("size and checksum not known, not checked") for line in lines)


def test_bert_is_fetched_at_the_revision_of_its_checksums(server, tmp_path, monkeypatch):
    contents = {file.name: file.name.encode() for file in fetch.BERT_BASE_UNCASED}
    files = tuple(fetch.File(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in contents.items())
    repository, revision, _ = fetch.MODELS["bert-base-uncased"]
    monkeypatch.setitem(fetch.MODELS, "bert-base-uncased", (repository, revision, files))
    server.files = {f"/google-bert/bert-base-uncased/resolve/{revision}/{n}": c for n, c in contents.items()}
    get(server, tmp_path, "bert-base-uncased")
    assert names(tmp_path) == sorted(f"models/bert-base-uncased/{name}" for name in contents)


@pytest.mark.parametrize("lacking", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_model_that_lacks_what_is_needed(server, tmp_path, lacking):
    for name in {"config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"} - {lacking}:
        server.files[f"/owner/name/resolve/main/{name}"] = b"{}"
    assert f"needs a model with {lacking}" in fails(server, tmp_path, "owner/name")
    assert not (tmp_path / "models/owner/name/model.safetensors").exists()


@pytest.mark.parametrize("name", ["squad-v3", "bert", "../etc", "a/../b", "owner/name/more", "owner/", "owner/a b", ""])
def test_names_that_are_no_target_stop_before_anything_is_fetched(server, squad, tmp_path, name):
    message = fails(server, tmp_path, "squad-v1.1", name)
    assert "squad-v2.0" in message and "owner/name" in message
    assert not server.requests and names(tmp_path) == []


def test_addresses_other_than_the_webs_are_refused(tmp_path):
    with pytest.raises(UserError, match="http"):
        fetch.main(["squad-v1.1", "--to", str(tmp_path), "--squad-url", f"file://{tmp_path}"])
