"""The dashboard's server: the page, its data, and a stream of changes, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from cloudtrain.errors import CloudtrainError, MissingExtraError, UserError
from cloudtrain.features.dashboard.access import SECURITY_HEADERS, AccessControl
from cloudtrain.features.dashboard.feed import RunFeed
from cloudtrain.features.dashboard.page import SCRIPTS, STATIC, STYLES, live_page
from cloudtrain.features.dashboard.run_record import POINTS, RunRecord, run_document
from cloudtrain.runs.comparison import Comparison
from cloudtrain.runs.status import status_texts
from cloudtrain.support.features import offer
from cloudtrain.support.installation import install_command
from cloudtrain_runtime.contract.strict_json import dump_json

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

DEFAULT_PORT: Final = 8787
_PUSH_SECONDS: Final = 1.0
"""Pause between two messages to a page. A chart that changes more often shows no more."""

_FIRST_PUSH_SECONDS: Final = 0.25
_FIRST_PUSHES: Final = 8
"""Messages in short succession while a new page waits for logs to be read."""

_LOG_WAIT_SECONDS: Final = 2.0
_FIRST_LIST_SECONDS: Final = 30.0
_IDLE_PUSHES: Final = 30
_MOST_POINTS: Final = 20_000


class Dashboard:
    """A dashboard server.

    Args:
        port: The port on loopback; 0 for a free one, None for 8787 or, if that is in use, a free one.
        allowed_hosts: Host names under which a proxy serves it.
        root_path: Prefix of the paths that a proxy adds and does not remove, such as `/proxy/absolute/8787`.

    Raises:
        MissingExtraError: Starlette or uvicorn is not installed.
        UserError: The port is in use.
    """

    def __init__(
        self, port: int | None = None, *, allowed_hosts: Iterable[str] = (), root_path: str = ""
    ) -> None:
        try:
            import starlette  # noqa: F401 (only whether it is there)
            import uvicorn  # noqa: F401
        except ImportError:
            raise MissingExtraError(
                "the dashboard needs Starlette and uvicorn", install_command("dashboard")
            ) from None
        self._socket = _listen(port)
        self._token = secrets.token_urlsafe(24)
        self._access = AccessControl(self._token, allowed_hosts)
        self._root_path = "/" + root_path.strip("/") if root_path.strip("/") else ""
        self._feed = RunFeed()

    @property
    def url(self) -> str:
        """Its address, with the token."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}{self._root_path}/#token={self._token}"

    def serve(self) -> None:
        """Answer requests until Ctrl-C."""
        import uvicorn

        config = uvicorn.Config(
            self.application(),
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[self._socket])

    def application(self) -> Any:
        """Return the ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/", self._page),
            *(Route(f"/{name}", self._asset) for name in (*SCRIPTS, *STYLES)),
            Route("/api/runs", self._runs),
            Route("/api/events", self._events),
            Route("/api/compare", self._compare),
            Route("/api/sweeps", self._sweeps),
            Route("/api/sweep/{name}", self._sweep),
            Route("/api/run/{reference}", self._run),
            Route("/api/run/{reference}/curves", self._curves),
            Route("/api/run/{reference}/{action:str}", self._act, methods=["POST"]),
        ]
        return _Guard(Starlette(routes=routes), self._access, self._root_path)

    async def _page(self, _: Request) -> Response:
        from starlette.responses import HTMLResponse

        return HTMLResponse(live_page())

    async def _asset(self, request: Request) -> Response:
        from starlette.responses import FileResponse

        return FileResponse(STATIC / request.url.path.removeprefix("/"))

    async def _runs(self, _: Request) -> Response:
        # Starts the first list.
        self._feed.changes(0)
        is_complete = await asyncio.to_thread(self._feed.has_listed.wait, _FIRST_LIST_SECONDS)
        version, rows, __ = self._feed.changes(0)
        unreachable = list(self._feed.unreachable.values())
        return _json(
            {
                "version": version,
                "runs": rows,
                "is_complete": is_complete,
                "unreachable": unreachable,
            }
        )

    async def _run(self, request: Request) -> Response:
        def read() -> dict[str, Any]:
            # Curves, events and log lines come from the stream of changes.
            followed = self._feed.follow(request.path_params["reference"])
            document = run_document(followed.run, RunRecord(), followed.status, followed.plan)
            return {**document, "ledger": followed.ledger()}

        return await _answer(read)

    async def _curves(self, request: Request) -> Response:
        def read() -> dict[str, Any]:
            query = request.query_params
            first = _number(query.get("from"), 0.0)
            last = _number(query.get("to"), float("inf"))
            points = int(min(_MOST_POINTS, max(10, _number(query.get("points"), POINTS))))
            record = self._feed.follow(request.path_params["reference"]).record
            names = query.getlist("metric") or None
            return {"curves": record.curves(names, first=first, last=last, points=points)}

        return await _answer(read)

    async def _compare(self, request: Request) -> Response:
        def read() -> dict[str, Any]:
            followed = [self._feed.follow(name) for name in request.query_params.getlist("run")]
            for each in followed:
                each.wait_read(_LOG_WAIT_SECONDS)
            return Comparison.of(
                [each.run.reference for each in followed],
                [each.plan for each in followed],
                [each.record.history for each in followed],
            ).to_page()

        return await _answer(read)

    async def _sweeps(self, _: Request) -> Response:
        return await _answer(lambda: {"sweeps": self._feed.sweeps()})

    async def _sweep(self, request: Request) -> Response:
        return await _answer(lambda: offer("sweep_page")(request.path_params["name"]))

    async def _act(self, request: Request) -> Response:
        reference = request.path_params["reference"]
        action = request.path_params["action"]

        def act() -> dict[str, Any]:
            if action == "stop":
                self._feed.client.stop(reference)
                return {"message": f"stopping {reference}", "run": reference}
            if action == "resume":
                run = self._feed.client.resume(reference)
                return {"message": f"resumed as {run.reference}", "run": run.reference}
            raise UserError(f"there is no action {action!r}", "stop or resume")

        return await _answer(act)

    async def _events(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        stream = self._changes(
            request.query_params.getlist("run"),
            int(_number(request.query_params.get("version"), 0)),
        )
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _changes(self, references: list[str], version: int) -> AsyncIterator[str]:
        """Yield server-sent events: changed rows of the list, and what is new in the runs that the page shows."""
        cursors = {name: _Cursor() for name in references}
        pauses = itertools.chain(
            [_FIRST_PUSH_SECONDS] * _FIRST_PUSHES, itertools.repeat(_PUSH_SECONDS)
        )
        idle = 0
        was_listed = False
        while True:
            is_listed = self._feed.has_listed.is_set()
            version, rows, deleted = self._feed.changes(version)
            content: dict[str, Any] = {}
            if rows or deleted or is_listed != was_listed:
                was_listed = is_listed
                content = {
                    "version": version,
                    "rows": rows,
                    "deleted": deleted,
                    "is_listed": is_listed,
                }
                content["unreachable"] = list(self._feed.unreachable.values())
            runs = [
                await asyncio.to_thread(self._news, name, cursor)
                for name, cursor in cursors.items()
            ]
            if any(runs):
                content["runs"] = [each for each in runs if each]
            idle = 0 if content else idle + 1
            if content:
                yield f"data: {dump_json(content)}\n\n"
            elif idle % _IDLE_PUSHES == 1:
                yield ": alive\n\n"
            await asyncio.sleep(next(pauses))

    def _news(self, reference: str, cursor: _Cursor) -> dict[str, Any] | None:
        """Return what is new in a run since the last call with this cursor, or None."""
        try:
            followed = self._feed.follow(reference)
        except CloudtrainError as error:
            text = error.for_terminal()
            is_known = cursor.state == text
            cursor.state = text
            return None if is_known else {"reference": reference, "error": text}
        record = followed.record
        appended, replaced = record.new_values(cursor.sent)
        lines = record.lines_after(cursor.line)
        events = record.events_after(cursor.event)
        state = (followed.status, followed.error, followed.is_live)
        if not (appended or replaced or lines or events or state != cursor.state):
            return None
        cursor.line = lines[-1]["number"] if lines else cursor.line
        cursor.event = events[-1]["number"] if events else cursor.event
        cursor.state = state
        return {
            "reference": reference,
            "status": followed.status.to_json(),
            "texts": status_texts(followed.status, time.time()),
            "words": record.words(followed.status, followed.plan),
            "events": events,
            "analysis": record.analysis,
            "ledger": followed.ledger(),
            "append": appended,
            "replace": replaced,
            "lines": lines,
            "error": followed.error,
            "is_reading": followed.is_live,
        }


@dataclass
class _Cursor:
    """What of a run has been sent to a page."""

    sent: dict[str, tuple[int, int]] = field(default_factory=dict)
    line: int = 0
    event: int = 0
    state: Any = None


class _Guard:
    """ASGI application that rejects requests, removes the proxy's prefix and adds the headers of every response."""

    def __init__(self, application: Starlette, access: AccessControl, root_path: str) -> None:
        self._application = application
        self._access = access
        self._root_path = root_path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import JSONResponse

        if scope["type"] != "http":
            return
        if self._root_path and scope["path"].startswith(f"{self._root_path}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root_path)}
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }

        async def send_secured(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [
                    (name.lower().encode(), value.encode())
                    for name, value in SECURITY_HEADERS.items()
                ]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        reason = self._access.rejection_reason(
            headers, needs_token=scope["path"].startswith("/api/")
        )
        if reason:
            await JSONResponse({"error": reason}, status_code=403)(scope, receive, send_secured)
        else:
            await self._application(scope, receive, send_secured)


def _listen(port: int | None) -> socket.socket:
    """Return a socket that listens on loopback.

    Raises:
        UserError: the port is in use.
    """
    for each in (DEFAULT_PORT, 0) if port is None else (port,):
        # asyncio sends small answers at once only where the socket names its protocol.
        listener = socket.socket(proto=socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", each))
            # From now on connections wait for the server.
            listener.listen()
        except OSError as error:
            listener.close()
            if port is not None:
                raise UserError(
                    f"port {port} cannot be used: {error.strerror}",
                    "use another: --port 0 finds a free one",
                ) from None
        else:
            return listener
    raise UserError("no free port on 127.0.0.1", "choose one: --port N")


def _number(text: str | None, default: float) -> float:
    try:
        return default if text is None else float(text)
    except ValueError:
        return default


def _json(content: Any, status_code: int = 200) -> Response:
    from starlette.responses import Response

    return Response(dump_json(content), status_code, media_type="application/json")


async def _answer(read: Any) -> Response:
    """Return what a function returns, called in a thread; an error as JSON with message and hint."""
    try:
        return _json(await asyncio.to_thread(read))
    except CloudtrainError as error:
        return _json(
            {"error": error.message, "hint": error.hint},
            404 if isinstance(error, UserError) else 502,
        )
