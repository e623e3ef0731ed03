"""Runs on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cloudtrain.backends.base import Backend
    from cloudtrain.backends.context import BackendContext
    from cloudtrain.planning.targets import Target


def make_target(context: BackendContext) -> Target:
    """Return this machine as the target of a plan.

    Raises:
        UserError: The plan is to have a stand-in for CUDA, and this machine has CUDA.
    """
    from cloudtrain.backends.container.machine import this_machine
    from cloudtrain.backends.local.target import LocalTarget

    options = {"installs": context.installs, "cuda_on_cpu": _uses_cuda_on_cpu(context)}
    return LocalTarget(context.load_settings(), context.home, this_machine(), **options)


def open_backend(context: BackendContext) -> Backend:
    """Return the local backend.

    Raises:
        UserError: The runs are to have a stand-in for CUDA, and this machine has CUDA.
    """
    from cloudtrain.backends.local.backend import LocalBackend

    options = {"installs": context.installs, "cuda_on_cpu": _uses_cuda_on_cpu(context)}
    return LocalBackend(context.home, context.load_settings, steps=context.steps, **options)


def _uses_cuda_on_cpu(context: BackendContext) -> bool:
    if context.cuda_on_cpu:
        from cloudtrain.backends.container.machine import visible_gpus
        from cloudtrain.errors import UserError

        if gpus := len(visible_gpus()):
            plural = "" if gpus == 1 else "s"
            message = f"--cuda-on-cpu is not needed: this machine has CUDA with {gpus} GPU{plural}"
            raise UserError(
                message,
                "leave it out; to hide the GPUs, set CUDA_VISIBLE_DEVICES to an empty value",
            )
    return context.cuda_on_cpu


def find_backends(context: BackendContext) -> Iterator[Backend]:
    """Yield a local backend for each folder of local runs."""
    from cloudtrain.backends.local.backend import LocalBackend

    for home in context.homes:
        yield LocalBackend(home, context.load_settings, steps=context.steps)
