"""Ends of processes where the interpreter has no descriptors of processes."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Pipe
from typing import Final

import pytest

from cloudtrain.backends.container.process_tree import wait_for_end
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.launcher.fork_server import ForkServer
from cloudtrain_runtime.launcher.rank_processes import RankProcesses, signal_group

SLEEP: Final = [sys.executable, "-c", "import time; time.sleep(600)"]


class Ending:
    """The process of a rank that ends with exit code 1 while it is waited for."""

    def __init__(self, pid: int, events: list[tuple[str, int]]) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self._events = events

    def join(self, seconds: float) -> None:
        """Note that it was waited for."""
        del seconds
        self.exit_code = 1
        self._events.append(("joined", self.pid))


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_lost_server_ends_its_workers(
    has_descriptors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_descriptors:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    ours, theirs = Pipe()
    server = ForkServer(ours)
    with subprocess.Popen(SLEEP, start_new_session=True) as worker:
        theirs.send_bytes(dump_json([worker.pid, None]).encode())
        server.receive()
        theirs.close()
        server.receive()
        assert server.exit_codes == {worker.pid: 255}
        assert worker.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_supervisor_waits_for_its_hosts(
    has_descriptors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_descriptors:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    with subprocess.Popen(SLEEP) as host:
        started = time.monotonic()
        wait_for_end([host], 0.2)
        assert time.monotonic() - started > 0.1
        host.kill()


def test_a_worker_without_its_group_is_signalled() -> None:
    with subprocess.Popen(SLEEP) as worker:
        signal_group(worker.pid, signal.SIGKILL)
        assert worker.wait(60) == -signal.SIGKILL


def test_the_group_of_a_rank_is_killed_when_its_end_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not after the other ranks' ends: another process may have its id by then."""
    events: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: events.append((number.name, pid)))
    processes = RankProcesses(0.0)
    for rank in (1, 2):
        processes.add(rank, Ending(rank, events))
    processes.end(signal.SIGTERM, 1.0)
    assert events == [
        ("SIGTERM", 1),
        ("SIGTERM", 2),
        ("joined", 1),
        ("SIGKILL", 1),
        ("joined", 2),
        ("SIGKILL", 2),
    ]
