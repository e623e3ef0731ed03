"""The rendered request equals what a real estimator sends, for each distribution and every field we set."""

import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.sagemaker import SageMakerBackend, send_by_estimator
from cloudtrain.errors import DriftError
from cloudtrain.plan import CodeInfo, Plan, make_plan
from cloudtrain.settings import Settings
from cloudtrain.spec import JobSpec

pytestmark = [
    pytest.mark.aws,
    # The SageMaker SDK's own warnings; none of them is about what we call.
    pytest.mark.filterwarnings("ignore"),
]

TASK = """\
name: demo
code: {task: "mine:Mine", env: {A: "b"}}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2}
train: {epochs: 3}
"""
SCRIPT = """\
name: demo
code: {script: train.py, args: {lr: 0.1}}
cluster: {instance_type: ml.g5.xlarge}
"""
ACCOUNT = Settings(role="arn:aws:iam::123456789012:role/training", bucket="cloudtrain-test", region="us-west-2")
KEYED = dataclasses.replace(
    ACCOUNT, kms_key="arn:aws:kms:us-west-2:123456789012:key/k", subnets=("subnet-9",), security_groups=("sg-9",)
)
VARIANTS: dict[str, tuple[str, list[str], Settings]] = {
    "torch_distributed": (TASK, [], ACCOUNT),
    "pytorchddp": (TASK, ["cluster.distribution=pytorchddp"], ACCOUNT),
    "smdistributed": (TASK, ["cluster.distribution=smdistributed"], ACCOUNT),
    "script": (SCRIPT, [], ACCOUNT),
    "script-pytorchddp": (
        SCRIPT,
        ["cluster.distribution=pytorchddp", "cluster.instance_type=ml.p4d.24xlarge"],
        ACCOUNT,
    ),
    "spot": (TASK, ["cluster.spot={max_wait: 36h}", "limits.retries=3"], ACCOUNT),
    "spot-smdistributed": (TASK, ["cluster.spot=true", "cluster.distribution=smdistributed"], ACCOUNT),
    "warm-pool": (TASK, ["cluster.keep_alive=30m", "cluster.volume=500GB"], ACCOUNT),
    "network": (
        TASK,
        ["cluster.network={subnets: [subnet-1], security_groups: [sg-1], isolation: true, encrypt_traffic: true}"],
        ACCOUNT,
    ),
    "isolated-smdistributed": (
        TASK,
        ["cluster.network.isolation=true", "cluster.distribution=smdistributed"],
        ACCOUNT,
    ),
    "settings-network-and-key": (TASK, [], KEYED),
    "data": (
        TASK,
        [
            "data.train={uri: s3://bucket/train, mode: FastFile, sharded: true}",
            "data.validation=s3://bucket/validation",
            "data.pipe={uri: s3://bucket/pipe, mode: Pipe}",
        ],
        ACCOUNT,
    ),
    "image": (TASK, ["cluster.image=123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1"], ACCOUNT),
    "older-framework": (TASK, ["cluster.framework=2.8"], ACCOUNT),
    "cpu": (TASK, ["cluster.instance_type=ml.m5.xlarge"], ACCOUNT),
    "preferences": (
        TASK.replace("instance_type: ml.p4d.24xlarge", "prefer: [ml.p4d.24xlarge, ml.p4de.24xlarge]"),
        [],
        ACCOUNT,
    ),
    "pending": (TASK, ["cluster.max_pending=6h", "limits.cost=500 USD"], ACCOUNT),
    "tags": (TASK, ["tags={team: vision, cost-center: 42}"], ACCOUNT),
}


@pytest.fixture
def plan_of(job: Callable[..., Path]) -> Callable[..., Plan]:
    def plan(text: str, overrides: list[str], settings: Settings) -> Plan:
        spec = JobSpec.from_yaml(
            job(text, mine_py="class Mine:\n    def __init__(self, layers=2): ...\n", train_py=""), overrides
        )
        now = datetime(2026, 11, 20, 10, 15, 0, tzinfo=UTC)
        return make_plan(spec, settings, CodeInfo("d" * 64, 1000, 3), run="demo-261120-101500-1a2b3c", now=now)

    return plan


