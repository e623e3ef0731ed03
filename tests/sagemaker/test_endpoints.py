"""`deploy`, `list --endpoints`, `costs` and `undeploy` against moto over HTTP. No model runs there."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.aws_frontend import Answer, Front, Request, quotas, simulation
from support.jobs import Cli
from support.recorded_runs import write_run

from cloudtrain import Observer
from cloudtrain.aws.retry import OutagePolicy
from cloudtrain.features.serving import deployment

pytestmark = [pytest.mark.aws, pytest.mark.filterwarnings("ignore")]

RUN = "digits-261120-101500-1a2b3c"


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A finished local run of a Task, with code and weights."""
    folder = write_run(tmp_path / "runs-home", RUN, [])
    with tarfile.open(tmp_path / "sourcedir.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("digits.py"), io.BytesIO())
    (folder / "output").mkdir()
    with tarfile.open(folder / "output" / "model.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("model.pt"), io.BytesIO())
    plan = json.loads((folder / "plan.json").read_text())
    code = {"S3DataSource": {"S3Uri": tmp_path.as_uri(), "S3DataType": "S3Prefix"}}
    saved = {"uri": (tmp_path / "checkpoints").as_uri()}
    plan |= {
        "checkpoint": saved,
        "config": {"task": "digits:Digits", "script": None, "checkpoint": saved},
    }
    plan["request"] = {"InputDataConfig": [{"ChannelName": "code", "DataSource": code}]}
    (folder / "plan.json").write_text(json.dumps(plan))
    return RUN


@pytest.fixture
def account(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    """Serve an account with two endpoint instances, in a network, that allows everything."""
    monkeypatch.setenv("CLOUDTRAIN_SUBNETS", "subnet-1")
    monkeypatch.setenv("CLOUDTRAIN_SECURITY_GROUPS", "sg-1")
    with Front(aws["AWS_ENDPOINT_URL"]).serve() as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        front.rules["SimulatePrincipalPolicy"] = simulation()
        front.respond("ListServiceQuotas", quotas({"ml.m5.xlarge for endpoint usage": 2}))
        front.respond("ListAWSDefaultServiceQuotas", quotas({}))
        yield front


def created(account: Front) -> list[str]:
    return [each for each in account.seen if each.startswith("Create")]


@pytest.mark.promise
def test_an_endpoint_is_created_listed_and_deleted(account: Front, cli: Cli, run: str) -> None:
    options = ("--name", "digits", "--autoscale", "1:2", "--json")
    deployed = cli("deploy", run, *options)
    assert deployed.code == 0, deployed.err
    made = created(account)
    assert made == ["CreateModel", "CreateEndpointConfig", "CreateEndpoint"]
    again = cli("deploy", run, *options)
    assert (again.json["existed"], created(account)) == (True, made)
    (listed,) = cli("list", "--endpoints", "--json").json["endpoints"]
    assert (listed["name"], listed["capacity"]) == ("digits", "1 x ml.m5.xlarge")
    (cost,) = cli("costs", "--sagemaker", "--json").json["endpoints"]
    assert (cost["endpoint"], cost["run"], cost["group"]) == (
        "digits",
        f"sagemaker:{run}",
        "digits",
    )
    refused = cli("deploy", run, "--name", "other", "--instances", "2")
    assert refused.code == 3
    assert (
        "quota: ml.m5.xlarge for endpoint usage: 2 in us-west-2, 1 in use, the endpoint needs 2"
        in refused.err
    )
    assert "--quota-code L-00000001 --desired-value 3" in refused.err
    assert created(account) == made
    deleted = cli("undeploy", "digits", "--json")
    assert [each.split()[0] for each in deleted.json["deleted"]] == [
        "scaling",
        "endpoint",
        "endpoint",
        "model",
    ]
    (cost,) = cli("costs", "--sagemaker", "--json").json["endpoints"]
    assert (cost["endpoint"], cost["state"]) == ("digits", "Deleted")


def test_a_missing_permission_stops_a_deploy(account: Front, cli: Cli, run: str) -> None:
    account.rules["SimulatePrincipalPolicy"] = simulation({"sagemaker:CreateModel": "implicitDeny"})
    planned = cli(
        "deploy",
        run,
        "--name",
        "digits",
        "--autoscale",
        "1:3",
        "--instance-type",
        "ml.m5.xlarge",
        "--plan",
    )
    assert planned.code == 0
    denied = "not allowed: sagemaker:CreateModel on arn:aws:sagemaker:us-west-2:123456789012:model/digits-"
    assert f"caller failed: {denied}" in planned.out
    assert "warning: it cannot scale to 3 instances" in planned.out
    assert "the role allows all" in planned.out
    refused = cli("deploy", run, "--name", "digits")
    assert (refused.code, f"caller: {denied}" in refused.err) == (3, True)
    assert created(account) == []
    assert cli("deploy", run, "--name", "digits", "--skip-check").code == 0


def test_a_sample_of_an_unknown_kind_creates_nothing(
    account: Front, cli: Cli, run: str, tmp_path: Path
) -> None:
    (tmp_path / "sample.txt").write_text("text")
    done = cli("deploy", run, "--name", "digits", "--sample", tmp_path / "sample.txt")
    assert done.code == 2
    assert "sample.txt: expected one of .json, .npy, .png, .jpg" in done.err
    assert created(account) == []


def test_a_refused_sample_is_an_input_error_that_names_the_rest(
    account: Front, cli: Cli, run: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text('{"inputs": "text"}')

    def refuse(request: Request) -> Answer | None:
        error = {
            "Message": "no numbers",
            "OriginalStatusCode": 400,
            "OriginalMessage": "no numbers",
        }
        headers = {"x-amzn-ErrorType": "ModelError", "Content-Type": "application/json"}
        return Answer(json.dumps(error).encode(), 424, headers) if b"text" in request.body else None

    account.rules["POST /endpoints/digits/invocations"] = refuse
    done = cli("deploy", run, "--name", "digits", "--sample", tmp_path / "bad.json")
    assert done.code == 2, account.seen
    assert "digits refuses the request with 400: no numbers" in done.err
    left = "what was created of digits is still there, and an endpoint with instances costs money"
    assert f"{left}; to delete it: cloudtrain undeploy digits" in done.err


def test_undeploy_waits_until_aws_can_delete(
    account: Front, cli: Cli, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cli("deploy", run, "--name", "digits", "--json").json
    content = {
        "EndpointName": "digits",
        "EndpointArn": "arn:aws:sagemaker:us-west-2:123456789012:endpoint/digits",
        "EndpointConfigName": made["requests"]["CreateEndpointConfig"]["EndpointConfigName"],
        "EndpointStatus": "Creating",
        "CreationTime": 1.0,
        "LastModifiedTime": 1.0,
    }
    down = Answer(b"", 503)
    responses = iter([*[Answer.json(content)] * 2, down, Answer.json(content)])
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(deployment, "_ANSWERED", OutagePolicy(0.01, limit_seconds=60))
    account.rules["DescribeEndpoint"] = lambda request: next(responses, None)
    real = deployment.open_account
    monkeypatch.setattr(
        deployment,
        "open_account",
        lambda *given: dataclasses.replace(real(*given), poll_seconds=0.05),
    )
    reported: list[str] = []

    class Reported(Observer):
        def on_progress(self, text: str) -> None:
            reported.append(text)

    assert "endpoint digits" in deployment.undeploy("digits", observer=Reported())
    assert (
        "the endpoint is Creating: waiting, because AWS cannot delete it before that ends"
        in reported
    )
    assert any(text.startswith("recovered after ") for text in reported)
    assert next(responses, None) is None


def test_a_list_without_settings_says_so(cli: Cli) -> None:
    listed = cli("list", "--endpoints", "--json")
    assert (listed.code, listed.json) == (0, {"endpoints": []})
    assert "the account was not asked for endpoints: settings are missing: role" in listed.err
    assert cli("list", "--endpoints", "--sagemaker").code == 2
