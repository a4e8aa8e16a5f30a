"""tools.fetch as a command, against a server on 127.0.0.1 that is SQuAD's web server and a small Hub."""

import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from squad_dir import ROOT

from tools import fetch

TRAIN, DEV = bytes(range(256)) * 1000, b"dev " * 5000
WEIGHTS = bytes(range(255, -1, -1)) * 48_000  # 12 MB: more than the library writes at once
SMALL = {"config.json": b'{"a": 1}', "tokenizer.json": b'{"b": 2}', "vocab.txt": b"a\nb\n"}
COMMIT = "0123456789" * 4
# The command with other pinned files, and without the library's pauses between its tries.
COMMAND = """
import json, sys, time
from common.errors import run
from tools import fetch
squad, bert = json.loads(sys.argv.pop(1))
time.sleep = lambda seconds: None
fetch.SQUAD["squad-v1.1"] = [fetch.File(*file) for file in squad]
fetch.MODELS["bert-base-uncased"] = (*fetch.MODELS["bert-base-uncased"][:2], [fetch.File(*file) for file in bert])
run(fetch.main)
"""


class Server:
    """A web server and Hub with some files. The attributes change how it answers."""

    def __init__(self):
        self.files = {"/train-v1.1.json": TRAIN, "/dev-v1.1.json": DEV}  # path: content
        self.status = None  # answer this and nothing else
        self.content_type = "application/octet-stream"
        self.breaks = 0  # so many bodies break off
        self.breaks_after = 0  # after so many bytes
        self.silent = False  # send no body, and do not end
        self.error_codes = True  # say what is missing, as the Hub does and a plain mirror does not
        self.requests = []  # (method, path, headers, status)
        self.awake = threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"server_": self}))
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def add_model(self, name="owner/name", revision="main", weights=WEIGHTS, lacking=()):
        """The small files and the weights; the weights lie elsewhere, as the Hub's do."""
        files = {**SMALL, "model.safetensors": weights, "pytorch_model.bin": b"never"}
        for file in files.keys() - set(lacking):
            self.files[f"/{name}/resolve/{revision}/{file}"] = files[file]

    def got(self):
        """Names of the files whose content was sent, in order, each once."""
        return list(
            dict.fromkeys(p.rsplit("/")[-1] for m, p, _, status in self.requests if m == "GET" and status < 300)
        )

    def close(self):
        self.awake.set()
        self.http.shutdown()
        self.http.server_close()


