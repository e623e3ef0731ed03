"""A bound on the memory that the requests of a replica take together.

A small request can have a large content: 100 KB of an image can be 33 million pixels.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from cloudtrain_runtime.serving.payloads import RequestError

MOST_CONTENT_BYTES: Final = 2**30
"""Memory for the content of all requests. One that needs more is read alone."""
MOST_BODY_BYTES: Final = 2**28
"""Memory for the bodies of all requests while they arrive, and of all answers while they are sent."""
WAIT_SECONDS: Final = 60.0
"""Longest wait for memory, which is the time that SageMaker gives an invocation."""
BODY_SECONDS: Final = 30.0
"""Longest time in which a body arrives."""


class RequestMemory:
    """Counts the memory that the requests of one event loop hold."""

    def __init__(self) -> None:
        self._bodies = self._contents = self._queued = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Condition()

    @contextlib.contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Give a function that counts the bytes of a body as they arrive; they are free afterwards.

        The function raises a RequestError where the bodies of all requests are too large together.
        """
        size = 0

        def count(more: int) -> None:
            nonlocal size
            if self._bodies + more > MOST_BODY_BYTES:
                raise RequestError(503, "the server has too many requests: try again later")
            size += more
            self._bodies += more

        try:
            yield count
        finally:
            self._bodies -= size

    @contextlib.contextmanager
    def answer(self, size: int) -> Iterator[None]:
        """Hold the memory of an answer until its client has read it, beside the bodies that arrive.

        Args:
            size: Its bytes. One that is larger than all may be is sent alone.

        Raises:
            RequestError: it does not fit.
        """
        if self._bodies and self._bodies + size > MOST_BODY_BYTES:
            raise RequestError(
                503, "the server has too many answers that nobody reads: try again later"
            )
        self._bodies += size
        try:
            yield
        finally:
            self._bodies -= size

    @contextlib.asynccontextmanager
    async def content(self, size: int) -> AsyncIterator[None]:
        """Wait, in the order of arrival, until the content of a request fits beside that of the others; hold it.

        Args:
            size: Bytes that the content needs at most.

        Raises:
            RequestError: it did not fit in time.
        """
        # Most requests find room, and nobody who waits for it.
        if self._queued or not self._has_room(size):
            await self._wait_for_room(size)
        self._contents += size
        try:
            yield
        finally:
            self._contents -= size  # first, because a request can be cancelled while it waits below
            if self._queued:
                async with self._freed:
                    self._freed.notify_all()

    def _has_room(self, size: int) -> bool:
        return not self._contents or self._contents + size <= MOST_CONTENT_BYTES

    async def _wait_for_room(self, size: int) -> None:
        self._queued += 1
        try:
            async with asyncio.timeout(WAIT_SECONDS), self._turn, self._freed:
                await self._freed.wait_for(lambda: self._has_room(size))
        except TimeoutError:
            raise RequestError(503, "the server has too many requests: try again later") from None
        finally:
            self._queued -= 1
