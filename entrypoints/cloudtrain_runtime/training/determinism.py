"""Only algorithms that give the same bits each time."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, MutableMapping

from cloudtrain_runtime.errors import JobError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REFUSAL = re.compile(r"(?P<operation>\S+) does not have a deterministic implementation")


def configure_cublas(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what cuBLAS reads when it is loaded, so before the device is touched."""
    # With a fixed workspace it takes no other order of sums when several streams are in use.
    # Source: cuBLAS documentation, "Results reproducibility", 2026-11.
    environ.setdefault(_WORKSPACE, ":4096:8")


def require_deterministic_algorithms() -> None:
    """Have torch take deterministic algorithms in this process, and raise where there is none."""
    import torch

    configure_cublas()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def explain_nondeterminism() -> Iterator[None]:
    """Say which operation has no deterministic form, in place of torch's own error.

    Raises:
        JobError: it was used in this block.
    """
    try:
        yield
    except RuntimeError as error:
        found = _REFUSAL.search(str(error))
        if found is None:
            raise
        operation = found["operation"]
        raise JobError(
            f"train.deterministic: {operation} has no deterministic form on this device: replace it in the model or "
            "the loss, or set train.deterministic: false"
        ) from error
