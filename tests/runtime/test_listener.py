"""Ranks that connect before the first one listens."""

import socket
import threading
from collections.abc import Iterator

import pytest

from cloudtrain_runtime.process.process_group import wait_for_listener


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    """A port that is taken, and at which no process listens yet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        yield found


def test_late_listener_is_found(bound: socket.socket) -> None:
    host, port = bound.getsockname()
    assert not wait_for_listener(host, port, 0.01)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(wait_for_listener(host, port, 60)))
    waiting.start()
    bound.listen()
    waiting.join(60)
    assert found == [True]


def test_unknown_host_times_out() -> None:
    assert not wait_for_listener("unknown.invalid", 1, 0.01)
