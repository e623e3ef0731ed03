"""Connections of clients to the server on this machine: each step has a time limit, so that none stays for nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from cloudtrain_runtime.serving.request_memory import BODY_SECONDS


class Connection(H11Protocol):
    """A connection that is closed if the head of a request, or a client's reading of an answer, takes too long.

    uvicorn limits only the time between two requests. A request's content has its limit where it is read.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_limit: asyncio.TimerHandle | None = None
        self._read_limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the limits."""
        super().connection_lost(exc)
        for limit in (self._head_limit, self._read_limit):
            if limit is not None:
                limit.cancel()

    def handle_events(self) -> None:
        """Take what has arrived, which may be the rest of a head."""
        super().handle_events()
        if self._head_limit is not None and self._has_request():
            self._head_limit.cancel()
            self._head_limit = None

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if not self._has_request():
            self._limit_head()

    def pause_writing(self) -> None:
        """Wait until the client has read more of an answer."""
        super().pause_writing()
        self._read_limit = self.loop.call_later(BODY_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on with an answer."""
        super().resume_writing()
        if self._read_limit is not None:
            self._read_limit.cancel()

    def _has_request(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _limit_head(self) -> None:
        self._head_limit = self.loop.call_later(BODY_SECONDS, self.transport.abort)
