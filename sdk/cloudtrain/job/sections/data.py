"""The `data` section of job.yaml: input channels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.fields import Section, s3_uri_error, short_for


class Channel(Section):
    """One input channel."""

    uri: str = Field(examples=["s3://bucket/prefix"])
    """s3://bucket/prefix, or a local path relative to the job file."""
    mode: Literal["File", "FastFile", "Pipe"] = "File"
    """File downloads before the start; FastFile streams on read; Pipe is a FIFO."""
    sharded: bool = False
    """Give each instance its own share of the objects instead of a full copy."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        error = s3_uri_error(self.uri)
        if not self.uri.strip():
            error = "expected s3://bucket/prefix or a path, got nothing"
        elif self.uri.startswith("file:"):
            error = f'expected a path, got the uri "{self.uri}"'
        elif self.uri.startswith(("arn:aws:s3", "s3:", "s3/")) and not self.uri.startswith("s3://"):
            error = f'expected s3://bucket/prefix, got "{self.uri}"'
        if error:
            yield Diagnostic(error, ("uri",), "for example s3://my-bucket/train, or a path on this machine")

    @property
    def is_s3(self) -> bool:
        """Whether the data is in S3."""
        return self.uri.startswith("s3://")


ChannelOrUri = Annotated[Channel, short_for("uri")]
"""A channel, or its uri alone as a short form."""
