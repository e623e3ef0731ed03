"""The backends by name. A new backend is a package like these and a line here.

A backend's package has three functions: `make_target`, `find_backends` and `open_backend` (see `BackendPackage`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from cloudtrain.errors import UserError, did_you_mean
from cloudtrain.planning.plan import SAGEMAKER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cloudtrain.backends.base import Backend, BackendContext
    from cloudtrain.planning.targets import Target

BACKENDS = {
    "local": "cloudtrain.backends.local",
    "sandbox": "cloudtrain.backends.sandbox",
    "sagemaker": "cloudtrain.backends.sagemaker",
}
"""Package of each backend, in the order in which a run without a backend's name is looked up."""


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
        UserError: There is no backend of this name.
    """
    if name not in BACKENDS:
        raise UserError(f"there is no backend {name!r}", did_you_mean(name, list(BACKENDS)))
    return cast("BackendPackage", importlib.import_module(BACKENDS[name]))


def backend_option(name: str) -> str:
    """Return the option of commands for a backend, after a space; an empty text for SageMaker, which needs none."""
    return "" if name == SAGEMAKER else f" --{name}"
