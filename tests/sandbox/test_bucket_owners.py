"""Every request to S3, of client and container, names the account that must own the bucket, as it goes out."""

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
    """Write down what later processes send to S3, but for the sandbox's own calls; return what there is."""
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
@pytest.mark.parametrize("transport", ["estimator", "boto3"])
def test_every_request_of_client_and_container_names_the_owner(
    wire: Callable[[], list[dict[str, Any]]], cli: Cli, transport: str
) -> None:
    environ = {"CLOUDTRAIN_TRANSPORT": transport, "CLOUDTRAIN_S3_ENGINE": "boto3"}
    job = EXAMPLES / "digits" / "job.yaml"
    # The engine of the container's uploads that shows every request; the other one is looked at below.
    engine = "code.env.CLOUDTRAIN_S3_ENGINE=boto3"
    try:
        done = cli("submit", job, "--sandbox", "--set", engine, "--follow", "--json", environ=environ)
        assert done.code == 0, done.err
        by_client = [line for line in wire() if "Boto3" in line["headers"].get("user-agent", "")]
        run = done.json["run"]
        assert cli("checkpoints", run, environ=environ).code == 0
        assert cli("checkpoints", "verify", run, environ=environ).code == 0
        assert cli("status", run, environ=environ).code == 0
        again = cli("resume", run, "--json", environ=environ)
        assert again.code in (0, 2), again.err
    finally:
        cli("sandbox", "--stop")
    sent = wire()
    assert by_client
    assert {"GET", "PUT"} <= verbs(sent)
    assert any("step-" in line["request"] and line["request"].startswith("PUT") for line in sent), "the container's"
    assert [line["request"] for line in sent if line["headers"].get(OWNER) != ACCOUNT] == []
    # No bucket is made: a name that can be guessed may be somebody else's by now.
    assert not [line for line in sent if line["request"].startswith("PUT") and line["request"].count("/") <= 2]


@pytest.mark.processes
def test_local_runs_name_the_owner_too(
    wire: Callable[[], list[dict[str, Any]]], aws: dict[str, str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings' bucket, to which local runs may save: at start, resume and inspection."""
    passed = ",".join(name for name in aws if name.startswith("AWS_"))
    monkeypatch.setenv("CLOUDTRAIN_PASS_ENVIRONMENT", f"{os.environ['CLOUDTRAIN_PASS_ENVIRONMENT']},{passed}")
    job = EXAMPLES / "digits" / "job.yaml"
    changes = {"train.steps": 4, "train.epochs": "null", "checkpoint.every": "2 steps"}
    changes |= {"checkpoint.uri": f"s3://{aws['CLOUDTRAIN_BUCKET']}/saved", "code.env.CLOUDTRAIN_S3_ENGINE": "boto3"}
    options = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    done = cli("submit", job, "--local", "--instances", "1", "--follow", "--json", *options)
    assert done.code == 0, done.err
    run = done.json["run"]
    assert cli("checkpoints", run, "--json").json["checkpoints"]
    assert cli("checkpoints", "verify", run).code == 0
    seen = len(wire())
    on = cli("resume", run, "--set", "train.steps=6", "--follow", "--json")
    assert on.code == 0, on.err
    assert on.json["first_step"] == 4
    assert len(wire()) > seen
    assert [line["request"] for line in wire() if line["headers"].get(OWNER) != ACCOUNT] == []


def test_the_sandbox_refuses_another_owner_as_s3_does(sandbox: Served) -> None:
    from botocore.exceptions import ClientError

    s3 = sandbox.client("s3")
    bucket = sandbox.info["bucket"]
    s3.put_object(Bucket=bucket, Key="own", Body=b"1", ExpectedBucketOwner=ACCOUNT)
    with pytest.raises(ClientError, match="AccessDenied"):
        s3.get_object(Bucket=bucket, Key="own", ExpectedBucketOwner="999999999999")


def test_the_runtime_neither_reads_nor_writes_anothers_bucket(sandbox: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """With either engine; s3torchconnector cannot name the owner, so boto3 checks the owner and uploads."""
    from cloudtrain_runtime.contract.bucket_owner import OWNERS_VARIABLE
    from cloudtrain_runtime.s3.objects import S3Error, S3Objects

    for name, value in sandbox.environment.items():
        monkeypatch.setenv(name, value)
    bucket = sandbox.info["bucket"]
    uri = f"s3://{bucket}/whose"

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
