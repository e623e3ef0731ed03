"""Gloo in place of NCCL for ranks that share a GPU, which NCCL refuses ("Duplicate GPU detected").

Each Python process of the ranks calls `start`, which changes public functions of torch.distributed after their import.
Standard library only.
"""

from __future__ import annotations

from typing import Any

from cloudtrain_runtime.process.after_import import call_after_import, change_arguments


def start() -> None:
    """Let this process, when it imports torch.distributed, create process groups of Gloo where it asks for NCCL."""
    call_after_import("torch.distributed.distributed_c10d", use_gloo)


def use_gloo(distributed: Any) -> None:
    """Change the functions of a module that create and use process groups; other backends than NCCL stay."""
    for name in ("init_process_group", "new_group", "barrier"):
        # A build of torch without distributed lacks the functions.
        if hasattr(distributed, name):
            change_arguments(
                distributed,
                name,
                backend=gloo_for_nccl,
                # These are options of NCCL.
                device_id=_nothing,
                device_ids=_nothing,
                pg_options=_nothing,
            )


def gloo_for_nccl(backend: Any) -> Any:
    """Return "gloo" for NCCL, and for the default, which is NCCL for tensors on a GPU."""
    if backend is None or "nccl" in str(backend).lower():
        return "gloo"
    return backend


def _nothing(_: Any) -> None:
    return None
