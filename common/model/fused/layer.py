"""BERT's encoder layer over packed windows, forward and backward by hand.

`FusedLayer` is matrix products, and the kernels of common/model/fused/kernels.py between them. It uses what a compiler
cannot know. Biases are added, and their gradients summed, by kernels that hold the values anyway. Queries, keys and
values are one product, and their gradients another, which adds the residual's. Weight gradients leave their products in
fp32. benchmarks/NOTES.md has what each saves. The kernels are imported where they are used: they need Triton, which
comes with torch for CUDA alone.
"""

import torch
from torch import nn

from common.model.fused.gradients import WritesGradients, into_buffers, product

NAMES = (  # a layer's parameters, as BERT and its likes (RoBERTa, ELECTRA, …) name them
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)


class FusedLayer(torch.autograd.Function):
    """x [T, C] and a layer's weights and biases in the order of NAMES -> the layer's output [T, C].

    buffers: tensors for the gradients of the weights, or None. halves: see Halves.of.
    """

    @staticmethod
    def forward(ctx, x, heads, cu_seqlens, max_length, dropout, eps, seeds, halves, buffers, *weights):
        from common.model.fused import kernels

        wq, bq, wk, bk, wv, bv, wo, bo, norm1, shift1, wi, bi, wd, bd, norm2, shift2 = weights
        if halves is None:  # the weights have the type of x: fp32, or half as FSDP's, which it may free until backward
            wqkv, bqkv, kept = torch.cat([wq, wk, wv]), torch.cat([bq, bk, bv]), (wq, wk, wv)
        else:
            wqkv, bqkv, wo, wi, wd = halves
            kept = (wqkv,)
        qkv = torch.addmm(bqkv, x, wqkv.t())
        attended, lse = kernels.attention_forward(qkv, heads, cu_seqlens, max_length)
        middle, saved1 = kernels.add_norm(attended @ wo.t(), bo, x, norm1, shift1, eps, dropout, seeds, 0)
        up = middle @ wi.t()
        active = kernels.gelu(up, bi)
        out, saved2 = kernels.add_norm(active @ wd.t(), bd, middle, norm2, shift2, eps, dropout, seeds, 1)
        ctx.max_length, ctx.dropout, ctx.buffers = max_length, dropout, buffers
        ctx.save_for_backward(
            x, qkv, attended, lse, middle, up, active, *saved1, *saved2, wo, wi, wd, bi, norm1, norm2, cu_seqlens,
            seeds, *kept,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx, grad):
        from common.model.fused import kernels

        tensors = ctx.saved_tensors  # once: activation checkpointing computes them again each time
        x, qkv, attended, lse, middle, up, active, *saved = tensors[:13]
        wo, wi, wd, bi, norm1, norm2, cu_seqlens, seeds, *kept = tensors[13:]
        dropout, dtype = ctx.dropout, bi.dtype  # that of the parameters, and so of their gradients
        buffers = ctx.buffers or 16 * [None]  # in the order of the weights: 6 is of wo, 10 of wi, 12 of wd
        dout, dmiddle, parts2 = kernels.add_norm_backward(grad.contiguous(), saved[3:], norm2, dropout, seeds, 1)
        dup, parts_up = kernels.gelu_backward(dout @ wd, up, bi)
        dmiddle = dmiddle.addmm_(dup, wi)
        dattended, dx, parts1 = kernels.add_norm_backward(dmiddle, saved[:3], norm1, dropout, seeds, 0)
        dqkv = kernels.attention_backward(dattended @ wo, qkv, attended, lse, cu_seqlens, ctx.max_length)
        dx = dx.addmm_(dqkv, kept[0] if len(kept) == 1 else torch.cat(kept))
        # The weights' gradients last. Until then NCCL has sent those of the layer after this one: beside it these
        # products, which fill every multiprocessor just once, would take half as long again.
        dwd = product(dout, active, dtype, buffers[12])
        dwi = product(dup, middle, dtype, buffers[10])
        dwo = product(dattended, attended, dtype, buffers[6])
        dwq, dwk, dwv = product(dqkv, x, dtype).chunk(3)
        sums = [total.to(dtype) for total in kernels.column_sums(kernels.row_sums(dqkv), parts1, parts_up, parts2)]
        (dbq, dbk, dbv), (dnorm1, dshift1, dbo), (dnorm2, dshift2, dbd) = (sums[i].chunk(3) for i in (0, 1, 3))
        gradients = (
            dwq, dbq, dwk, dbk, dwv, dbv, dwo, dbo, dnorm1, dshift1, dwi, sums[2], dwd, dbd, dnorm2, dshift2,
        )  # fmt: skip
        return dx, *[None] * 8, *into_buffers(gradients, ctx.buffers)


