"""An iterator that also an event loop can wait for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_END: Any = object()


class BothIterator(Generic[T]):
    """An iterator for `for`, and for `async for` in an event loop."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[T]:
        return self._items

    def __next__(self) -> T:
        return next(self._items)

    async def __aiter__(self) -> AsyncIterator[T]:
        # asyncio takes as long to import as a command may take.
        from cloudtrain.support.awaiting import in_thread

        while (item := await in_thread(next, self._items, _END)) is not _END:
            yield item

    def close(self) -> None:
        """End the iteration."""
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
