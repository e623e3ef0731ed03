"""A thread pool whose threads do not block the end of the process.

The interpreter joins the threads of concurrent.futures at exit, so a request without a response would keep a rank
alive, at the price of its instance, until the client's timeout.
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
    """Daemon threads that run tasks in order of submission. They are started on demand."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._begun: list[threading.Thread] = []

    def submit(self, act: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a function in a thread; return the future of its result."""
        future: Future[T] = Future()
        self._tasks.put((future, act, arguments))
        if len(self._begun) < self._most:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._begun.append(thread)
            thread.start()
        return future

    def close(self) -> None:
        """Cancel tasks that have not started, wait for the others, and end the threads."""
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
            except BaseException as error:  # noqa: BLE001 (the future raises it)
                future.set_exception(error)
            else:
                future.set_result(result)
            # Release the memory of the arguments before the next task arrives.
            del task, future, act, arguments
