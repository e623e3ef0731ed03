"""The packages of the backends, by the names in `support.backend_facts`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from cloudtrain.errors import UserError
from cloudtrain.support.backend_facts import facts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cloudtrain.backends.base import Backend
    from cloudtrain.backends.context import BackendContext
    from cloudtrain.planning.targets import Target


class BackendPackage(Protocol):
    """The functions of a backend's package. They import what they need, so that a plan stays fast."""

    def make_target(self, context: BackendContext) -> Target:
        """Return what offline plans for this backend are made for."""
        ...

    def find_backends(self, context: BackendContext) -> Iterator[Backend]:
        """Yield the backends that are in use on this machine, such as one per folder of runs. Nothing is started."""
        ...

    def open_backend(self, context: BackendContext) -> Backend:
        """Return the backend for a submit; start what it needs on this machine."""
        ...


def backend_package(name: str) -> BackendPackage:
    """Return the package of a backend.

    Raises:
        UserError: There is no backend of this name, or its package cannot be imported.
    """
    package = facts_of(name).package
    try:
        return cast("BackendPackage", importlib.import_module(package))
    except ImportError as error:
        raise UserError(
            f"the backend {name} cannot be used: its package {package} cannot be imported: {error}",
            "install it again, or use another backend",
        ) from error
