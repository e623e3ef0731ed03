"""Warm pools: which job can reuse another job's cluster, and what status and plan show."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.console.status_fields import pool_rows
from cloudtrain.planning.warm_pool import describe_start, differences, read_pool
from cloudtrain.runs.status import State, Status

ENDED = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
JOB = {
    **json.loads((Path(__file__).parent / "golden" / "request-everything.json").read_text()),
    "TrainingJobName": "first-261120-101500-1a2b3c",
    "EnableManagedSpotTraining": False,
    "TrainingEndTime": ENDED,
    "WarmPoolStatus": {"Status": "Available"},
}
JOB["ResourceConfig"] = {**JOB["ResourceConfig"], "KeepAlivePeriodInSeconds": 1800}


def changed(path: str, value: Any) -> dict[str, Any]:
    document: dict[str, Any] = copy.deepcopy(JOB)
    at, _, name = path.rpartition(".")
    target = document.setdefault(at, {}) if at else document
    target.update({name: value}) if value is not None else target.pop(name, None)
    return document


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (
            "RoleArn",
            "arn:aws:iam::123456789012:role/other",
            "role (arn:aws:iam::123456789012:role/training",
        ),
        ("ResourceConfig.VolumeSizeInGB", 50, "the job has 50)"),
        ("ResourceConfig.VolumeKmsKeyId", "other", "kms_key ("),
        ("ResourceConfig.InstanceCount", 7, "cluster.instances ("),
        ("ResourceConfig.InstanceType", "ml.g5.xlarge", "cluster.instance_type (ml."),
        ("VpcConfig.Subnets", ["subnet-9"], "cluster.network.subnets ("),
        ("VpcConfig.SecurityGroupIds", ["sg-9"], "cluster.network.security_groups ("),
        (
            "EnableInterContainerTrafficEncryption",
            not JOB.get("EnableInterContainerTrafficEncryption"),
            "encrypt_tra",
        ),
        (
            "EnableNetworkIsolation",
            not JOB.get("EnableNetworkIsolation"),
            "cluster.network.isolation (",
        ),
        (
            "SessionChainingConfig.EnableSessionTagChaining",
            True,
            "session tags (false, the job has true)",
        ),
        ("EnableManagedSpotTraining", True, "cluster.spot (on demand, the job has spot)"),
    ],
)
def test_each_value_that_aws_compares_makes_a_difference(
    path: str, value: Any, expected: str
) -> None:
    found = differences(JOB, changed(path, value))
    assert [expected in str(each) for each in found] == [True]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("TrainingJobName", "other"),
        ("HyperParameters.x", "1"),
        ("AlgorithmSpecification.TrainingImage", "other"),
        ("ResourceConfig.KeepAlivePeriodInSeconds", None),
        ("Tags", []),
    ],
)
def test_other_values_make_no_difference(path: str, value: Any) -> None:
    assert differences(JOB, changed(path, value)) == ()


def test_an_absent_value_equals_the_default_of_aws() -> None:
    plain = {"RoleArn": "r", "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1}}
    described = {
        **plain,
        "EnableNetworkIsolation": False,
        "EnableInterContainerTrafficEncryption": False,
    }
    assert differences(described, plain) == ()


def test_the_order_of_subnets_makes_no_difference() -> None:
    one, other = (
        {"VpcConfig": {"Subnets": subnets, "SecurityGroupIds": ["sg-1"]}}
        for subnets in (["a", "b"], ["b", "a"])
    )
    assert differences({**JOB, **one}, {**JOB, **other}) == ()


def test_job_with_preferences_reuses_the_pool_of_any_type() -> None:
    preferences = [{"InstanceType": name} for name in ("ml.p4d.24xlarge", "ml.p4de.24xlarge")]
    wanted = {
        **JOB,
        "ResourceConfig": {
            "VolumeSizeInGB": 30,
            "InstanceCount": 2,
            "InstancePreferences": preferences,
        },
    }
    taken = {
        **wanted["ResourceConfig"],
        "SelectedInstanceType": "ml.p4de.24xlarge",
        "SelectedInstanceCount": 2,
    }
    assert differences({**JOB, "ResourceConfig": taken}, wanted) == ()
    others = {**taken, "SelectedInstanceCount": 3}
    assert [each.field for each in differences({**JOB, "ResourceConfig": others}, wanted)] == [
        "cluster.instances"
    ]


def test_an_available_pool_is_paid_for_until_its_time_is_over() -> None:
    pool = read_pool(JOB, 50.0, ENDED + timedelta(minutes=6))
    assert pool is not None
    assert (pool.until, pool.kept_seconds, pool.usd) == (ENDED + timedelta(minutes=30), 360, 5.0)
    late = read_pool(JOB, 50.0, ENDED + timedelta(hours=6))
    assert late is not None
    assert (late.kept_seconds, late.usd) == (1800, 25.0)
    assert read_pool({**JOB, "WarmPoolStatus": None}, 50.0, ENDED) is None


def test_a_pool_that_is_gone_costs_what_aws_billed() -> None:
    pool_status = {
        "Status": "Reused",
        "ReusedByJob": "second",
        "ResourceRetainedBillableTimeInSeconds": 90,
    }
    pool = read_pool({**JOB, "WarmPoolStatus": pool_status}, 40.0, ENDED + timedelta(hours=1))
    assert pool is not None
    assert (pool.kept_seconds, pool.usd, pool.until, pool.is_available) == (90, 1.0, None, False)


@pytest.mark.parametrize(
    ("pool_status", "row"),
    [
        (
            {"Status": "Available"},
            "kept until 12:30 UTC at 50.00 USD per hour (6m, 5.00 USD so far)",
        ),
        ({"Status": "InUse"}, "kept for 30m after the end"),
        (
            {
                "Status": "Reused",
                "ReusedByJob": "second",
                "ResourceRetainedBillableTimeInSeconds": 72,
            },
            "taken over by second after 1m12s, 1.00 USD",
        ),
        (
            {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": 72},
            "ended after 1m12s, 1.00 USD",
        ),
        ({"Status": "Terminated"}, "ended, or was not kept"),
    ],
)
def test_status_shows_the_pool(pool_status: dict[str, Any], row: str) -> None:
    pool = read_pool({**JOB, "WarmPoolStatus": pool_status}, 50.0, ENDED + timedelta(minutes=6))
    status = Status(
        "first-261120-101500-1a2b3c",
        "sagemaker",
        State.SUCCEEDED,
        usd_per_hour=50.0,
        warm_pool=pool,
    )
    rows = pool_rows(status)
    assert rows[0] == ("warm pool", row)
    is_available = pool_status["Status"] == "Available"
    assert [value.partition("stop ")[2] for _, value in rows[1:]] == [
        f"{status.reference} --pool"
    ] * is_available
    assert status.to_json()["warm_pool"]["status"] == pool_status["Status"]


def test_a_cold_start_names_the_nearest_pool() -> None:
    far, near = changed("RoleArn", "other"), changed("ResourceConfig.VolumeSizeInGB", 50)
    far["ResourceConfig"]["InstanceCount"] = 9
    near["TrainingJobName"] = "near"
    line = describe_start([far, near], JOB, ENDED)
    assert line.startswith(
        "the cluster starts cold: the warm pool of near (the nearest of 2) differs in cluster.volume (50"
    )
    assert (
        describe_start([far, near, JOB], JOB, ENDED)
        == f"reuses the warm pool of {JOB['TrainingJobName']}, kept until 12:30 UTC"
    )
    assert describe_start([], JOB, ENDED) == "no warm pool is available: the cluster starts cold"
