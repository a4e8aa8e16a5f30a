"""A transformers question-answering network that takes packed batches, and the span loss."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from common.model.attention import padding_places
from common.model.finding import POSITIONS_AFTER_PADDING
from common.model.fused.fuse import fuse_layers


class SpanModel(nn.Module):
    """A transformers question-answering network that takes a PackedBatch.

    network: any AutoModelForQuestionAnswering. attention: "fused", "flash", "sdpa" or "padded" (the network's own).
    """

    def __init__(self, network, attention):
        super().__init__()
        self.network = network
        self.attention = attention
        self.half = None  # see compute_in
        self.compiled = False  # whether compile_layers found something to compile
        self.compilable = True  # False where Triton's kernels fail: the compiler makes such kernels too
        self.fallbacks = []  # sentences: what runs instead of what was asked for, and why
        self.token_ids = None  # of the last batch, see PackedBatch: rows of the embeddings with a gradient
        config = network.config
        self.position_offset = config.pad_token_id + 1 if config.model_type in POSITIONS_AFTER_PADDING else 0
        # distilbert has no token types, and RoBERTa-likes have a single one
        self.has_token_types = getattr(config, "type_vocab_size", 0) > 1 and config.model_type != "distilbert"

    def fall_back(self, attention, why):
        """Run on this backend instead of the chosen one."""
        self.fallbacks.append(f"attention {attention} instead of {self.attention}: {why}")
        self.attention = attention

    def forward(self, batch):
        """Start and end logits, float32 [T] each."""
        padded = self.attention == "padded"
        self.token_ids = None if padded else batch.token_ids  # others' code may use that table in other ways too
        run = self.forward_padded if padded else self.forward_packed
        start_logits, end_logits = run(batch)
        return start_logits.float().clone(), end_logits.float().clone()  # FSDP's hooks must not sit on a view

    def forward_packed(self, batch):
        """`packing` goes through transformers' code to each layer: to packed_attention, or to Fused."""
        if self.attention in ("fused", "flash"):
            packing = {"backend": self.attention, "cu_seqlens": batch.cu_seqlens, "max_length": batch.max_length}
        elif batch.cu_seqlens.is_cpu and not self.compiled:  # sizes that change would compile anew
            packing = {"backend": "windows", "sizes": batch.cu_seqlens.diff().tolist()}
        else:
            place, present = padding_places(batch.cu_seqlens, len(batch.input_ids), batch.longest)
            packing = {"backend": "sdpa", "place": place, "mask": present[:, None, None]}
        inputs = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None] + self.position_offset}
        if self.has_token_types:
            inputs["token_type_ids"] = batch.token_type_ids[None]
        output = self.network(**inputs, packing=packing)
        return output.start_logits[0], output.end_logits[0]

    def forward_padded(self, batch):
        place, present = padding_places(batch.cu_seqlens, len(batch.input_ids), batch.longest)

        def pad(packed, fill):
            return packed.new_full((present.numel(),), fill).index_copy(0, place, packed).view(present.shape)

        inputs = {"input_ids": pad(batch.input_ids, self.network.config.pad_token_id or 0), "attention_mask": present}
        if self.has_token_types:
            inputs["token_type_ids"] = pad(batch.token_type_ids, 0)
        with torch.autocast(batch.input_ids.device.type, self.half, enabled=self.half is not None):
            output = self.network(**inputs)
        return output.start_logits.flatten()[place], output.end_logits.flatten()[place]


def encoder_layers(model):
    """The transformer layers of a SpanModel: the unit that is compiled and sharded."""
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len, default=())
    return list(layers)


def use_attention(model, attention):
    """Let a SpanModel of packed windows run on this backend; "fused" falls back to "flash" if it cannot be fused."""
    model.attention = attention
    if attention == "fused":
        obstacle = fuse_layers(model.network.base_model.embeddings, encoder_layers(model))
        if obstacle:
            model.fall_back("flash", obstacle)


def count_parameters(model):
    """(all parameters, those outside the embeddings)."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    sizes = {id(p): p.numel() for p in model.parameters()}
    return sum(sizes.values()), sum(size for key, size in sizes.items() if key not in embeddings)


def flops_per_token(model, lengths):
    """Model FLOP of training one real token, forward and backward without recomputation: the mean over all tokens.

    6 per parameter outside the embeddings and 12 * layers * width * window length for attention (Kaplan et al. 2020).
    lengths: int [W], tokens in each window.
    """
    config = model.network.config
    layers = config.num_hidden_layers
    uses = layers / getattr(config, "num_hidden_groups", layers)  # of each weight: ALBERT's layers share theirs
    mean_length = float((lengths.astype(float) ** 2).sum() / lengths.sum())  # of the window that a token stands in
    return 6 * uses * count_parameters(model)[1] + 12 * layers * config.hidden_size * mean_length


def parameter_groups(model, weight_decay):
    """Parameters for the optimizer: matrices decay, biases and LayerNorm weights do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def pad_logits(logits, cu_seqlens, longest):
    """Packed logits [T] as [B, L], -inf where a window has no token."""
    place, present = padding_places(cu_seqlens, len(logits), longest)
    full = logits.new_full((present.numel(),), -math.inf)
    return full.index_copy(0, place, logits).view(present.shape)


def window_losses(start_logits, end_logits, batch):
    """The mean of start and end cross-entropy within each window, times its weight: float32 [B]."""
    begin = batch.cu_seqlens[:-1].long()
    start_loss = F.cross_entropy(
        pad_logits(start_logits, batch.cu_seqlens, batch.longest), batch.start - begin, reduction="none"
    )
    end_loss = F.cross_entropy(
        pad_logits(end_logits, batch.cu_seqlens, batch.longest), batch.end - begin, reduction="none"
    )
    return torch.where(batch.weight > 0, (start_loss + end_loss) / 2 * batch.weight, 0.0)


def span_loss(start_logits, end_logits, batch):
    """The sum of the window losses; divide by the windows of the global batch, not of this one.

    If it is not finite, neither is any gradient, so that every rank sees it in the gradient norm.
    """
    loss = window_losses(start_logits, end_logits, batch).sum()
    return loss * torch.where(loss.isfinite(), 1.0, math.nan)
