"""Attention over packed windows without padding between them, by one of several backends.

`flash` is torch's variable-length attention (CUDA, bf16 or fp16). `sdpa` runs on any device in any precision and pads
inside attention only; on the CPU it takes one window after the other. transformers calls `packed_attention`.
"""

import importlib.util

import torch
import torch.nn.functional as F


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
