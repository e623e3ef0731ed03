"""A line of the log for each request, and the id by which a client finds it."""

from __future__ import annotations

import re
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from starlette.requests import Request

from cloudtrain_runtime.contract.redaction import redact

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

_ID_HEADER: Final = "x-request-id"
_ID: Final = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
_LONGEST_PATH: Final = 100
_FAULT: Final = 500
"""Status in the log of a request that was cancelled, or whose response could not be sent."""


def log_requests(handler: Callable[[Request], Awaitable[Response]]) -> ASGIApp:
    """Return the ASGI application of a handler, which also logs each request.

    Args:
        handler: Returns the response to a request.
    """

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        request = Request(scope, receive)
        given = request.headers.get(_ID_HEADER, "")
        name = given if _ID.fullmatch(given) else str(uuid.uuid4())
        status = _FAULT
        try:
            response = await handler(request)
            response.headers[_ID_HEADER] = name
            await response(scope, receive, send)
            status = response.status_code
        finally:
            milliseconds = (time.perf_counter() - began) * 1000
            # As it was sent, so without line ends, which would begin another line of the log.
            path = scope["raw_path"][:_LONGEST_PATH].decode("ascii", "replace")
            what = f"{request.method} {path} {status} {milliseconds:.1f}ms"
            sys.stderr.write(redact(f"INFO {_now()} {name} -- {what}\n"))

    return application


def _now() -> str:
    now = time.time()
    text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return f"{text},{int(now % 1 * 1000):03d}"