class Halves:
    """Half-precision copies of the weights that enter the products of all fused layers, made by one kernel."""

    def __init__(self, layers):
        self.layers, self.copies = layers, {}

    def of(self, layer, dtype):
        """(wqkv, bqkv, wo, wi, wd) of a layer, None if its weights have this type; the first layer casts for all."""
        if layer.output.dense.weight.dtype == dtype:
            return None
        if layer is self.layers[0]:
            self.copies, copies, weights = {}, [], []
            for one in self.layers:
                query, key, value, wo, _, wi, wd, _ = one.parts()
                wqkv = query.weight.new_empty(3 * len(query.bias), query.weight.shape[1], dtype=dtype)
                bqkv = wqkv.new_empty(len(wqkv))
                rest = [torch.empty_like(part.weight, dtype=dtype) for part in (wo, wi, wd)]
                copies += [*wqkv.chunk(3), *bqkv.chunk(3), *rest]
                weights += [part.weight for part in (query, key, value)] + [part.bias for part in (query, key, value)]
                weights += [part.weight for part in (wo, wi, wd)]
                self.copies[one] = (wqkv, bqkv, *rest)
            with torch.no_grad():
                torch._foreach_copy_(copies, weights)
        return self.copies[layer]


class Fused(WritesGradients):
    """What the class of an encoder layer is mixed with by `fuse_layers`: the same parameters, another forward.

    It is called by transformers' encoder, which hands `packing` on from SpanModel.forward_packed.
    """

    def parts(self):
        """The layer's Linear and LayerNorm modules in the order of NAMES."""
        return [self.get_submodule(name) for name in NAMES]

    def weights(self):
        return [tensor for part in self.parts() for tensor in (part.weight, part.bias)]

    def forward(self, hidden_states, attention_mask=None, *unused, packing, **named):
        if attention_mask is not None:
            raise ValueError("a fused layer takes packed windows, and got a mask")
        weights = self.weights()
        x, cu_seqlens = hidden_states.flatten(0, 1), packing["cu_seqlens"]
        dropout = self.output.dropout.p if self.training else 0.0
        seeds = torch.randint(2**31, (2,), device=x.device, dtype=torch.int32) if dropout else cu_seqlens
        eps, heads = self.output.LayerNorm.eps, self.attention.self.num_attention_heads
        halves = self.halves.of(self, x.dtype)
        buffers = self.free_buffers(weights)
        out = FusedLayer.apply(
            x, heads, cu_seqlens, packing["max_length"], dropout, eps, seeds, halves, buffers, *weights
        )
        return out.view_as(hidden_states)


def can_fuse(layer):
    """Whether an encoder layer is BERT's: these parameters and no others, exact GELU, one dropout, narrow heads."""
    from transformers.activations import GELUActivation  # slow to import

    expected = {f"{name}.{kind}" for name in NAMES for kind in ("weight", "bias")}
    if {name for name, _ in layer.named_parameters()} != expected:
        return False
    attention, output = layer.attention, layer.output
    width = getattr(attention.self, "attention_head_size", 0)
    return (
        width in (16, 32, 64, 128)
        and isinstance(layer.intermediate.intermediate_act_fn, (nn.GELU, GELUActivation))
        and getattr(layer.intermediate.intermediate_act_fn, "approximate", "none") == "none"
        and attention.output.dropout.p == output.dropout.p
        and attention.output.LayerNorm.eps == output.LayerNorm.eps
    )
