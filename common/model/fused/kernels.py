"""Triton kernels of BERT over packed windows, forward and backward: attention, dropout and LayerNorm, embeddings, GELU.

They save memory traffic, which bounds the time of such work. A bias is added, and its gradient summed, by the kernel
that holds the values in registers. Dropout's mask is not stored: the backward pass computes it again from a seed.
Attention works on tiles of at most 64. Windows hold 171 tokens on average, which fill less than half of
flash-attention's tiles of 128 by 128. No sum uses atomics, so that equal inputs give equal results to the bit. All
kernels take bf16, fp16 and fp32.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Numbers that differ from batch to batch: else Triton compiles for those that 16 divides, and those that are 1, apart.
SIZES = ["tokens", "rows", "which", "rows_a", "rows_b", "rows_c", "rows_d"]
jit = functools.partial(triton.jit, do_not_specialize=SIZES)


@functools.cache
def multiprocessors(device):
    """How many the card has; kernels that sum over rows start a few programs on each. 4: for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@jit
def attention_forward_kernel(
    QKV, OUT, LSE, CU_SEQLENS, scale, tokens, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one window and head against all of the window's keys."""
    window, head = tl.program_id(1), tl.program_id(2)
    begin = tl.load(CU_SEQLENS + window)
    length = tl.load(CU_SEQLENS + window + 1) - begin
    first = tl.program_id(0) * TILE
    if first >= length:
        return
    rows, columns, channel = first + tl.arange(0, TILE), tl.arange(0, STEP), tl.arange(0, WIDTH)
    WIDE: tl.constexpr = HEADS * WIDTH
    base = begin.to(tl.int64) * 3 * WIDE + head * WIDTH
    q = tl.load(QKV + base + rows[:, None] * 3 * WIDE + channel[None, :], mask=rows[:, None] < length, other=0.0)
    highest = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    out = tl.zeros([TILE, WIDTH], tl.float32)
    for start in range(0, length, STEP):
        inside = start + columns < length
        there = base + (start + columns)[:, None] * 3 * WIDE + channel[None, :]
        k = tl.load(QKV + WIDE + there, mask=inside[:, None], other=0.0)
        v = tl.load(QKV + 2 * WIDE + there, mask=inside[:, None], other=0.0)
        score = tl.where(inside[None, :], tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, -float("inf"))
        new = tl.maximum(highest, tl.max(score, 1))
        shrink, weight = tl.exp2(highest - new), tl.exp2(score - new[:, None])
        total = total * shrink + tl.sum(weight, 1)
        out = out * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        highest = new
    at = begin.to(tl.int64) * WIDE + head * WIDTH + rows[:, None] * WIDE + channel[None, :]
    tl.store(OUT + at, (out / total[:, None]).to(q.dtype), mask=rows[:, None] < length)
    tl.store(LSE + head * tokens + begin + rows, highest + tl.log2(total), mask=rows < length)


@jit
def attention_backward_kernel(
    QKV, OUT, GRAD, LSE, DQKV, CU_SEQLENS, scale, tokens, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values, then of the same tile of queries, of one window and head."""
    window, head = tl.program_id(1), tl.program_id(2)
    begin = tl.load(CU_SEQLENS + window)
    length = tl.load(CU_SEQLENS + window + 1) - begin
    first = tl.program_id(0) * TILE
    if first >= length:
        return
    own, step, channel = first + tl.arange(0, TILE), tl.arange(0, STEP), tl.arange(0, WIDTH)
    WIDE: tl.constexpr = HEADS * WIDTH
    wide_base = begin.to(tl.int64) * 3 * WIDE + head * WIDTH
    base = begin.to(tl.int64) * WIDE + head * WIDTH
    at = wide_base + own[:, None] * 3 * WIDE + channel[None, :]
    mine = own[:, None] < length
    row = head * tokens + begin
    scale_log2 = scale * 1.4426950408889634  # log2(e): LSE is in powers of 2, as in the forward pass

    k = tl.load(QKV + WIDE + at, mask=mine, other=0.0)
    v = tl.load(QKV + 2 * WIDE + at, mask=mine, other=0.0)
    dk, dv = tl.zeros([TILE, WIDTH], tl.float32), tl.zeros([TILE, WIDTH], tl.float32)
    for start in range(0, length, STEP):
        others = start + step
        inside = others[:, None] < length
        there = base + others[:, None] * WIDE + channel[None, :]
        q = tl.load(QKV + wide_base + others[:, None] * 3 * WIDE + channel[None, :], mask=inside, other=0.0)
        grad = tl.load(GRAD + there, mask=inside, other=0.0)
        out = tl.load(OUT + there, mask=inside, other=0.0)
        delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        lse = tl.load(LSE + row + others, mask=others < length, other=float("inf"))  # outside: no weight
        weight = tl.exp2(
            tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale_log2 - lse[None, :]
        )  # keys by queries
        dv += tl.dot(weight.to(grad.dtype), grad, input_precision=PRECISION)
        slope = weight * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :])
        dk += tl.dot(slope.to(q.dtype), q, input_precision=PRECISION)
    tl.store(DQKV + WIDE + at, (dk * scale).to(k.dtype), mask=mine)
    tl.store(DQKV + 2 * WIDE + at, dv.to(k.dtype), mask=mine)

    q = tl.load(QKV + at, mask=mine, other=0.0)
    here = base + own[:, None] * WIDE + channel[None, :]
    grad = tl.load(GRAD + here, mask=mine, other=0.0)
    out = tl.load(OUT + here, mask=mine, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    lse = tl.load(LSE + row + own, mask=own < length, other=float("inf"))
    dq = tl.zeros([TILE, WIDTH], tl.float32)
    for start in range(0, length, STEP):
        others = start + step
        there = wide_base + others[:, None] * 3 * WIDE + channel[None, :]
        key = tl.load(QKV + WIDE + there, mask=others[:, None] < length, other=0.0)
        value = tl.load(QKV + 2 * WIDE + there, mask=others[:, None] < length, other=0.0)
        score = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale_log2
        weight = tl.exp2(tl.where(others[None, :] < length, score, -float("inf")) - lse[:, None])
        slope = weight * (tl.dot(grad, tl.trans(value), input_precision=PRECISION) - delta[:, None])
        dq += tl.dot(slope.to(key.dtype), key, input_precision=PRECISION)
    tl.store(DQKV + at, (dq * scale).to(q.dtype), mask=mine)


class Launch(NamedTuple):
    """How an attention kernel is compiled.

    tile: the queries, or keys, that a program has. step: the keys, or queries, that it meets at a time. warps: of a
    program. stages: steps whose loads are under way at once. registers: at most so many a thread; None: no limit.
    """

    tile: int
    step: int
    warps: int = 4
    stages: int = 1
    registers: int | None = None

    def options(self):
        """As Triton names them."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


ARCHITECTURES = (80, 86, 89, 90, 100, 120)  # 10 * major + minor of the compute capability
PLAIN = (80, 86, 89, 120)  # tensor cores that read and write registers: these fill up first
SMALL = (86, 89, 120)  # 100 KB of shared memory on a multiprocessor, where 80 has 164 and the others 228
WIDTHS = (16, 32, 64, 128)

# How attention is launched: kernel, products, architectures, widths of a head. The first row that fits is taken. On 90
# widths 32 and 64 were chosen by measurement. All else is chosen by what the compiler reports for it
# (`python -m benchmarks.kernels`): few spilled registers, then many warps on a multiprocessor.
LAUNCHES = (
    ("forward", "half", SMALL, (128,), Launch(64, 32, stages=2)),
    ("forward", "half", SMALL, (64,), Launch(64, 64, stages=2)),
    ("forward", "half", (80,), (128,), Launch(64, 64, stages=2)),
    ("forward", "half", ARCHITECTURES, WIDTHS, Launch(64, 64, stages=3)),
    ("forward", "tf32", ARCHITECTURES, (128,), Launch(32, 32)),
    ("forward", "tf32", ARCHITECTURES, WIDTHS, Launch(64, 64)),
    ("forward", "fp32", (80, 86, 89), (128,), Launch(32, 32, warps=8)),
    ("forward", "fp32", ARCHITECTURES, (128,), Launch(16, 16)),
    ("forward", "fp32", ARCHITECTURES, WIDTHS, Launch(32, 32)),
    ("backward", "half", SMALL, (32,), Launch(64, 32, registers=168)),
    ("backward", "half", PLAIN, (64,), Launch(64, 16, registers=168)),
    ("backward", "half", PLAIN, (128,), Launch(64, 16)),
    ("backward", "half", ARCHITECTURES, (128,), Launch(64, 64)),
    # 168 registers let three programs share a multiprocessor, not two: 316 us, not 371, for width 64 on 90.
    ("backward", "half", ARCHITECTURES, WIDTHS, Launch(64, 64, registers=168)),
    ("backward", "tf32", PLAIN, (32, 64), Launch(32, 32, registers=168)),
    ("backward", "tf32", SMALL, (128,), Launch(32, 32, warps=8)),
    ("backward", "tf32", ARCHITECTURES, (128,), Launch(32, 32)),
    ("backward", "tf32", ARCHITECTURES, WIDTHS, Launch(64, 64)),
    ("backward", "fp32", (*PLAIN, 100), (64,), Launch(32, 16)),
    ("backward", "fp32", ARCHITECTURES, (128,), Launch(16, 16, warps=8)),
    ("backward", "fp32", ARCHITECTURES, WIDTHS, Launch(32, 32)),
)


@functools.cache
def architecture(device):
    """Which of ARCHITECTURES the card is, or the last one before it; 90 without a card, for Triton's interpreter."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return max(known for known in ARCHITECTURES if known <= 10 * major + minor)


@functools.cache
def find_launch(kernel, products, card, width):
    """The first Launch of LAUNCHES that fits."""
    for name, kind, cards, widths, launch in LAUNCHES:
        if name == kernel and kind == products and card in cards and width in widths:
            return launch
    raise ValueError(f"no launch of attention's {kernel} kernel for heads of width {width}")


def attention_launch(kernel, qkv, width):
    """The Launch of a kernel, "forward" or "backward", and how products of fp32 are taken.

    "tf32", or "ieee": as they are, without tensor cores.
    """
    exact = torch.get_float32_matmul_precision() == "highest"
    products = "half" if qkv.dtype != torch.float32 else "fp32" if exact else "tf32"
    return find_launch(kernel, products, architecture(qkv.device), width), "ieee" if exact else "tf32"


def attention_forward(qkv, heads, cu_seqlens, max_length):
    """Attention within each window: qkv [T, 3 * C] -> its output [T, C] and log2-sum-exp2, float32 [heads, T].

    FlashAttention-2 (Dao 2023), with its online softmax.
    """
    tokens, wide = qkv.shape[0], qkv.shape[1] // 3
    out, lse = qkv.new_empty(tokens, wide), qkv.new_empty(heads, tokens, dtype=torch.float32)
    launch, precision = attention_launch("forward", qkv, wide // heads)
    grid = (triton.cdiv(max_length, launch.tile), len(cu_seqlens) - 1, heads)
    scale = (wide // heads) ** -0.5 * 1.4426950408889634  # log2(e): powers of 2 are quicker than those of e
    attention_forward_kernel[grid](
        qkv, out, lse, cu_seqlens, scale, tokens, heads, wide // heads, launch.tile, launch.step,
        precision, **launch.options(),
    )  # fmt: skip
    return out, lse


def attention_backward(grad, qkv, out, lse, cu_seqlens, max_length):
    """The gradient of qkv [T, 3 * C] from that of the output [T, C].

    FlashAttention-2 (Dao 2023): the probabilities are computed again, not stored.
    """
    tokens, wide, heads = *out.shape, len(lse)
    dqkv = torch.empty_like(qkv)
    launch, precision = attention_launch("backward", qkv, wide // heads)
    grid = (triton.cdiv(max_length, launch.tile), len(cu_seqlens) - 1, heads)
    attention_backward_kernel[grid](
        qkv, out, grad, lse, dqkv, cu_seqlens, (wide // heads) ** -0.5, tokens, heads, wide // heads,
        launch.tile, launch.step, precision, **launch.options(),
    )  # fmt: skip
    return dqkv


@jit
def kept(seed, place, share):
    """Whether dropout keeps each place: a hash of place and seed, true for this share (of 2 ** 31) of all places.

    The hash is one of xor, shift and multiply, its multipliers from C. Wellons' search for such (hash-prospector).
    """
    x = place.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x31848BAB
    x = x ^ (x >> 14) ^ seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x31848BAB
    return ((x ^ (x >> 14)) >> 1).to(tl.int32) < share


@jit
def add_norm_kernel(
    X, BIAS, RESIDUAL, WEIGHT, SHIFT, SEED, OUT, SUM, MEAN, RSTD, which, share, keep, eps, width,
    DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32) + tl.load(BIAS + column, mask=inside, other=0.0)
    if DROPOUT:
        x = tl.where(kept(tl.load(SEED + which), place, share), x / keep, 0.0)
    total = (x + tl.load(RESIDUAL + place, mask=inside, other=0.0)).to(SUM.dtype.element_ty)
    tl.store(SUM + place, total, mask=inside)
    total = total.to(tl.float32)
    mean = tl.sum(tl.where(inside, total, 0.0), 0) / width
    centred = tl.where(inside, total - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    out = centred * rstd * weight + tl.load(SHIFT + column, mask=inside, other=0.0)
    tl.store(OUT + place, out.to(OUT.dtype.element_ty), mask=inside)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)


@jit
def add_norm_backward_kernel(
    GRAD, SUM, MEAN, RSTD, WEIGHT, SEED, DX, DRESIDUAL, PARTS, which, share, keep, rows, width,
    DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that are num_programs apart; their sums for weight, shift and bias go to this program's row of PARTS."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    dweight, dshift = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=3):  # loads two rows ahead
        place = (row + tl.zeros([BLOCK], tl.int64)) * width + column
        grad = tl.load(GRAD + place, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(SUM + place, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        normed = tl.where(inside, (total - tl.load(MEAN + row)) * rstd, 0.0)
        dweight += grad * normed
        dshift += grad
        grad = grad * weight
        slope = tl.sum(grad * normed, 0) / width
        dtotal = tl.where(inside, (grad - tl.sum(grad, 0) / width - normed * slope) * rstd, 0.0)
        tl.store(DRESIDUAL + place, dtotal.to(DRESIDUAL.dtype.element_ty), mask=inside)
        if DROPOUT:
            dtotal = tl.where(kept(tl.load(SEED + which), place, share), dtotal / keep, 0.0)
        tl.store(DX + place, dtotal.to(DX.dtype.element_ty), mask=inside)
        dbias += dtotal
    parts = PARTS + tl.program_id(0) * 3 * width + column
    tl.store(parts, dweight, mask=inside)
    tl.store(parts + width, dshift, mask=inside)
    tl.store(parts + 2 * width, dbias, mask=inside)


def add_norm(x, bias, residual, weight, shift, eps, dropout, seeds, which):
    """LayerNorm(dropout(x + bias) + residual) of x, residual [T, C]; also what is normed, its mean and 1 / deviation.

    seeds[which], an integer on the device, decides what is dropped.
    """
    rows, width = x.shape
    out, total = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    add_norm_kernel[(rows,)](
        x, bias, residual, weight, shift, seeds, out, total, mean, rstd, which, int((1 - dropout) * 2**31), 1 - dropout,
        eps, width, dropout > 0, triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return out, (total, mean, rstd)


def add_norm_backward(grad, saved, weight, dropout, seeds, which):
    """Gradients of x, residual [T, C]; parts of the sums for weight, shift and bias, float32 [P, 3 * C].

    The two gradients are two tensors without dropout too: the second is added to while the first is still needed.
    """
    total, mean, rstd = saved
    rows, width = grad.shape
    dx, dresidual = torch.empty_like(grad), torch.empty_like(grad)
    programs = min(triton.cdiv(rows, 4), 6 * multiprocessors(grad.device))
    parts = grad.new_empty(programs, 3 * width, dtype=torch.float32)
    add_norm_backward_kernel[(programs,)](
        grad, total, mean, rstd, weight, seeds, dx, dresidual, parts, which, int((1 - dropout) * 2**31), 1 - dropout,
        rows, width, dropout > 0, triton.next_power_of_2(width), num_warps=2,
    )  # fmt: skip
    return dx, dresidual, parts


@jit
def embed_kernel(
    IDS, POSITIONS, TYPES, WORD, POSITION, TYPE, WEIGHT, SHIFT, SEED, OUT, SUM, MEAN, RSTD, share, keep, eps, width,
    DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = token * width + column
    total = tl.load(WORD + tl.load(IDS + token) * width + column, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(POSITION + tl.load(POSITIONS + token) * width + column, mask=inside, other=0.0)
    total += tl.load(TYPE + tl.load(TYPES + token) * width + column, mask=inside, other=0.0)
    tl.store(SUM + place, total.to(SUM.dtype.element_ty), mask=inside)
    mean = tl.sum(tl.where(inside, total, 0.0), 0) / width
    centred = tl.where(inside, total - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    out = centred * rstd * weight + tl.load(SHIFT + column, mask=inside, other=0.0)
    if DROPOUT:
        out = tl.where(kept(tl.load(SEED), place, share), out / keep, 0.0)
    tl.store(OUT + place, out.to(OUT.dtype.element_ty), mask=inside)
    tl.store(MEAN + token, mean)
    tl.store(RSTD + token, rstd)


@jit
def embed_backward_kernel(
    GRAD, SUM, MEAN, RSTD, TYPES, WEIGHT, SEED, DSUM, PARTS, share, keep, tokens, width,
    DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tokens that are num_programs apart; their sums for weight, shift and both types go to its row of PARTS."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    dweight, dshift = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    dfirst, dsecond = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=3):
        place = (token + tl.zeros([BLOCK], tl.int64)) * width + column
        grad = tl.load(GRAD + place, mask=inside, other=0.0).to(tl.float32)
        if DROPOUT:
            grad = tl.where(kept(tl.load(SEED), place, share), grad / keep, 0.0)
        rstd = tl.load(RSTD + token)
        total = tl.load(SUM + place, mask=inside, other=0.0).to(tl.float32)
        normed = tl.where(inside, (total - tl.load(MEAN + token)) * rstd, 0.0)
        dweight += grad * normed
        dshift += grad
        grad = grad * weight
        slope = tl.sum(grad * normed, 0) / width
        dsum = tl.where(inside, (grad - tl.sum(grad, 0) / width - normed * slope) * rstd, 0.0)
        tl.store(DSUM + place, dsum, mask=inside)
        second = tl.load(TYPES + token) == 1
        dfirst += tl.where(second, 0.0, dsum)
        dsecond += tl.where(second, dsum, 0.0)
    parts = PARTS + tl.program_id(0) * 4 * width + column
    tl.store(parts, dweight, mask=inside)
    tl.store(parts + width, dshift, mask=inside)
    tl.store(parts + 2 * width, dfirst, mask=inside)
    tl.store(parts + 3 * width, dsecond, mask=inside)


def embed(ids, positions, types, word, position, kind, weight, shift, eps, dropout, seed, dtype):
    """dropout(LayerNorm(word + position + type)) [T, C] in `dtype`, and the sum with its mean and 1 / deviation.

    ids, positions, types: [T]. There are two types.
    """
    tokens, width = len(ids), word.shape[1]
    out, total = (word.new_empty(tokens, width, dtype=dtype) for _ in range(2))
    mean, rstd = (word.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    embed_kernel[(tokens,)](
        ids, positions, types, word, position, kind, weight, shift, seed, out, total, mean, rstd,
        int((1 - dropout) * 2**31), 1 - dropout, eps, width, dropout > 0, triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return out, (total, mean, rstd)


def embed_backward(grad, saved, types, weight, dropout, seed):
    """The gradient of the embeddings' sum, float32 [T, C]; those of weight, shift and both types, float32 [C] each."""
    total, mean, rstd = saved
    tokens, width = grad.shape
    dsum = torch.empty_like(grad, dtype=torch.float32)
    programs = min(triton.cdiv(tokens, 4), 6 * multiprocessors(grad.device))
    parts = grad.new_empty(programs, 4 * width, dtype=torch.float32)
    embed_backward_kernel[(programs,)](
        grad, total, mean, rstd, types, weight, seed, dsum, parts, int((1 - dropout) * 2**31), 1 - dropout, tokens,
        width, dropout > 0, triton.next_power_of_2(width), num_warps=2,
    )  # fmt: skip
    return dsum, parts.sum(0).chunk(4)


@jit
def normal(x):
    """The normal distribution's share below x, to 1e-7 (Abramowitz and Stegun 26.2.17), and its density at x.

    Both take the same exponential, and no other: half as many instructions as the error function, which would hold up
    the memory.
    """
    density = tl.exp2(x * x * -0.7213475204444817) * 0.3989422804014327  # exp(-x * x / 2) / sqrt(2 pi)
    t = 1 / (1 + 0.2316419 * tl.abs(x))
    tail = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    return tl.where(x < 0, density * tail, 1 - density * tail), density


@jit
def gelu_kernel(X, BIAS, OUT, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One tile."""
    across = tl.cdiv(width, BLOCK)  # in one dimension of the grid, since the others end at 65,535
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    x = tl.load(X + row * width + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(BIAS + column, mask=column < width, other=0.0)
    tl.store(OUT + row * width + column, (x * normal(x)[0]).to(OUT.dtype.element_ty), mask=inside)


@jit
def gelu_backward_kernel(GRAD, X, BIAS, DX, PARTS, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Tiles of a block of columns that are num_programs apart; the sums over their rows go to its row of PARTS."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    bias = tl.load(BIAS + column, mask=column < width, other=0.0).to(tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)
        x = tl.load(X + row * width + column, mask=inside, other=0.0).to(tl.float32) + bias
        grad = tl.load(GRAD + row * width + column, mask=inside, other=0.0).to(tl.float32)
        below, density = normal(x)
        dx = grad * (below + x * density)
        tl.store(DX + row * width + column, dx.to(DX.dtype.element_ty), mask=inside)
        dbias += dx
    parts = PARTS + tl.program_id(1) * width + column
    tl.store(parts, tl.sum(dbias, 0)[None, :], mask=column < width)


def gelu(x, bias):
    """GELU(x + bias) of x [T, C], the exact one."""
    rows, width = x.shape
    out = torch.empty_like(x)
    gelu_kernel[(triton.cdiv(width, 256) * triton.cdiv(rows, 8),)](x, bias, out, rows, width, 8, 256)
    return out


def gelu_backward(grad, x, bias):
    """Gradient of x [T, C], and parts of its sum over the rows, float32 [P, C]."""
    rows, width = x.shape
    dx, columns = torch.empty_like(x), triton.cdiv(width, 128)
    programs = min(triton.cdiv(rows, 32), triton.cdiv(32 * multiprocessors(grad.device), columns))
    parts = x.new_empty(programs, width, dtype=torch.float32)
    gelu_backward_kernel[(columns, programs)](grad, x, bias, dx, parts, rows, width, 16, 128)
    return dx, parts


@jit
def row_sums_kernel(X, PARTS, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Tiles of a block of columns that are num_programs apart."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        total += tl.load(X + row * width + column, mask=(row < rows) & (column < width), other=0.0)
    tl.store(PARTS + tl.program_id(1) * width + column, tl.sum(total, 0)[None, :], mask=column < width)


def row_sums(x):
    """Parts of the sum of x [T, C] over its rows, float32 [P, C]."""
    rows, width = x.shape
    columns = triton.cdiv(width, 128)
    programs = min(triton.cdiv(rows, 64), triton.cdiv(16 * multiprocessors(x.device), columns))
    parts = x.new_empty(programs, width, dtype=torch.float32)
    row_sums_kernel[(columns, programs)](x, parts, rows, width, 32, 128)
    return parts


@jit
def column_sums_kernel(
    A, B, C, D, OUT, rows_a, rows_b, rows_c, rows_d, a, b, c, d, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A block of columns of one of four matrices, whose widths are a to d."""
    block, at = tl.program_id(0), 0
    matrix, rows, width = A, rows_a, a
    if block >= tl.cdiv(a, BLOCK):
        block, at = block - tl.cdiv(a, BLOCK), a
        matrix, rows, width = B, rows_b, b
        if block >= tl.cdiv(b, BLOCK):
            block, at = block - tl.cdiv(b, BLOCK), a + b
            matrix, rows, width = C, rows_c, c
            if block >= tl.cdiv(c, BLOCK):
                block, at = block - tl.cdiv(c, BLOCK), a + b + c
                matrix, rows, width = D, rows_d, d
    column = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, rows, ROWS):
        total += tl.load(
            matrix + (first + row) * width + column, mask=(first + row < rows) & (column < width), other=0.0
        )
    tl.store(OUT + at + column, tl.sum(total, 0)[None, :], mask=column < width)


def column_sums(*matrices):
    """The column sums of four float32 matrices [P, C], each its own P and C, by one kernel."""
    widths = [matrix.shape[1] for matrix in matrices]
    out = matrices[0].new_empty(sum(widths))
    blocks = sum(triton.cdiv(width, 32) for width in widths)
    column_sums_kernel[(blocks,)](*matrices, out, *(len(matrix) for matrix in matrices), *widths, 256, 32, num_warps=8)
    return out.split(widths)
