"""The check `saves`: whether a checkpoint is complete and fits the stop notice."""

from __future__ import annotations

from collections.abc import Iterator

from cloudtrain import catalog
from cloudtrain.errors import CloudtrainError
from cloudtrain.features.rehearsal.runs import Ended, RunDriver
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.checkpoints import CheckpointFolder
from cloudtrain.support.checks import Check, Result
from cloudtrain.support.units import format_size
from cloudtrain_runtime.contract import STOP_GRACE_SECONDS
from cloudtrain_runtime.contract.saved_checkpoint import COMPLETE

NAME = "saves"


def check_saves(driver: RunDriver, reference: Ended, plan: Plan) -> Iterator[Check]:
    """Verify the last checkpoint of the reference run, and judge its duration.

    Args:
        driver: The runs.
        reference: The uninterrupted run.
        plan: The plan of the cluster.
    """
    events = reference.of_kind("checkpoint")
    if not events:
        yield Check(NAME, Result.FAIL, "the run has written no checkpoint")
        return
    step = max(event["step"] for event in events)
    folder = CheckpointFolder(
        driver.runner.checkpoints(reference.run), environ=driver.runner.environ()
    )
    try:
        found = next(iter(folder.verify(step)), None)
    except CloudtrainError as error:
        text = f"the checkpoint of step {step} cannot be verified: {error.message}"
        yield Check(NAME, Result.FAIL, text)
        return
    if found is None or found.state != COMPLETE:
        state = "missing" if found is None else f"{found.state}: {found.why}"
        yield Check(NAME, Result.FAIL, f"the checkpoint of step {step} is {state}")
        return
    seconds = max(float(event.get("seconds") or 0.0) for event in events)
    cluster = seconds_on_cluster(plan, found.bytes)
    detail = (
        f"step {step} verified: {format_size(found.bytes)} in {found.files} files, {seconds:.1f} s here; "
        f"on the cluster about {cluster:.1f} s, at an assumed {upload_rate(plan) / 10**6:,.0f} MB/s per instance to S3"
    )
    if max(seconds, cluster) > STOP_GRACE_SECONDS:
        detail += f", which does not fit the stop notice of {STOP_GRACE_SECONDS} s"
        yield Check(NAME, Result.FAIL, detail)
        return
    yield Check(NAME, Result.PASS, detail)


def upload_rate(plan: Plan) -> float:
    """Return the assumed rate in bytes per second at which an instance uploads a checkpoint."""
    return catalog.s3_upload_bytes_per_second(plan.cluster.instance_type)


def seconds_on_cluster(plan: Plan, size: int) -> float:
    """Return the seconds that a checkpoint of a size takes on the cluster, whose instances write equal parts."""
    return size / (max(1, plan.cluster.instances) * upload_rate(plan))
