"""The `checkpoint` section of job.yaml: where and how often a run saves, and what it resumes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.fields import Every, GigaBytes, Integer, Section, s3_uri_error
from cloudtrain.support.run_id import is_run_id
from cloudtrain.support.units import Cadence


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
