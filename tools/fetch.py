"""Download SQuAD and pretrained models: the only part of this project that touches the network.

    python -m tools.fetch squad-v1.1 squad-v2.0 bert-base-uncased

Run it where there is a network (on a cluster: a login node). SQuAD goes to data/squad/, a model to data/models/NAME/.
Any other model of the Hugging Face Hub is named owner/name. A download is written to FILE.part, checked and then
renamed, so that a file of the right name is a whole one; run the same command again to resume a broken download.
HTTP_PROXY, HTTPS_PROXY and NO_PROXY are honoured.
"""

import errno
import hashlib
import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from common.errors import Parser, UserError, run

DATA = Path(__file__).resolve().parent.parent / "data"
SQUAD_URL = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
HUB_URL = "https://huggingface.co"
CHUNK = 1 << 18  # bytes read at a time


class File(NamedTuple):
    """A file to fetch; size (bytes) and sha256 are None where they are not known."""

    name: str
    size: int | None = None
    sha256: str | None = None
    required: bool = True


SQUAD = {
    "squad-v1.1": (
        File("train-v1.1.json", 30288272, "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955"),
        File("dev-v1.1.json", 4854279, "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9"),
    ),
    "squad-v2.0": (
        File("train-v2.0.json", 42123633, "68dcfbb971bd3e96d5b46c7177b16c1a4e7d4bdef19fb204502738552dede002"),
        File("dev-v2.0.json", 4370528, "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8"),
    ),
}

