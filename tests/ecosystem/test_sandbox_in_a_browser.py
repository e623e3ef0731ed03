"""Web pages in a real browser cannot use a sandbox: not from another origin, not by DNS rebinding, not with its key."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.jobs import serve_moto
from support.sandboxes import Served, request, serve

pytestmark = [
    pytest.mark.aws,
    pytest.mark.skipif(
        shutil.which("chromium") is None, reason="Chromium is not installed (make test-all)"
    ),
]

PAGE = Path(__file__).with_name("attack.html")
EVIL = "evil.example"
REBOUND = "127.0.0.2"
"""Another loopback address. The page's server uses the sandbox's port there, so that both have the same origin."""
KEPT = "content of the user"
REFUSALS = ("the sandbox rejects requests from web pages", "the sandbox accepts only requests to")
JSON = "application/x-amz-json-1.1"
WAIT_SECONDS = 300


def attempts(bucket: str, job: Mapping[str, Any], key: str = "") -> list[dict[str, Any]]:
    """Return requests that read or change a sandbox. With `key`, each contains the access key."""
    query = (
        f"?X-Amz-Credential={quote(f'{key}/20261122/us-west-2/s3/aws4_request', safe='')}&X-Amz-Signature=none"
        if key
        else ""
    )

    def target(operation: str) -> dict[str, str]:
        return {"X-Amz-Target": f"SageMaker.{operation}", "Content-Type": JSON}

    found: list[tuple[str, str, str, dict[str, str], str]] = [
        ("list buckets", "GET", "/", {}, ""),
        ("read an object", "GET", f"/{bucket}/kept", {}, ""),
        ("read the controls", "GET", "/_cloudtrain/faults", {}, ""),
        ("list jobs", "POST", "/", target("ListTrainingJobs"), "{}"),
        ("create a job", "POST", "/", target("CreateTrainingJob"), json.dumps(job)),
        ("create an object", "PUT", f"/{bucket}/planted", {}, "x"),
        ("create a bucket", "PUT", "/planted", {}, ""),
        ("change the controls", "PUT", "/_cloudtrain/faults", {}, '{"seed": 99}'),
        ("delete an object", "DELETE", f"/{bucket}/kept", {}, ""),
    ]
    plain = [
        dict(zip(("name", "method", "path", "headers", "body"), each, strict=True))
        for each in found
    ]
    form = {
        "name": "upload an object",
        "path": f"/{bucket}",
        "form": {"key": "uploaded", "success_action_status": "201", "file": "x"},
    }
    reset = {
        "name": "reset",
        "method": "POST",
        "path": "/moto-api/reset",
        "headers": {},
        "body": "{}",
    }
    label = " with the key" if key else ""
    return [
        {**each, "name": each["name"] + label, "path": each["path"] + query}
        for each in (*plain, form, reset)
    ]


def state(sandbox: Served) -> dict[str, Any]:
    """Return the buckets, objects, jobs and fault plan of a sandbox."""
    s3 = sandbox.client("s3")
    buckets = [each["Name"] for each in s3.list_buckets()["Buckets"]]
    return {
        "buckets": buckets,
        "objects": {
            key: s3.get_object(Bucket=bucket, Key=key)["Body"].read().decode()
            for bucket in buckets
            for key in [
                each["Key"] for each in s3.list_objects_v2(Bucket=bucket).get("Contents", [])
            ]
        },
        "jobs": [
            each["TrainingJobName"]
            for each in sandbox.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
        ],
        "controls": ask(
            sandbox.port, "GET", "/_cloudtrain/faults", {"Authorization": sandbox.authorization}
        )[1],
    }


def ask(
    port: int, method: str, path: str, headers: dict[str, str], body: bytes = b""
) -> tuple[int, str]:
    """Send a request without a browser; return the status and the body of the response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", "replace")
    finally:
        connection.close()


