"""The `limits` section of job.yaml: how long a run trains, and what it may cost."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from cloudtrain.job.diagnostics import field_error
from cloudtrain.job.fields import (
    Dollars,
    Duration,
    Integer,
    Section,
    parse_switch,
)
from cloudtrain.job.sections.recover import RecoverField
from cloudtrain.support.units import format_duration

MAX_RUNTIME_SECONDS = 28 * 86400
"""Source: AWS's reference of StoppingCondition, "maximum 28 days". botocore's model does not have this limit."""


def _between(least_seconds: int, expected: str, hint: str) -> AfterValidator:
    def validate(seconds: int) -> int:
        if not least_seconds <= seconds <= MAX_RUNTIME_SECONDS:
            raise field_error(f"expected {expected}, got {format_duration(seconds)}", hint=hint)
        return seconds

    return AfterValidator(validate)


# With less than 10 s a slow disk would count as a hang.
HangLimit = Annotated[
    Annotated[
        Duration, _between(10, "10s to 28d", "use 10s to 28d, or off to disable hang detection")
    ]
    | None,
    BeforeValidator(lambda value: None if parse_switch(value) is False else value),
    # Serialized as "off", because null in a job file means that the field is not given.
    PlainSerializer(
        lambda value: "off" if value is None else f"{value}s", return_type=str, when_used="json"
    ),
]


class Limits(Section):
    """Limits of the run's time, cost and retries."""

    runtime: Annotated[Duration, _between(60, "1m to 28d", "use 1m to 28d")] = 86400
    """Longest training time, 1m to 28d; the run is stopped after it."""
    cost: Annotated[Dollars, Field(gt=0)] | None = None
    """Ceiling of the estimate: shortens the default runtime, and rejects a runtime or max_wait that costs more."""
    retries: Integer = Field(default=0, ge=0, examples=[3])
    """How often failed workers are restarted from the last checkpoint, at most 30."""
    hang: HangLimit = 600
    """End a run without a new step for this long beyond its slowest step so far, 10s to 28d; off disables this."""
    recover: RecoverField = None
    """Continue the run by itself after outside causes; on for the defaults."""
    require_rehearsal: bool = False
    """Refuse a submit to SageMaker without a receipt of a proven rehearsal (cloudtrain rehearse)."""
