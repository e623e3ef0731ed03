"""The `output` section of job.yaml."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.fields import Section, s3_uri_error


class Output(Section):
    """Where and how SageMaker stores the model and the other outputs of a run."""

    uri: str | None = Field(None, examples=["s3://bucket/models"])
    """s3://bucket/prefix below which `<run>/output/` is stored; default: the settings' bucket and prefix."""
    compress: bool = True
    """Store the model as model.tar.gz; false stores its files below `<run>/output/model/`, which is faster."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        if self.uri is not None and (s3_uri_error(self.uri) or not self.uri.startswith("s3://")):
            message = f'expected s3://bucket/prefix, got "{self.uri}"'
            yield Diagnostic(message, ("uri",), "for example s3://my-bucket/models")