def handler_of(
    page: str, rebound_to: int | None, responses: queue.Queue[Any]
) -> type[BaseHTTPRequestHandler]:
    """Return a handler that serves the page and receives its report.

    With `rebound_to`, the handler forwards all other requests to that port of 127.0.0.1. This is the effect of DNS
    rebinding, where the address of a name changes after the page has loaded.
    """

    class Handler(BaseHTTPRequestHandler):
        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path == "/page":
                self.write(200, {"Content-Type": "text/html"}, page.encode())
            elif self.path == "/report":
                self.write(204, {}, b"")
                responses.put(json.loads(body))
            elif rebound_to is None or "Upgrade" in self.headers:
                self.write(404, {}, b"")
            else:
                connection = http.client.HTTPConnection("127.0.0.1", rebound_to, timeout=60)
                connection.request(self.command, self.path, body, dict(self.headers))
                response = connection.getresponse()
                kept = {
                    name: value
                    for name, value in response.getheaders()
                    if name.lower() == "content-type"
                }
                self.write(response.status, kept, response.read())
                connection.close()

        do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = serve  # noqa: N815 (names of http.server)

        def write(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    return Handler


@contextlib.contextmanager
def served_page(address: str, port: int, handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Serve the page; yield the port."""
    server = ThreadingHTTPServer((address, port), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def visit(folder: Path, url: str, address: str, responses: queue.Queue[Any]) -> dict[str, Any]:
    """Open a page in Chromium; return its report. Only EVIL resolves, so no request leaves this machine."""
    rules = f"MAP {EVIL} {address}, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE {REBOUND}"
    options = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
    )
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
    own = (f"--user-data-dir={folder / 'profile'}", f"--host-resolver-rules={rules}")
    with (folder / "chromium.log").open("w") as log:
        browser = subprocess.Popen(
            ["chromium", *options, *quiet, *own, url], stdout=log, stderr=log
        )
    try:
        found: dict[str, Any] = responses.get(timeout=WAIT_SECONDS)
    except queue.Empty:
        pytest.fail(f"the page reported nothing: {(folder / 'chromium.log').read_text()[-4000:]}")
    finally:
        browser.terminate()
        browser.wait(300)
    return found


@dataclass(frozen=True)
class Origin:
    """The origin of the page.

    Attributes:
        host: Name or address in the URLs of the page and of its requests.
        address: Address of the page's server.
        is_rebound: Whether the page has the target's port, and so the same origin as the target.
    """

    host: str
    address: str = "127.0.0.1"
    is_rebound: bool = False


ORIGINS = {
    "another port": Origin("127.0.0.1"),
    "another name": Origin(EVIL),
    "a rebound name": Origin(EVIL, REBOUND, is_rebound=True),
}


def attack(folder: Path, target: int, sent: list[dict[str, Any]], origin: Origin) -> dict[str, Any]:
    """Open a page of an origin that sends requests to a port of this machine; return its report of the responses."""
    responses: queue.Queue[Any] = queue.Queue()
    config = {"target": f"http://{origin.host}:{target}", "attempts": sent}
    page = PAGE.read_text().replace("CONFIG", json.dumps(config).replace("<", "\\u003c"), 1)
    handler = handler_of(page, target if origin.is_rebound else None, responses)
    folder.mkdir()
    with served_page(origin.address, target if origin.is_rebound else 0, handler) as port:
        return visit(folder, f"http://{origin.host}:{port}/page", origin.address, responses)


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Served]:
    """Serve a sandbox with one object."""
    with serve(tmp_path / "sandbox") as served:
        served.client("s3").put_object(Bucket=served.info["bucket"], Key="kept", Body=KEPT.encode())
        yield served


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_web_page_cannot_use_the_sandbox(sandbox: Served, tmp_path: Path, origin: str) -> None:
    before = state(sandbox)
    assert before["objects"] == {"kept": KEPT}
    job = request(sandbox, "planted", "true")
    keys = ("", sandbox.environment["AWS_ACCESS_KEY_ID"])
    sent = [each for key in keys for each in attempts(sandbox.info["bucket"], job, key)]
    responses = attack(tmp_path / "page", sandbox.port, sent, ORIGINS[origin])
    assert state(sandbox) == before
    assert len(responses) > 2 * len(sent)
    for name, response in responses.items():
        assert not response.keys() & {"open", "loaded"}, (name, response)
        if ORIGINS[origin].is_rebound:  # a page can read the error responses of its own origin
            assert response.get("status", 403) in (0, 403), (name, response)
            assert any(refusal in (response.get("text") or refusal) for refusal in REFUSALS), (
                name,
                response,
            )
        else:
            assert not response.get("status"), (name, response)
            assert not response.get("text"), (name, response)


def test_a_client_with_the_key_sends_the_same_requests(sandbox: Served) -> None:
    """The page's requests have an effect if they contain the key, so rejecting them is necessary."""
    before = state(sandbox)
    key = sandbox.environment["AWS_ACCESS_KEY_ID"]
    for each in attempts(sandbox.info["bucket"], request(sandbox, "planted", "true"), key):
        if "form" not in each and "reset" not in each["path"]:
            status, text = ask(
                sandbox.port, each["method"], each["path"], each["headers"], each["body"].encode()
            )
            assert 200 <= status < 300, (each["name"], text)
    sandbox.end_of("planted")
    after = state(sandbox)
    assert set(after["buckets"]) - set(before["buckets"]) == {"planted"}
    assert after["objects"].get("planted") == "x"
    assert "kept" not in after["objects"]
    assert (before["jobs"], after["jobs"]) == ([], ["planted"])
    assert after["controls"] != before["controls"]


def test_the_same_page_uses_a_server_without_a_check(tmp_path: Path) -> None:
    """The browser sends the page's requests. Without the sandbox's check, the page reads and changes objects."""
    import boto3

    with serve_moto(tmp_path / "moto.log") as endpoint:
        s3 = boto3.client(
            "s3",
            "us-east-1",
            endpoint_url=endpoint,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )
        s3.create_bucket(Bucket="open")
        s3.put_object(Bucket="open", Key="kept", Body=KEPT.encode(), ACL="public-read-write")
        sent = [each for each in attempts("open", {}) if each["name"] != "reset"]
        responses = attack(
            tmp_path / "page", int(endpoint.rpartition(":")[2]), sent, ORIGINS["another port"]
        )
        keys = [each["Key"] for each in s3.list_objects_v2(Bucket="open")["Contents"]]
    assert "open" in responses["list buckets (cors)"]["text"]
    assert responses["read an object (cors)"]["text"] == KEPT
    assert {"planted", "uploaded"} <= set(keys)
    assert "kept" not in keys
