"""Statuses of one run at different times, as a followed run returns them."""

from __future__ import annotations

import dataclasses
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudtrain.runs.progress import fold_events
from cloudtrain.runs.status import Phase, State, Status, Waiting

RUN = "digits-261121-074043-d30c68"

BEGAN = datetime(2026, 11, 21, 7, 40, 43, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """Return the time so many seconds after the run was created."""
    return BEGAN + timedelta(seconds=seconds)


def stages(
    *names_and_seconds: tuple[str, float | None], billed: str = "Downloading Training"
) -> tuple[Phase, ...]:
    """Return consecutive phases; one without seconds has not ended."""
    found, began = [], 0.0
    for name, seconds in names_and_seconds:
        ended = None if seconds is None else at(began + seconds)
        found.append(Phase(name, at(began), ended, f"{name} it is", is_billed=name in billed))
        began += seconds or 0.0
    return tuple(found)


def steps(
    first: int, last: int, *, began: float, every: float = 20.0, total: int | None = 1000
) -> list[dict[str, Any]]:
    """Return the events of steps that take two seconds each."""
    head = {
        "event": "started",
        "step": first,
        "total_steps": total,
        "world_size": 16,
        "device": "cuda",
    }
    numbers = range(first + 10, last + 1, 10)
    times = itertools.count(at(began).timestamp() + every, every)
    events = [
        {
            "event": "step",
            "step": step,
            "epoch": 1,
            "loss": 2.3139,
            "samples_per_second": 812.4,
            "time": time,
        }
        for step, time in zip(numbers, times, strict=False)
    ]
    return [head, *events]


PENDING = Status(
    RUN,
    "sagemaker",
    State.QUEUED,
    "Training job waiting for capacity",
    created=at(0),
    cost_usd=0.0,
    instances=2,
    phases=stages(("Starting", 5), ("Pending", None)),
    waiting=Waiting(("ml.p4d.24xlarge", "ml.p4de.24xlarge"), 2, at(21600), "cluster.max_pending"),
)

CHECKPOINT = {
    "event": "checkpoint",
    "uri": "s3://bucket/step-00000600",
    "step": 600,
    "time": at(1375).timestamp(),
}

TRAINING = Status(
    RUN,
    "sagemaker",
    State.RUNNING,
    "Training image download completed. Training in progress.",
    created=at(0),
    started=at(135),
    billable_seconds=1265,
    cost_usd=17.75,
    instance_type="ml.p4d.24xlarge",
    instances=2,
    usd_per_hour=50.5,
    phases=stages(("Starting", 5), ("Pending", 130), ("Downloading", 40), ("Training", None)),
    progress=fold_events([*steps(0, 610, began=175), CHECKPOINT]),
)

INTERRUPTED = dataclasses.replace(
    TRAINING,
    state=State.INTERRUPTED,
    reason="Training job waiting for capacity",
    phases=stages(
        ("Starting", 5),
        ("Pending", 130),
        ("Downloading", 40),
        ("Training", 1225),
        ("Interrupted", 0),
        ("Pending", None),
    ),
    waiting=Waiting(("ml.p4d.24xlarge",), 2, at(36000), "cluster.spot.max_wait"),
    is_spot=True,
)

RESUMED = dataclasses.replace(
    TRAINING,
    phases=stages(
        ("Training", 1400),
        ("Restarting", 0),
        ("Starting", 300),
        ("Downloading", 40),
        ("Training", None),
    ),
    progress=fold_events([*steps(0, 610, began=0), CHECKPOINT, *steps(600, 660, began=1760)]),
)

STOPPED = dataclasses.replace(
    TRAINING,
    state=State.STOPPED,
    reason="MaxRuntimeExceeded: the run's time (21m) is over; raise it and resume from the last checkpoint",
    ended=at(1435),
    billable_seconds=1300,
    cost_usd=18.24,
    phases=stages(
        ("Pending", 135),
        ("Downloading", 40),
        ("Training", 1220),
        ("Stopping", 30),
        ("Uploading", 10),
        ("MaxRuntimeExceeded", 0),
    ),
)

FAILED = dataclasses.replace(
    STOPPED,
    state=State.FAILED,
    reason="AlgorithmError: rank 3: ValueError: no such column\nTraceback (most recent call last)",
    phases=stages(("Pending", 135), ("Downloading", 40), ("Training", 1260), ("Failed", 0)),
)
