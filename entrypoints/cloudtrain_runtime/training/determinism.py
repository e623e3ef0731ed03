"""Deterministic algorithms: the same bits in every run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, MutableMapping

from cloudtrain_runtime.errors import JobError

_TORCH_ERROR = re.compile(r"(?P<operation>\S+) does not have a deterministic implementation")


def configure_cublas(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the cuBLAS workspace. Call this before CUDA is initialised, because cuBLAS reads it when it is loaded."""
    # With a fixed workspace, cuBLAS keeps its order of summation when several streams are in use.
    # Source: cuBLAS documentation, "Results reproducibility", 2026-11.
    environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def require_deterministic_algorithms() -> None:
    """Require deterministic algorithms of torch in this process; torch raises where it has none."""
    import torch

    configure_cublas()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def explain_nondeterminism() -> Iterator[None]:
    """Replace torch's error about a nondeterministic operation by one that says what to do.

    Raises:
        JobError: the block used an operation without a deterministic implementation.
    """
    try:
        yield
    except RuntimeError as error:
        found = _TORCH_ERROR.search(str(error))
        if found is None:
            raise
        operation = found["operation"]
        raise JobError(
            f"train.deterministic: {operation} has no deterministic form on this device: replace it in the model or "
            "the loss, or set train.deterministic: false"
        ) from error
