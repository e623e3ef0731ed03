"""The Ray Serve application of a model's package, which `deployment.py` in the package creates for AWS's image."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ray import serve

from cloudtrain_runtime.contract.serving_config import SERVING_FILE, ServingConfig
from cloudtrain_runtime.serving.http_requests import RequestHandler

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.requests import Request
    from starlette.responses import Response

NAME = "model"
_MOST_ONGOING = 1000
"""Requests that a replica has at a time, most of them waiting. Slow ones must not keep others, and /ping, outside."""


class ModelServer:
    """One replica: a process with the model.

    Args:
        folder: The model's package.
    """

    def __init__(self, folder: str) -> None:
        from cloudtrain_runtime.serving.model_service import ModelService

        # Ray's own requests, such as those for the replica's health, need the event loop while the model computes.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._handler = RequestHandler(ModelService(Path(folder), thread), is_local=False)

    async def __call__(self, request: Request) -> Response:
        """Answer one request: GET /ping, POST /invocations."""
        return await self._handler(request)


def build(folder: Path) -> Application:
    """Return the application of a model's package, with the replicas and GPUs of its configuration."""
    config = ServingConfig.from_json((folder / SERVING_FILE).read_text(encoding="utf-8"))
    deployment = serve.deployment(
        name=NAME,
        num_replicas=config.replicas,
        max_ongoing_requests=_MOST_ONGOING,
        ray_actor_options={"num_cpus": 0, "num_gpus": config.gpus},
    )(ModelServer)
    return deployment.bind(str(folder))
