"""Loading a network as a SpanModel, with checks and a trial run; and saving it."""

import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from common.data.files import sync
from common.data.packing import PackedBatch
from common.errors import UserError, shorten
from common.model.attention import packed_attention, register_attention
from common.model.finding import load_config, stored_numbers, weights_file
from common.model.fused.fuse import unfuse_layers
from common.model.precision import HALF, compile_layers, compute_in
from common.model.span import SpanModel, count_parameters, encoder_layers, use_attention
from common.start import ended

# Models that call packed_attention once a layer and take positions as an argument. A name on a list proves nothing, so
# `packs` checks at load what a model does with a packed batch.
PACKED_TYPES = {"bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "ernie"}
BACKENDS = ("fused", "flash", "sdpa", "padded")  # of attention; each falls back to a later one


def build_model(args, world, vocabulary):
    """The SpanModel that `args` ask for, on the device of `world`, ready to train.

    vocabulary: how many token ids the tokenizer has. Switches args.cuda_graphs off for a padded network: others' code
    may wait for the device. Each fall-back is printed, and kept in model.fallbacks. All ranks take part.
    """
    needs_head = bool(args.evaluate_only)
    dropouts = args.dropout, args.attention_dropout
    model = load_model(args.model_path, args.attention, *dropouts, vocabulary, needs_head).to(world.device)
    compute_in(model, HALF.get(args.precision))
    settle_attention(model, world, training=not args.evaluate_only)
    if args.cuda_graphs and model.attention == "padded":
        model.fallbacks.append("no CUDA graphs: a padded network may wait for the device")
        args.cuda_graphs = False
    for line in model.fallbacks:
        world.log(f"note: {line}")
    if args.compile:
        compile_layers(model)
    if args.checkpoint_activations:
        model.network.gradient_checkpointing_enable({"use_reentrant": False})
    ended("model")
    return model.train()


def settle_attention(model, world, training=True):
    """Let all ranks run on the same backend, one that works here. All ranks take part.

    Each tries its own on a small batch, and all fall back if it fails on any. A kernel that this card cannot run fails
    here, and not in the middle of a run.
    """
    while True:
        found = world.gather((model.attention, try_attention(model, world.device, training)))
        problems = [problem for _, problem in found if problem]
        ranked = [BACKENDS.index(attention) + bool(problem) for attention, problem in found]
        if not problems and len(set(ranked)) == 1:
            return
        wanted = BACKENDS[max(ranked)]
        if model.attention != wanted:
            if model.attention == "fused":
                unfuse_layers(model)
                model.compilable = not problems
            model.fall_back(wanted, problems[0] if problems else "another rank has no better one")
            compute_in(model, model.half)  # falls back from flash where that does not take the type


def try_attention(model, device, training):
    """Why a pass over a small batch fails, in one line; None if it does not. training: backward too."""
    if model.attention not in ("fused", "flash"):
        return None
    ids = torch.arange(64) % model.network.config.vocab_size
    batch = example_batch(ids, [24, 40]).to(device)
    weights = [*model.network.base_model.embeddings.parameters(), *encoder_layers(model)[0].parameters()]
    model.train(training)
    try:
        with torch.set_grad_enabled(training):
            total = torch.stack(model(batch)).sum()
        if training:
            torch.autograd.grad(total, weights)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:  # no other backend would help
        raise
    except Exception as error:  # compilers and drivers raise many kinds
        return shorten(" ".join(f"{type(error).__name__}: {error}".split()), 120)
    return None


def load_model(name, attention="sdpa", dropout=None, attention_dropout=0.0, vocabulary=0, needs_head=False):
    """A SpanModel in fp32 on the CPU; a network without a span head gets a new one from torch's random state.

    attention: "fused", "flash" or "sdpa"; a network that cannot take packed windows is "padded" instead, and one whose
    layers are not BERT's takes "flash" for "fused" (see the attribute `attention`).
    dropout: of the hidden layers, None for the model's own value. vocabulary: the tokenizer's size, which must fit.
    needs_head: refuse a network without a trained span head. Only safetensors are read and no code is executed.
    UserError, naming the folder, for what cannot be loaded or run.
    """
    config = load_config(name)
    if vocabulary > getattr(config, "vocab_size", vocabulary):
        raise UserError(
            f"{name}: the tokenizer has {vocabulary} entries, the model {config.vocab_size}; they do not fit"
        )
    set_dropout(config, dropout, attention_dropout)
    register_attention()
    network, missing = read_network(name, config)
    check_missing(name, [key for key in missing if needs_head or not key.startswith("qa_outputs.")])
    try:
        model = probe(network, config.model_type in PACKED_TYPES)
    except Exception as error:  # what a wrong number in config.json leads to is raised anywhere in transformers
        raise UserError(f"{name}: cannot be run ({shorten(' '.join(str(error).split()), 200)})") from None
    if model.attention != "padded":
        use_attention(model, attention)
    else:
        model.attention = attention
        model.fall_back("padded", f"{config.model_type} cannot take packed windows; padding them is slower")
    return model


def set_dropout(config, dropout, attention_dropout):
    """Put dropout into a configuration, under whichever names its model type has. dropout: None keeps the model's."""
    config.chunk_size_feed_forward = 0  # it would fail where the tokens are no multiple of it
    hidden = ("hidden_dropout_prob", "dropout", "qa_dropout") if dropout is not None else ()
    values = dict.fromkeys(hidden, dropout)
    values |= dict.fromkeys(("attention_probs_dropout_prob", "attention_dropout"), attention_dropout)
    for field, value in values.items():
        if hasattr(config, field):
            setattr(config, field, value)


def read_network(name, config):
    """(network, sorted names of weights that the folder does not have); UserError for a damaged or unsafe folder."""
    import transformers
    from transformers import AutoModelForQuestionAnswering

    weights = weights_file(name)
    if weights is None:
        raise UserError(f"{name}: no model.safetensors; other weight formats can execute code and are not read")
    attend = "packed" if config.model_type in PACKED_TYPES else None
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
    return network, sorted(loading["missing_keys"])


def check_missing(name, missing):
    """UserError where weights are missing, a sorted list of their names."""
    if missing:
        head = missing[0].startswith("qa_outputs.")
        why = "it has no trained span head: fine-tune it first" if head else "is it whole?"
        raise UserError(f"{name}: {len(missing)} weights are missing, first {missing[0]}; {why}")


def probe(network, listed):
    """A SpanModel of this network, run once: "sdpa" if it is `listed` and takes packed windows, else "padded"."""
    model = SpanModel(network, "sdpa" if listed else "padded")
    if listed and packs(model):
        return model
    if listed:
        network.set_attn_implementation("sdpa")
    model.attention = "padded"
    model(example_batch(torch.tensor([0, 1, 2]), [1, 2]))  # uneven, so that one is padded
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
    """Write a folder that `from_pretrained` loads; it appears under its name when all of it is on the disk.

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
        for path in (*new.iterdir(), new):
            sync(path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{folder}: cannot be written: {reason}; free some space") from None
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
