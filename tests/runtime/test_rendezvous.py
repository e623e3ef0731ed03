"""Ranks that come before the first one listens."""

import importlib
import inspect
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cloudtrain_runtime.launcher import rendezvous

RENDEZVOUS: Any = importlib.import_module("torch.distributed.rendezvous")
NAME = "_create_c10d_store"


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    """A port that is taken, and at which nobody listens yet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        yield found


def test_it_waits_for_who_listens_late(bound: socket.socket) -> None:
    host, port = bound.getsockname()
    assert not rendezvous.wait_for_listener(host, port, 0.01)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(rendezvous.wait_for_listener(host, port, 60)))
    waiting.start()
    bound.listen()
    waiting.join(60)
    assert found == [True]


def test_a_name_that_nobody_knows_is_waited_for_as_well() -> None:
    assert not rendezvous.wait_for_listener("nobody.invalid", 1, 0.01)


def test_each_rank_but_the_first_asks_before_it_connects(bound: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    host, port = bound.getsockname()
    listened: list[bool] = []

    def connect(hostname: str, port: int, rank: int, world_size: int) -> int:
        listened.append(rendezvous.wait_for_listener(hostname, port, 0.01))
        return world_size

    # torch's own has these names, or nothing would be connect_without_backoffed.
    assert list(inspect.signature(getattr(RENDEZVOUS, NAME)).parameters)[:3] == ["hostname", "port", "rank"]
    monkeypatch.setattr(RENDEZVOUS, NAME, connect)
    rendezvous.connect_without_backoff()
    assert getattr(RENDEZVOUS, NAME)(host, port, 0, 2) == 2
    later = threading.Timer(0.05, bound.listen)
    later.start()
    assert getattr(RENDEZVOUS, NAME)(host, port, 1, 2) == 2
    assert listened == [False, True]


def test_another_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*options: object) -> None: ...

    monkeypatch.setattr(RENDEZVOUS, NAME, other)
    rendezvous.connect_without_backoff()
    assert getattr(RENDEZVOUS, NAME) is other
