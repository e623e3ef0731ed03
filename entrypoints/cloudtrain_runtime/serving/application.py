"""The Ray Serve application of a model's package, which `deployment.py` in the package creates."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve

from cloudtrain_runtime.contract.serving_config import (
    MAX_REQUEST_BYTES,
    SERVING_FILE,
    ServingConfig,
)
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.serving.payloads import JSON, RequestError, needed_bytes
from cloudtrain_runtime.serving.request_memory import BODY_SECONDS, RequestMemory

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.requests import Request
    from starlette.responses import Response

NAME = "model"
LOOPBACK_VARIABLE = "CLOUDTRAIN_SERVES_LOOPBACK"
"""Set where the server belongs to a user of this machine, and not to SageMaker."""
_LOOPBACK_NAMES = ("127.0.0.1", "localhost")
_MOST_ONGOING = 1000
"""Requests that a replica has at a time, most of them waiting. Slow ones must not keep others, and /ping, outside."""
_PATHS = ("/", "/invocations")
"""AWS's adapter sends the requests for /invocations to /."""


class ModelServer:
    """One replica: a process with the model.

    Args:
        folder: The model's package.
    """

    def __init__(self, folder: str) -> None:
        from cloudtrain_runtime.serving.predictor import Predictor, load_folder

        config = load_folder(Path(folder))
        self._predictor = Predictor.from_folder(Path(folder), config)
        self._max_batch = config.max_batch
        self._is_local = LOOPBACK_VARIABLE in os.environ
        self._memory = RequestMemory()
        self._work = set[asyncio.Task[tuple[bytes, str]]]()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._batched.set_max_batch_size(config.max_batch)
        self._batched.set_batch_wait_timeout_s(config.batch_wait_seconds)

    async def __call__(self, request: Request) -> Response:
        """Answer one request: GET /ping, POST /invocations."""
        from starlette.responses import Response

        try:
            body, kind = await self._answer(request)
        except RequestError as error:
            content = dump_json({"error": error.message})
            return Response(content, status_code=error.status, media_type=JSON)
        except Exception:  # noqa: BLE001 (a bug of the Task must not end the replica)
            traceback.print_exc(file=sys.stderr)
            content = dump_json({"error": "the Task failed; the server's log has the reason"})
            return Response(content, status_code=500, media_type=JSON)
        return Response(body, media_type=kind)

    async def _answer(self, request: Request) -> tuple[bytes, str]:
        if self._is_local:
            _refuse_web_pages(request)
        path = request.url.path.rstrip("/") or "/"
        if path == "/ping":
            _require_method(request, "GET", "HEAD")
            return b"", JSON
        if path not in _PATHS:
            raise RequestError(404, f"there is no {path[:100]}: use GET /ping or POST /invocations")
        _require_method(request, "POST")
        kind, accept = (request.headers.get(name, "") for name in ("content-type", "accept"))
        with contextlib.ExitStack() as held:
            count = held.enter_context(self._memory.body())
            body = await _read_body(request, count)
            # A client that leaves cancels its request, and threads go on: the memory is theirs until they end.
            work = asyncio.create_task(self._predict(kind, accept, body, held.pop_all()))
        self._work.add(work)
        work.add_done_callback(self._forget)
        try:
            return await asyncio.shield(work)
        finally:
            del work  # its error holds this frame, which would hold it

    def _forget(self, work: asyncio.Task[tuple[bytes, str]]) -> None:
        self._work.discard(work)
        if not work.cancelled():
            work.exception()  # of a request that was cancelled nobody else asks for it

    async def _predict(
        self, kind: str, accept: str, body: bytes, held: contextlib.ExitStack
    ) -> tuple[bytes, str]:
        loop = asyncio.get_running_loop()
        with held:
            size = await loop.run_in_executor(None, needed_bytes, kind, body)
            async with self._memory.content(size):
                return await self._answer_content(kind, accept, body)

    async def _answer_content(self, kind: str, accept: str, body: bytes) -> tuple[bytes, str]:
        loop = asyncio.get_running_loop()
        inputs = await loop.run_in_executor(None, self._predictor.read, kind, body)
        outputs = await self._batched(inputs)
        # An error keeps this frame, and with it the inputs, until the next garbage collection.
        del inputs
        if isinstance(outputs, RequestError):
            raise RequestError(outputs.status, outputs.message)
        return await loop.run_in_executor(None, self._predictor.write, outputs, accept)

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.0)  # type: ignore[untyped-decorator]
    async def _batched(self, inputs: list[Any]) -> list[Any]:
        """Return the outputs or the error of each of the waiting requests."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, self._predictor.predict, inputs, self._max_batch
        )


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


def _refuse_web_pages(request: Request) -> None:
    """Refuse requests of web pages: other origins, and names that lead here by DNS rebinding."""
    if "origin" in request.headers or request.url.hostname not in _LOOPBACK_NAMES:
        raise RequestError(403, "this server answers programs of this machine only, not web pages")


def _require_method(request: Request, *methods: str) -> None:
    if request.method not in methods:
        raise RequestError(
            405, f"{request.url.path[:100]} takes {methods[0]}, not {request.method}"
        )


async def _read_body(request: Request, count: Callable[[int], None]) -> bytes:
    """Return a request's body, of which at most the limit is kept.

    Args:
        request: The request.
        count: Called with the size of each part.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                count(len(part))
                size += len(part)
                if size > MAX_REQUEST_BYTES:
                    raise RequestError(413, f"the request has more than {MAX_REQUEST_BYTES} bytes")
                parts.append(part)
    except TimeoutError:
        raise RequestError(
            408, f"the content did not arrive in {BODY_SECONDS:.0f} seconds"
        ) from None
    return b"".join(parts)
