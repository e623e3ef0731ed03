"""The `limits` and `checkpoint` sections of job.yaml: how long a run trains, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from cloudtrain.job.diagnostics import Diagnostic, field_error
from cloudtrain.job.fields import (
    Dollars,
    Duration,
    Every,
    GigaBytes,
    Integer,
    Section,
    parse_switch,
    s3_uri_error,
)
from cloudtrain.support.run_id import is_run_id
from cloudtrain.support.units import Cadence, format_duration

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
    require_rehearsal: bool = False
    """Refuse a submit to SageMaker without a receipt of a proven rehearsal (cloudtrain rehearse)."""


class Checkpoint(Section):
    """Where and how often the run saves checkpoints."""

    uri: str | None = Field(None, examples=["s3://bucket/prefix"])
    """s3://bucket/prefix, or a local folder for local runs; default: the run's own folder."""
    every: Every = Cadence(seconds=600)
    """A duration such as 10m or a count such as 500 steps."""
    keep: Integer = Field(default=3, ge=1)
    """Complete checkpoints to keep."""
    size: Annotated[GigaBytes, Field(ge=1)] | None = Field(None, examples=["48GB"])
    """Expected size of one checkpoint; with it the plan warns when there is no time to save one after a stop notice."""
    resume: str = Field("auto", examples=["auto"])
    """auto (newest under uri), never, a run id, or the uri or absolute path of another run's checkpoints."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        for name in ("uri", "resume"):
            error = s3_uri_error(getattr(self, name) or "")
            if getattr(self, name) is not None and not getattr(self, name).strip():
                error = "expected s3://bucket/prefix, got nothing"
            if error:
                yield Diagnostic(error, (name,), "for example s3://my-bucket/checkpoints")
        is_location = "/" in self.resume or is_run_id(self.resume.rpartition(":")[2])
        if self.resume not in ("auto", "never") and not is_location:
            hint = "use auto, never, a run id, s3://bucket/prefix or an absolute path"
            yield Diagnostic(
                f'expected where to resume from, got "{self.resume}"', ("resume",), hint
            )
        elif (
            is_location
            and ":/" not in self.resume
            and "/" in self.resume
            and not self.resume.startswith("/")
        ):
            message = f'expected an absolute path, got "{self.resume}"'
            yield Diagnostic(message, ("resume",), f"write /.../{self.resume}")
