"""Retries of a container's credentials endpoint, and the error when every attempt fails."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from botocore.utils import ContainerMetadataFetcher

from cloudtrain_runtime.contract import SecretConfig
from cloudtrain_runtime.launcher import secrets
from cloudtrain_runtime.s3.objects import S3Error, S3Objects
from cloudtrain_runtime.s3.retry import client_retries

pytestmark = pytest.mark.aws

REQUESTS_PER_ATTEMPT = ContainerMetadataFetcher.RETRY_ATTEMPTS
"""Number of requests that botocore itself sends in one attempt."""


class Endpoint:
    """A container's credentials endpoint whose first `failures` responses have status 500."""

    def __init__(self) -> None:
        self.failures = 0
        self.requests = 0

    def respond(self) -> tuple[int, dict[str, str]]:
        self.requests += 1
        if self.requests <= self.failures:
            return 500, {"message": "not yet"}
        found = {
            "AccessKeyId": "CONTAINER",
            "SecretAccessKey": "s",
            "Token": "t",
            "Expiration": "2999-01-01T00:00:00Z",
        }
        return 200, found


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, aws: dict[str, str]) -> Iterator[Endpoint]:
    found = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = found.respond()
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 (the base class names it so)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv(
        "AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{server.server_port}/credentials"
    )
    yield found
    server.shutdown()
    server.server_close()


def use_objects() -> str:
    return str(S3Objects("s3://cloudtrain-test/p").sizes())


def use_secrets() -> str:
    return "\n".join(secrets.resolve({"TOKEN": SecretConfig("none")}, os.environ).problems)


@pytest.mark.parametrize(("use", "answer"), [(use_objects, "{}"), (use_secrets, "is not there")])
def test_a_credentials_endpoint_that_fails_at_first_is_retried(
    endpoint: Endpoint, use: Callable[[], str], answer: str
) -> None:
    endpoint.failures = REQUESTS_PER_ATTEMPT + 1
    assert answer in use()
    assert endpoint.requests == endpoint.failures + 1


def test_the_advice_fits_a_container(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint.failures = 10**6
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    with pytest.raises(
        S3Error, match="container's credentials endpoint failed on every attempt: resume"
    ):
        use_objects()
    assert endpoint.requests == 2 * REQUESTS_PER_ATTEMPT
    found = use_secrets()
    assert found.startswith(
        "TOKEN: the secrets cannot be read: the source of the credentials failed: submit again"
    )
    assert "sign in" not in found


def test_a_failing_credentials_process_is_called_once(
    monkeypatch: pytest.MonkeyPatch, aws: dict[str, str], tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    calls = tmp_path / "calls"
    Path(os.environ["AWS_CONFIG_FILE"]).write_text(
        f"[default]\ncredential_process = sh -c 'echo x >> {calls}; exit 1'\n"
    )
    with pytest.raises(
        S3Error, match="source of the credentials failed: check AWS_PROFILE, or sign in again"
    ):
        use_objects()
    assert calls.read_text() == "x\n"


@pytest.mark.parametrize("value", ["many", "2.5", "0", "-1"])
def test_an_invalid_number_of_attempts_is_reported_once(
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    aws: dict[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", value)
    for _ in range(2):
        assert use_objects() == "{}"
    assert client_retries() == {"mode": "standard", "total_max_attempts": 10}
    line = f"AWS_MAX_ATTEMPTS is {value!r}, which is not a positive integer: the default applies\n"
    assert capfd.readouterr().out == line
