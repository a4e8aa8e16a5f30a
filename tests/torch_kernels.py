"""The fused layer's kernels in plain torch: they stand in where there is no GPU, and the real ones must agree."""

import types

import torch
import torch.nn.functional as F


def differentiated(function, inputs, grad):
    """Gradients of `function` at `inputs`."""
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(function(*inputs), inputs, grad)


def attend(qkv, heads, cu_seqlens):
    parts = [part.unflatten(1, (heads, -1)).transpose(0, 1) for part in qkv.chunk(3, 1)]
    windows = [
        F.scaled_dot_product_attention(*(part[:, begin:end] for part in parts))
        for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
    ]
    return torch.cat(windows, 1).transpose(0, 1).flatten(1)


def kept(like, dropout, seed):
    generator = torch.Generator().manual_seed(int(seed))
    return torch.rand(like.shape, generator=generator) >= dropout


def dropped(x, dropout, seeds, which):
    return x * kept(x, dropout, seeds[which]) / (1 - dropout) if dropout else x


class Kernels(types.ModuleType):
    """The functions of common/model/fused/kernels.py. What each saves is what its own backward pass needs here."""

    @staticmethod
    def attention_forward(qkv, heads, cu_seqlens, max_length):
        return attend(qkv, heads, cu_seqlens), torch.empty(heads, len(qkv))

    @staticmethod
    def attention_backward(grad, qkv, out, lse, cu_seqlens, max_length):
        return differentiated(lambda x: attend(x, len(lse), cu_seqlens), [qkv], grad)[0]

    @staticmethod
    def add_norm(x, bias, residual, weight, shift, eps, dropout, seeds, which):
        total = dropped(x + bias.to(x.dtype), dropout, seeds, which) + residual
        out = F.layer_norm(total, weight.shape, weight.to(x.dtype), shift.to(x.dtype), eps)
        return out, (total, torch.full((1,), eps), torch.empty(0))

    @staticmethod
    def add_norm_backward(grad, saved, weight, dropout, seeds, which):
        total, eps, _ = saved
        norm = lambda total, weight, shift: F.layer_norm(total, weight.shape, weight, shift, float(eps))
        weight = weight.to(total.dtype)
        dresidual, dweight, dshift = differentiated(norm, [total, weight, torch.zeros_like(weight)], grad)
        dx = dropped(dresidual, dropout, seeds, which).clone()
        sums = torch.cat([dweight, dshift, dx.sum(0)]).float()
        return dx, dresidual, torch.stack([sums / 2, sums / 2])

    @staticmethod
    def gelu(x, bias):
        return F.gelu(x + bias.to(x.dtype))

    @staticmethod
    def gelu_backward(grad, x, bias):
        (dx,) = differentiated(F.gelu, [x + bias.to(x.dtype)], grad)
        return dx, dx.float().sum(0, keepdim=True)

    @staticmethod
    def row_sums(x):
        return x.float().sum(0, keepdim=True)

    @staticmethod
    def column_sums(*matrices):
        return [matrix.sum(0) for matrix in matrices]

    @staticmethod
    def embed(ids, positions, types, word, position, kind, weight, shift, eps, dropout, seed, dtype):
        total = word[ids] + position[positions] + kind[types]
        out = F.layer_norm(total, weight.shape, weight, shift, eps)
        return dropped(out, dropout, seed, 0).to(dtype), (total, torch.full((1,), eps), torch.empty(0))

    @staticmethod
    def embed_backward(grad, saved, types, weight, dropout, seed):
        total, eps, _ = saved
        grad = dropped(grad.float(), dropout, seed, 0)
        norm = lambda total, weight, shift: F.layer_norm(total, weight.shape, weight, shift, float(eps))
        dsum, dweight, dshift = differentiated(norm, [total, weight, torch.zeros_like(weight)], grad)
        return dsum, [dweight, dshift, *(dsum[types == one].sum(0) for one in (0, 1))]
