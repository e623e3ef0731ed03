"""Calls in threads that do not block the end of the process.

The interpreter joins the threads of concurrent.futures at exit, so a request without a response would keep a rank
alive, at the price of its instance, until the client's timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def call_in_thread(name: str, act: Callable[..., T], *arguments: Any) -> Future[T]:
    """Call a function in a daemon thread of this name; return the future of its result."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(act(*arguments))
        except BaseException as error:  # noqa: BLE001 (the future raises it)
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future
