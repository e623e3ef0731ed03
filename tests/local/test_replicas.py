"""The processes with a served model: batches, several replicas, their death, and the end of the server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.jobs import until
from support.serving import JSON, Answer, Content, send_all, sender, write_package

from cloudtrain.backends.container.machine import free_port
from cloudtrain.backends.container.model_server import LocalServer
from cloudtrain.errors import UserError
from cloudtrain_runtime.contract.serving_config import ServingConfig

pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

SOURCE = """
import os
import subprocess
import time
from pathlib import Path
import torch
from cloudtrain_runtime import Task

HELD, CALLS = Path("held"), Path("calls")

class Model(torch.nn.Module):
    def forward(self, x):
        with CALLS.open("a") as out:
            out.write(f"{os.getpid()} {len(x)}\\n")
        if (x < -1).any() and os.fork() == 0:
            os.setsid()
            time.sleep(3)
            os._exit(0)
        if (x < 0).any():
            os._exit(7)
        if (x == 99).any():
            subprocess.Popen(["sleep", "600"])
        while (x == 99).any() and HELD.exists():
            time.sleep(0.01)
        return 2 * x

class Twice(Task):
    def model(self): return Model()
    def datasets(self): return {}
    def loss(self, model, batch): return model(batch).sum()
"""
HOLD, KILL, KILL_PARENT = 99, -1, -2


class Served:
    """A server of the model above, whose answers to `HOLD` can be held up."""

    def __init__(self, server: LocalServer, code: Path, log: Path) -> None:
        self.server = server
        self.code = code
        self.log = log
        self.clients = ThreadPoolExecutor(32)

    def ask(self, value: int) -> Answer:
        return sender(self.server.url)(content(value))

    def start(self, value: int) -> Future[Answer]:
        return self.clients.submit(self.ask, value)

    def hold(self) -> Future[Answer]:
        """Start a request that the model computes until `release`."""
        (self.code / "held").touch()
        before = len(self.calls())
        found = self.start(HOLD)
        until(lambda: len(self.calls()) > before)
        return found

    def release(self) -> None:
        (self.code / "held").unlink()

    def calls(self) -> list[tuple[int, int]]:
        """Process and number of samples of each call of the model."""
        path = self.code / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(each.split()[0]), int(each.split()[1])) for each in lines]

    def replicas(self) -> list[int]:
        return [each.pid for each in psutil.Process(self.server.process.pid).children()]

    def arrived(self) -> int:
        """Number of connections that the server has accepted."""
        found = psutil.Process(self.server.process.pid).net_connections("tcp")
        return sum(each.status == psutil.CONN_ESTABLISHED for each in found)


def content(value: int) -> Content:
    return Content(JSON, json.dumps([[value, 1]]).encode())


def twice(value: int) -> Answer:
    return 200, json.dumps({"outputs": [[2.0 * value, 2.0]]}).encode()


Serve = Callable[..., contextlib.AbstractContextManager[Served]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    @contextlib.contextmanager
    def serve(**options: Any) -> Iterator[Served]:
        config = ServingConfig("run", "served:Twice", **options)
        package = write_package(tmp_path / "package", SOURCE, config)
        with LocalServer(package, tmp_path / "server.log") as server:
            server.wait_until_ready()
            found = Served(server, package / "code", tmp_path / "server.log")
            yield found
            found.clients.shutdown()

    return serve


def test_requests_that_wait_for_the_model_form_batches(serve: Serve) -> None:
    with serve(max_batch=4) as served:
        assert served.ask(1) == twice(1)
        assert served.calls()[-1][1] == 1, "a lone request waits for no other"
        held = served.hold()
        before = len(served.calls())
        answers = [served.start(value) for value in range(2, 12)]
        until(lambda: served.arrived() == 11)
        served.release()
        assert held.result() == twice(HOLD)
        assert [each.result() for each in answers] == [twice(value) for value in range(2, 12)]
        sizes = [size for _, size in served.calls()[before:]]
        assert max(sizes) > 1
        assert max(sizes) <= 4


def test_requests_go_to_the_replica_that_is_free(serve: Serve) -> None:
    with serve(replicas=2) as served:
        held = served.hold()
        busy = served.calls()[-1][0]
        answers = [served.ask(value) for value in range(5)]
        assert answers == [twice(value) for value in range(5)]
        assert not held.done()
        assert {process for process, _ in served.calls()[1:]} == set(served.replicas()) - {busy}
        served.release()
        assert held.result() == twice(HOLD)


def test_the_other_replica_answers_while_one_is_loaded_again(serve: Serve) -> None:
    with serve(replicas=2) as served:
        held = served.hold()
        before = served.replicas()
        killed = served.ask(KILL)
        assert killed[0] == 500
        assert not held.done()
        served.release()
        assert held.result() == twice(HOLD)
        until(lambda: len(served.replicas()) == 2 and served.replicas() != before)
        answers = send_all(sender(served.server.url), [content(value) for value in range(20)])
        assert answers == [twice(value) for value in range(20)]


def test_a_model_process_that_is_killed_is_started_again(serve: Serve) -> None:
    with serve() as served:
        held = served.hold()
        os.kill(served.replicas()[0], signal.SIGKILL)
        status, body = held.result()
        assert status == 500
        assert json.loads(body) == {
            "error": "the model's process has ended; the server's log has the reason"
        }
        served.release()
        # It waits until the model is loaded again.
        assert served.ask(3) == twice(3)
        log = served.log.read_text()
        assert "a process with the model has ended with exit code -9: starting it again" in log
        assert log.count(" is loaded\n") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="another process's limits are of Linux")
def test_a_server_short_of_descriptors_recovers(serve: Serve) -> None:
    with serve() as served:
        # Then it has imported what it needs.
        assert served.ask(1) == twice(1)
        server = psutil.Process(served.server.process.pid)
        before = server.rlimit(psutil.RLIMIT_NOFILE)
        server.rlimit(psutil.RLIMIT_NOFILE, (3, before[1]))
        os.kill(served.replicas()[0], signal.SIGKILL)
        until(lambda: "cannot start a process with the model: " in served.log.read_text())
        server.rlimit(psutil.RLIMIT_NOFILE, before)
        assert served.ask(3) == twice(3)


def test_a_fault_in_keeping_a_replica_ends_the_server(tmp_path: Path) -> None:
    """Nobody reads what the server says about a replica that has ended, so to say it is an error."""
    package = write_package(
        tmp_path / "package", SOURCE, ServingConfig("run", "served:Twice", replicas=2)
    )
    argv = [sys.executable, "-m", "cloudtrain_runtime.serving.server", str(package), "--port"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [*argv, str(free_port())],
            cwd=package,
            env={**os.environ, "PYTHONPATH": str(package)},
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert server.stdout is not None
    assert b"url" in server.stdout.readline()
    server.stdout.close()
    replicas = psutil.Process(server.pid).children()
    replicas[0].kill()
    assert server.wait(300) == 1
    assert "error: [Errno 32] Broken pipe" in (tmp_path / "log").read_text()
    assert not [each for each in replicas if each.is_running()]


def test_no_request_goes_to_a_process_that_has_ended(serve: Serve) -> None:
    """A process that it has started holds its channel open, for which the server waits a second."""
    with serve(replicas=2) as served:
        before = set(served.replicas())
        killed = served.start(KILL_PARENT)
        until(lambda: before - set(served.replicas()))
        answers = send_all(sender(served.server.url), [content(value) for value in range(20)])
        assert answers == [twice(value) for value in range(20)]
        assert killed.result()[0] == 500


def test_a_stop_answers_the_requests_that_have_begun(serve: Serve) -> None:
    with serve() as served:
        held = served.hold()
        processes = served.replicas()
        stopping = threading.Thread(target=served.server.stop)
        stopping.start()

        def refuses() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", served.server.port)) != 0

        until(refuses)
        assert not held.done()
        served.release()
        assert held.result() == twice(HOLD)
        stopping.join()
        assert served.server.process.returncode == 0
        assert not [each for each in processes if psutil.pid_exists(each)]


def test_replicas_end_with_a_server_that_is_killed(serve: Serve) -> None:
    """One computes, and has started a process."""
    with serve(replicas=2) as served:
        held = served.hold()
        server = psutil.Process(served.server.process.pid)
        started = server.children(recursive=True)
        assert len(started) == 3
        server.kill()
        psutil.wait_procs(started, timeout=300)
        assert not [each for each in started if each.is_running()]
        with pytest.raises(ConnectionError):
            held.result()


def test_clients_that_leave_disturb_nobody(serve: Serve) -> None:
    with serve() as served:
        address = ("127.0.0.1", served.server.port)
        held = served.hold()
        head = f"POST /invocations HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {JSON}\r\n"
        for body, length in (("[[5, ", 100), ("[[5, 1]]", 8)):
            with socket.create_connection(address, timeout=60) as client:
                client.sendall(f"{head}Content-Length: {length}\r\n\r\n{body}".encode())
        until(lambda: served.arrived() == 1)
        served.release()
        assert held.result() == twice(HOLD)
        assert served.ask(4) == twice(4)
        assert "Traceback" not in served.log.read_text()


def test_large_contents_are_read_beside_small_ones(serve: Serve) -> None:
    """Contents of more than a few kilobytes are read in threads."""
    with serve() as served:
        rows = [[value, 1] for value in range(20_000)]
        large = Content(JSON, json.dumps(rows).encode())
        small = [content(value) for value in range(10)]
        answers = send_all(sender(served.server.url), [large, *small, large])
        wanted = [[2.0 * value, 2.0] for value in range(20_000)]
        assert json.loads(answers[0][1])["outputs"] == wanted
        assert json.loads(answers[-1][1])["outputs"] == wanted
        assert answers[1:-1] == [twice(value) for value in range(10)]


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("raise ValueError('a mistake of the module')", "a mistake of the module"),
        ("import os\nos._exit(9)", "a process with the model has ended with exit code 9"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_an_error(
    tmp_path: Path, source: str, wanted: str
) -> None:
    config = ServingConfig("run", "served:Twice", replicas=2)
    package = write_package(tmp_path / "package", source, config)
    with (
        LocalServer(package, tmp_path / "server.log") as server,
        pytest.raises(UserError, match="the model cannot be served") as refused,
    ):
        server.wait_until_ready()
    assert wanted in str(refused.value)
    assert server.process.returncode == 1
