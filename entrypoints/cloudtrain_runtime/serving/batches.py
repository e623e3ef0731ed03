"""Batches of requests: what arrives while the model computes forms the next batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, NamedTuple, TypeVar

Input = TypeVar("Input")
Output = TypeVar("Output")


class _Waiting(NamedTuple, Generic[Input, Output]):
    item: Input
    result: asyncio.Future[Output]
    deadline: float

    def succeed(self, result: Output) -> None:
        # A request that was cancelled takes no result.
        if not self.result.done():
            self.result.set_result(result)

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class Batches(Generic[Input, Output]):
    """Calls a function with the items that wait together: one call at a time, in the order of arrival.

    Args:
        compute: Returns a result for each of several items.
        most: Most items of a call.
        wait_seconds: How long an item waits for others although nothing is computed.
        thread: Where it is computed; None for the event loop's own thread, which takes nothing else meanwhile.
    """

    def __init__(
        self,
        compute: Callable[[list[Input]], Sequence[Output]],
        most: int,
        wait_seconds: float,
        thread: Executor | None,
    ) -> None:
        self._compute = compute
        self._most = most
        self._wait_seconds = wait_seconds
        self._waiting = deque[_Waiting[Input, Output]]()
        self._is_full = asyncio.Event()
        self._thread = thread
        self._work: asyncio.Task[None] | None = None

    async def submit(self, item: Input) -> Output:
        """Return the result of an item.

        Raises:
            Exception: what the function has raised for its call.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Output] = loop.create_future()
        self._waiting.append(_Waiting(item, result, loop.time() + self._wait_seconds))
        if len(self._waiting) >= self._most:
            self._is_full.set()
        if self._work is None:
            self._work = asyncio.create_task(self._compute_all())
        del item  # the batch has it, and lets go of it first
        return await result

    async def _compute_all(self) -> None:
        try:
            while self._waiting:
                await self._wait_for_more()
                await self._compute_batch()
                if self._waiting:
                    # Those are answered before the next ones are computed, also in the same thread.
                    await asyncio.sleep(0)
        finally:
            self._work = None

    async def _wait_for_more(self) -> None:
        """Wait until a call would be full, or the first item has waited long enough."""
        if not self._wait_seconds:
            return
        try:
            async with asyncio.timeout_at(self._waiting[0].deadline):
                await self._is_full.wait()
        except TimeoutError:
            return

    async def _compute_batch(self) -> None:
        size = min(self._most, len(self._waiting))
        batch = [self._waiting.popleft() for _ in range(size)]
        if len(self._waiting) < self._most:
            self._is_full.clear()
        items = [each.item for each in batch]
        try:
            results = await self._call(items)
        except Exception as error:  # noqa: BLE001 (each request reports it)
            # The error has this frame: if the frame had the requests, too, their memory would wait for garbage collection.
            while batch:
                batch.pop().fail(error)
            return
        for each, result in zip(batch, results, strict=True):
            each.succeed(result)

    async def _call(self, items: list[Input]) -> Sequence[Output]:
        if self._thread is None:
            return self._compute(items)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._compute, items)