# In every list of a model's files the weights stand last: where they are, the rest is there too.
BERT_BASE_UNCASED = (
    File("config.json", 570, "7160e1553ad2ca51d8c1cb066be533db31826e12d173824c1bb0cb1a4f187d20"),
    File("tokenizer_config.json", 48, "a025160ef0431f1a392f6f050c1310f4c5d9fb6f275932dbccba73c4d214bf10"),
    File("vocab.txt", 231508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
    File("tokenizer.json", 466062, "ce64fce797c24f68df90b40a3f74f579b336a493db14bd583fd520ea0d8c9a98"),
    File("model.safetensors", 440449768, "68d45e234eb4a928074dfd868cead0219ab85354cc53d20e772753c6bb9169d3"),
)
MODELS = {  # target: (repository, revision, files); the checksums are those of this revision
    "bert-base-uncased": (
        "google-bert/bert-base-uncased",
        "86b5e0934494bd15c9632b12f734a8a67f723594",
        BERT_BASE_UNCASED,
    ),
}
ANY_MODEL = (  # never pytorch_model.bin: unpickling a downloaded file would run what it says
    File("config.json"),
    File("tokenizer.json"),
    File("tokenizer_config.json", required=False),
    File("special_tokens_map.json", required=False),
    File("vocab.txt", required=False),
    File("vocab.json", required=False),
    File("merges.txt", required=False),
    File("model.safetensors"),
)


class NotThere(UserError):
    """The server has no such file (HTTP 404)."""


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follow status 308 as well, which urllib itself does only from Python 3.11 on."""

    def http_error_308(self, request, response, code, message, headers):
        return self.http_error_302(request, response, 307, message, headers)


def plan(target, to, squad_url=SQUAD_URL, hub_url=HUB_URL):
    """What a target needs: a list of (File, URL, path below `to`). UserError for a name that is no target."""
    if target in SQUAD:
        return [(file, f"{squad_url.rstrip('/')}/{file.name}", to / "squad" / file.name) for file in SQUAD[target]]
    if target in MODELS:
        repository, revision, files = MODELS[target]
    elif re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", target, re.ASCII) and ".." not in target:
        repository, revision, files = target, "main", ANY_MODEL
    else:
        known = ", ".join([*SQUAD, *MODELS])
        raise UserError(f"{target}: not known: name one of {known}, or a Hugging Face model as owner/name")
    url = f"{hub_url.rstrip('/')}/{repository}/resolve/{revision}"
    return [(file, f"{url}/{file.name}", to / "models" / target / file.name) for file in files]


def fetch(file, url, path, timeout=30, force=False):
    """See to it that `path` is the wanted file: check the one that is there, or download it. Returns what was done.

    timeout: seconds without a byte after which to give up. force: download even if the file is there. Raises UserError
    (NotThere for HTTP 404), leaving FILE.part to resume from where that can work, and never a wrong file at `path`.
    """
    part, tag = path.with_name(path.name + ".part"), path.with_name(path.name + ".part.etag")
    try:
        if path.exists() and not force:
            problem = check(path, file)
            if problem:
                raise UserError(f"{path}: is there, but {problem}: move it away, or replace it with --force")
            return f"already there, {checked(file)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if force:
            discard(part, tag)
        resumed = transfer(file, url, part, tag, timeout)
        problem = check(part, file)
        if problem and resumed:  # the first half may have been of another version: once more, from the start
            discard(part, tag)
            transfer(file, url, part, tag, timeout)
            problem = check(part, file)
        if problem:
            discard(part, tag)
            raise UserError(f"{url}: {problem}: nothing kept; try again, and mistrust the server if this comes back")
        os.replace(part, path)
        tag.unlink(missing_ok=True)
        return f"{path.stat().st_size:,} bytes, {checked(file)}"
    except OSError as error:  # the network's errors are UserErrors by now: this is the disk
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            todo = "make room and run this again to go on"
        else:
            todo = "choose another folder with --to DIR"
        raise UserError(f"{path}: cannot be written ({error.strerror}): {todo}") from None


def transfer(file, url, part, tag, timeout):
    """Download `url` into `part`, going on from what `part` holds where that is safe. True if it went on.

    It is safe when the server confirms by the ETag kept in `tag` that its file is still the same one, or when a
    checksum will tell afterwards. UserError for whatever the network does.
    """
    host = urllib.parse.urlsplit(url).netloc
    have = part.stat().st_size if part.exists() else 0
    if file.size is not None and have == file.size:  # stopped between the last byte and the renaming
        return True
    etag = tag.read_text("latin-1") if tag.exists() else ""
    too_long = file.size is not None and have > file.size
    if too_long or not (etag or file.sha256):
        have = 0

    headers = {"User-Agent": "tools.fetch", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if etag:
            headers["If-Range"] = etag
    try:
        opener = urllib.request.build_opener(Redirects)
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # the server's file is not longer than what we have
            discard(part, tag)
            return transfer(file, url, part, tag, timeout)
        raise http_problem(url, error) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            reason = f"no answer for {timeout:g} s"
        raise UserError(f"{host}: cannot be reached ({reason}): run this where there is a network") from None

    with response:
        if response.headers.get_content_type() == "text/html":
            raise UserError(f"{url}: the server sent a web page instead of the file: does the network want a log-in?")
        if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            discard(part, tag)
            raise UserError(f"{url}: the server sent another part than the one asked for: run this again")
        if response.status != 206:
            have = 0
        total = None if response.length is None else have + response.length
        if None not in (total, file.size) and total != file.size:
            raise UserError(
                f"{url}: the server's file has {total:,} bytes, the published one {file.size:,}: not fetched"
            )
        with (
            open(part, "ab" if have else "wb") as out,
            tqdm(total=total, initial=have, desc=file.name, unit="B", unit_scale=True, disable=None) as bar,
        ):
            # After the old content has gone and before any new comes: tag and content always belong together. A weak
            # tag (W/) does not vouch for single bytes.
            etag = response.headers.get("ETag", "")
            tag.write_text("" if etag.startswith("W/") else etag, "latin-1")
            while chunk := read(response, url, timeout):
                out.write(chunk)
                bar.update(len(chunk))
            out.flush()
            os.fsync(out.fileno())
    got = part.stat().st_size
    if total is not None and got != total:
        raise UserError(f"{url}: the connection broke after {got:,} of {total:,} bytes: run this again to go on")
    return have > 0


def read(response, url, timeout):
    """The next bytes as soon as there are any, b"" at the end; UserError where the network fails."""
    try:
        return response.read1(CHUNK)
    except TimeoutError:
        raise UserError(f"{url}: nothing arrived for {timeout:g} s: run this again to go on") from None
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{url}: the connection broke ({error}): run this again to go on") from None


def http_problem(url, error):
    """The UserError for an HTTP status that is not a success."""
    said = f"{url}: HTTP {error.code} {error.reason}"
    if error.code == 404:
        return NotThere(f"{said}: the server has no such file")
    if error.code in (401, 403):
        return UserError(f"{said}: no such model, or one that wants a log-in: check the name")
    if error.code == 407:
        return UserError(f"{said}: the proxy wants a log-in: see HTTPS_PROXY")
    return UserError(f"{said}: try again later")


def check(path, file):
    """What is wrong with the file at `path`, in words; "" if nothing is known to be."""
    if not path.is_file():
        return "it is not a file"
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"it has {size:,} bytes where the published file has {file.size:,}"
    if file.sha256 is not None:
        digest = hashlib.sha256()
        with open(path, "rb") as data:
            while chunk := data.read(1 << 20):
                digest.update(chunk)
        if digest.hexdigest() != file.sha256:
            return f"its sha256 is {digest.hexdigest()} where the published file has {file.sha256}"
    return ""


def checked(file):
    """What `check` has looked at."""
    if file.size is None and file.sha256 is None:
        return "size and checksum not known, not checked"
    return "size checked, checksum not known" if file.sha256 is None else "checksum right"


def discard(*paths):
    for path in paths:
        path.unlink(missing_ok=True)


def main(argv=None):
    parser = Parser(
        prog="python -m tools.fetch",
        description="Download SQuAD and pretrained models, with checksums. Run again to resume.",
    )
    parser.add_argument(
        "targets", nargs="+", metavar="TARGET", help=f"{', '.join([*SQUAD, *MODELS])}, or a Hub model as owner/name"
    )
    parser.add_argument("--to", type=Path, default=DATA, metavar="DIR", help="where to put it (default: data/)")
    parser.add_argument("--force", action="store_true", help="download anew what is already there")
    parser.add_argument("--timeout", type=float, default=30, metavar="S", help="seconds without a byte (default: 30)")
    parser.add_argument(
        "--squad-url",
        metavar="URL",
        default=os.environ.get("SQUAD_URL") or SQUAD_URL,
        help=f"folder of the SQuAD files on the web (default: SQUAD_URL, else {SQUAD_URL})",
    )
    parser.add_argument(
        "--hub-url",
        metavar="URL",
        default=os.environ.get("HF_ENDPOINT") or HUB_URL,
        help=f"a Hugging Face Hub or a mirror of it (default: HF_ENDPOINT, else {HUB_URL})",
    )
    args = parser.parse_args(argv)
    if not 0 < args.timeout < float("inf"):
        parser.error("argument --timeout: give a number of seconds above 0")
    for url in (args.squad_url, args.hub_url):
        if not url.startswith(("http://", "https://")):
            raise UserError(f"{url}: not a web address: write it with http:// or https://")

    plans = [plan(target, args.to, args.squad_url, args.hub_url) for target in args.targets]  # names first, all of them
    for steps in plans:
        whole = (
            os.path.exists(steps[-1][2]) and not args.force
        )  # the last file is there: what else is absent is not needed
        for file, url, path in steps:
            if whole and not file.required and not os.path.exists(path):
                continue
            try:
                print(f"{path}: {fetch(file, url, path, args.timeout, args.force)}", flush=True)
            except NotThere as error:
                if file.required and file in ANY_MODEL:
                    raise UserError(f"{error}: this project needs a model with {file.name}, in one file") from None
                if file.required:
                    raise


if __name__ == "__main__":
    run(main)
