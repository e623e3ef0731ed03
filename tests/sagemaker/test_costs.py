"""`cloudtrain costs` of an account: descriptions of jobs, logs of failures, tags of plans, and Cost Explorer."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import requests
from support.aws_frontend import Answer, Front, Request
from support.jobs import Cli

from cloudtrain import catalog
from cloudtrain.backends.sagemaker.endpoint_billing import EndpointRecord, record_deleted

pytestmark = [pytest.mark.aws, pytest.mark.filterwarnings("ignore")]

NOW = datetime.now(UTC).replace(microsecond=0)
ENDED = NOW - timedelta(days=2)


def job_of(
    name: str, status: str, seconds: int, *, kind: str = "ml.g5.xlarge", billed: int | None = None
) -> Any:
    """Return the description of a job with 2 instances that ran for some seconds; `billed` is for spot."""
    began = (ENDED - timedelta(seconds=seconds)).timestamp()
    return {
        "TrainingJobName": name,
        "TrainingJobArn": f"arn:aws:sagemaker:us-west-2:123456789012:training-job/{name}",
        "CreationTime": began,
        "TrainingStartTime": began,
        "TrainingEndTime": ENDED.timestamp(),
        "LastModifiedTime": ENDED.timestamp(),
        "TrainingJobStatus": status,
        "SecondaryStatus": status,
        "ResourceConfig": {"InstanceType": kind, "InstanceCount": 2, "VolumeSizeInGB": 1},
        "OutputDataConfig": {"S3OutputPath": "s3://cloudtrain-test/x"},
        "TrainingTimeInSeconds": seconds,
        "BillableTimeInSeconds": billed or seconds,
        "EnableManagedSpotTraining": billed is not None,
    }


JOBS = {
    job["TrainingJobName"]: job
    for job in (
        job_of("gpt-261120-101500-000003", "Failed", 1800),
        job_of("gpt-261120-101500-000002", "Completed", 7200, billed=1800),
        job_of("digits-261120-101500-000001", "Completed", 3600),
        job_of("digits-261120-101500-000000", "Completed", 3600, kind="ml.p6-b300.48xlarge"),
    )
}


@pytest.fixture
def account(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    """Serve an account with four jobs."""
    with Front(aws["AWS_ENDPOINT_URL"]).serve() as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        front.rules["ListTrainingJobs"] = lambda _: Answer.json(
            {"TrainingJobSummaries": list(JOBS.values())}
        )
        front.rules["DescribeTrainingJob"] = describe
        yield front


def describe(request: Request) -> Answer:
    return Answer.json(JOBS[json.loads(request.body)["TrainingJobName"]])


def test_the_sums_are_billed_seconds_times_price(account: Front, cli: Cli) -> None:
    usd = catalog.bundled_prices().usd_per_hour("ml.g5.xlarge", "us-west-2")
    assert usd is not None
    found = cli("costs", "--sagemaker", "--json").json
    assert found["total"] == {
        "group": "total",
        "runs": 4,
        "instance_hours": 2 * (0.5 + 0.5 + 1 + 1),
        "cost_usd": round(2 * usd * (0.5 + 0.5 + 1), 2),
        "saved_usd": round(2 * usd * 1.5, 2),
        "interrupted_usd": 0.0,
        "failed_usd": round(2 * usd * 0.5, 2),  # the log has no checkpoint
        "unpriced": 1,
        "endpoints": 0,
    }
    assert [group["group"] for group in found["groups"]] == ["digits", "gpt"]
    assert found["unknown_prices"] == [
        {"instance_type": "ml.p6-b300.48xlarge", "region": "us-west-2", "runs": 1, "endpoints": 0}
    ]
    assert found["billed"] is None
    assert not [call for call in account.seen if "CostAndUsage" in call]
    shown = cli("costs", "--sagemaker")
    assert (
        "not in the sums, because no price is known: ml.p6-b300.48xlarge in us-west-2: 1 run"
        in shown.err
    )
    csv = cli("costs", "--sagemaker", "--csv").out.splitlines()
    assert (
        csv[0]
        == "group,runs,instance_hours,cost_usd,saved_usd,interrupted_usd,failed_usd,unpriced,endpoints"
    )
    assert [line.split(",")[0] for line in csv[1:]] == ["digits", "gpt", "total"]


def test_cost_explorer_is_asked_only_with_billed(
    account: Front, aws: dict[str, str], cli: Cli
) -> None:
    groups = [
        {"Keys": [usage], "Metrics": {"UnblendedCost": {"Amount": usd, "Unit": "USD"}}}
        for usage, usd in {
            "USW2-Train:ml.g5.xlarge": "6.5",
            "TrSpt:ml.g5.xlarge": "0.5",
            "USW2-Notebk:ml.t3": "1",
        }.items()
    ]
    period = {
        "TimePeriod": {"Start": "2026-11-01", "End": "2026-12-01"},
        "Groups": groups,
        "Estimated": True,
    }
    url = f"{aws['AWS_ENDPOINT_URL']}/moto-api/static/ce/cost-and-usage-results"
    requests.post(
        url, json={"results": [{"ResultsByTime": [period]}]}, timeout=60
    ).raise_for_status()
    done = cli("costs", "--sagemaker", "--billed")
    assert (
        "7.00 USD for training instances, 8.00 USD for SageMaker, which AWS may still change"
        in done.out
    )
    assert "1 request of Cost Explorer, each of which AWS bills" in done.err
    assert [call for call in account.seen if "CostAndUsage" in call] == ["GetCostAndUsage"]


ENDPOINT_DAYS = {"current": 10, "elsewhere": 10, "old": 60, "broken": 10, "small": 10}
"""Days since the creation of each endpoint."""
HOURLY = {"InstanceType": "ml.g5.xlarge", "InitialInstanceCount": 1}


def endpoint_of(name: str) -> Any:
    """Return the description of an endpoint; that of `current` has scaled to 2 instances."""
    return {
        "EndpointName": name,
        "EndpointArn": f"arn:aws:sagemaker:us-west-2:123456789012:endpoint/{name}",
        "EndpointConfigName": name,
        "EndpointStatus": "Failed" if name == "broken" else "InService",
        "CreationTime": (NOW - timedelta(days=ENDPOINT_DAYS[name])).timestamp(),
        "LastModifiedTime": NOW.timestamp(),
        "ProductionVariants": [
            {"VariantName": "main", "CurrentInstanceCount": 2 if name == "current" else 1}
        ],
    }


def serve_endpoints(account: Front) -> None:
    """Give the account five endpoints, of which `deploy` has created four, and record one that was deleted."""

    def name_in(request: Request, field: str) -> str:
        return str(json.loads(request.body)[field]).rpartition("/")[2]

    def config_of(request: Request) -> Answer:
        name = name_in(request, "EndpointConfigName")
        serverless = {"ServerlessConfig": {"MemorySizeInMB": 1024, "MaxConcurrency": 5}}
        variant = {
            "VariantName": "main",
            "ModelName": "m",
            **(serverless if name == "small" else HOURLY),
        }
        described = {
            "EndpointConfigName": name,
            "EndpointConfigArn": f"arn:{'x' * 20}",
            "CreationTime": 0,
        }
        return Answer.json({**described, "ProductionVariants": [variant]})

    def tags_of(request: Request) -> Answer:
        run = [{"Key": "cloudtrain:run", "Value": "digits-261120-101500-000001"}]
        return Answer.json({"Tags": [] if name_in(request, "ResourceArn") == "elsewhere" else run})

    account.respond(
        "ListEndpoints", Answer.json({"Endpoints": [endpoint_of(name) for name in ENDPOINT_DAYS]})
    )
    account.rules["DescribeEndpoint"] = lambda request: Answer.json(
        endpoint_of(name_in(request, "EndpointName"))
    )
    account.rules["DescribeEndpointConfig"] = config_of
    account.rules["ListTags"] = tags_of
    created = NOW - timedelta(days=20)
    deleted = EndpointRecord(
        "arn:aws:sagemaker:us-west-2:123456789012:endpoint/gone",
        "gone",
        "gpt-261120-101500-000002",
        created.timestamp(),
        (created + timedelta(hours=5)).timestamp(),
        "ml.g5.xlarge",
        3,
    )
    record_deleted("sagemaker", deleted, os.environ)
    record_deleted(
        "sagemaker",
        dataclasses.replace(deleted, arn=deleted.arn.replace("west-2", "east-1")),
        os.environ,
    )


def test_endpoints_and_trials_equal_the_sum_by_hand(account: Front, cli: Cli) -> None:
    usd = catalog.bundled_prices().usd_per_hour("ml.g5.xlarge", "us-west-2")
    assert usd is not None
    trials = [
        job_of(f"gpt-0123456789-2-{number:03d}-89abcdef", "Completed", 1800) for number in (1, 2)
    ]
    jobs = {job["TrainingJobName"]: job for job in (*trials, JOBS["digits-261120-101500-000001"])}
    account.rules["ListTrainingJobs"] = lambda _: Answer.json(
        {"TrainingJobSummaries": list(jobs.values())}
    )
    account.rules["DescribeTrainingJob"] = lambda request: Answer.json(
        jobs[json.loads(request.body)["TrainingJobName"]]
    )
    serve_endpoints(account)
    until = NOW - timedelta(days=1)
    arguments = (
        "--since",
        f"{NOW - timedelta(days=30):%Y-%m-%dT%H:%M:%S}",
        "--until",
        f"{until:%Y-%m-%dT%H:%M:%S}",
    )
    done = cli("costs", "--sagemaker", *arguments, "--json")
    assert done.code == 0, done.err
    found = done.json
    by_name = {group["group"]: group for group in found["groups"]}
    # Of the endpoints: 9 days of 2 instances, 29 days of one, 5 hours of 3. The failed one has no instances.
    assert by_name["digits"]["cost_usd"] == round(usd * (2 * 1 + 24 * (9 * 2 + 29)), 2)
    assert by_name["gpt"]["cost_usd"] == round(usd * (2 * 2 * 0.5 + 5 * 3), 2)
    assert found["total"]["cost_usd"] == round(usd * (2 + 24 * 47 + 2 + 15), 2)
    assert (found["total"]["runs"], found["total"]["endpoints"], found["total"]["unpriced"]) == (
        3,
        5,
        1,
    )
    assert {each["endpoint"]: each["cost_usd"] for each in found["endpoints"]} == {
        "small": None,
        "current": round(usd * 24 * 18, 2),
        "broken": 0.0,
        "old": round(usd * 24 * 29, 2),
        "gone": round(usd * 15, 2),
    }
    assert found["unknown_prices"] == []
    assert found["missing"][0] == "small is serverless: AWS bills its requests"
    assert "deleted otherwise than by `cloudtrain undeploy` on this machine" in found["missing"][1]
    shown = cli("costs", "--sagemaker", *arguments)
    assert shown.out.splitlines()[1].split()[:3] == ["digits", "1", "4"]
    assert "not in the sums: small is serverless: AWS bills its requests" in shown.err


def test_costs_without_the_permission_to_list_endpoints(account: Front, cli: Cli) -> None:
    account.respond("ListEndpoints", Answer.denied())
    done = cli("costs", "--sagemaker", "--json")
    assert (done.code, done.json["total"]["runs"]) == (0, 4)
    assert done.json["missing"][0].startswith(
        "endpoints: could not list the endpoints: AWS says AccessDenied"
    )
