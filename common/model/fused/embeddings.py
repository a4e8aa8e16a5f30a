"""BERT's embeddings with their LayerNorm by our own kernels, forward and backward."""

import torch

from common.model.fused.gradients import WritesGradients, into_buffers


class FusedEmbedding(torch.autograd.Function):
    """Token ids, positions and types [T], and the weights of the embeddings -> [T, C] in `dtype`.

    buffers: tensors for the gradients of the weights, or None.
    """

    @staticmethod
    def forward(ctx, ids, positions, types, eps, dropout, seed, padding, dtype, buffers, *tables):
        from common.model.fused import kernels

        word, position, _, weight, _ = tables
        out, saved = kernels.embed(ids, positions, types, *tables, eps, dropout, seed, dtype)
        ctx.dropout, ctx.padding, ctx.rows, ctx.buffers = dropout, padding, (len(word), len(position)), buffers
        ctx.save_for_backward(ids, positions, types, weight, seed, *saved)
        return out

    @staticmethod
    def backward(ctx, grad):
        from common.model.fused import kernels

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


def can_fuse_embeddings(embeddings):
    """Whether these are BERT's embeddings: of words, positions and two types, and a LayerNorm."""
    names = {name for name, _ in embeddings.named_parameters()}
    tables = {f"{name}_embeddings.weight" for name in ("word", "position", "token_type")}
    return (
        names == tables | {"LayerNorm.weight", "LayerNorm.bias"} and len(embeddings.token_type_embeddings.weight) == 2
    )
