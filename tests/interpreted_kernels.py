"""The Triton kernels under Triton's interpreter against plain torch; tests/model/test_kernels.py starts this file."""

import pytest
import torch
from tiny import load_small, same_gradients, sample_features
from torch_kernels import Kernels as Plain

from common.data.packing import pack
from common.model.fused import kernels
from common.model.span import span_loss, use_attention

EPS = 1e-12
EXACT = {torch.float32: 2e-5, torch.float16: 5e-3}  # largest difference, for values of about 1


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def same(ours, theirs, error=EXACT[torch.float32]):
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=error, atol=error)


@pytest.fixture(params=["highest", "high"])
def products(request):
    """Without and with tensor cores: other sizes of tiles."""
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "heads, width, dtype, card",
    [(2, 16, torch.float32, 90), (1, 32, torch.float32, 90), (2, 16, torch.float16, 90), (1, 64, torch.float16, 80)],
)
def test_attention(products, heads, width, dtype, card, monkeypatch):
    """Windows of one token, of a whole tile, of one token more; on 80 the loop's steps are shorter than a tile."""
    monkeypatch.setattr(kernels, "architecture", lambda device: card)
    cu_seqlens = torch.tensor([0, 1, 65, 130, 163], dtype=torch.int32)
    qkv, grad = random(163, 3 * heads * width, dtype=dtype), random(163, heads * width, dtype=dtype)
    out, lse = kernels.attention_forward(qkv, heads, cu_seqlens, 65)
    expected = Plain.attention_forward(qkv.float(), heads, cu_seqlens, 65)[0]
    same(out, expected, EXACT[dtype])
    q, k, _ = (part[1:65].unflatten(1, (heads, width)).transpose(0, 1).float() for part in qkv.chunk(3, 1))
    same(lse[:, 1:65], torch.logsumexp(q @ k.transpose(1, 2) / width**0.5, -1) / torch.tensor(2.0).log(), EXACT[dtype])
    ours = kernels.attention_backward(grad, qkv, out, lse, cu_seqlens, 65)
    same(ours, Plain.attention_backward(grad.float(), qkv.float(), expected, lse, cu_seqlens, 65), EXACT[dtype])


def test_add_norm_without_dropout():
    x, bias, weight, shift = random(37, 48), random(48), random(49)[:48], random(50)[:48]
    residual, grad, seeds = random(38, 48)[:37], random(39, 48)[:37], torch.tensor([3, 4], dtype=torch.int32)
    out, saved = kernels.add_norm(x, bias, residual, weight, shift, EPS, 0.0, seeds, 0)
    expected, theirs = Plain.add_norm(x, bias, residual, weight, shift, EPS, 0.0, seeds, 0)
    same(out, expected)
    same(saved[0], theirs[0])
    dx, dresidual, parts = kernels.add_norm_backward(grad, saved, weight, 0.0, seeds, 0)
    expected, _, sums = Plain.add_norm_backward(grad, theirs, weight, 0.0, seeds, 0)
    assert dx.data_ptr() != dresidual.data_ptr()  # one is added to in place while the other is still needed
    same(dx, expected)
    same(dresidual, expected)
    same(parts.sum(0), sums.sum(0))


def test_dropout_is_the_same_both_ways_and_another_for_each_seed():
    x, residual, grad = random(64, 96), random(65, 96)[:64], random(66, 96)[:64]
    bias, weight, shift = torch.zeros(96), torch.ones(96), torch.zeros(96)
    seeds = torch.tensor([3, 4], dtype=torch.int32)
    masks = []
    for which in (0, 1):
        _, saved = kernels.add_norm(x, bias, residual, weight, shift, EPS, 0.25, seeds, which)
        kept = saved[0] != residual
        same(saved[0], torch.where(kept, x / 0.75, 0) + residual)
        dx, dresidual, parts = kernels.add_norm_backward(grad, saved, weight, 0.25, seeds, which)
        same(dx, torch.where(kept, dresidual / 0.75, 0))
        same(parts.sum(0)[-96:], dx.sum(0))
        assert kept.float().mean().item() == pytest.approx(0.75, abs=0.02)
        masks.append(kept)
    assert 0.3 < (masks[0] != masks[1]).float().mean() < 0.45  # 2 * 0.25 * 0.75


def test_gelu_and_sums_over_rows():
    x, bias, grad = 3 * random(70, 40), random(40), random(71, 40)[:70]
    same(kernels.gelu(x, bias), Plain.gelu(x, bias), 1e-6)
    dx, parts = kernels.gelu_backward(grad, x, bias)
    expected, total = Plain.gelu_backward(grad, x, bias)
    same(dx, expected, 1e-5)
    same(parts.sum(0), total[0], 1e-4)
    same(kernels.row_sums(x).sum(0), x.sum(0), 1e-4)
    matrices = [random(rows, width) for rows, width in ((3, 40), (300, 33), (1, 64), (5, 7))]
    for ours, matrix in zip(kernels.column_sums(*matrices), matrices, strict=True):
        same(ours, matrix.sum(0), 1e-4)


def test_embeddings():
    word, position, kind = random(50, 48), random(40, 48), random(2, 48)
    weight, shift, grad = random(48), random(49)[:48], random(37, 48)
    ids, positions, types = (torch.arange(37) * step % size for step, size in ((7, 50), (1, 40), (1, 2)))
    arguments = ids, positions, types, word, position, kind, weight, shift, EPS, 0.0, torch.tensor([3]), torch.float32
    (ours, saved), (expected, theirs) = kernels.embed(*arguments), Plain.embed(*arguments)
    same(ours, expected)
    dsum, rest = kernels.embed_backward(grad, saved, types, weight, 0.0, torch.tensor([3]))
    expected, others = Plain.embed_backward(grad, theirs, types, weight, 0.0, torch.tensor([3]))
    same(dsum, expected)
    for one, other in zip(rest, others, strict=True):
        same(one, other, 1e-4)


def test_a_whole_model():
    features, _ = sample_features(10)
    batch = pack(features, [1, 5])
    models = [load_small("bert", num_hidden_layers=1) for _ in range(2)]
    use_attention(models[0], "fused")
    assert models[0].attention == "fused"
    for model in models:
        span_loss(*model(batch), batch).backward()
    same_gradients(*(dict(model.named_parameters()) for model in models), 1e-5)
