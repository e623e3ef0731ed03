"""Threads that a process does not wait for when it ends.

Those of concurrent.futures are joined then, so a request that is never answered would keep a rank, and what it costs,
for as long as the client waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class DaemonThreadPool:
    """A few threads that do what they are given, in order; begun when they are needed.

    Args:
        most: How many at most.
        name: Of each.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._begun: list[threading.Thread] = []

    def submit(self, act: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a thread call it; return what it will return."""
        future: Future[T] = Future()
        self._tasks.put((future, act, arguments))
        if len(self._begun) < self._most:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._begun.append(thread)
            thread.start()
        return future

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, and end the threads."""
        while not self._tasks.empty():
            task = self._tasks.get()
            if task is not None:
                task[0].cancel()
        for _ in self._begun:
            self._tasks.put(None)
        for thread in self._begun:
            thread.join()
        self._begun.clear()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, act, arguments = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = act(*arguments)
            except BaseException as error:  # noqa: BLE001 (whoever asks for the result has it)
                future.set_exception(error)
            else:
                future.set_result(result)
            del task, future, act, arguments  # a block of memory must not stay until the next one comes
