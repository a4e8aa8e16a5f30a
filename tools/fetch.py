"""Download SQuAD and pretrained models. No other part of this project uses the network.

    python -m tools.fetch squad-v1.1 squad-v2.0 bert-base-uncased

Run it where there is a network (on a cluster: a login node). SQuAD goes to data/squad/, a model to data/models/NAME/.
Any other model of the Hugging Face Hub is named owner/name. A file gets its name only when it is whole and correct.
After an error run the same command again: whole files stay. HTTP_PROXY, HTTPS_PROXY and NO_PROXY are honoured.
"""

import http.client
import math
import os
import re
import tempfile
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from common import ROOT
from common.data.files import digest
from common.errors import Parser, UserError, run

SQUAD_URL = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
HUB_URL = "https://huggingface.co"


class File(NamedTuple):
    """A file to fetch; size (bytes) and sha256 are None where they are not known."""

    name: str
    size: int | None = None
    sha256: str | None = None


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
BERT_BASE_UNCASED = (  # the weights come last in every list: where they are, the other files are too
    File("config.json", 570, "7160e1553ad2ca51d8c1cb066be533db31826e12d173824c1bb0cb1a4f187d20"),
    File("tokenizer_config.json", 48, "a025160ef0431f1a392f6f050c1310f4c5d9fb6f275932dbccba73c4d214bf10"),
    File("vocab.txt", 231508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
    File("tokenizer.json", 466062, "ce64fce797c24f68df90b40a3f74f579b336a493db14bd583fd520ea0d8c9a98"),
    File("model.safetensors", 440449768, "68d45e234eb4a928074dfd868cead0219ab85354cc53d20e772753c6bb9169d3"),
)
BERT_REVISION = "86b5e0934494bd15c9632b12f734a8a67f723594"  # the checksums are those of this revision
MODELS = {"bert-base-uncased": ("google-bert/bert-base-uncased", BERT_REVISION, BERT_BASE_UNCASED)}
OPTIONAL = [File("tokenizer_config.json"), File("special_tokens_map.json")]
OPTIONAL += [File("vocab.txt"), File("vocab.json"), File("merges.txt")]
# never pytorch_model.bin: unpickling a file can run code
ANY_MODEL = [File("config.json"), File("tokenizer.json"), *OPTIONAL, File("model.safetensors")]


def plan(target, to):
    """(files, folder, repository, revision) of a target; repository None for SQuAD. UserError for an unknown name."""
    if target in SQUAD:
        return SQUAD[target], to / "squad", None, None
    if target in MODELS:
        repository, revision, files = MODELS[target]
        return files, to / "models" / target, repository, revision
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", target, re.ASCII) and ".." not in target:
        return ANY_MODEL, to / "models" / target, target, "main"
    known = ", ".join([*SQUAD, *MODELS])
    raise UserError(f"{target}: not known: name one of {known}, or a Hugging Face model as owner/name")


def fetch(file, path, download, force):
    """Check the file at `path`, or get it by download(name, folder); returns what was done, None if no server has it.

    UserError for a wrong file or a folder that cannot be written. A wrong file never gets the name `path`.
    """
    checked = "checksum correct" if file.sha256 else "checksum not known, not checked"
    try:
        if path.exists() and not force:
            if problem := fault(path, file):
                raise UserError(f"{path}: exists, but {problem}: move it away, or replace it with --force")
            return f"already there, {checked}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(None, ".fetch-", path.parent, ignore_cleanup_errors=True) as scratch:
            got = download(file.name, Path(scratch))
            if got is None:
                return None
            if problem := fault(got, file):
                raise UserError(f"{path}: {problem}: nothing kept; run this again, or try another server")
            os.replace(got, path)
        return f"{path.stat().st_size:,} bytes, {checked}"
    except OSError as error:  # network errors are UserErrors by now: this one is the disk's
        reason = error.strerror or error
        raise UserError(f"{path}: cannot be written ({reason}): free some space, or use --to DIR") from None


def fault(path, file):
    """What is wrong with the file at `path`, in words; "" if nothing is known to be."""
    if not path.is_file():
        return "it is not a file"
    size = path.stat().st_size
    if file.size not in (None, size):
        return f"it has {size:,} bytes where the published file has {file.size:,}"
    found = digest(path) if file.sha256 else None
    return "" if found == file.sha256 else f"its sha256 is {found} where the published file has {file.sha256}"


def from_web(url, timeout, name, folder):
    """Download one file of a plain web server; returns its path. UserError for network errors."""
    what, content = f"{url}/{name}", bytearray()  # in memory, at most 42 MB: any error in here is the network's
    try:
        with urllib.request.urlopen(what, timeout=timeout) as response:
            if response.headers.get_content_type() == "text/html":
                raise UserError(f"{what}: a web page instead of the file: does the network require a login?")
            with tqdm(desc=name, total=response.length, unit="B", unit_scale=True, disable=None) as bar:
                while chunk := response.read(1 << 18):
                    content += chunk
                    bar.update(len(chunk))
    except urllib.error.HTTPError as error:
        raise UserError(f"{what}: HTTP {error.code} {error.reason}: check the address, or try later") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"{what}: no connection ({reason}): run this where there is a network") from None
    (folder / name).write_bytes(content)
    return folder / name


