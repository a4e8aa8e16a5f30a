"""Attention of packed windows in Triton: forward and backward for windows that are short, as question answering's are.

What flash-attention's kernels do with windows of 171 tokens on average is mostly overhead: tiles of 128 by 128 that the
windows fill by half, gradients of the queries added up by atomics in fp32 and converted by a kernel of their own. Here
tiles are smaller, and the backward pass walks twice, once for keys and values, once for queries, so that nothing is
added by atomics and equal inputs give equal gradients to the bit.
Follows FlashAttention-2 (Dao 2023): online softmax forward, recomputed probabilities backward.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
BLOCK = 64  # queries and keys in a tile


@triton.jit
def forward_kernel(
    Q, K, V, OUT, LSE, CU_SEQLENS, scale, stride, tokens,
    WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one window and head against all of the window's keys."""
    window, head = tl.program_id(1), tl.program_id(2)
    begin = tl.load(CU_SEQLENS + window)
    length = tl.load(CU_SEQLENS + window + 1) - begin
    first = tl.program_id(0) * BLOCK_Q
    if first >= length:
        return
    rows, columns, channel = first + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K), tl.arange(0, WIDTH)
    base = begin.to(tl.int64) * stride + head * WIDTH
    at = base + rows[:, None] * stride + channel[None, :]
    q = tl.load(Q + at, mask=rows[:, None] < length, other=0.0)
    highest = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    for start in range(0, length, BLOCK_K):
        inside = start + columns < length
        there = base + (start + columns)[:, None] * stride + channel[None, :]
        k = tl.load(K + there, mask=inside[:, None], other=0.0)
        v = tl.load(V + there, mask=inside[:, None], other=0.0)
        score = tl.where(inside[None, :], tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        new = tl.maximum(highest, tl.max(score, 1))
        shrink, weight = tl.exp2(highest - new), tl.exp2(score - new[:, None])
        total = total * shrink + tl.sum(weight, 1)
        out = out * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
        highest = new
    tl.store(OUT + at, (out / total[:, None]).to(q.dtype), mask=rows[:, None] < length)
    tl.store(LSE + head * tokens + begin + rows, highest + tl.log2(total), mask=rows < length)


@triton.jit
def backward_kernel(
    Q, K, V, GRAD, LSE, DELTA, DQ, DK, DV, CU_SEQLENS, scale, stride, tokens,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values, then of the same tile of queries, of one window and head."""
    window, head = tl.program_id(1), tl.program_id(2)
    begin = tl.load(CU_SEQLENS + window)
    length = tl.load(CU_SEQLENS + window + 1) - begin
    first = tl.program_id(0) * BLOCK
    if first >= length:
        return
    own, tile, channel = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    base = begin.to(tl.int64) * stride + head * WIDTH
    at = base + own[:, None] * stride + channel[None, :]
    mine = own < length
    row = head * tokens + begin
    scale_log2 = scale * 1.4426950408889634

    k = tl.load(K + at, mask=mine[:, None], other=0.0)
    v = tl.load(V + at, mask=mine[:, None], other=0.0)
    dk, dv = tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(0, length, BLOCK):
        others = start + tile
        inside = others < length
        there = base + others[:, None] * stride + channel[None, :]
        q = tl.load(Q + there, mask=inside[:, None], other=0.0)
        grad = tl.load(GRAD + there, mask=inside[:, None], other=0.0)
        lse = tl.load(LSE + row + others, mask=inside, other=float("inf"))  # no weight outside the window
        delta = tl.load(DELTA + row + others, mask=inside, other=0.0)
        weight = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])  # keys by queries
        dv += tl.dot(weight.to(grad.dtype), grad)
        slope = weight * (tl.dot(v, tl.trans(grad)) - delta[None, :])
        dk += tl.dot(slope.to(q.dtype), q)
    tl.store(DK + at, (dk * scale).to(k.dtype), mask=mine[:, None])
    tl.store(DV + at, dv.to(k.dtype), mask=mine[:, None])

    q = tl.load(Q + at, mask=mine[:, None], other=0.0)
    grad = tl.load(GRAD + at, mask=mine[:, None], other=0.0)
    lse = tl.load(LSE + row + own, mask=mine, other=float("inf"))
    delta = tl.load(DELTA + row + own, mask=mine, other=0.0)
    dq = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(0, length, BLOCK):
        others = start + tile
        inside = others < length
        there = base + others[:, None] * stride + channel[None, :]
        k = tl.load(K + there, mask=inside[:, None], other=0.0)
        v = tl.load(V + there, mask=inside[:, None], other=0.0)
        score = tl.where(inside[None, :], tl.dot(q, tl.trans(k)) * scale_log2, -float("inf"))
        weight = tl.exp2(score - lse[:, None])
        slope = weight * (tl.dot(grad, tl.trans(v)) - delta[:, None])
        dq += tl.dot(slope.to(k.dtype), k)
    tl.store(DQ + at, (dq * scale).to(q.dtype), mask=mine[:, None])


@torch.library.custom_op("squad::short_attention", mutates_args=())
def short_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, max_length: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention within each window: query, key, value [T, heads, width] -> the same, and log2-sum-exp2 [heads, T]."""
    tokens, heads, width = query.shape
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = torch.empty_like(query)
    lse = query.new_empty(heads, tokens, dtype=torch.float32)
    grid = (triton.cdiv(max_length, BLOCK), len(cu_seqlens) - 1, heads)
    forward_kernel[grid](
        query, key, value, out, lse, cu_seqlens, scale * LOG2_E, heads * width, tokens, width, BLOCK, BLOCK
    )
    return out, lse


@short_attention.register_fake
def _(query, key, value, cu_seqlens, max_length, scale):
    tokens, heads, width = query.shape
    return query.new_empty(tokens, heads, width), query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("squad::short_attention_backward", mutates_args=())
def short_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; delta: the sum of grad times output over the width, float32 [heads, T]."""
    tokens, heads, width = query.shape
    grad, query, key, value = (tensor.contiguous() for tensor in (grad, query, key, value))
    gradients = [torch.empty_like(query) for _ in range(3)]
    grid = (triton.cdiv(max_length, BLOCK), len(cu_seqlens) - 1, heads)
    backward_kernel[grid](
        query, key, value, grad, lse, delta, *gradients, cu_seqlens, scale, heads * width, tokens, width, BLOCK
    )
    return tuple(gradients)


@short_attention_backward.register_fake
def _(grad, query, key, value, lse, delta, cu_seqlens, max_length, scale):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def keep_for_backward(ctx, inputs, output):
    query, key, value, cu_seqlens, ctx.max_length, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, cu_seqlens, *output)


def gradients(ctx, grad, _):
    query, key, value, cu_seqlens, out, lse = ctx.saved_tensors
    delta = (grad.float() * out.float()).sum(-1).t().contiguous()
    found = short_attention_backward(grad, query, key, value, lse, delta, cu_seqlens, ctx.max_length, ctx.scale)
    return *found, None, None, None


short_attention.register_autograd(gradients, setup_context=keep_for_backward)