@pytest.fixture
def sent(aws: dict[str, str]) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Return a session, a SageMaker client, and the list of requests that leave it."""
    import boto3

    session = boto3.Session(region_name="us-west-2")
    client = session.client("sagemaker")
    requests: list[dict[str, Any]] = []
    client.meta.events.register(
        "before-parameter-build.sagemaker.CreateTrainingJob", lambda params, **_: requests.append(params)
    )
    return session, client, requests


def canonical(document: Any) -> Any:
    """Sort lists of named things, whose order means nothing to AWS."""
    if isinstance(document, dict):
        return {key: canonical(value) for key, value in document.items()}
    if isinstance(document, list) and document and isinstance(document[0], dict):
        return sorted((canonical(item) for item in document), key=lambda item: json.dumps(item, sort_keys=True))
    return document


def test_the_estimator_sends_the_plan(
    plan_of: Callable[..., Plan], sent: tuple[Any, Any, list[dict[str, Any]]]
) -> None:
    session, client, requests = sent
    for name, variant in VARIANTS.items():
        plan = plan_of(*variant)
        plan = dataclasses.replace(
            plan,
            run=f"{name}-1",
            request={
                **plan.request,
                "TrainingJobName": f"{name}-1",
                "HyperParameters": {**plan.request["HyperParameters"], "sagemaker_job_name": f'"{name}-1"'},
            },
        )
        send_by_estimator(plan, session, client)
        assert canonical(requests[-1]) == canonical(plan.request), name
    assert len(requests) == len(VARIANTS)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("ResourceConfig", "VolumeSizeInGB"), 31, None),
        (("Environment", "EXTRA"), "x", None),
        (("HyperParameters", "sagemaker_region"), '"eu-west-1"', "HyperParameters.sagemaker_region: planned"),
        (("EnableNetworkIsolation",), False, "EnableNetworkIsolation: planned False, not sent"),
        (("Surprise",), 1, "Surprise: planned 1, not sent"),
    ],
)
def test_a_difference_stops_the_submit_and_is_shown(
    plan_of: Callable[..., Plan],
    sent: tuple[Any, Any, list[dict[str, Any]]],
    path: tuple[str, ...],
    value: Any,
    expected: str | None,
) -> None:
    """What the estimator takes from the plan follows it; what it decides itself must equal it."""
    session, client, _ = sent
    plan = plan_of(*VARIANTS["torch_distributed"])
    target = plan.request
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    if expected is None:
        send_by_estimator(plan, session, client)
        return
    with pytest.raises(DriftError) as caught:
        send_by_estimator(plan, session, client)
    assert expected in caught.value.message
    assert client.list_training_jobs()["TrainingJobSummaries"] == []


def test_the_sdk_prints_nothing_and_leaves_the_exception_hook(
    plan_of: Callable[..., Plan], sent: tuple[Any, Any, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    hook = sys.excepthook
    session, client, _ = sent
    send_by_estimator(plan_of(*VARIANTS["torch_distributed"]), session, client)
    assert capsys.readouterr().out == ""
    assert sys.excepthook is hook


def test_without_the_sdk_the_same_document_is_sent(
    plan_of: Callable[..., Plan], aws: dict[str, str], tmp_path: Path
) -> None:
    from cloudtrain.bundle import Bundle

    settings = dataclasses.replace(ACCOUNT, transport="boto3")
    plan = plan_of(*VARIANTS["preferences"][:2], settings)
    archive = tmp_path / "sourcedir.tar.gz"
    archive.write_bytes(b"code")
    backend = SageMakerBackend(settings)
    requests: list[dict[str, Any]] = []
    backend._client("sagemaker").meta.events.register(  # noqa: SLF001 (the one seam where a request can be seen)
        "before-parameter-build.sagemaker.CreateTrainingJob", lambda params, **_: requests.append(params)
    )
    # moto's answer to a request without InstanceType is beside the point: what was sent counts.
    try:
        backend.submit(plan, Bundle(archive, plan.bundle))
    finally:
        assert requests == [plan.request]
