"""A sandbox rejects requests without its access key, from web pages, and from other users of the machine."""

from __future__ import annotations

import http.client
import json
import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES, Cli
from support.sandboxes import Served

CREATE = {
    "X-Amz-Target": "SageMaker.ListTrainingJobs",
    "Content-Type": "application/x-amz-json-1.1",
}
PATHS = (
    ("GET", "/", {}),
    ("POST", "/", CREATE),
    ("GET", "/cloudtrain-sandbox", {}),
    ("PUT", "/cloudtrain-sandbox/planted", {}),
    ("GET", "/_cloudtrain/faults", {}),
    ("PUT", "/_cloudtrain/faults", {}),
    ("POST", "/moto-api/reset", {}),
    ("OPTIONS", "/cloudtrain-sandbox/x", {}),
)


def ask(
    sandbox: Served, method: str, path: str, headers: dict[str, str], body: str = "{}"
) -> tuple[int, dict[str, str], str]:
    """Send one request; return the status, the headers and the body of the response."""
    connection = http.client.HTTPConnection("127.0.0.1", sandbox.port, timeout=60)
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return response.status, names, response.read().decode("utf-8", "replace")
    finally:
        connection.close()


def with_key(sandbox: Served, **headers: str) -> dict[str, str]:
    return {"Authorization": sandbox.authorization, **headers}


@pytest.mark.promise
@pytest.mark.parametrize(("method", "path", "headers"), PATHS)
def test_a_request_without_the_key_is_rejected(
    sandbox: Served, method: str, path: str, headers: dict[str, str]
) -> None:
    for authorization in (
        None,
        "AWS4-HMAC-SHA256 Credential=sandbox/20261122/us-west-2/s3/aws4_request",
        "Basic eDp5",
    ):
        sent = {**headers, **({} if authorization is None else {"Authorization": authorization})}
        status, _, body = ask(sandbox, method, path, sent)
        assert status == 403, (authorization, body)
    assert sandbox.keys("planted") == []


@pytest.mark.promise
@pytest.mark.parametrize(("method", "path", "headers"), PATHS)
@pytest.mark.parametrize(
    "foreign",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:{port}"},
        {"Host": "127.0.0.1.evil.example:{port}"},
        {"Host": "127.0.0.1:1"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:{port}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "none"},
    ],
)
def test_web_pages_are_rejected_even_with_the_key(
    sandbox: Served, method: str, path: str, headers: dict[str, str], foreign: dict[str, str]
) -> None:
    sent = {name: value.format(port=sandbox.port) for name, value in foreign.items()}
    status, received, _ = ask(sandbox, method, path, {**headers, **with_key(sandbox), **sent})
    assert status == 403
    assert [name for name in received if name.startswith("access-control")] == []
    assert sandbox.keys("planted") == []


def test_no_response_grants_cors(sandbox: Served) -> None:
    for method, path, headers in PATHS:
        if path != "/moto-api/reset":
            _, received, _ = ask(sandbox, method, path, {**headers, **with_key(sandbox)})
            assert [name for name in received if name.startswith("access-control")] == []
    sandbox.client("s3").delete_object(Bucket=sandbox.info["bucket"], Key="planted")


@pytest.mark.parametrize("signature", ["s3v4", None])
def test_a_presigned_url_with_the_key_is_accepted(sandbox: Served, signature: str | None) -> None:
    import boto3
    from botocore.config import Config

    keys = [sandbox.environment["AWS_ACCESS_KEY_ID"], sandbox.environment["AWS_SECRET_ACCESS_KEY"]]
    s3 = boto3.Session(*keys, region_name="us-west-2").client(
        "s3", endpoint_url=sandbox.info["endpoint"], config=Config(signature_version=signature)
    )
    bucket = sandbox.info["bucket"]
    s3.put_object(Bucket=bucket, Key="signed", Body=b"content")
    url = s3.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "signed"})
    path = url.removeprefix(sandbox.info["endpoint"])
    assert ask(sandbox, "GET", path, {})[::2] == (200, "content")
    assert ask(sandbox, "GET", path.replace(keys[0], "sandbox"), {})[0] == 403


