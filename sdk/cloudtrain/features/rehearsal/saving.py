"""The check `saves`: whether a checkpoint is complete, fits the stop notice, and is written often enough."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

from cloudtrain import catalog
from cloudtrain.errors import CloudtrainError
from cloudtrain.features.rehearsal.runs import Ended, RunDriver
from cloudtrain.features.rehearsal.shared_imports import with_shared_imports
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.checkpoint_interval import best_interval
from cloudtrain.runs.checkpoints import CheckpointFolder
from cloudtrain.support.checks import Check, failed, passed
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.units import format_duration, format_size, format_usd
from cloudtrain_runtime.contract import STOP_GRACE_SECONDS
from cloudtrain_runtime.contract.saved_checkpoint import COMPLETE

NAME = "saves"

GPU_HOURS_PER_FAILURE = 50_700.0
"""Mean time between unexpected interruptions, in GPU hours. Source: "The Llama 3 Herd of Models" (arXiv:2407.21783),
section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs, 16384 x 54 x 24 / 419."""

SPOT_HOURS_PER_INTERRUPTION = 3_600.0
"""Mean time between interruptions of one spot instance, in hours. Source: AWS's Spot Instance Advisor, whose class of
the most frequent interruptions begins at 20 % of the instances per month of 720 h."""

_GPUS_WITHOUT_CATALOG = 8
_FAR = 3.0
"""An interval that is this many times longer or shorter than the optimum is named."""


def check_saves(driver: RunDriver, reference: Ended, plan: Plan) -> Iterator[Check]:
    """Verify the last checkpoint of the reference run, and judge its duration and the interval.

    Args:
        driver: The runs.
        reference: The uninterrupted run.
        plan: The plan of the cluster.
    """
    events = reference.of_kind("checkpoint")
    if not events:
        yield failed(NAME, "the run has written no checkpoint")
        return
    step = max(event["step"] for event in events)
    folder = CheckpointFolder(
        driver.runner.checkpoints(reference.run),
        environ=driver.runner.environ(),
        wrap=partial(with_shared_imports, place=driver.imports),
    )
    try:
        found = next(iter(folder.verify(step)), None)
    except CloudtrainError as error:
        text = f"the checkpoint of step {step} cannot be verified: {error.message}"
        yield failed(NAME, text)
        return
    if found is None or found.state != COMPLETE:
        state = "missing" if found is None else f"{found.state}: {found.why}"
        yield failed(NAME, f"the checkpoint of step {step} is {state}")
        return
    seconds = max(float(event.get("seconds") or 0.0) for event in events)
    cluster = seconds_on_cluster(plan, found.bytes)
    detail = (
        f"step {step} verified: {format_size(found.bytes)} in {count(found.files, 'file')}, {seconds:.1f} s here; "
        f"on the cluster about {cluster:.1f} s, at an assumed {upload_rate(plan) / 10**6:,.0f} MB/s per instance to S3"
    )
    longest = max(seconds, cluster)
    if longest > STOP_GRACE_SECONDS:
        detail += f", which does not fit the stop notice of {STOP_GRACE_SECONDS} s"
        yield failed(NAME, detail)
        return
    interval = judge_interval(plan, longest, seconds_per_step(reference))
    yield passed(NAME, f"{detail}. {interval}")


def upload_rate(plan: Plan) -> float:
    """Return the assumed rate in bytes per second at which an instance uploads a checkpoint."""
    return catalog.s3_upload_bytes_per_second(plan.cluster.instance_type)


def seconds_on_cluster(plan: Plan, size: int) -> float:
    """Return the seconds that a checkpoint of a size takes on the cluster, whose instances write equal parts."""
    return size / (max(1, plan.cluster.instances) * upload_rate(plan))


def seconds_between_failures(plan: Plan) -> float:
    """Return the assumed mean time between failures of the cluster, in seconds."""
    instance = catalog.find_instance(plan.cluster.instance_type)
    gpus = _GPUS_WITHOUT_CATALOG
    if instance is not None and instance.gpus:
        gpus = instance.gpus
    rate = gpus * plan.cluster.instances / GPU_HOURS_PER_FAILURE
    if plan.request.get("EnableManagedSpotTraining"):
        rate += plan.cluster.instances / SPOT_HOURS_PER_INTERRUPTION
    return 3600.0 / rate


def seconds_per_step(reference: Ended) -> float | None:
    """Return the median seconds between two steps here; None for fewer than three steps."""
    times = sorted(event["time"] for event in reference.of_kind("step") if "time" in event)
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    return gaps[len(gaps) // 2] if gaps else None


def judge_interval(plan: Plan, save_seconds: float, step_seconds: float | None) -> str:
    """Return a sentence about `checkpoint.every`: what a failure costs, and the optimum of Young and Daly."""
    failures = seconds_between_failures(plan)
    optimum = best_interval(max(save_seconds, 0.1), failures)
    checkpoint = plan.config.checkpoint
    source = "Llama 3's failure rate"
    if _is_spot(plan):
        source += ", and AWS's of spot"
    text = (
        f"With a failure every {format_duration(round(failures))} ({source}), a checkpoint each "
        f"{format_duration(max(1, round(optimum)))} loses least"
    )
    interval = checkpoint.every_seconds
    if interval is None and checkpoint.every_steps and step_seconds is not None:
        interval = checkpoint.every_steps * step_seconds
        text += f"; {checkpoint.every_steps} steps take {_seconds(interval)} at the speed of this machine"
    if interval is None:
        return text
    price = plan.cost.usd_per_hour
    loss = ""
    if price is not None:
        # Half an interval of work is lost on average.
        loss = f", {format_usd(price * interval / 2 / 3600)}"
    text += f"; checkpoint.every loses {_seconds(interval / 2)}{loss} per failure on average"
    if checkpoint.every_seconds is not None and not optimum / _FAR <= interval <= optimum * _FAR:
        text += f"; a value near {format_duration(max(1, round(optimum)))} is better"
    return text


def _is_spot(plan: Plan) -> bool:
    return bool(plan.request.get("EnableManagedSpotTraining"))


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds:.2f} s"
    return format_duration(round(seconds))
