"""Runs on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cloudtrain.backends.base import Backend, BackendContext
    from cloudtrain.planning.targets import Target


def make_target(context: BackendContext) -> Target:
    """Return this machine as the target of a plan."""
    from cloudtrain.backends.container.machine import this_machine
    from cloudtrain.planning.targets import LocalTarget

    return LocalTarget(context.load_settings(), context.home, this_machine(), installs=context.installs)


def open_backend(context: BackendContext) -> Backend:
    """Return the local backend, or the one whose runs use an environment with their requirements."""
    if context.installs:
        from cloudtrain.backends.local.environments import InstallingBackend

        return InstallingBackend(context.home, context.load_settings)
    from cloudtrain.backends.local.backend import LocalBackend

    return LocalBackend(context.home, context.load_settings)


def find_backends(context: BackendContext) -> Iterator[Backend]:
    """Yield a local backend for each folder of local runs."""
    from cloudtrain.backends.local.backend import LocalBackend

    for home in context.homes:
        yield LocalBackend(home, context.load_settings)