class Handler(BaseHTTPRequestHandler):
    server_: Server

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        server, asked = self.server_, urlsplit(self.path).path  # a whole address where this is a proxy
        hub_path = asked.removeprefix("/storage")
        content = server.files.get(hub_path)
        elsewhere = asked == hub_path and asked.endswith(".safetensors")
        status = server.status or (404 if content is None else 302 if elsewhere else 200)
        content, start = content or b"", 0
        if status == 200 and self.command == "GET" and "Range" in self.headers:
            start, status = int(self.headers["Range"].removeprefix("bytes=").split("-")[0]), 206
        server.requests.append((self.command, self.path, dict(self.headers), status))
        body = content[start:] if status in (200, 206) else b""
        digest = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"Content-Type": server.content_type, "Content-Length": len(body), "X-Repo-Commit": COMMIT}
        if status == 302:
            address = f"{server.url}/storage{asked}"
            headers |= {"Location": address, "X-Linked-ETag": digest, "X-Linked-Size": len(content)}
            headers |= {"X-Xet-Hash": "0" * 64, "X-Xet-Refresh-Route": f"{server.url}/xet"}  # the Hub's newer storage
        elif status == 206:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        elif status == 404 and server.error_codes:
            known = any(path.startswith(hub_path.split("/resolve/")[0]) for path in server.files)
            headers["X-Error-Code"] = "EntryNotFound" if known else "RepoNotFound"
        if status < 300:
            headers["ETag"] = digest
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET" and body:
            self.send(body)

    def send(self, body):
        server = self.server_
        if server.silent:
            server.awake.wait(30)
        elif server.breaks:
            server.breaks -= 1
            self.wfile.write(body[: server.breaks_after])
        else:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def pinned(files):
    return [(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()]


def command(*arguments, limit=None, **environment):
    """The command's outcome. limit: bytes that a file may have; environment: variables beside the plain ones."""
    lists = pinned({"train-v1.1.json": TRAIN, "dev-v1.1.json": DEV}), pinned({**SMALL, "model.safetensors": WEIGHTS})
    plain = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    argv = [sys.executable, "-c", COMMAND, json.dumps(lists), *map(str, arguments)]
    settings = {"cwd": ROOT, "env": plain | environment, "capture_output": True, "text": True, "timeout": 60}
    if limit:
        settings["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    done = subprocess.run(argv, **settings)
    return SimpleNamespace(status=done.returncode, lines=done.stdout.splitlines(), error=done.stderr)


def get(server, to, *targets, **more):
    done = command(*targets, "--to", to, "--squad-url", server.url, "--hub-url", server.url, **more)
    assert (done.status, done.error) == (0, "")  # no progress bar either: this is no terminal
    return done.lines


def fails(server, to, *targets, **more):
    done = command(*targets, "--to", to, "--squad-url", server.url, "--hub-url", server.url, **more)
    return one_line(done)


def one_line(done):
    assert done.status == 2 and done.error.count("\n") == 1 and done.error.startswith("error: "), done.error
    return done.error


def names(folder):
    """Every file below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


SQUAD = ["squad/dev-v1.1.json", "squad/train-v1.1.json"]
MODEL = [f"models/owner/name/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json", "vocab.txt")]


def test_squad(server, tmp_path):
    lines = get(server, tmp_path, "squad-v1.1")
    assert names(tmp_path) == SQUAD
    assert (tmp_path / "squad/train-v1.1.json").read_bytes() == TRAIN
    assert (tmp_path / "squad/dev-v1.1.json").read_bytes() == DEV
    assert len(lines) == 2 and lines[0].endswith("train-v1.1.json: 256,000 bytes, checksum correct")


def test_bert_is_fetched_at_the_revision_of_its_checksums(server, tmp_path):
    repository, revision, _ = fetch.MODELS["bert-base-uncased"]
    server.add_model(repository, revision)
    lines = get(server, tmp_path, "bert-base-uncased")
    folder = tmp_path / "models/bert-base-uncased"
    assert names(folder) == sorted([*SMALL, "model.safetensors"])  # and nothing of the library's own
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert len(lines) == 4 and all(line.endswith("checksum correct") for line in lines)
    mode = (folder / "model.safetensors").stat().st_mode & 0o777
    assert mode == (folder / "config.json").stat().st_mode & 0o777 != 0o600  # others of the group may read it


def test_two_targets_in_one_call(server, tmp_path):
    server.add_model()
    lines = get(server, tmp_path, "squad-v1.1", "owner/name")
    assert names(tmp_path) == sorted(SQUAD + MODEL)
    assert server.got()[-1] == "model.safetensors"  # the weights come last
    assert not any(path.endswith(".bin") for _, path, *_ in server.requests)
    assert all(line.endswith("checksum not known, not checked") for line in lines[2:])

    server.status = 503  # everything is there: no server is asked
    assert len(get(server, tmp_path, "squad-v1.1", "owner/name")) == 6


def test_what_is_there_and_correct_is_skipped(server, tmp_path):
    get(server, tmp_path, "squad-v1.1")
    asked = len(server.requests)
    lines = get(server, tmp_path, "squad-v1.1")
    assert len(server.requests) == asked and lines[1].endswith("already there, checksum correct")


def test_force_downloads_again(server, tmp_path):
    server.add_model(weights=b"old")
    get(server, tmp_path, "squad-v1.1", "owner/name")
    server.add_model(weights=b"new")
    server.requests.clear()
    get(server, tmp_path, "squad-v1.1", "owner/name", "--force")
    assert (tmp_path / "models/owner/name/model.safetensors").read_bytes() == b"new"
    assert server.got()[:2] == ["train-v1.1.json", "dev-v1.1.json"] and names(tmp_path) == sorted(SQUAD + MODEL)


@pytest.mark.parametrize("content", [TRAIN[:-1], TRAIN[:-1] + b"?"])
def test_what_is_there_and_wrong_is_replaced_only_by_force(server, tmp_path, content):
    path = tmp_path / "squad/train-v1.1.json"
    path.parent.mkdir()
    path.write_bytes(content)
    message = fails(server, tmp_path, "squad-v1.1")
    assert str(path) in message and "--force" in message
    assert path.read_bytes() == content and not server.requests
    get(server, tmp_path, "squad-v1.1", "--force")
    assert path.read_bytes() == TRAIN


@pytest.mark.parametrize("content, word", [(b"!" + TRAIN[1:], "sha256"), (TRAIN + b"!", "256,001 bytes")])
def test_a_wrong_file_of_squad_is_not_kept(server, tmp_path, content, word):
    server.files["/train-v1.1.json"] = content
    message = fails(server, tmp_path, "squad-v1.1")
    assert word in message and "nothing kept" in message and "train-v1.1.json" in message
    assert names(tmp_path) == []


@pytest.mark.parametrize("weights, word", [(b"!" + WEIGHTS[1:], "sha256"), (WEIGHTS[:-1], "12,287,999 bytes")])
def test_wrong_weights_are_not_kept(server, tmp_path, weights, word):
    repository, revision, _ = fetch.MODELS["bert-base-uncased"]
    server.add_model(repository, revision, weights)
    message = fails(server, tmp_path, "bert-base-uncased")
    assert word in message and "nothing kept" in message and "model.safetensors" in message
    assert names(tmp_path / "models/bert-base-uncased") == sorted(SMALL)


def test_a_wrong_file_does_not_replace_a_correct_one(server, tmp_path):
    get(server, tmp_path, "squad-v1.1")
    server.files["/train-v1.1.json"] = TRAIN[1:]
    assert "nothing kept" in fails(server, tmp_path, "squad-v1.1", "--force")
    assert (tmp_path / "squad/train-v1.1.json").read_bytes() == TRAIN


def test_a_broken_download_of_squad_is_fetched_again(server, tmp_path):
    server.breaks, server.breaks_after = 1, 100_000
    fails(server, tmp_path, "squad-v1.1")
    assert names(tmp_path) == []
    get(server, tmp_path, "squad-v1.1")
    assert names(tmp_path) == SQUAD and (tmp_path / "squad/train-v1.1.json").read_bytes() == TRAIN


def test_a_connection_that_breaks_once_is_resumed(server, tmp_path):
    server.add_model()
    get(server, tmp_path, "owner/name")
    (tmp_path / "models/owner/name/model.safetensors").unlink()
    server.requests.clear()
    server.breaks, server.breaks_after = 1, 11_000_000
    get(server, tmp_path, "owner/name")
    ranges = [headers.get("Range") for method, _, headers, _ in server.requests if method == "GET"]
    assert len(ranges) == 2 and ranges[0] is None and ranges[1].startswith("bytes=10")
    assert (tmp_path / "models/owner/name/model.safetensors").read_bytes() == WEIGHTS


def test_after_a_broken_download_only_the_missing_file_is_fetched(server, tmp_path):
    server.add_model()
    get(server, tmp_path, "owner/name")
    (tmp_path / "models/owner/name/model.safetensors").unlink()
    server.breaks, server.breaks_after = 100, 1_000_000
    assert "run this again" in fails(server, tmp_path, "owner/name")
    assert names(tmp_path) == [name for name in MODEL if "safetensors" not in name]
    server.breaks = 0
    server.requests.clear()
    get(server, tmp_path, "owner/name")
    assert server.got() == ["model.safetensors"] and names(tmp_path) == MODEL
    assert (tmp_path / "models/owner/name/model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("lacking", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_model_that_lacks_what_is_needed(server, tmp_path, lacking):
    server.add_model(lacking=[lacking])
    assert f"needs a model with {lacking}" in fails(server, tmp_path, "owner/name")
    assert not (tmp_path / "models/owner/name/model.safetensors").exists()


def test_a_mirror_may_lack_optional_files_without_saying_why(server, tmp_path):
    server.add_model(lacking=["vocab.txt"])
    server.error_codes = False
    get(server, tmp_path, "owner/name")
    assert names(tmp_path) == MODEL[:-1]


def test_a_model_that_does_not_exist(server, tmp_path):
    message = fails(server, tmp_path, "owner/name")
    assert "owner/name/config.json: HTTP 404: no such model" in message and names(tmp_path) == []


@pytest.mark.parametrize(
    "status, words", [(401, "requires a login"), (403, "requires a login"), (503, "run this again")]
)
def test_a_model_that_the_hub_does_not_give(server, tmp_path, status, words):
    server.status = status
    message = fails(server, tmp_path, "owner/name")
    assert f"owner/name/config.json: HTTP {status}" in message and words in message
    assert names(tmp_path) == []


@pytest.mark.parametrize("status", [404, 401, 429, 503])
def test_http_errors_of_squads_server(server, tmp_path, status):
    server.status = status
    message = fails(server, tmp_path, "squad-v1.1")
    assert f"HTTP {status}" in message and "/train-v1.1.json" in message
    assert names(tmp_path) == []


def test_a_web_page_is_not_taken_for_the_file(server, tmp_path):
    server.files["/train-v1.1.json"], server.content_type = b"<html>Log in</html>", "text/html; charset=utf-8"
    assert "login" in fails(server, tmp_path, "squad-v1.1")
    assert names(tmp_path) == []


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_mode_is_named(server, tmp_path, variable):
    server.add_model()
    assert variable in fails(server, tmp_path, "owner/name", **{variable: "1"})
    assert not server.requests


@pytest.mark.parametrize("target", ["squad-v1.1", "owner/name"])
def test_a_server_that_sends_nothing(server, tmp_path, target):
    server.add_model()
    server.silent = True
    started = time.monotonic()
    message = fails(server, tmp_path, target, "--timeout", "0.3")
    assert "timed out" in message and time.monotonic() - started < 20
    assert names(tmp_path) == []


def test_a_server_that_never_answers(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as where a firewall drops what leaves a compute node
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for target in ("squad-v1.1", "owner/name"):
            done = command(target, "--to", tmp_path, "--squad-url", url, "--hub-url", url, "--timeout", "0.5")
            assert "no connection" in one_line(done) and "timed out" in done.error


@pytest.mark.parametrize("target", ["squad-v1.1", "owner/name"])
def test_no_network(tmp_path, target):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    done = command(target, "--to", tmp_path, "--squad-url", url, "--hub-url", url)
    assert "no connection" in one_line(done) and "refused" in done.error and done.lines == []


def test_a_server_that_is_no_hub(server, tmp_path, monkeypatch):
    server.add_model()
    answer = Handler.send_header
    monkeypatch.setattr(Handler, "send_header", lambda self, name, value: name[:2] == "X-" or answer(self, name, value))
    assert "not seem to be served by a Hugging Face Hub" in fails(server, tmp_path, "owner/name")


def test_another_file_than_the_official_one_is_refused(server, tmp_path):
    environment = {"cwd": ROOT, "capture_output": True, "text": True, "env": {**os.environ, "SQUAD_URL": server.url}}
    argv = [sys.executable, "-m", "tools.fetch", "squad-v1.1", "--to", tmp_path]
    done = subprocess.run(argv, **environment)
    assert (done.returncode, done.stdout) == (2, "") and "30,288,272" in done.stderr and names(tmp_path) == []


def test_addresses_come_from_the_environment(server, tmp_path):
    server.add_model()
    done = command("squad-v1.1", "owner/name", "--to", tmp_path, SQUAD_URL=server.url, HF_ENDPOINT=f"{server.url}/")
    assert (done.status, done.error) == (0, "") and names(tmp_path) == sorted(SQUAD + MODEL)


def test_a_proxy_is_used(server, tmp_path):
    server.add_model()
    urls = ("--squad-url", "http://elsewhere.invalid", "--hub-url", "http://elsewhere.invalid")
    done = command("squad-v1.1", "owner/name", "--to", tmp_path, *urls, HTTP_PROXY=server.url, http_proxy=server.url)
    assert (done.status, done.error) == (0, "") and names(tmp_path) == sorted(SQUAD + MODEL)
    assert any(path.startswith("http://elsewhere.invalid/owner/name") for _, path, *_ in server.requests)


def test_a_mirror_does_not_see_the_users_token(server, tmp_path):
    server.add_model()
    get(server, tmp_path, "owner/name", HF_TOKEN="hf_secret")
    assert server.requests and "hf_secret" not in str(server.requests)


@pytest.mark.parametrize("target", ["squad-v1.1", "owner/name"])
def test_a_folder_that_cannot_be_written(server, tmp_path, target):
    (tmp_path / "file").write_text("in the way")  # not a chmod: root may write anywhere
    message = fails(server, tmp_path / "file", target)
    assert str(tmp_path / "file") in message and "--to DIR" in message
    assert not server.requests


@pytest.mark.parametrize("target, name", [("squad-v1.1", "train-v1.1.json"), ("owner/name", "model.safetensors")])
def test_a_disk_without_room(server, tmp_path, target, name):
    server.add_model()
    message = fails(server, tmp_path, target, limit=100_000)  # a limit to a file's size, as a full disk acts
    assert f"{name}: cannot be written (File too large)" in message and "free some space" in message
    assert not any(name in path for path in names(tmp_path))


@pytest.mark.parametrize("name", ["squad-v3", "bert", "../etc", "a/../b", "owner/name/more", "owner/", "owner/a b", ""])
def test_names_that_are_no_target_stop_before_anything_is_fetched(server, tmp_path, name):
    message = fails(server, tmp_path, "squad-v1.1", name)
    assert "squad-v2.0" in message and "owner/name" in message
    assert not server.requests and names(tmp_path) == []


@pytest.mark.parametrize("option, value", [("--squad-url", "file:///tmp"), ("--timeout", "0"), ("--timeout", "1e300")])
def test_options_that_make_no_sense(tmp_path, option, value):
    message = one_line(command("squad-v1.1", "--to", tmp_path, option, value))
    assert value in message or option in message


def test_a_model_that_the_library_refuses_to_name(server, tmp_path):
    assert "repo_id" in fails(server, tmp_path, "owner/a--b")
