"""Packed batches give what plain padded ones give, and models that cannot take them are noticed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from squad_dir import squad_file
from tiny import load_small, minilm_tokenizer, pack_share, same_gradients, sample_features

from common.data import splits
from common.data.packing import capacity, pack
from common.data.windows import build
from common.errors import UserError
from common.model import loading
from common.model.loading import packs
from common.model.precision import compute_in
from common.model.span import encoder_layers, flops_per_token, span_loss, window_losses

REAL_WINDOWS = [0, 3, 17, 40, 41, 95, 200, 333]


@pytest.fixture(scope="module")
def real_features():
    """Windows of real SQuAD, of many lengths."""
    data = splits.QuestionSet(squad_file("dev-v1.1.json.gz"), (("first", 400),)).data
    return build(data, minilm_tokenizer(), 384, 128)


@pytest.fixture(scope="module")
def features():
    return sample_features(60)[0]


def padded_reference(network, features, windows):
    """Loss and gradients of the network as transformers runs it: padded input, stock attention, its own positions."""
    if network.config.model_type != "deberta":  # whose attention is its own and knows no other
        network.set_attn_implementation("eager")
    length = max(int(features.lengths[w]) for w in windows)
    pad_id = network.config.pad_token_id
    ids = torch.full((len(windows), length), pad_id)
    types, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, w in enumerate(windows):
        tokens = torch.from_numpy(features.input_ids[features.offsets[w] : features.offsets[w + 1]].astype("int64"))
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        types[row, int(features.context_at[w]) : len(tokens)] = features.token_type
    inputs = {"input_ids": ids, "attention_mask": mask}
    if getattr(network.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = types
    out = network(**inputs)
    start, end = (torch.tensor([int(column[w]) for w in windows]) for column in (features.start, features.end))
    losses = []
    for logits, label in ((out.start_logits, start), (out.end_logits, end)):
        losses.append(F.cross_entropy(logits.masked_fill(mask == 0, -torch.inf), label, reduction="sum"))
    loss = sum(losses) / 2 / len(windows)
    loss.backward()
    return loss.detach()


PACKED = ["bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "ernie"]


@pytest.mark.parametrize("compiled", [False, True])  # True: padded inside attention, as on CUDA
@pytest.mark.parametrize("model_type", [*PACKED, "mpnet", "deberta"])
def test_a_packed_batch_equals_the_padded_reference_on_real_windows(real_features, model_type, compiled):
    model = load_small(model_type)
    model.compiled = compiled
    assert model.attention == ("sdpa" if model_type in PACKED else "padded")
    reference = copy.deepcopy(model.network)
    batch = pack(real_features, REAL_WINDOWS)
    loss = span_loss(*model(batch), batch) / len(REAL_WINDOWS)
    loss.backward()
    expected = padded_reference(reference, real_features, REAL_WINDOWS)
    assert torch.isclose(loss, expected, rtol=1e-6, atol=0)
    same_gradients(dict(model.network.named_parameters()), dict(reference.named_parameters()), 1e-5)


def test_probe_refuses_a_leak():
    model = load_small("bert")
    assert packs(model)
    embeddings = model.network.bert.embeddings
    forward = embeddings.forward

    def leaking(*arguments, **named):  # each token sees its left neighbour, as mobilebert's trigram embeddings do
        out = forward(*arguments, **named)
        return out + 0.1 * F.pad(out, (0, 0, 1, 0))[:, :-1]

    embeddings.forward = leaking
    assert not packs(model)


def test_probe_refuses_a_model_that_never_calls_the_attention():
    model = load_small("bert")
    model.network.set_attn_implementation("eager")
    assert not packs(model)


def test_a_leaking_model_is_padded_at_load(monkeypatch):
    monkeypatch.setattr(loading, "packs", lambda model: False)
    assert load_small("bert").attention == "padded"


def test_packed_attention_refuses_a_padded_call():
    model = load_small("bert")
    with pytest.raises(ValueError, match="without a packed batch"):
        model.network(input_ids=torch.ones(2, 8, dtype=torch.long))


def test_filling_changes_nothing(features):
    model = load_small("bert")
    windows = [1, 5, 9, 30]
    plain = pack(features, windows)
    tokens = int(features.lengths[windows].sum())
    size = capacity([tokens], [len(windows)], features.max_length)
    filled = pack(features, windows, size)
    assert len(filled.input_ids) == size[0] > tokens and len(filled.window) == size[1] > len(windows)
    assert filled.cu_seqlens[-1] == size[0] and filled.cu_seqlens.diff().max() <= features.max_length
    assert filled.cu_seqlens.diff().min() >= 1
    assert filled.window.tolist()[: len(windows)] == windows and set(filled.window.tolist()[len(windows) :]) == {-1}
    losses = [window_losses(*model(batch), batch) for batch in (plain, filled)]
    assert torch.allclose(losses[0], losses[1][: len(windows)], rtol=1e-5)
    assert losses[1][len(windows) :].abs().max() == 0
    losses[1].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_rank_with_nothing_to_do_gets_a_filling_window(features):
    model = load_small("bert")
    batch = pack_share(features, [[]], 0, fixed_shapes=False)
    loss = span_loss(*model(batch), batch)
    assert loss == 0 and batch.window.tolist() == [-1]
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_windows_without_a_label_have_no_loss(features):
    features = copy.copy(features)
    features.start = features.start.copy()
    features.start[4] = -1
    model = load_small("bert")
    batch = pack(features, [3, 4, 5])
    losses = window_losses(*model(batch), batch)
    assert losses[1] == 0 and losses[0] > 0 and losses[2] > 0


def test_a_loss_that_is_not_finite_makes_every_gradient_so(features):
    model = load_small("bert")
    batch = pack(features, [0, 1])
    start_logits, end_logits = model(batch)
    start_logits = torch.where(torch.arange(len(start_logits)) == batch.start[0], -torch.inf, start_logits)
    span_loss(start_logits, end_logits, batch).backward()
    assert not model.network.qa_outputs.weight.grad.isfinite().any()


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "electra", "albert", "mpnet", "deberta-v2"])
def test_computing_in_half_precision(features, model_type):
    """bf16 gradients are near the fp32 ones, and reach fp32 weights."""
    exact, half = load_small(model_type), load_small(model_type)
    compute_in(half, torch.bfloat16)
    batch = pack(features, [1, 5, 9])
    gradients = []
    for model in (exact, half):
        start_logits, end_logits = model(batch)
        assert start_logits.dtype == end_logits.dtype == torch.float32
        span_loss(start_logits, end_logits, batch).backward()
        assert all(p.dtype == torch.float32 for p in model.parameters())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    distance = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert 0 < distance < 0.05  # bf16 has 8 bits
    assert half.state_dict().keys() == exact.state_dict().keys()


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "mpnet"])
def test_the_head_computes_in_fp32(features, model_type):
    """From the last hidden state, in half, to the logits: bf16 would give logits of three digits, with many ties."""
    model = load_small(model_type)
    compute_in(model, torch.bfloat16)
    head, seen = model.network.qa_outputs, []
    head.register_forward_hook(lambda module, inputs, output: seen.extend([inputs[0], output]))
    start_logits, end_logits = model(pack(features, [1, 5, 9]))
    hidden, logits = seen
    assert hidden.dtype == (torch.float32 if model.attention == "padded" else torch.bfloat16)
    assert torch.equal(logits, torch.nn.functional.linear(hidden.float(), head.weight, head.bias))
    for one in (start_logits, end_logits):
        assert (one != one.bfloat16().float()).float().mean() > 0.9
    span_loss(start_logits, end_logits, pack(features, [1, 5, 9])).backward()
    assert head.weight.grad.dtype == torch.float32


def test_deberta_is_refused_in_half_precision():
    """Its mask is the lowest number of fp32, which half-precision attention scores cannot hold."""
    with pytest.raises(UserError, match="--precision fp32"):
        compute_in(load_small("deberta"), torch.bfloat16)


def test_what_travels_between_the_layers_is_half(features):
    model = load_small("bert")
    compute_in(model, torch.bfloat16)
    seen = []
    for layer in encoder_layers(model):
        layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    model(pack(features, [0]))
    assert seen == [torch.bfloat16] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: variable-length attention runs on CUDA alone")
@pytest.mark.parametrize("backend", ["flash", "fused"])
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_packed_kernels_are_as_exact_as_stock_bf16_attention(real_features, fixed_shapes, backend):
    """bf16 gradients' distance from fp32: at most twice stock SDPA's."""

    def gradients(attention, dtype):
        model = load_small("bert", attention, hidden_size=256, intermediate_size=512).cuda()
        compute_in(model, dtype)
        batch = pack_share(real_features, [REAL_WINDOWS], 0, fixed_shapes).to("cuda")
        span_loss(*model(batch), batch).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    exact = gradients("sdpa", None)
    stock, flash = (gradients(attention, torch.bfloat16) for attention in ("sdpa", backend))
    assert flash.isfinite().all()
    assert (flash - exact).norm() <= 2 * (stock - exact).norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the kernels are CUDA's")
@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize("products, error", [("highest", 1e-5), ("high", 1e-2)])
def test_fused_layers_in_fp32_and_tf32(real_features, heads, products, error):
    """Gradients beside those of torch's CPU code; heads of 32, 64 and 128 channels."""
    gradients = []
    for device in ("cpu", "cuda"):
        attention = "fused" if device == "cuda" else "sdpa"
        model = load_small("bert", attention, hidden_size=256, intermediate_size=512, num_attention_heads=heads).to(
            device
        )
        batch = pack_share(real_features, [REAL_WINDOWS], 0, fixed_shapes=False).to(device)
        torch.set_float32_matmul_precision(products if device == "cuda" else "highest")
        span_loss(*model(batch), batch).backward()
        torch.set_float32_matmul_precision("highest")
        gradients.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None]))
    assert (gradients[1] - gradients[0]).norm() <= error * gradients[0].norm()


@pytest.mark.parametrize("model_type", ["bert", "albert"])
def test_arithmetic_grows_with_the_layers(features, model_type):
    """ALBERT's too, whose layers are one and the same."""
    counts = []
    for layers in (1, 2, 3):
        counts.append(flops_per_token(load_small(model_type, num_hidden_layers=layers), features.lengths))
    assert counts[1] - counts[0] == pytest.approx(counts[2] - counts[1]) and counts[1] > 1.8 * counts[0]
