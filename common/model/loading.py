"""A pretrained encoder with a span head that takes packed batches, and the span loss.

Padding-free attention has backends behind one function: `flash` (torch's variable-length attention; CUDA, bf16 or
fp16) and `sdpa` (any device, any precision; pads inside attention only, on the CPU not even there). `fused` is more
than attention: whole encoder layers by our own kernels, on CUDA in any precision, if the layers are BERT's. Models
whose attention cannot be replaced get the same batch padded in here; nobody else knows.
"""

import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from common.errors import UserError, shorten
from common.model.attention import packed_attention, register_attention
from common.model.finding import load_config, stored_numbers, weights_file
from common.model.span import SpanModel, count_parameters, use_attention

# Models that call the attention function registered below once a layer and take positions as an argument. What a model
# does with a packed batch is checked at load as well (see `packs`), since a name on a list proves nothing.
PACKED_TYPES = {"bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "ernie"}


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
