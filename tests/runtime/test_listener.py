"""Ranks that connect before the first one listens, and the port on which it will listen."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from cloudtrain_runtime.process.process_group import wait_for_listener
from cloudtrain_runtime.process.reserved_port import reserve_master_port


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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems would refuse the second socket")
@pytest.mark.parametrize("has_libuv", [True, False])
def test_a_reserved_port_is_for_the_store_of_rank_0(bound: socket.socket, has_libuv: bool) -> None:
    _, port = bound.getsockname()
    bound.close()
    reserve_master_port({"RANK": "0", "MASTER_PORT": str(port)})
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    store = f"TCPStore('127.0.0.1', {port}, 1, is_master=True, use_libuv={has_libuv})"
    subprocess.run(
        [sys.executable, "-c", f"import torch.distributed as dist; dist.{store}"], check=True
    )


def test_only_rank_0_reserves_a_port(bound: socket.socket) -> None:
    _, port = bound.getsockname()
    bound.close()
    reserve_master_port({"RANK": "1", "MASTER_PORT": str(port)})
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    "variables", [{}, {"MASTER_PORT": "x"}, {"MASTER_PORT": "99999"}, {"MASTER_PORT": "1"}]
)
def test_a_port_that_cannot_be_reserved_is_left_to_torch(variables: dict[str, str]) -> None:
    reserve_master_port({"RANK": "0", **variables})
