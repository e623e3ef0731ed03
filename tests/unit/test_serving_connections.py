"""Connections of a served model: hosts, clients that stay silent or do not read, and faults of the server."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from support.jobs import until

pytest.importorskip("uvicorn")

from cloudtrain_runtime.serving import connections, request_memory
from cloudtrain_runtime.serving.payloads import PONG, Answer
from cloudtrain_runtime.serving.server import http_server

POST = b"POST /invocations HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\n"
PING = b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
ANSWER_BYTES = 2**25
"""More than the sockets of a connection keep."""


class Model:
    """Answers with many bytes; a content of `f` is a fault of the server."""

    async def answer(self, kind: str, accept: str, body: bytes) -> Answer:
        del kind, accept
        if body == b"f":
            raise KeyError("a fault")
        return Answer(200, bytes(ANSWER_BYTES), "application/octet-stream")

    async def ping(self) -> Answer:
        return PONG


Connect = Callable[[], socket.socket]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Opens connections to a server whose limits are small."""
    monkeypatch.setattr(connections, "BODY_SECONDS", 1.0)
    monkeypatch.setattr(request_memory, "MOST_BODY_BYTES", ANSWER_BYTES + 100)
    server = http_server(Model())
    opened = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()

        def connect() -> socket.socket:
            opened.append(socket.create_connection(address, timeout=60))
            return opened[-1]

        yield connect
        for each in opened:
            each.close()
        server.should_exit = True
        thread.join()


def response(client: socket.socket) -> tuple[http.client.HTTPResponse, bytes]:
    found = http.client.HTTPResponse(client)
    found.begin()
    return found, found.read()


@pytest.mark.parametrize("sent", [b"", b"GET /ping HT", PING, PING + b"GET /ping HT"])
def test_a_connection_without_a_request_is_closed(connect: Connect, sent: bytes) -> None:
    client = connect()
    client.sendall(sent)
    if sent.startswith(PING):
        assert response(client)[0].status == 200
    assert client.recv(1) == b""


def test_an_answer_that_nobody_reads_is_counted_and_dropped(connect: Connect) -> None:
    slow, other = connect(), connect()
    slow.sendall(POST + b"1")
    assert slow.recv(10) == b"HTTP/1.1 2"

    def ask() -> tuple[http.client.HTTPResponse, bytes]:
        other.sendall(POST + b"1")
        return response(other)

    refused, body = ask()
    assert refused.status == 503
    assert refused.headers["x-request-id"]
    assert "answers that nobody reads" in json.loads(body)["error"]

    def is_answered() -> bool:
        found, body = ask()
        return found.status == 200 and body == bytes(ANSWER_BYTES)

    until(is_answered)


@pytest.mark.parametrize(
    "host", ["", "[", "me@localhost", "localhost/a", "localhost:a", "evil.example"]
)
def test_a_host_of_another_name_is_refused(connect: Connect, host: str) -> None:
    client = connect()
    client.sendall(PING.replace(b"127.0.0.1", host.encode()))
    assert response(client)[0].status in (400, 403)


def test_a_request_without_a_host_is_refused(connect: Connect) -> None:
    client = connect()
    client.sendall(b"GET /ping HTTP/1.0\r\n\r\n")
    assert response(client)[0].status == 403


def test_a_path_does_not_depend_on_the_host(connect: Connect) -> None:
    client = connect()
    client.sendall(PING.replace(b"/ping", b"/other%20path").replace(b"127.0.0.1", b"localhost:1"))
    found, body = response(client)
    assert found.status == 404
    assert "there is no /other path" in json.loads(body)["error"]


def test_a_fault_of_the_server_is_an_error_with_an_id(
    connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    client = connect()
    client.sendall(POST + b"f")
    found, body = response(client)
    assert found.status == 500
    assert json.loads(body) == {"error": "the server has a fault; its log has the reason"}
    wanted = f"{found.headers['x-request-id']} -- POST /invocations 500"
    log = ""

    def is_logged() -> bool:
        nonlocal log
        log += capsys.readouterr().err
        return wanted in log

    until(is_logged)
    assert "KeyError: 'a fault'" in log
