"""Warm pools and instance preferences in the sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.jobs import Cli, until
from support.sandboxes import (
    Served,
    model_of,
    request,
    statuses,
    unknown_fields,
)

from cloudtrain.backends.sandbox.training_job import TrainingJob, WarmPools

pytestmark = [pytest.mark.processes, pytest.mark.aws]

TRAIN = "echo trained"
P4D, P4DE, P5 = "ml.p4d.24xlarge", "ml.p4de.24xlarge", "ml.p5.48xlarge"


CLUSTER = {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 77}
"""Jobs of other tests have another volume size, so they reuse no pool of these jobs."""


def warm(seconds: int = 600, **fields: Any) -> dict[str, Any]:
    return {"ResourceConfig": {**CLUSTER, "KeepAlivePeriodInSeconds": seconds, **fields}}


def pool_of(sandbox: Served, name: str) -> dict[str, Any]:
    found: dict[str, Any] = sandbox.describe(name).get("WarmPoolStatus", {})
    return found


def listed(sandbox: Served, status: str, name: str) -> list[str]:
    client = sandbox.client("sagemaker")
    response = client.list_training_jobs(
        WarmPoolStatusEquals=status, NameContains=name, MaxResults=100
    )
    for job in response["TrainingJobSummaries"]:
        assert job["WarmPoolStatus"]["Status"] == status
    return [job["TrainingJobName"] for job in response["TrainingJobSummaries"]]


def wait_for(file: Path) -> str:
    """Return a command that ends when a file exists."""
    return f"until [ -e '{file}' ]; do sleep 0.1; done"


def end_pool(sandbox: Served, name: str, seconds: int = 0) -> None:
    resources = {"KeepAlivePeriodInSeconds": seconds}
    sandbox.client("sagemaker").update_training_job(TrainingJobName=name, ResourceConfig=resources)


def test_the_next_matching_job_reuses_the_cluster(sandbox: Served, tmp_path: Path) -> None:
    sandbox.create("pool-a", TRAIN, **warm())
    sandbox.end_of("pool-a")
    assert pool_of(sandbox, "pool-a") == {"Status": "Available"}
    assert listed(sandbox, "Available", "pool-a") == ["pool-a"]
    sandbox.set_faults(capacity_after_seconds=3600)
    sandbox.create("pool-other", TRAIN, **warm(VolumeSizeInGB=11))
    sandbox.create("pool-b", f"echo trained; {wait_for(tmp_path / 'go')}", **warm(1200))
    sandbox.secondary("pool-b", "Training")
    assert pool_of(sandbox, "pool-b") == {"Status": "InUse"}
    (tmp_path / "go").touch()
    done = sandbox.end_of("pool-b")
    assert statuses(done) == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    reused = pool_of(sandbox, "pool-a")
    assert (reused["Status"], reused["ReusedByJob"]) == ("Reused", "pool-b")
    assert reused["ResourceRetainedBillableTimeInSeconds"] >= 0
    assert pool_of(sandbox, "pool-b") == {"Status": "Available"}
    assert sandbox.describe("pool-other")["SecondaryStatus"] == "Pending"
    assert pool_of(sandbox, "pool-other") == {}
    sandbox.client("sagemaker").stop_training_job(TrainingJobName="pool-other")
    sandbox.end_of("pool-other")
    assert pool_of(sandbox, "pool-other") == {}, "it never had a cluster"
    end_pool(sandbox, "pool-b")


def test_job_without_keep_alive_releases_the_warm_cluster(sandbox: Served) -> None:
    sandbox.create("keeps", TRAIN, **warm())
    sandbox.end_of("keeps")
    sandbox.set_faults(capacity_after_seconds=3600)
    sandbox.create("takes", TRAIN, ResourceConfig=CLUSTER)
    sandbox.end_of("takes")
    assert pool_of(sandbox, "keeps")["ReusedByJob"] == "takes"
    assert pool_of(sandbox, "takes")["Status"] == "Terminated"


def test_a_pool_expires_or_is_terminated(sandbox: Served, tmp_path: Path) -> None:
    client = sandbox.client("sagemaker")
    sandbox.create("short", TRAIN, **warm(1))
    command = wait_for(tmp_path / "go")
    sandbox.create("running", command, **warm(VolumeSizeInGB=78))  # does not match the other pool
    sandbox.secondary("running", "Training")
    with pytest.raises(ClientError, match="running has no warm pool that is Available"):
        end_pool(sandbox, "running")
    sandbox.end_of("short")
    until(lambda: pool_of(sandbox, "short")["Status"] == "Terminated")
    assert pool_of(sandbox, "short") == {
        "Status": "Terminated",
        "ResourceRetainedBillableTimeInSeconds": 1,
    }
    with pytest.raises(ClientError, match="no warm pool"):
        end_pool(sandbox, "short")
    (tmp_path / "go").touch()
    sandbox.end_of("running")
    end_pool(sandbox, "running", 3600)
    assert sandbox.describe("running")["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 3600
    assert pool_of(sandbox, "running")["Status"] == "Available"
    with pytest.raises(ClientError, match="less than or equal to 21600"):
        end_pool(sandbox, "running", 21601)
    end_pool(sandbox, "running")
    assert pool_of(sandbox, "running")["Status"] == "Terminated"
    assert listed(sandbox, "Available", "running") == []
    with pytest.raises(
        ClientError,
        match="cloudtrain sandbox: UpdateTrainingJob supports only KeepAlivePeriodInSeconds",
    ):
        client.update_training_job(
            TrainingJobName="running", RemoteDebugConfig={"EnableRemoteDebug": True}
        )


def test_warm_cluster_survives_job_failures_only(sandbox: Served) -> None:
    sandbox.create("own-fault", "exit 3", **warm())
    sandbox.create("stopped-warm", "sleep 60", **warm(InstanceCount=2))
    sandbox.secondary("stopped-warm", "Training")
    sandbox.client("sagemaker").stop_training_job(TrainingJobName="stopped-warm")
    for name in ("own-fault", "stopped-warm"):
        sandbox.end_of(name)
        assert pool_of(sandbox, name)["Status"] == "Available"
        end_pool(sandbox, name)
    sandbox.set_faults(dead_instance={"host": "algo-1", "step": 2})
    sandbox.create(
        "died", 'echo "CLOUDTRAIN {\\"event\\": \\"step\\", \\"step\\": 2}"; sleep 20', **warm()
    )
    assert sandbox.end_of("died")["FailureReason"].startswith("InternalServerError")
    assert pool_of(sandbox, "died") == {
        "Status": "Terminated",
        "ResourceRetainedBillableTimeInSeconds": 0,
    }


def test_one_pool_is_reused_by_one_job_only(sandbox: Served) -> None:
    sandbox.create("one", TRAIN, **warm())
    sandbox.end_of("one")
    sandbox.set_faults(capacity_after_seconds=3600)
    names = [f"many-{index}" for index in range(4)]
    for name in names:
        sandbox.create(name, "sleep 1", **warm())
    # The jobs run one after the other. Each reuses the cluster of the previous one.
    for name in names:
        sandbox.end_of(name)
    takers = [pool_of(sandbox, name).get("ReusedByJob") for name in ["one", *names]]
    assert sorted(filter(None, takers)) == names
    last = names[takers[1:].index(None)]
    end_pool(sandbox, last)


def test_warm_pool_responses_match_botocores_model(sandbox: Served) -> None:
    client = sandbox.client("sagemaker")
    sandbox.create("warm-shape", TRAIN, Tags=[{"Key": "team", "Value": "vision"}], **warm())
    sandbox.end_of("warm-shape")
    raw: dict[str, Any] = {}
    client.meta.events.register(
        "after-call.sagemaker",
        lambda http_response, model, **_: raw.update({model.name: http_response.content}),
    )
    client.describe_training_job(TrainingJobName="warm-shape")
    client.list_training_jobs(WarmPoolStatusEquals="Available")
    filters = [{"Name": "Tags.team", "Operator": "Equals", "Value": "vision"}]
    client.search(Resource="TrainingJob", SearchExpression={"Filters": filters})
    client.update_training_job(
        TrainingJobName="warm-shape", ResourceConfig={"KeepAlivePeriodInSeconds": 0}
    )
    assert len(raw) == 4
    for name, content in raw.items():
        response, shape = json.loads(content), model_of(name).output_shape
        assert unknown_fields(response, shape) == []
        assert set(shape.required_members) <= set(response)


def test_search_finds_by_tags_time_status_and_name(sandbox: Served) -> None:
    client = sandbox.client("sagemaker")
    for index in range(3):
        tags = [{"Key": "set", "Value": "search"}, {"Key": "parity", "Value": str(index % 2)}]
        sandbox.create(f"search-{index}", "exit 1" if index == 2 else TRAIN, Tags=tags)
    for index in range(3):
        sandbox.end_of(f"search-{index}")

    def names(*filters: tuple[str, str, str], **more: Any) -> list[str]:
        conditions = [
            {"Name": name, "Operator": test, **({"Value": value} if value else {})}
            for name, test, value in filters
        ]
        arguments = {"SortBy": "CreationTime", "SortOrder": "Descending", **more}
        pages = client.get_paginator("search").paginate(
            Resource="TrainingJob", SearchExpression={"Filters": conditions}, **arguments
        )
        return [
            result["TrainingJob"]["TrainingJobName"] for page in pages for result in page["Results"]
        ]

    ours = ("Tags.set", "Equals", "search")
    assert names(ours) == ["search-2", "search-1", "search-0"]
    assert names(ours, PaginationConfig={"PageSize": 2}) == ["search-2", "search-1", "search-0"]
    assert names(ours, SortOrder="Ascending") == ["search-0", "search-1", "search-2"]
    assert names(ours, ("Tags.parity", "Equals", "0")) == ["search-2", "search-0"]
    assert names(ours, ("TrainingJobStatus", "In", "Failed,Stopped")) == ["search-2"]
    assert names(ours, ("TrainingJobName", "Contains", "-1")) == ["search-1"]
    assert names(ours, ("CreationTime", "GreaterThanOrEqualTo", "2001-01-01T00:00:00")) != []
    assert names(ours, ("CreationTime", "LessThanOrEqualTo", "2001-01-01T00:00:00")) == []
    assert names(ours, ("Tags.none", "Exists", "")) == []
    for wrong in (
        ("TrainingJobName", "GreaterThan", "a"),
        ("CreationTime", "LessThanOrEqualTo", "soon"),
        ("Metrics.x", "Equals", "1"),
    ):
        with pytest.raises(ClientError, match="ValidationException"):
            names(ours, wrong)


def prefers(*names: str, **more: Any) -> dict[str, Any]:
    counts = range(1, len(names) + 1)
    preferences = [
        {"InstanceType": name, "InstanceCount": count}
        for name, count in zip(names, counts, strict=True)
    ]
    return {"ResourceConfig": {"InstancePreferences": preferences, "VolumeSizeInGB": 10, **more}}


def test_next_preferred_type_is_used_without_capacity(sandbox: Served) -> None:
    sandbox.set_faults(no_capacity_types=[P4D])
    script = 'cat "$CLOUDTRAIN_ML_ROOT/input/config/resourceconfig.json"'
    sandbox.create("second-best", script, **prefers(P4D, P4DE))
    resources = sandbox.end_of("second-best")["ResourceConfig"]
    assert (resources["SelectedInstanceType"], resources["SelectedInstanceCount"]) == (P4DE, 2)
    assert "InstanceType" not in resources
    config = json.loads("".join(sandbox.lines("second-best", "algo-2")))
    assert (config["current_instance_type"], config["hosts"]) == (P4DE, ["algo-1", "algo-2"])


def test_job_waits_when_no_preferred_type_has_capacity(sandbox: Served) -> None:
    sandbox.set_faults(no_capacity_types=[P4D, P4DE])
    sandbox.create("waits-for-any", TRAIN, **prefers(P4D, P4DE))
    sandbox.secondary("waits-for-any", "Pending")
    assert not {"SelectedInstanceType", "SelectedInstanceCount"} & set(
        sandbox.describe("waits-for-any")["ResourceConfig"]
    )
    sandbox.set_faults(no_capacity_types=[P4DE])
    done = sandbox.end_of("waits-for-any")
    assert (done["TrainingJobStatus"], done["ResourceConfig"]["SelectedInstanceType"]) == (
        "Completed",
        P4D,
    )


def test_a_list_of_cpu_types_does_not_wait(sandbox: Served) -> None:
    sandbox.set_faults(no_capacity_types=["ml.m5.large", "ml.c5.xlarge"])
    sandbox.create("cpu-list", TRAIN, **prefers("ml.m5.large", "ml.c5.xlarge"))
    assert sandbox.end_of("cpu-list")["FailureReason"].startswith("CapacityError")


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (
            {"InstancePreferences": [{"InstanceType": P4D}]},
            "InstanceCount must be specified either in ResourceConfig",
        ),
        (
            {
                "InstancePreferences": [{"InstanceType": P4D, "InstanceCount": 1}],
                "InstanceCount": 1,
            },
            "InstanceCount must be specified either in ResourceConfig",
        ),
        (
            {
                "InstancePreferences": [
                    {"InstanceType": P4D, "InstanceCount": 1},
                    {"InstanceType": P4DE},
                ]
            },
            "or in every entry",
        ),
        (
            {"InstancePreferences": [{"InstanceType": P4D}] * 2, "InstanceCount": 1},
            "can appear only once",
        ),
        (
            {
                "InstanceGroups": [
                    {"InstanceGroupName": "a", "InstanceType": P4D, "InstanceCount": 1}
                ]
            },
            "KeepAlivePeriodInSeconds is not supported with InstanceGroups",
        ),
    ],
)
def test_invalid_combinations_are_rejected(
    sandbox: Served, resources: dict[str, Any], message: str
) -> None:
    document = request(sandbox, "refused", TRAIN)
    document["ResourceConfig"] = {"VolumeSizeInGB": 10, "KeepAlivePeriodInSeconds": 60, **resources}
    with pytest.raises(ClientError, match=message):
        sandbox.client("sagemaker").create_training_job(**document)


def test_one_count_for_all_preferences(sandbox: Served) -> None:
    preferences = [{"InstanceType": name} for name in (P4D, P4DE)]
    resources = {"InstancePreferences": preferences, "InstanceCount": 2, "VolumeSizeInGB": 10}
    sandbox.create("uniform", TRAIN, ResourceConfig=resources)
    resources = sandbox.end_of("uniform")["ResourceConfig"]
    assert (resources["SelectedInstanceType"], resources["SelectedInstanceCount"]) == (P4D, 2)


JOB = f"""\
name: prefers
code: {{script: train.py}}
cluster: {{prefer: [{P5}, {P4D}], instances: 2, processes_per_instance: 1, keep_alive: 30m}}
limits: {{runtime: 10m}}
"""


def test_status_shows_selected_type_price_and_pool(
    cli: Cli, sandbox: Served, job: Callable[..., Path]
) -> None:
    path = job(JOB, train_py='print("trained")\n')
    environ = {**sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}
    sandbox.set_faults(no_capacity_types=[P5])
    done = cli("submit", path, "--skip-check", "--follow", "--json", environ=environ)
    assert done.code == 0, done.err
    run = done.json["run"]
    status = cli("status", run, "--json", environ=environ).json
    assert (status["instance_type"], status["instances"]) == (P4D, 2)
    first, second = (_usd_per_hour(cli, name) for name in (P5, P4D))
    assert status["usd_per_hour"] == pytest.approx(2 * second, abs=1e-3)
    assert first != second
    assert status["warm_pool"]["status"] == "Available"
    assert f"end pool cloudtrain stop sagemaker:{run} --pool" in _plain(
        cli("status", run, environ=environ).out
    )

    line = next(
        each for each in cli("list", "--sagemaker", environ=environ).out.splitlines() if run in each
    )
    assert line.endswith("warm pool kept")

    # The next job reuses the pool without other capacity. The check reports this before the submit.
    sandbox.set_faults(no_capacity_types=[P5, P4D])
    checks = {
        each["name"]: each for each in cli("check", path, "--json", environ=environ).json["checks"]
    }
    assert checks["warm start"]["result"] == "pass"
    assert checks["warm start"]["detail"].startswith(f"reuses the warm pool of {run}, kept until ")
    other = cli("check", path, "--set", "cluster.volume=50GB", "--json", environ=environ).json[
        "checks"
    ]
    detail = next(each["detail"] for each in other if each["name"] == "warm start")
    assert (
        detail
        == f"the cluster starts cold: the warm pool of {run} differs in cluster.volume (30, the job has 50)"
    )
    following = cli("submit", path, "--skip-check", "--follow", "--json", environ=environ).json[
        "run"
    ]
    assert cli("status", run, "--json", environ=environ).json["warm_pool"]["reused_by"] == following
    assert f"taken over by {following}" in cli("status", run, environ=environ).out

    # The pool of an active run cannot be ended without waiting. The command rejects this and does not stop the run.
    sandbox.create("active-261120-101500-1a2b3c", "sleep 600")
    rejected = cli("stop", "active-261120-101500-1a2b3c", "--pool", "--no-wait", environ=environ)
    assert (rejected.code, "can only be ended after it" in rejected.err) == (2, True)
    assert sandbox.describe("active-261120-101500-1a2b3c")["TrainingJobStatus"] == "InProgress"
    stopped = cli("stop", "active-261120-101500-1a2b3c", "--pool", "--json", environ=environ)
    assert (stopped.code, stopped.json["state"]) == (0, "STOPPED")
    assert "has no warm pool: the job does not request one" in stopped.err
    ended = cli("stop", following, "--pool", "--json", environ=environ)
    assert (ended.code, ended.json["warm_pool"]["status"]) == (0, "Terminated")
    again = cli("stop", following, "--pool", environ=environ)
    assert again.code == 2
    assert "has no warm pool: it has ended already" in again.err
    assert f"see: cloudtrain status sagemaker:{following}" in again.err
    gone = cli("stop", run, "--pool", environ=environ)
    assert f"{following} uses it now" in gone.err


def _usd_per_hour(cli: Cli, name: str) -> float:
    prices = cli("prices", "--region", "us-west-2", "--json").json["prices"]
    return float(prices[name]["usd_per_hour"])


def _plain(text: str) -> str:
    """Return a text with `cloudtrain` in place of the path of the command."""
    return " ".join("cloudtrain" if word.endswith("/cloudtrain") else word for word in text.split())


class Clock:
    """A clock that tests advance."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_warm_pool_billing() -> None:
    clock = Clock()
    document = {
        "TrainingJobName": "job",
        "RoleArn": "role",
        "StoppingCondition": {"MaxRuntimeInSeconds": 10},
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
        **warm(100),
    }
    pools = WarmPools()
    jobs = [
        TrainingJob({**document, "TrainingJobName": name}, clock) for name in ("a", "b", "c", "d")
    ]
    for job in jobs:
        pools.add(job)
    first, second, third, fourth = jobs
    assert not pools.take(first)
    assert "WarmPoolStatus" not in first.summary()
    _run(first, clock)
    clock.now += 30
    assert pools.take(second)
    assert first.summary()["WarmPoolStatus"] == {
        "Status": "Reused",
        "ResourceRetainedBillableTimeInSeconds": 30,
        "ReusedByJob": "b",
    }
    assert second.pool_status == "InUse"
    assert not pools.take(third), "one job at a time"
    _run(second, clock)
    second.keep_pool_for(200)
    clock.now += 150
    assert second.pool_status == "Available"
    second.keep_pool_for(60)
    assert second.summary()["WarmPoolStatus"] == {
        "Status": "Terminated",
        "ResourceRetainedBillableTimeInSeconds": 150,
    }
    assert not pools.take(third)
    third.select(*third.cluster)
    _run(third, clock)
    clock.now += 100
    assert third.summary()["WarmPoolStatus"] == {
        "Status": "Terminated",
        "ResourceRetainedBillableTimeInSeconds": 100,
    }
    assert not pools.take(fourth)


def _run(job: TrainingJob, clock: Clock) -> None:
    job.select(*job.cluster)
    for status in ("Downloading", "Training", "Uploading", "Completed"):
        clock.now += 5
        job.enter(status)
