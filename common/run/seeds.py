"""Seeds, and warnings about choices that are made on purpose."""

import os
import warnings

import torch


def quiet_warnings():
    """Silence the warnings of libraries about choices that are made on purpose here."""
    warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated.*")  # its successor is too new
    warnings.filterwarnings("ignore", message=".*TensorFloat32 tensor cores.*")  # --precision decides
    warnings.filterwarnings("ignore", message=".*capturable=True.*without CUDA graph.*")  # the first steps do
    warnings.filterwarnings("ignore", message=".*Profiler clears events.*")


def seed_everything(seed, deterministic=False):
    """Seed the new head's weights; with `deterministic`, refuse kernels whose sums depend on timing."""
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def seed_dropout(seed, step, rank):
    """Reseed dropout, so that it depends on where the run is and not on how it got there: a resumed run is exact.

    The micro-batches of a step draw on from here, one after the other.
    """
    torch.manual_seed(hash((seed, step, rank)) & 0x7FFFFFFFFFFFFFFF)
