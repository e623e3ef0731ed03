"""A server on loopback between the SDKs and moto: it hands requests on, and answers itself where moto cannot.

What it answers has the documented form of the wire: XML for IAM (query protocol), JSON for the others.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Request:
    """What came in. `operation` is the call's name, or `METHOD /path` in S3."""

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
    """What goes out."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, content: Any, status: int = 200) -> Answer:
        """Return an answer of the JSON protocol."""
        return cls(json.dumps(content).encode(), status, {"Content-Type": "application/x-amz-json-1.1"})

    @classmethod
    def denied(cls, code: str = "AccessDeniedException") -> Answer:
        """Return a refusal of the JSON protocol."""
        return cls.json({"__type": code, "message": "User is not authorized"}, 400)


Rule = Callable[[Request], Answer | None]
"""Returns an answer, or None to let moto answer."""


class Front:
    """The server. `rules` are asked by operation; `seen` names the operations in order."""

    def __init__(self, moto: str) -> None:
        self.rules: dict[str, Rule] = {}
        self.seen: list[str] = []
        self.requests: list[Request] = []
        self.meeting: threading.Barrier | None = None
        self._moto = urlsplit(moto)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

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
            self._server.shutdown()
            self._server.server_close()

    def say(self, operation: str, answer: Answer) -> None:
        """Answer an operation so, always."""
        self.rules[operation] = lambda request: answer

    def _answer(self, method: str, path: str, request: Request) -> Answer:
        self.seen.append(request.operation)
        self.requests.append(request)
        if self.meeting is not None:
            self.meeting.wait()
        rule = self.rules.get(request.operation)
        answer = rule(request) if rule is not None else None
        return answer if answer is not None else self._ask_moto(method, path, request)

    def _ask_moto(self, method: str, path: str, request: Request) -> Answer:
        connection = http.client.HTTPConnection(self._moto.hostname or "", self._moto.port, timeout=30)
        try:
            connection.request(method, path, request.body, dict(request.headers))
            response = connection.getresponse()
            headers = {
                name: value
                for name, value in response.getheaders()
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server")
            }
            return Answer(response.read(), response.status, headers)
        finally:
            connection.close()

    def _handler(front) -> type[BaseHTTPRequestHandler]:  # noqa: N805 (the handler has a self of its own)
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = Request(operation_of(self.command, self.path, self.headers, body), dict(self.headers), body)
                answer = front._answer(self.command, self.path, request)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815 (the base class's names)

            def log_message(self, *arguments: Any) -> None:
                """Stay silent."""

        return Handler


def operation_of(method: str, path: str, headers: Mapping[str, str], body: bytes) -> str:
    """Return a request's operation, by the protocol it is written in."""
    target = headers.get("X-Amz-Target")
    if target:
        return target.rpartition(".")[2]
    if headers.get("Content-Type", "").startswith("application/x-www-form-urlencoded"):
        return parse_qs(body.decode())["Action"][0]
    return f"{method} {urlsplit(path).path}"


# ---------------------------------------------------------------- answers that moto does not have


def simulation(denied: Mapping[str, str] | None = None, missing: tuple[str, ...] = ()) -> Rule:
    """Return a rule for SimulatePrincipalPolicy: `denied` holds a decision by action, all else is allowed.

    Args:
        denied: The decision (`implicitDeny` or `explicitDeny`) by action.
        missing: Names of context keys that a denial depends on.
    """

    def answer(request: Request) -> Answer:
        keys = "".join(f"<member>{key}</member>" for key in missing)
        members = "".join(
            f"<member><EvalActionName>{action}</EvalActionName><EvalResourceName>{resource}</EvalResourceName>"
            f"<EvalDecision>{(denied or {}).get(action, 'allowed')}</EvalDecision>"
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

    return answer


def quotas(values: Mapping[str, int]) -> Answer:
    """Return an answer to ListServiceQuotas with these values by name."""
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
