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

import huggingface_hub.constants
import pytest
from squad_dir import ROOT

from common.errors import UserError
from tools import fetch

TRAIN = bytes(range(256)) * 1000
DEV = b"dev " * 5000


class Server:
    """A web server and Hub with some files. What it does with a request can be spoilt by the attributes below."""

    def __init__(self):
        self.files = {}  # path: content
        self.stop_after = None  # close the connection after so many bytes of a body
        self.stall_after = None  # or go silent there
        self.content_type = "application/octet-stream"
        self.status = None  # answer this and nothing else
        self.requests = []  # (path, Range header, status sent) of each GET
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

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        server, asked = self.owner, self.headers.get("Range")
        content, start = server.files.get(self.path), 0
        status = server.status or (404 if content is None else 200)
        if asked and status == 200 and body:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            status = 206 if start else 200
        content = content if content is not None and status < 400 else b""
        if body:
            server.requests.append((self.path, asked, status))
        self.send_response(status)
        self.send_header("Content-Type", server.content_type)
        self.send_header("Content-Length", str(len(content) - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if status == 404:
            known = any(path.startswith(self.path.rsplit("/", 1)[0]) for path in server.files)
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if body and server.stall_after is not None:
            self.wfile.write(content[start : start + server.stall_after])
            self.wfile.flush()
            server.awake.wait(20)
        elif body:
            end = None if server.stop_after is None else start + server.stop_after
            self.wfile.write(content[start:end])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "SQUAD_URL", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # the tests' own setting
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
    """Files below a folder, without what a broken download left to be resumed."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if ".fetch" not in path.parts)


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


def test_a_broken_download_is_fetched_again(server, squad, tmp_path):
    server.stop_after = 100_000
    assert "nothing kept" in fails(server, tmp_path)
    assert names(tmp_path) == []
    server.stop_after = None
    get(server, tmp_path)
    assert names(tmp_path) == BOTH and (tmp_path / "squad/train-v1.1.json").read_bytes() == TRAIN


def model_files(server, weights=DEV, repository="owner/name"):
    for name, content in {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": weights}.items():
        server.files[f"/{repository}/resolve/main/{name}"] = content


def test_after_a_broken_download_of_a_model_only_the_missing_file_is_fetched(server, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the library's own tries
    weights = TRAIN * 100
    model_files(server, weights)
    server.stop_after = 1_000_000
    assert "run this again" in fails(server, tmp_path, "owner/name")
    assert not (tmp_path / "models/owner/name/model.safetensors").exists()
    server.stop_after, before = None, len(server.requests)
    get(server, tmp_path, "owner/name")
    got = [path.rsplit("/")[-1] for path, _, status in server.requests[before:] if status == 200]
    assert got == ["model.safetensors"]
    assert (tmp_path / "models/owner/name/model.safetensors").read_bytes() == weights
    assert names(tmp_path) == [f"models/owner/name/{n}" for n in ("config.json", "model.safetensors", "tokenizer.json")]


def test_a_wrong_checksum_keeps_nothing(server, squad, tmp_path):
    server.files["/train-v1.1.json"] = b"!" + TRAIN[1:]
    message = fails(server, tmp_path)
    assert "sha256" in message and "nothing kept" in message and "train-v1.1.json" in message
    assert names(tmp_path) == []


def test_a_wrong_size_keeps_nothing(server, squad, tmp_path):
    server.files["/train-v1.1.json"] = TRAIN + b"!"
    assert "has 256,001 bytes where the published file has 256,000" in fails(server, tmp_path)
    assert names(tmp_path) == []


def test_a_web_page_is_not_taken_for_the_file(server, squad, tmp_path):
    server.files["/train-v1.1.json"], server.content_type = b"<html>Log in</html>", "text/html; charset=utf-8"
    assert "log-in" in fails(server, tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("status", [404, 401, 429, 503])
def test_http_errors(server, squad, tmp_path, status):
    server.status = status
    message = fails(server, tmp_path)
    assert f"HTTP {status}" in message and "/train-v1.1.json" in message
    assert names(tmp_path) == []


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_model_that_the_hub_does_not_give(server, tmp_path, status):
    server.status = status
    message = fails(server, tmp_path, "owner/name")
    assert "owner/name/config.json" in message
    assert names(tmp_path) == []


def test_offline_mode_is_named(server, tmp_path, monkeypatch):
    model_files(server)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids the network" in fails(server, tmp_path, "owner/name")
    assert not server.requests


def test_a_server_that_falls_silent(server, squad, tmp_path):
    server.stall_after = 1000
    started = time.monotonic()
    message = fails(server, tmp_path, "squad-v1.1", "--timeout", "0.3")
    assert "timed out" in message and time.monotonic() - started < 10
    assert names(tmp_path) == [] or not (tmp_path / "squad/train-v1.1.json").exists()


@pytest.fixture
def nobody():
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def command(*arguments):
    unset = ("_proxy", "hf_hub_offline")
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith(unset)}
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
    assert done.stderr.count("\n") == 1 and "no connection" in done.stderr and "refused" in done.stderr


def test_no_hub_is_one_line_and_status_2(nobody, tmp_path):
    done = command("owner/name", "--to", tmp_path, "--hub-url", nobody)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("error: ") and "run this where there is a network" in done.stderr


def test_another_file_than_the_official_one_is_refused_on_the_command_line(server, tmp_path):
    done = command("squad-v1.1", "--to", tmp_path, "--squad-url", server.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "30,288,272" in done.stderr and not any((tmp_path / "squad").glob("*.json"))


def test_a_folder_that_cannot_be_written(server, squad, tmp_path):
    (tmp_path / "file").write_text("in the way")  # not a chmod: root may write anywhere
    message = fails(server, tmp_path / "file")
    assert str(tmp_path / "file") in message and "--to DIR" in message
    assert not server.requests


def test_a_full_disk(server, squad, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full (Linux)")
    (tmp_path / "squad/.fetch").mkdir(parents=True)
    (tmp_path / "squad/.fetch/train-v1.1.json").symlink_to("/dev/full")
    message = fails(server, tmp_path)
    assert "No space left" in message and "make room" in message
    assert not (tmp_path / "squad/train-v1.1.json").exists()


def test_two_targets_in_one_call(server, squad, tmp_path):
    model_files(server, repository="owner/some-model.v2")
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
    assert len(lines) == 4 and all(line.endswith("checksum not known, not checked") for line in lines)


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
