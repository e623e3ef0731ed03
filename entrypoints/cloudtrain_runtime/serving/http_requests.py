"""The HTTP contract of a served model: GET /ping and POST /invocations."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cloudtrain_runtime.contract.host_header import host_name
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.contract.serving_config import MAX_REQUEST_BYTES
from cloudtrain_runtime.serving.payloads import Answer, RequestError, error_answer
from cloudtrain_runtime.serving.request_memory import BODY_SECONDS, RequestMemory

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost")
_PATHS: Final = ("/", "/invocations")
"""AWS's adapter sends the requests for /invocations to /."""
_CLIENT_LEFT: Final = 499
"""Status of a request whose client has left. Nobody gets it."""


class Model(Protocol):
    """What answers the contents of requests: the model of this process, or replicas in others."""

    async def answer(self, kind: str, accept: str, body: bytes) -> Answer:
        """Return the answer to a content, by its Content-Type and the types that the client accepts."""

    async def ping(self) -> Answer:
        """Return 200 when the model can answer."""


class RequestHandler:
    """Checks the requests of a server, and gives their contents to the model.

    Args:
        model: Answers a content.
        is_local: Whether the server belongs to a user of this machine. Web pages are refused there.
    """

    def __init__(self, model: Model, *, is_local: bool) -> None:
        self._model = model
        self._is_local = is_local
        self._memory = RequestMemory()
        self._work = set[asyncio.Task[Answer]]()

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        try:
            answer = await self._answer(request)
        except RequestError as error:
            answer = error_answer(error.status, error.message)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_LEFT)
        except Exception:  # noqa: BLE001 (a fault of this server, which its clients see as one)
            sys.stderr.write(redact(traceback.format_exc()))
            answer = error_answer(500, "the server has a fault; its log has the reason")
        if self._is_local:
            return _CountedResponse(answer, self._memory)
        return Response(answer.body, status_code=answer.status, media_type=answer.kind)

    async def _answer(self, request: Request) -> Answer:
        if self._is_local:
            _refuse_web_pages(request)
        path = str(request.scope["path"]).rstrip("/") or "/"
        if path == "/ping":
            _require_method(request, "GET", "HEAD")
            return await self._model.ping()
        if path not in _PATHS:
            raise RequestError(404, f"there is no {path[:100]}: use GET /ping or POST /invocations")
        _require_method(request, "POST")
        kind, accept = (request.headers.get(name, "") for name in ("content-type", "accept"))
        with contextlib.ExitStack() as held:
            count = held.enter_context(self._memory.body())
            body = await _read_body(request, count)
            # Where a client that leaves cancels its request, threads go on: the memory is theirs until they end.
            work = asyncio.create_task(self._ask(kind, accept, body, held.pop_all()))
        self._work.add(work)
        work.add_done_callback(self._forget)
        return await asyncio.shield(work)

    def _forget(self, work: asyncio.Task[Answer]) -> None:
        self._work.discard(work)
        if not work.cancelled():
            # Of a request that was cancelled nobody else asks for it.
            work.exception()

    async def _ask(self, kind: str, accept: str, body: bytes, held: contextlib.ExitStack) -> Answer:
        with held:
            return await self._model.answer(kind, accept, body)


class _CountedResponse(Response):
    """A response whose content counts as memory of the server until the client has read it."""

    def __init__(self, answer: Answer, memory: RequestMemory) -> None:
        super().__init__(answer.body, status_code=answer.status, media_type=answer.kind)
        self._memory = memory

    async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
        """Send it, or an error where clients that do not read hold too much."""
        try:
            with self._memory.answer(len(self.body)):
                await self._send(send)
        except RequestError as error:
            refusal = error_answer(error.status, error.message)
            self.status_code, self.body = refusal.status, refusal.body
            self.headers["content-type"] = refusal.kind
            self.headers["content-length"] = str(len(refusal.body))
            await self._send(send)

    async def _send(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        # The server takes this last part when the client has read most of the content.
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _refuse_web_pages(request: Request) -> None:
    """Refuse requests of web pages: other origins, and names that lead here by DNS rebinding."""
    host = host_name(request.headers.get("host", ""))
    if "origin" in request.headers or host not in _LOOPBACK_NAMES:
        raise RequestError(403, "this server answers programs of this machine only, not web pages")


def _require_method(request: Request, *methods: str) -> None:
    if request.method not in methods:
        path = request.scope["path"][:100]
        raise RequestError(405, f"{path} takes {methods[0]}, not {request.method}")


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
