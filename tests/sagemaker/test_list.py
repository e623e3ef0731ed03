"""`cloudtrain list`: the calls to AWS that it makes, and the meaning of each filter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import pytest
from support.aws_frontend import Answer, Front, Request
from support.jobs import Cli

import cloudtrain
from cloudtrain.backends.sagemaker.backend import SageMakerBackend
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter
from cloudtrain.runs.status import State
from cloudtrain.settings.settings import Settings

pytestmark = [pytest.mark.aws, pytest.mark.filterwarnings("ignore")]

COUNT = 250
NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
STATUSES = ("Completed", "Failed", "InProgress", "Stopped", "Stopping")
STATES = dict(zip(STATUSES, ("SUCCEEDED", "FAILED", "RUNNING", "STOPPED", "STOPPING"), strict=True))


def job_of(index: int) -> dict[str, Any]:
    """Return the summary of a job created `index` hours before NOW. cloudtrain did not submit every tenth job."""
    created = NOW - timedelta(hours=index)
    name = f"{'gpt' if index % 2 else 'digits'}-{created:%y%m%d-%H%M%S}-{index:06x}"
    status = STATUSES[index % len(STATUSES)]
    return {
        "TrainingJobName": f"pytorch-training-{index}" if index % 10 == 9 else name,
        "TrainingJobArn": f"arn:aws:sagemaker:us-west-2:123456789012:training-job/{name}",
        "CreationTime": created.timestamp(),
        "LastModifiedTime": created.timestamp(),
        "TrainingJobStatus": status,
        "SecondaryStatus": "Training" if status == "InProgress" else status,
    }


JOBS = [job_of(index) for index in range(COUNT)]
OURS = [job for job in JOBS if not job["TrainingJobName"].startswith("pytorch")]


def sagemaker_calls(account: Front) -> list[str]:
    """Return the calls to SageMaker. The one call to S3 lists the AWS Batch queues that were used."""
    others = [operation for operation in account.seen if operation.startswith("GET ")]
    assert others in ([], ["GET /cloudtrain-test"])
    return [operation for operation in account.seen if operation not in others]


def answer_list_training_jobs(request: Request) -> Answer:
    """Answer ListTrainingJobs as documented: time and name filter before a page is cut, the status afterwards."""
    wanted = json.loads(request.body)
    found = [
        job
        for job in JOBS
        if wanted.get("NameContains", "") in job["TrainingJobName"]
        and wanted.get("CreationTimeAfter", 0)
        < job["CreationTime"]
        < wanted.get("CreationTimeBefore", 1e12)
    ]
    assert (wanted["SortBy"], wanted["SortOrder"]) == ("CreationTime", "Descending")
    start, size = int(wanted.get("NextToken", 0)), wanted.get("MaxResults", 10)
    status = wanted.get("StatusEquals")
    page = [
        job for job in found[start : start + size] if status in (None, job["TrainingJobStatus"])
    ]
    more = {"NextToken": str(start + size)} if start + size < len(found) else {}
    return Answer.json({"TrainingJobSummaries": page, **more})


@pytest.fixture
def account(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    """Serve an account with many jobs."""
    with Front(aws["AWS_ENDPOINT_URL"]).serve() as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        front.rules["ListTrainingJobs"] = answer_list_training_jobs
        yield front


def backend() -> SageMakerBackend:
    return SageMakerBackend(Settings(region="us-west-2"))


def names(wanted: RunFilter = ALL_RUNS, most: int | None = None) -> list[str]:
    return [status.run for status in islice(backend().list(wanted), most)]


def expected(*indexes: int) -> list[str]:
    return [job_of(index)["TrainingJobName"] for index in indexes]


def test_only_the_shown_pages_are_fetched(account: Front, cli: Cli) -> None:
    assert names(most=20) == [job["TrainingJobName"] for job in OURS[:20]]
    assert sagemaker_calls(account) == ["ListTrainingJobs"]
    account.seen.clear()
    assert len(names(most=91)) == 91
    assert sagemaker_calls(account) == ["ListTrainingJobs"] * 2
    account.seen.clear()
    assert names() == [job["TrainingJobName"] for job in OURS]
    assert sagemaker_calls(account) == ["ListTrainingJobs"] * 3
    account.seen.clear()
    done = cli("list", "--sagemaker")
    assert sagemaker_calls(account) == ["ListTrainingJobs"]
    lines = done.out.splitlines()
    assert lines[0].split() == ["run", "state", "submitted", "(UTC)", "took"]
    assert [line.split()[0] for line in lines[1:]] == [
        f"sagemaker:{job['TrainingJobName']}" for job in OURS[:20]
    ]
    assert lines[1].split()[1:4] == ["SUCCEEDED", "2026-11-20", "12:00"]
    assert done.err.strip().endswith("list --sagemaker -n 40")
    assert done.err.startswith("more: ")


def test_no_call_is_made_before_the_first_run_is_read(account: Front) -> None:
    runs = cloudtrain.Client().list_runs(backend=["sagemaker"])
    assert sagemaker_calls(account) == []
    next(runs)
    assert sagemaker_calls(account) == ["ListTrainingJobs"]


def request_documents(front: Front) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in front.requests if request.body]


def test_names(account: Front, cli: Cli) -> None:
    assert names(RunFilter(name="digits"), 3) == expected(0, 2, 4)
    assert request_documents(account)[0]["NameContains"] == "digits"
    account.seen.clear()
    assert names(RunFilter(name="no such name")) == []
    assert sagemaker_calls(account) == [], "AWS would refuse the text"
    done = cli("list", "--sagemaker", "--name", "nothing")
    assert (done.code, done.out) == (0, "no run matches\n")


@pytest.mark.parametrize("status", STATUSES)
def test_states_are_found_behind_pages_without_them(account: Front, status: str) -> None:
    state = State(STATES[status])
    found = names(RunFilter(states=frozenset({state})))
    assert found == [job["TrainingJobName"] for job in OURS if job["TrainingJobStatus"] == status]
    sent = {each.get("StatusEquals") for each in request_documents(account)}
    # Each of these two states has several statuses at AWS, so the client filters them.
    assert sent == {None if state in (State.STOPPING, State.STOPPED) else status}


def test_several_states(account: Front) -> None:
    wanted = RunFilter(states=frozenset({State.FAILED, State.SUCCEEDED}))
    assert names(wanted, 4) == expected(0, 1, 5, 6)


def test_since_is_inclusive_and_until_is_exclusive(account: Front, cli: Cli) -> None:
    wanted = RunFilter(since=NOW - timedelta(hours=4), until=NOW - timedelta(hours=1))
    assert names(wanted) == expected(2, 3, 4)
    assert sagemaker_calls(account) == ["ListTrainingJobs"]
    done = cli(
        "list",
        "--sagemaker",
        "--since",
        "2026-11-19",
        "--until",
        "2026-11-19",
        "-n",
        "50",
        "--json",
    )
    assert [run["run"] for run in done.json["runs"]] == expected(
        *(each for each in range(13, 37) if each % 10 != 9)
    )
    cli("list", "--sagemaker", "--since", "2d")
    assert request_documents(account)[-1]["CreationTimeAfter"] == pytest.approx(
        datetime.now(UTC).timestamp() - 2 * 86400, abs=60
    )


def create(name: str, **tags: str) -> None:
    import boto3

    boto3.client("sagemaker").create_training_job(
        TrainingJobName=name,
        AlgorithmSpecification={"TrainingImage": "image", "TrainingInputMode": "File"},
        RoleArn="arn:aws:iam::123456789012:role/training",
        OutputDataConfig={"S3OutputPath": "s3://cloudtrain-test/x"},
        ResourceConfig={"InstanceType": "ml.g5.xlarge", "InstanceCount": 2, "VolumeSizeInGB": 1},
        StoppingCondition={"MaxRuntimeInSeconds": 60},
        Tags=[{"Key": key, "Value": value} for key, value in tags.items()],
    )


def test_tags_are_found_by_one_search(account: Front, cli: Cli) -> None:
    create("digits-261120-101500-1a2b3c", team="vision", stage="test")
    create("digits-261120-101501-1a2b3c", team="vision")
    create("other-job", team="vision", stage="test")
    create("digits-261120-101502-1a2b3c", team="language", stage="test")
    account.seen.clear()
    done = cli("list", "--sagemaker", "--tag", "team=vision", "--tag", "stage=test", "--json")
    assert sagemaker_calls(account) == ["Search"]
    (run,) = done.json["runs"]
    assert run["run"] == "digits-261120-101500-1a2b3c"
    assert (run["instance_type"], run["instances"], run["state"]) == (
        "ml.g5.xlarge",
        2,
        "SUCCEEDED",
    )
    assert "2 x ml.g5.xlarge" in cli("list", "--sagemaker", "--tag", "stage=test").out


def test_a_search_contains_every_filter(account: Front) -> None:
    account.respond("Search", Answer.json({"Results": []}))
    wanted = RunFilter(
        "gpt", frozenset({State.RUNNING, State.FAILED}), {"team": "vision", "empty": ""}, NOW, NOW
    )
    assert names(wanted) == []
    (sent,) = request_documents(account)
    filters = {
        (each["Name"], each["Operator"], each.get("Value"))
        for each in sent["SearchExpression"]["Filters"]
    }
    assert filters == {
        ("Tags.team", "Equals", "vision"),
        ("Tags.empty", "Exists", None),
        ("TrainingJobStatus", "In", "Failed,InProgress"),
        ("TrainingJobName", "Contains", "gpt"),
        ("CreationTime", "GreaterThanOrEqualTo", "2026-11-20T12:00:00"),
        ("CreationTime", "LessThanOrEqualTo", "2026-11-20T12:00:01"),
    }
    assert (sent["SortBy"], sent["SortOrder"], sent["MaxResults"]) == (
        "CreationTime",
        "Descending",
        100,
    )


def test_a_denied_account_hides_no_local_runs(account: Front, cli: Cli) -> None:
    account.respond("ListTrainingJobs", Answer.denied())
    account.respond("Search", Answer.denied())
    done = cli("list")
    assert done.code == 0
    assert "the account's runs are not shown: could not list training jobs" in done.err
    denied = cli("list", "--sagemaker", "--tag", "team=vision")
    assert denied.code == 3
    assert "sagemaker:Search for --tag" in denied.err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--state", "RUNING", 'there is no such state\n  did you mean "RUNNING"?'),
        ("--state", "x", "one of: QUEUED, STARTING, RUNNING"),
        ("--tag", "team", "expected KEY=VALUE"),
        (
            "--since",
            "yesterday",
            "expected a duration such as 2d or a date such as 2026-11-01, got 'yesterday'",
        ),
        ("--until", "2026-13-01", "--until: expected a duration"),
    ],
)
def test_invalid_options_are_exit_code_2(
    account: Front, cli: Cli, option: str, value: str, message: str
) -> None:
    done = cli("list", option, value)
    assert done.code == 2
    assert message in done.err
    assert sagemaker_calls(account) == []
