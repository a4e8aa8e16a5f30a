"""BERT's encoder layer over packed windows, forward and backward by hand, and its embeddings.

`FusedLayer` is the layer: matrix products, and the kernels of common/kernels.py between them. It uses what a compiler
cannot know: biases are added, and their gradients summed, by kernels that hold the values anyway; queries, keys and
values are one product, and their gradients another, which adds the residual's; weight gradients leave their products
in fp32. Nothing is to be compiled at the start but the kernels. benchmarks/NOTES.md has what each is worth. The rest of
this file puts it in place of transformers' layer, parameters and names unchanged. The kernels are imported where they
are used, since they need Triton, which comes with torch for CUDA alone.
"""

import importlib.util

import torch
from torch import nn

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


def product(a, b, dtype, out=None):
    """a.T @ b in `dtype`, written into `out` if there is one and the product can leave in its type.

    The sums of half-precision products are fp32 inside, and may leave as such. What does not begin at a multiple of 16
    bytes is left alone: cuBLAS would take a kernel half as fast. (DDP's first bucket begins with the head's bias, 8
    bytes.)
    """
    if out is not None and out.data_ptr() % 16:
        out = None
    if dtype == a.dtype:
        return torch.mm(a.t(), b, out=out)
    if a.is_cuda:
        return torch.mm(a.t(), b, out_dtype=dtype, out=out)
    return torch.mm(a.t(), b).to(dtype)


def into_buffers(gradients, buffers):
    """The gradients in the buffers, copied by one kernel where they are not there yet; as they are without buffers.

    What returns are new tensors of that memory: autograd makes a tensor the parameter's gradient as it is only if
    nobody else holds it.
    """
    if buffers is None:
        return gradients
    rest = [(buffer, one) for buffer, one in zip(buffers, gradients, strict=True) if one is not buffer]
    torch._foreach_copy_([buffer for buffer, _ in rest], [one for _, one in rest])
    return [buffer.detach() for buffer in buffers]


class FusedLayer(torch.autograd.Function):
    """x [T, C] and a layer's weights and biases in the order of NAMES -> the layer's output [T, C].

    buffers: tensors for the gradients of the weights, or None. halves: see Halves.of.
    """

    @staticmethod
    def forward(ctx, x, heads, cu_seqlens, max_length, dropout, eps, seeds, halves, buffers, *weights):
        from common import kernels

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
        from common import kernels

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


class FusedEmbedding(torch.autograd.Function):
    """Token ids, positions and types [T], and the weights of the embeddings -> [T, C] in `dtype`; buffers: as above."""

    @staticmethod
    def forward(ctx, ids, positions, types, eps, dropout, seed, padding, dtype, buffers, *tables):
        from common import kernels

        word, position, _, weight, _ = tables
        out, saved = kernels.embed(ids, positions, types, *tables, eps, dropout, seed, dtype)
        ctx.dropout, ctx.padding, ctx.rows, ctx.buffers = dropout, padding, (len(word), len(position)), buffers
        ctx.save_for_backward(ids, positions, types, weight, seed, *saved)
        return out

    @staticmethod
    def backward(ctx, grad):
        from common import kernels

        ids, positions, types, weight, seed, *saved = ctx.saved_tensors
        dsum, (dweight, dshift, *dkinds) = kernels.embed_backward(
            grad.contiguous(), saved, types, weight, ctx.dropout, seed
        )
        buffers = ctx.buffers or [dsum.new_empty(rows, dsum.shape[1]) for rows in ctx.rows]
        dword, dposition = (
            buffer.zero_().index_add_(0, index, dsum)  # by atomics, unless torch is to be deterministic
            for buffer, index in zip(buffers[:2], (ids, positions), strict=True)
        )
        if ctx.padding is not None:  # nn.Embedding does not learn that row
            dword[ctx.padding].zero_()
        gradients = [one.to(weight.dtype) for one in (dword, dposition, torch.stack(dkinds), dweight, dshift)]
        return *[None] * 9, *into_buffers(gradients, ctx.buffers)


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


class WritesGradients:
    """A module that can write the gradients of self.weights() into given tensors; see `keep_gradient_buffers`."""

    gradient_buffers = None

    def free_buffers(self, weights):
        """The tensors for this pass's gradients; None if there are gradients already, to which autograd will add."""
        if self.gradient_buffers is None or any(weight.grad is not None for weight in weights):
            return None
        return self.gradient_buffers


def keep_gradient_buffers(model):
    """Let the fused modules write gradients, from now on, into the tensors that hold them now.

    Call it after a backward pass of DistributedDataParallel with gradient_as_bucket_view: those tensors are its
    buckets, and it need not copy each gradient into them. Each forward pass must then be followed by its backward pass
    before the next one's, since both would write into the same tensors.
    """
    for module in model.modules():
        if isinstance(module, WritesGradients):
            gradients = [weight.grad for weight in module.weights()]
            module.gradient_buffers = None if any(one is None for one in gradients) else gradients


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


class FusedEmbeddings(WritesGradients):
    """What the class of BERT's embeddings is mixed with by `fuse_layers`."""

    def weights(self):
        tables = self.word_embeddings, self.position_embeddings, self.token_type_embeddings
        return [*(table.weight for table in tables), self.LayerNorm.weight, self.LayerNorm.bias]

    def forward(self, input_ids, token_type_ids=None, position_ids=None, **unused):
        if token_type_ids is None or position_ids is None:
            raise ValueError("fused embeddings take packed windows, with their types and positions")
        weights = self.weights()
        dropout = self.dropout.p if self.training else 0.0
        seed = torch.randint(2**31, (1,), device=input_ids.device, dtype=torch.int32) if dropout else input_ids
        out = FusedEmbedding.apply(
            input_ids.flatten(),
            position_ids.flatten(),
            token_type_ids.flatten(),
            self.LayerNorm.eps,
            dropout,
            seed,
            self.word_embeddings.padding_idx,
            getattr(self.LayerNorm, "output", weights[0].dtype),  # see compute_in
            self.free_buffers(weights),
            *weights,
        )
        return out.view(*input_ids.shape, -1)


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


def can_fuse_embeddings(embeddings):
    """Whether these are BERT's embeddings: of words, positions and two types, and a LayerNorm."""
    names = {name for name, _ in embeddings.named_parameters()}
    tables = {f"{name}_embeddings.weight" for name in ("word", "position", "token_type")}
    return (
        names == tables | {"LayerNorm.weight", "LayerNorm.bias"} and len(embeddings.token_type_embeddings.weight) == 2
    )


def fuse_layers(embeddings, layers):
    """Let encoder layers that are BERT's run fused; False, and nothing done, if one is not or Triton is absent.

    The embeddings too, if they are BERT's (RoBERTa's have one type).
    """
    triton = importlib.util.find_spec("triton") is not None and not torch.version.hip  # tuned for NVIDIA's cards
    if not triton or not layers or not all(map(can_fuse, layers)):
        return False
    halves = Halves(layers)
    for layer in layers:
        layer.halves = halves
        layer.__class__ = type(f"Fused{type(layer).__name__}", (Fused, type(layer)), {})
    if can_fuse_embeddings(embeddings):
        embeddings.__class__ = type(f"Fused{type(embeddings).__name__}", (FusedEmbeddings, type(embeddings)), {})
    return True
