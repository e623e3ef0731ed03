"""Peak memory of a rank."""

from __future__ import annotations

import resource
import sys

import torch

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of ru_maxrss. Source: getrusage(2) of macOS and of Linux."""


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: of its GPU, or of the host if it has none.

    For a GPU this is the memory that PyTorch's allocator has reserved, because that is the memory that runs out.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