def test_keys_from_sts_of_the_sandbox_are_accepted(sandbox: Served) -> None:
    import boto3

    found = sandbox.client("sts").assume_role(RoleArn=sandbox.info["role"], RoleSessionName="test")[
        "Credentials"
    ]
    session = boto3.Session(
        found["AccessKeyId"], found["SecretAccessKey"], found["SessionToken"], "us-west-2"
    )
    s3 = session.client("s3", endpoint_url=sandbox.info["endpoint"])
    s3.put_object(Bucket=sandbox.info["bucket"], Key="of-a-role", Body=b"1")
    assert sandbox.keys("of-a-role") == ["of-a-role"]


def test_each_sandbox_has_a_random_key_in_a_private_file(
    sandbox: Served, own_sandbox: Callable[..., Any], tmp_path: Path
) -> None:
    with own_sandbox() as other:
        keys = [each.environment["AWS_ACCESS_KEY_ID"] for each in (sandbox, other)]
        assert keys[0] != keys[1]
        assert all(len(bytes.fromhex(key.removeprefix("SANDBOX"))) == 16 for key in keys)
        assert stat.S_IMODE((other.home / "sandbox.json").stat().st_mode) == 0o600
        headers = {"Authorization": sandbox.authorization}
        assert ask(other, "GET", "/_cloudtrain/faults", headers)[0] == 403, "another sandbox's key"


AS_OTHER_USER = """
import email.parser, encodings.idna, http.client, json, os, socket, sys  # before setuid: Python may be root's
port, home = int(sys.argv[1]), sys.argv[2]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
seen = {}
for name in ("sandbox.json", "sandbox.log", "jobs"):
    try:
        path = os.path.join(home, name)
        seen[name] = os.listdir(path) if os.path.isdir(path) else open(path).read()
    except OSError as error:
        seen[name] = type(error).__name__
for number in filter(str.isdigit, os.listdir("/proc")):
    try:
        text = open(f"/proc/{number}/cmdline", "rb").read() + open(f"/proc/{number}/environ", "rb").read()
    except OSError:
        continue
    if b"SANDBOX" in text:
        seen["process"] = number
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
connection.request("PUT", "/cloudtrain-sandbox/planted", body="x")
seen["status"] = connection.getresponse().status
print(json.dumps(seen))
"""


@pytest.mark.promise
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user of this machine")
def test_another_user_of_the_machine_has_no_access(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox runs in the background, and its folder is below a folder that all users can enter."""
    import tempfile

    assert pwd.getpwuid(65534).pw_name == "nobody"
    with tempfile.TemporaryDirectory(prefix="sandbox-access-") as root:
        Path(root).chmod(0o755)
        monkeypatch.setenv("CLOUDTRAIN_HOME", root)
        try:
            done = cli(
                "submit",
                EXAMPLES / "digits" / "job.yaml",
                "--sandbox",
                "--set",
                "train.epochs=1",
                "--json",
            )
            assert done.code == 0, done.err
            home = Path(root) / "sandbox"
            info = json.loads((home / "sandbox.json").read_text())
            port = info["endpoint"].rpartition(":")[2]
            assert stat.S_IMODE((home / "sandbox.log").stat().st_mode) == 0o600
            seen = json.loads(
                subprocess.run(
                    [sys.executable, "-I", "-c", AS_OTHER_USER, port, str(home)],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
        finally:
            cli("sandbox", "--stop")
    assert seen == {
        "sandbox.json": "PermissionError",
        "sandbox.log": "PermissionError",
        "jobs": "PermissionError",
    } | {"status": 403}


@pytest.mark.processes
def test_no_module_of_the_working_directory_is_imported(cli: Cli, tmp_path: Path) -> None:
    """All processes that `submit` starts import modules with these names."""
    folder = tmp_path / "cloned"
    folder.mkdir()
    names = (
        "json",
        "signal",
        "boto3",
        "moto",
        "yaml",
        "click",
        "torch",
        "cloudtrain",
        "cloudtrain_runtime",
    )
    for name in names:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\n"
        )
    (folder / "job.yaml").write_text(
        json.dumps(
            {
                "name": "cloned",
                "code": {"script": "train.py", "directory": "code"},
                "cluster": {"instance_type": "ml.m5.large", "instances": 1},
            }
        )
    )
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text("print('ran')\n")
    try:
        for target in ("--local", "--sandbox"):
            done = cli("submit", "job.yaml", target, "--follow", cwd=folder)
            assert done.code == 0, done.err
    finally:
        cli("sandbox", "--stop")
    assert not (tmp_path / "imported").exists()
