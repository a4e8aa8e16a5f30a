"""Download SQuAD and pretrained models: the only part of this project that touches the network.

    python -m tools.fetch squad-v1.1 squad-v2.0 bert-base-uncased

Run it where there is a network (on a cluster: a login node). SQuAD goes to data/squad/, a model to data/models/NAME/.
Any other model of the Hugging Face Hub is named owner/name. A file appears under its name only when it is whole and
right. After a broken download run the same command again: it fetches what is missing. HTTP_PROXY, HTTPS_PROXY and
NO_PROXY are honoured.
"""

import contextlib
import os
import re
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from common import ROOT
from common.errors import Parser, UserError, run
from common.model.finding import file_sha256

SQUAD_URL = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
HUB_URL = "https://huggingface.co"


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

# In every list of a model's files the weights stand last: where they are, the others are there too.
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
    """The server has no such file."""


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
    """Check the file at `path`, or download it; returns what was done.

    download: a function that fetches into a folder and returns the file's path there. UserError for a wrong file or a
    folder that cannot be written; a wrong file never stands at `path`.
    """
    try:
        if path.exists() and not force:
            problem = check(path, file)
            if problem:
                raise UserError(f"{path}: is there, but {problem}: move it away, or replace it with --force")
            return f"already there, {checked(file)}"
        scratch = path.parent / ".fetch"  # a file appears under its name only when it is whole
        scratch.mkdir(parents=True, exist_ok=True)
        got = download(scratch)
        problem = check(got, file)
        if problem:
            shutil.rmtree(scratch)
            raise UserError(f"{path}: {problem}: nothing kept; try again, and mistrust the server if this comes back")
        os.replace(got, path)
        return f"{path.stat().st_size:,} bytes, {checked(file)}"
    except OSError as error:  # the network's errors are UserErrors by now: this is the disk
        reason = error.strerror or error
        raise UserError(
            f"{path}: cannot be written ({reason}): make room, or choose another folder: --to DIR"
        ) from None


def from_web(url, name, timeout, folder):
    """Download one file of a plain web server, whole; its path. UserError for what the network does."""
    got = folder / name
    try:
        with urllib.request.urlopen(f"{url}/{name}", timeout=timeout) as response, open(got, "wb") as file:
            if response.headers.get_content_type() == "text/html":
                raise UserError(f"{url}/{name}: a web page instead of the file: does the network want a log-in?")
            shutil.copyfileobj(response, file)
        return got
    except urllib.error.HTTPError as error:
        error.close()
        raise UserError(f"{url}/{name}: HTTP {error.code} {error.reason}: check the address, or try later") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"{url}/{name}: no connection ({reason}): run this where there is a network") from None


def from_hub(hub, repository, revision, name, timeout, folder):
    """Download one file of the Hugging Face Hub, or a mirror, by its own library; its path. UserError as above."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    what = f"{hub}/{repository}/{name}"
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{what}: HF_HUB_OFFLINE forbids the network: unset it for this command")
    try:
        settings = {"local_dir": folder, "endpoint": hub, "etag_timeout": timeout}
        return Path(huggingface_hub.hf_hub_download(repository, name, revision=revision, **settings))
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise UserError(f"{what}: no such model, or one that wants a log-in: check the name") from None
    except errors.LocalEntryNotFoundError:  # the hub did not answer, or not as a hub does
        raise UserError(f"{what}: no answer from the hub: run this where there is a network") from None
    except errors.EntryNotFoundError:
        raise NotThere(f"{what}: the server has no such file") from None
    except OSError as error:
        if error.errno:
            raise  # the disk's
        raise UserError(f"{what}: {' '.join(str(error).split())[:300]}: run this again") from None
    except Exception as error:  # the library raises its HTTP client's errors too
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{what}: the download broke ({reason}): run this again") from None


def check(path, file):
    """What is wrong with the file at `path`, in words; "" if nothing is known to be."""
    if not path.is_file():
        return "it is not a file"
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return f"it has {size:,} bytes where the published file has {file.size:,}"
    digest = file_sha256.__wrapped__(path) if file.sha256 else None  # not the cached one: the file may have changed
    return "" if digest == file.sha256 else f"its sha256 is {digest} where the published file has {file.sha256}"


def checked(file):
    """What `check` has looked at."""
    return "checksum right" if file.sha256 else "checksum not known, not checked"


def build_parser():
    parser = Parser(
        prog="python -m tools.fetch",
        description="Download SQuAD and pretrained models, with checksums. Whole files stay if it breaks.",
    )
    parser.add_argument(
        "targets", nargs="+", metavar="TARGET", help=f"{', '.join([*SQUAD, *MODELS])}, or a Hub model as owner/name"
    )
    data = ROOT / "data"
    parser.add_argument("--to", type=Path, default=data, metavar="DIR", help="where to put it (default: data/)")
    parser.add_argument("--force", action="store_true", help="download anew what is already there")
    parser.add_argument("--timeout", type=float, default=30, metavar="S", help="seconds without a byte (default: 30)")
    squad, hub = os.environ.get("SQUAD_URL") or SQUAD_URL, os.environ.get("HF_ENDPOINT") or HUB_URL
    parser.add_argument("--squad-url", metavar="URL", default=squad, help=f"folder of SQuAD's files (default: {squad})")
    parser.add_argument("--hub-url", metavar="URL", default=hub, help=f"the Hub or a mirror of it (default: {hub})")
    return parser


def main(argv=None):
    parser = build_parser()
    args = parser.parse_args(argv)
    if not 0 < args.timeout < float("inf"):
        parser.error("argument --timeout: give a number of seconds above 0")
    for url in (args.squad_url, args.hub_url):
        if not url.startswith(("http://", "https://")):
            raise UserError(f"{url}: not a web address: write it with http:// or https://")
    os.environ["HF_HUB_DOWNLOAD_TIMEOUT"] = str(max(1, round(args.timeout)))  # read when the library is imported
    hub = args.hub_url.rstrip("/")
    for files, folder, repository, revision in [plan(target, args.to) for target in args.targets]:  # names first
        whole = os.path.exists(folder / files[-1].name) and not args.force  # then what is not required is left out

        def download(scratch, name, repository=repository, revision=revision):
            if repository is None:
                return from_web(args.squad_url.rstrip("/"), name, args.timeout, scratch)
            return from_hub(hub, repository, revision, name, args.timeout, scratch)

        for file in files:
            path = folder / file.name
            if whole and not file.required and not path.exists():
                continue
            try:
                done = fetch(file, path, lambda scratch, name=file.name: download(scratch, name), args.force)
                print(f"{path}: {done}", flush=True)
            except NotThere as error:
                if file.required:
                    raise UserError(f"{error}: this project needs a model with {file.name}, in one file") from None
        with contextlib.suppress(OSError):
            shutil.rmtree(folder / ".fetch")


if __name__ == "__main__":
    run(main)
