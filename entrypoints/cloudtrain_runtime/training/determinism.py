"""Deterministic algorithms: the same bits in every run."""

from __future__ import annotations

import os


def configure_cublas() -> None:
    """Set the cuBLAS workspace. Call this before CUDA is initialised, because cuBLAS reads it when it is loaded."""
    # With a fixed workspace, cuBLAS keeps its order of summation when several streams are in use.
    # Source: cuBLAS documentation, "Results reproducibility", 2026-11.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def require_deterministic_algorithms() -> None:
    """Require deterministic algorithms of torch in this process; torch raises where it has none."""
    import torch

    configure_cublas()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
