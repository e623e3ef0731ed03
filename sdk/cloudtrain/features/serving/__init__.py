"""Serving of trained models: on this machine, and by SageMaker endpoints.

`package` makes the folder that AWS's Ray Serve image runs, of a run's code and weights. `served_run` serves it here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.support.lazy_names import import_lazily, modules_by_name

if TYPE_CHECKING:  # for type checkers and editors; the same names as in `_NAMES`
    from cloudtrain.features.serving.deployment import Deployment as Deployment
    from cloudtrain.features.serving.endpoint_request import EndpointOptions as EndpointOptions
    from cloudtrain.features.serving.endpoints import Endpoint as Endpoint
    from cloudtrain.features.serving.package import ServingOptions as ServingOptions
    from cloudtrain.features.serving.served_run import Server as Server

_NAMES = {
    "features.serving.deployment": "Deployment",
    "features.serving.endpoint_request": "EndpointOptions",
    "features.serving.endpoints": "Endpoint",
    "features.serving.package": "ServingOptions",
    "features.serving.served_run": "Server",
}
"""The public names by the module that defines them."""

_MODULE_OF = modules_by_name(_NAMES)

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 (a list of strings, but no literal)
__getattr__ = import_lazily(__name__, _MODULE_OF)
