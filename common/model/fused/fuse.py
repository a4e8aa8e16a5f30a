"""Putting the fused layers and embeddings in the place of transformers' own, with the same parameters, and back."""

import importlib.util

import torch

from common.model.fused.embeddings import FusedEmbeddings, can_fuse_embeddings
from common.model.fused.layer import Fused, Halves, can_fuse


def fuse_layers(embeddings, layers):
    """Let encoder layers that are BERT's run fused; returns "", or why nothing was done.

    The embeddings too, if they are BERT's (RoBERTa's have one type).
    """
    if importlib.util.find_spec("triton") is None or torch.version.hip:  # tuned for NVIDIA's cards
        return "Triton for CUDA is not installed"
    if not layers or not all(map(can_fuse, layers)):
        return "its layers are not BERT's"
    halves = Halves(layers)
    for layer in layers:
        layer.halves = halves
        layer.__class__ = type(f"Fused{type(layer).__name__}", (Fused, type(layer)), {})
    if can_fuse_embeddings(embeddings):
        embeddings.__class__ = type(f"Fused{type(embeddings).__name__}", (FusedEmbeddings, type(embeddings)), {})
    return ""


def unfuse_layers(model):
    """Give all fused modules of a model their own class back."""
    for module in model.modules():
        if isinstance(module, (Fused, FusedEmbeddings)):
            module.__class__ = type(module).__bases__[-1]


def fused_parts(model):
    """Which parts of a model run on our own kernels, a list of names."""
    parts = {"embeddings": FusedEmbeddings, "layers": Fused}
    return [name for name, kind in parts.items() if any(isinstance(module, kind) for module in model.modules())]