def from_hub(hub, repository, revision, timeout, name, folder):
    """The same for the Hugging Face Hub or a mirror of it; returns None if the model has no such file."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    what = f"{hub}/{repository}/{name}"
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{what}: HF_HUB_OFFLINE=1 (or TRANSFORMERS_OFFLINE) forbids the network: unset it")
    settings = {"revision": revision, "endpoint": hub, "local_dir": folder, "etag_timeout": timeout}
    settings["force_download"] = True  # not from the user's cache, and no minutes of retries without a network
    settings["token"] = None if hub == HUB_URL else False  # the user's token is for the Hub only
    try:
        return Path(huggingface_hub.hf_hub_download(repository, name, **settings))
    except Exception as error:  # the library's own, its HTTP client's and the disk's
        unreachable = type(error) is ValueError and error.__cause__  # so it wraps a failed first request
        cause = error.__cause__ if unreachable else error
        if isinstance(cause, OSError) and cause.errno:
            raise
        status = getattr(getattr(cause, "response", None), "status_code", None)
        what += f": HTTP {status}" if status else ""
        if status in (401, 403) or isinstance(cause, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)):
            raise UserError(f"{what}: no such model, or it requires a login: check the name") from None
        if status == 404:
            return None
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
        if unreachable and not status:
            raise UserError(f"{what}: no connection ({reason}): run this where there is a network") from None
        raise UserError(f"{what}: the download failed ({reason}): run this again") from None


def build_parser():
    what = "Download SQuAD and pretrained models, with checksums. Run again after an error: whole files stay."
    parser = Parser(prog="python -m tools.fetch", description=what)
    add, data, known = parser.add_argument, ROOT / "data", ", ".join([*SQUAD, *MODELS])
    squad, hub = os.environ.get("SQUAD_URL") or SQUAD_URL, os.environ.get("HF_ENDPOINT") or HUB_URL
    add("targets", nargs="+", metavar="TARGET", help=f"{known}, or a Hub model as owner/name")
    add("--to", type=Path, default=data, metavar="DIR", help="where to put it (default: data/)")
    add("--force", action="store_true", help="download again what is already there")
    add("--timeout", type=float, default=30, metavar="S", help="seconds without a byte (default: 30)")
    add("--squad-url", metavar="URL", default=squad, help=f"folder of SQuAD's files (default: {squad})")
    add("--hub-url", metavar="URL", default=hub, help=f"the Hub or a mirror of it (default: {hub})")
    return parser


def main(argv=None):
    parser = build_parser()
    args = parser.parse_args(argv)
    if not 0 < args.timeout <= 86400:
        parser.error("argument --timeout: give a number of seconds above 0, at most 86400")
    for url in (args.squad_url, args.hub_url):
        if not url.startswith(("http://", "https://")):
            raise UserError(f"{url}: not a web address: write it with http:// or https://")
    squad, hub = args.squad_url.rstrip("/"), args.hub_url.rstrip("/")
    os.environ["HF_HUB_DOWNLOAD_TIMEOUT"] = str(math.ceil(args.timeout))  # all read when the library is imported
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # its transfers know no timeout
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # no line for each of its retries

    for files, folder, repository, revision in [plan(target, args.to) for target in args.targets]:  # names first
        on_hub = partial(from_hub, hub, repository, revision, args.timeout)
        download = on_hub if repository else partial(from_web, squad, args.timeout)
        whole = os.path.exists(folder / files[-1].name) and not args.force
        for file in files:
            path = folder / file.name
            if whole and file in OPTIONAL and not os.path.exists(path):
                continue  # the server was asked for it before
            done = fetch(file, path, download, args.force)
            if done:
                print(f"{path}: {done}", flush=True)
            elif file not in OPTIONAL:
                what = f"{hub}/{repository}: the server has no {file.name} of it"
                raise UserError(f"{what}: this project needs a model with {file.name}, in one file")


if __name__ == "__main__":
    run(main)
