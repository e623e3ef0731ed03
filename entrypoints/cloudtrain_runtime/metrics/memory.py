"""Memory that a rank has used at most."""

from __future__ import annotations

import resource
import sys

import torch

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of ru_maxrss. Source: getrusage(2) of macOS and of Linux."""


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has taken so far: of its GPU, or of the host where it has none.

    Of a GPU it is what PyTorch's allocator has reserved, which is what runs out.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
