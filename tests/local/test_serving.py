"""Models of runs behind real servers on loopback."""

from __future__ import annotations

import contextlib
import io
import json
import select
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.jobs import command, until
from support.serving import (
    JSON,
    Content,
    copied_digits,
    digit_requests,
    direct_answers,
    environment,
    malformed_requests,
    send_all,
    sender,
    train_digits,
)

pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

REQUESTS = 1000
MALFORMED = 200
SLOW = 80


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with copied_digits() as folder:
        yield folder


@pytest.fixture(scope="module")
def run(home: Path) -> str:
    """A finished run of the example on this machine."""
    return train_digits(home)


@contextlib.contextmanager
def served(home: Path, run: str, log: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `cloudtrain serve`; yield its address and its process."""
    started = subprocess.Popen(
        [str(command()), "serve", run, "--json", "--log", str(home / log)],
        env=environment(home),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    lines = iter(started.stdout.readline, "}\n")
    text = "".join([*lines, "}"])
    assert text != "}", (home / log).read_text(encoding="utf-8")[-3000:]
    yield json.loads(text)["url"], started
    if started.poll() is None:
        started.terminate()
        started.wait(300)
    started.stdout.close()


@pytest.fixture(scope="module")
def server(home: Path, run: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`cloudtrain serve` with its address."""
    with served(home, run, "server.log") as found:
        yield found


@pytest.fixture(scope="module")
def expected(home: Path, run: str) -> list[Any]:
    return direct_answers(home, run, digit_requests(REQUESTS))


def test_requests_get_the_answers_of_a_direct_call(
    expected: list[Any], server: tuple[str, Any]
) -> None:
    contents = digit_requests(REQUESTS)
    answers = send_all(sender(server[0]), contents)
    assert {status for status, _ in answers} == {200}
    for (_, body), wanted in zip(answers, expected, strict=True):
        outputs = np.asarray(json.loads(body)["outputs"], np.float32)
        np.testing.assert_allclose(outputs, wanted, rtol=1e-4, atol=1e-5)
        assert outputs.argmax(1).tolist() == wanted.argmax(1).tolist()


def test_malformed_requests_get_4xx_and_no_crash(home: Path, server: tuple[str, Any]) -> None:
    answers = send_all(sender(server[0]), malformed_requests(MALFORMED))
    assert all(400 <= status < 500 and json.loads(body)["error"] for status, body in answers)
    assert sender(server[0])(Content(JSON, bytes(7 * 2**20)))[0] == 413
    with urllib.request.urlopen(f"{server[0]}/ping") as ping:  # noqa: S310 (loopback)
        assert ping.status == 200
    log = (home / "server.log").read_text(encoding="utf-8")
    assert log.count(" is loaded\n") == 1, "a replica was started again"


def test_slow_requests_keep_nobody_outside(server: tuple[str, Any]) -> None:
    """Each sends one byte of its content, and no more; after the time for a body each gets 408."""
    address = ("127.0.0.1", int(server[0].rpartition(":")[2]))
    head = f"POST /invocations HTTP/1.1\r\nHost: 127.0.0.1:{address[1]}\r\n"
    head += f"Content-Type: {JSON}\r\nContent-Length: 100\r\n\r\n["
    slow = [socket.create_connection(address, timeout=120) for _ in range(SLOW)]
    for each in slow:
        each.sendall(head.encode())
    answers = send_all(sender(server[0]), digit_requests(20))
    assert {status for status, _ in answers} == {200}
    readable, _, _ = select.select(slow, [], [], 0)
    assert not readable, "the others waited until the slow ones had ended"
    with urllib.request.urlopen(f"{server[0]}/ping") as ping:  # noqa: S310 (loopback)
        assert ping.status == 200
    for each in slow:
        assert each.recv(100).startswith(b"HTTP/1.1 408"), "a slow request was not ended"
        each.close()


def test_small_images_of_many_pixels_do_not_fill_the_memory(
    home: Path, server: tuple[str, Any]
) -> None:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("RGBA", (5700, 5700)).save(out, "PNG")
    contents = [Content("image/png", out.getvalue())] * 16
    most = 0

    def measure() -> None:
        nonlocal most
        while not done.wait(0.1):
            with contextlib.suppress(psutil.Error):
                most = max(most, *(each.memory_info().rss for each in processes_below(server[1])))

    done = threading.Event()
    watcher = threading.Thread(target=measure)
    watcher.start()
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(sender(server[0]), contents))
    done.set()
    watcher.join()
    # The model takes one channel of 8 x 8. A request that waited too long may try again.
    assert {status for status, _ in answers} <= {400, 503}
    assert most < 3 * 2**30, f"{most / 2**30:.1f} GiB"
    log = (home / "server.log").read_text(encoding="utf-8")
    assert log.count(" is loaded\n") == 1, "a replica was started again"


def test_web_pages_are_refused(server: tuple[str, Any]) -> None:
    port = server[0].rpartition(":")[2]
    for headers in ({"Origin": "http://evil.example"}, {"Host": f"evil.example:{port}"}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(f"{server[0]}/ping", headers=headers))  # noqa: S310
        assert refused.value.code == 403
        refused.value.close()


def processes_below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_only_the_address_is_open(server: tuple[str, Any]) -> None:
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for each in processes_below(server[1])
        for connection in each.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", int(server[0].rpartition(":")[2]))}


def test_each_request_has_an_id_and_a_line_of_the_log(home: Path, server: tuple[str, Any]) -> None:
    for given in ("mine-1", "a" * 200, ""):
        request = urllib.request.Request(f"{server[0]}/ping", headers={"X-Request-Id": given})  # noqa: S310
        with urllib.request.urlopen(request) as answer:  # noqa: S310 (loopback)
            name = answer.headers["x-request-id"]
        assert (name == given) is (given == "mine-1")
        wanted = f"{name} -- GET /ping 200"
        until(lambda wanted=wanted: wanted in (home / "server.log").read_text(encoding="utf-8"))


def test_ctrl_c_ends_all_processes(home: Path, run: str) -> None:
    with served(home, run, "ended.log") as (_, process):
        started = processes_below(process)
        folders = {Path(each.cwd()) for each in started}
        assert len(started) == 2, "the server, and the process with the model"
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0
    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    until(lambda: not any(each.is_running() and each.status() not in ended for each in started))
    assert not [folder for folder in folders if folder.exists()]


def test_sigterm_while_a_server_starts_leaves_nothing(home: Path, run: str, tmp_path: Path) -> None:
    environ = {**environment(home), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [str(command()), "serve", run], env=environ, stdout=subprocess.DEVNULL
    )
    until(
        lambda: any(
            "replica_process" in " ".join(each.cmdline()) for each in processes_below(process)
        )
    )
    processes = processes_below(process)
    process.terminate()
    assert process.wait(300) == 128 + signal.SIGTERM
    assert [
        each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE
    ] == []
    assert list(tmp_path.glob("cloudtrain-serve-*")) == []


def test_gpus_that_are_missing_are_named_at_once(home: Path, run: str) -> None:
    environ = {**environment(home), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(command()), "serve", run, "--gpus", "1"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "1 x 1 GPUs are needed, and this machine has 0" in done.stderr


def test_a_checkpoint_that_does_not_exist_is_named(home: Path, run: str) -> None:
    argv = [str(command()), "serve", run, "--checkpoint", "7"]
    done = subprocess.run(argv, env=environment(home), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "step 7" in done.stderr
