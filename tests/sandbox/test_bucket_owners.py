"""Every request to S3 of the client and the container contains the account id of the bucket's expected owner."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES, Cli
from support.sandboxes import Served

pytestmark = pytest.mark.aws

ACCOUNT = "123456789012"
SERVICE = "cloudtrain-sandbox-service"
OWNER = "x-amz-expected-bucket-owner"


@pytest.fixture
def wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """Log the requests of child processes to S3; return a function that reads them, without the sandbox's own."""
    log = tmp_path / "wire.jsonl"
    monkeypatch.setenv("CLOUDTRAIN_TEST_WIRE", str(log))
    passed = os.environ["CLOUDTRAIN_PASS_ENVIRONMENT"]
    monkeypatch.setenv("CLOUDTRAIN_PASS_ENVIRONMENT", f"{passed},CLOUDTRAIN_TEST_WIRE")

    def sent() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return [line for line in lines if SERVICE not in line["headers"].get("user-agent", "")]

    return sent


def verbs(sent: list[dict[str, Any]]) -> set[str]:
    return {line["request"].partition(" ")[0] for line in sent}


@pytest.mark.processes
def test_every_request_of_client_and_container_names_the_owner(
    wire: Callable[[], list[dict[str, Any]]], cli_process: Cli
) -> None:
    environ = {"CLOUDTRAIN_TRANSPORT": "estimator"}
    job = EXAMPLES / "digits" / "job.yaml"
    changes = ("train.steps=4", "train.epochs=null")
    changes = (*changes, "checkpoint.every=2 steps", "cluster.processes_per_instance=1")
    options = [word for change in changes for word in ("--set", change)]
    submit = ("submit", job, "--sandbox", "--json", *options)
    try:
        done = cli_process(*submit, "--follow", environ=environ)
        assert done.code == 0, done.err
        by_client = [line for line in wire() if "Boto3" in line["headers"].get("user-agent", "")]
        run = done.json["run"]
        assert cli_process("checkpoints", run, environ=environ).code == 0
        assert cli_process("checkpoints", "verify", run, environ=environ).code == 0
        assert cli_process("status", run, environ=environ).code == 0
        again = cli_process("resume", run, "--json", environ=environ)
        assert again.code in (0, 2), again.err
        # The other transport sends the same job; its container is the one that has been seen.
        environ["CLOUDTRAIN_TRANSPORT"] = "boto3"
        seen = len(wire())
        other = cli_process(*submit, "--new", environ=environ)
        assert other.code == 0, other.err
        assert len(wire()) > seen
        stopped = cli_process("stop", other.json["run"], environ=environ)
        assert stopped.code in (0, 5), stopped.err
    finally:
        cli_process("sandbox", "--stop")
    sent = wire()
    assert by_client
    assert {"GET", "PUT"} <= verbs(sent)
    assert any("step-" in line["request"] and line["request"].startswith("PUT") for line in sent), (
        "of the container"
    )
    assert [line["request"] for line in sent if line["headers"].get(OWNER) != ACCOUNT] == []
    # No bucket is created, because another account could own a bucket with a guessable name.
    assert not [
        line
        for line in sent
        if line["request"].startswith("PUT") and line["request"].count("/") <= 2
    ]


@pytest.mark.processes
def test_local_runs_send_the_owner_too(
    wire: Callable[[], list[dict[str, Any]]],
    aws: dict[str, str],
    cli_process: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Local runs can save to the bucket of the settings. Covers start, resume and inspection."""
    passed = ",".join(name for name in aws if name.startswith("AWS_"))
    monkeypatch.setenv(
        "CLOUDTRAIN_PASS_ENVIRONMENT", f"{os.environ['CLOUDTRAIN_PASS_ENVIRONMENT']},{passed}"
    )
    job = EXAMPLES / "digits" / "job.yaml"
    changes = {"train.steps": 4, "train.epochs": "null", "checkpoint.every": "2 steps"}
    changes["cluster.processes_per_instance"] = 1
    changes["checkpoint.uri"] = f"s3://{aws['CLOUDTRAIN_BUCKET']}/saved"
    options = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    done = cli_process("submit", job, "--local", "--instances", "1", "--follow", "--json", *options)
    assert done.code == 0, done.err
    run = done.json["run"]
    assert cli_process("checkpoints", run, "--json").json["checkpoints"]
    assert cli_process("checkpoints", "verify", run).code == 0
    seen = len(wire())
    resumed = cli_process("resume", run, "--set", "train.steps=6", "--follow", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["first_step"] == 4
    assert len(wire()) > seen
    assert [line["request"] for line in wire() if line["headers"].get(OWNER) != ACCOUNT] == []


def test_the_sandbox_rejects_another_owner_as_s3_does(sandbox: Served) -> None:
    from botocore.exceptions import ClientError

    s3 = sandbox.client("s3")
    bucket = sandbox.info["bucket"]
    s3.put_object(Bucket=bucket, Key="own", Body=b"1", ExpectedBucketOwner=ACCOUNT)
    with pytest.raises(ClientError, match="AccessDenied"):
        s3.get_object(Bucket=bucket, Key="own", ExpectedBucketOwner="999999999999")


def test_the_runtime_uses_no_bucket_of_another_account(
    sandbox: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cloudtrain_runtime.contract.bucket_owner import OWNERS_VARIABLE
    from cloudtrain_runtime.s3.objects import S3Error, S3Objects

    for name, value in sandbox.environment.items():
        monkeypatch.setenv(name, value)
    bucket = sandbox.info["bucket"]
    uri = f"s3://{bucket}/owned"

    def upload(owner: str) -> None:
        monkeypatch.setenv(OWNERS_VARIABLE, json.dumps({bucket: owner}))
        with S3Objects(uri).create("one") as writer:
            writer.write(b"1")

    upload(ACCOUNT)
    assert S3Objects(uri).read("one") == b"1"
    monkeypatch.setenv(OWNERS_VARIABLE, json.dumps({bucket: "999999999999"}))
    with pytest.raises(S3Error, match="belongs to another account"):
        S3Objects(uri).read("one")
    with pytest.raises(S3Error):
        upload("999999999999")
    monkeypatch.setenv(OWNERS_VARIABLE, json.dumps({"another": "999999999999"}))
    assert S3Objects(uri).read("one") == b"1", "the owner of this bucket is unknown"
