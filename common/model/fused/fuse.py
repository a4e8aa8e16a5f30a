"""Putting the fused layers and embeddings in the place of transformers' own, with the same parameters."""

import importlib.util

import torch

from common.model.fused.embeddings import FusedEmbeddings, can_fuse_embeddings
from common.model.fused.layer import Fused, Halves, can_fuse


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
