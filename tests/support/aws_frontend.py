"""A server on loopback between the SDKs and moto. It forwards requests to moto, except those that a test responds to.

Responses have the documented format: XML for IAM (query protocol), JSON for other services.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Request:
    """A request. `operation` is the name of the call, or `METHOD /path` in S3."""

    operation: str
    headers: Mapping[str, str]
    body: bytes

    def form(self, name: str) -> list[str]:
        """Return the members of a list in a query-protocol request."""
        found = parse_qs(self.body.decode())
        prefix = f"{name}.member."
        return [found[key][0] for key in sorted(found) if key.startswith(prefix)]


@dataclass(frozen=True)
class Answer:
    """A response."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, content: Any, status: int = 200) -> Answer:
        """Return a response in the JSON protocol."""
        return cls(
            json.dumps(content).encode(), status, {"Content-Type": "application/x-amz-json-1.1"}
        )

    @classmethod
    def denied(cls, code: str = "AccessDeniedException") -> Answer:
        """Return an access error in the JSON protocol."""
        return cls.json({"__type": code, "message": "User is not authorized"}, 400)


Rule = Callable[[Request], Answer | None]
"""Returns a response, or None to forward the request to moto."""


class _Server(ThreadingHTTPServer):
    """A server that leaves no connection and no thread behind."""

    # `server_close` waits for the threads.
    daemon_threads = False
    # Checks connect all at once. A connection that does not fit into the queue tries again after a second.
    request_queue_size = 256

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._open: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        for connection in tuple(self._open):
            # The client may have closed it.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


class Front:
    """The server.

    Attributes:
        rules: Rule by operation.
        seen: Operations of all requests, in order.
        requests: All requests, in order.
        barrier: Barrier at which each request waits, or None.
    """

    def __init__(self, moto: str) -> None:
        self.rules: dict[str, Rule] = {}
        self.seen: list[str] = []
        self.requests: list[Request] = []
        self.barrier: threading.Barrier | None = None
        self._moto = urlsplit(moto)
        self._server = _Server(self._handler())
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )

    @property
    def url(self) -> str:
        """Address for AWS_ENDPOINT_URL."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serve(self) -> Iterator[Front]:
        """Serve until the block ends."""
        self._thread.start()
        try:
            yield self
        finally:
            if self.barrier is not None:
                self.barrier.abort()
            self._server.shutdown()
            self._server.server_close()

    def respond(self, operation: str, response: Answer) -> None:
        """Give every request of an operation the same response."""
        self.rules[operation] = lambda request: response

    def _handle(self, method: str, path: str, request: Request) -> Answer:
        self.seen.append(request.operation)
        self.requests.append(request)
        if self.barrier is not None:
            self.barrier.wait()
        rule = self.rules.get(request.operation)
        response = rule(request) if rule is not None else None
        return response if response is not None else self._forward(method, path, request)

    def _forward(self, method: str, path: str, request: Request) -> Answer:
        connection = http.client.HTTPConnection(
            self._moto.hostname or "", self._moto.port, timeout=30
        )
        try:
            connection.request(method, path, request.body, dict(request.headers))
            response = connection.getresponse()
            headers = {
                name: value
                for name, value in response.getheaders()
                if name.lower()
                not in ("content-length", "transfer-encoding", "connection", "date", "server")
            }
            return Answer(response.read(), response.status, headers)
        finally:
            connection.close()

    def _handler(front) -> type[BaseHTTPRequestHandler]:  # noqa: N805 (`self` is the handler)
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = Request(
                    operation_of(self.command, self.path, self.headers, body),
                    dict(self.headers),
                    body,
                )
                response = front._handle(self.command, self.path, request)
                self.send_response_only(response.status)
                if "Date" not in response.headers:
                    self.send_header("Date", self.date_time_string())
                for name, value in response.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(response.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(response.body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815 (the base class's names)

            def log_message(self, *arguments: Any) -> None:
                """Log nothing."""

        return Handler


def operation_of(method: str, path: str, headers: Mapping[str, str], body: bytes) -> str:
    """Return the operation of a request in one of AWS's protocols."""
    target = headers.get("X-Amz-Target")
    if target:
        return target.rpartition(".")[2]
    if headers.get("Content-Type", "").startswith("application/x-www-form-urlencoded"):
        return parse_qs(body.decode())["Action"][0]
    return f"{method} {urlsplit(path).path}"


def simulation(
    denied: Mapping[str, str] | None = None, missing: tuple[str, ...] = (), only: str = ""
) -> Rule:
    """Return a rule for SimulatePrincipalPolicy, which moto does not support.

    Args:
        denied: The decision (`implicitDeny` or `explicitDeny`) by action. Other actions are allowed.
        missing: Names of context keys that a denial depends on.
        only: Part of the ARNs on which the actions are denied; an empty text denies them on all.
    """

    def decision(action: str, resource: str) -> str:
        is_denied = only in resource
        return (denied or {}).get(action, "allowed") if is_denied else "allowed"

    def response(request: Request) -> Answer:
        keys = "".join(f"<member>{key}</member>" for key in missing)
        members = "".join(
            f"<member><EvalActionName>{action}</EvalActionName><EvalResourceName>{resource}</EvalResourceName>"
            f"<EvalDecision>{decision(action, resource)}</EvalDecision>"
            f"<MissingContextValues>{keys if action in (denied or {}) else ''}</MissingContextValues></member>"
            for action in request.form("ActionNames")
            for resource in request.form("ResourceArns")
        )
        text = (
            '<SimulatePrincipalPolicyResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/">'
            f"<SimulatePrincipalPolicyResult><IsTruncated>false</IsTruncated><EvaluationResults>{members}"
            "</EvaluationResults></SimulatePrincipalPolicyResult>"
            "<ResponseMetadata><RequestId>1</RequestId></ResponseMetadata></SimulatePrincipalPolicyResponse>"
        )
        return Answer(text.encode(), 200, {"Content-Type": "text/xml"})

    return response


def quotas(values: Mapping[str, int]) -> Answer:
    """Return a response of ListServiceQuotas with values by name. moto does not support this operation."""
    return Answer.json(
        {
            "Quotas": [
                {
                    "ServiceCode": "sagemaker",
                    "QuotaName": name,
                    "QuotaCode": f"L-{index:08X}",
                    "Value": float(value),
                    "Adjustable": True,
                }
                for index, (name, value) in enumerate(values.items(), start=1)
            ]
        }
    )
