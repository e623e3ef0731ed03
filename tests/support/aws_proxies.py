"""A proxy in front of a sandbox that changes single answers of AWS, to plant differences on the server's side."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Change = Callable[[str, Any, int, Any], tuple[int, Any]]
"""Callback: operation, request, status and response, each parsed; returns the status and response to send."""
ChangeRequest = Callable[[str, Any], Any]
"""Callback: operation and request; returns the request that reaches the sandbox."""
_HOP = ("connection", "host", "content-length", "transfer-encoding")


def _same_request(operation: str, request: Any) -> Any:
    return request


def _parsed(content: bytes) -> Any:
    """Return a response; None for one that is not JSON, such as moto's page about what it lacks."""
    try:
        return json.loads(content)
    except ValueError:
        return None


@contextmanager
def serve_proxy(
    port: int, change: Change, change_request: ChangeRequest = _same_request
) -> Iterator[str]:
    """Serve a proxy of a port on loopback; yield its address. Only calls of AWS's JSON protocol are changed."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            operation = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
            request = json.loads(body) if operation and body else {}
            if operation:
                body = json.dumps(change_request(operation, request)).encode()
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in _HOP
            }
            server = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
            server.request(self.command, self.path, body, headers)
            answer = server.getresponse()
            content, status = answer.read(), answer.status
            if operation:
                status, response = change(operation, request, status, _parsed(content))
                content = content if response is None else json.dumps(response).encode()
            self.send_response(status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else len(content)
            self.send_header("Content-Length", str(length or 0))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
            server.close()

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward  # noqa: N815 (names of http.server)

        def log_message(self, *_: Any) -> None:
            return

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_port}"
    finally:
        served.shutdown()
        served.server_close()
        thread.join(60)
