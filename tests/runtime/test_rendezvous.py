"""The rendezvous of ranks that start before the store of rank 0 listens."""

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
"""The private function of torch that the launcher wraps. A test below checks that torch has it with this signature."""


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    """A socket that is bound to a port and does not listen yet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        yield found


def test_a_rank_waits_until_the_store_listens(bound: socket.socket) -> None:
    host, port = bound.getsockname()
    assert not rendezvous.wait_for_listener(host, port, 0.01)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(rendezvous.wait_for_listener(host, port, 60)))
    waiting.start()
    bound.listen()
    waiting.join(60)
    assert found == [True]


def test_an_unknown_host_name_counts_as_not_listening() -> None:
    assert not rendezvous.wait_for_listener("unknown.invalid", 1, 0.01)


def test_all_ranks_but_the_first_wait_before_connecting(bound: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    host, port = bound.getsockname()
    listened: list[bool] = []

    def connect(hostname: str, port: int, rank: int, world_size: int) -> int:
        listened.append(rendezvous.wait_for_listener(hostname, port, 0.01))
        return world_size

    # Otherwise connect_without_backoff would change nothing.
    assert list(inspect.signature(getattr(RENDEZVOUS, NAME)).parameters)[:3] == ["hostname", "port", "rank"]
    monkeypatch.setattr(RENDEZVOUS, NAME, connect)
    rendezvous.connect_without_backoff()
    assert getattr(RENDEZVOUS, NAME)(host, port, 0, 2) == 2
    later = threading.Timer(0.05, bound.listen)
    later.start()
    assert getattr(RENDEZVOUS, NAME)(host, port, 1, 2) == 2
    assert listened == [False, True]


def test_another_signature_of_torch_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*options: object) -> None: ...

    monkeypatch.setattr(RENDEZVOUS, NAME, other)
    rendezvous.connect_without_backoff()
    assert getattr(RENDEZVOUS, NAME) is other
