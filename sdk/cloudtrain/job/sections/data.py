"""The `data` section of job.yaml: input channels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.fields import Section, matching, s3_uri_error, short_for
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_SOURCES = ("uri", "fsx", "efs")
_ID_FORM = matching(
    lazy_pattern("fs-[0-9a-f]{8,18}"),
    "the id of a file system, such as fs-0123456789abcdef0",
    "to list them: aws fsx describe-file-systems, or aws efs describe-file-systems",
)
FileSystemId = Annotated[str, _ID_FORM]


class Channel(Section):
    """One input channel: data in S3 or on this machine (uri), or a file system in the job's network (fsx, efs)."""

    uri: str | None = Field(None, examples=["s3://bucket/prefix"])
    """s3://bucket/prefix, or a local path relative to the job file (exactly one of uri, fsx and efs)."""
    fsx: FileSystemId | None = Field(None, examples=["fs-0123456789abcdef0"])
    """Id of an FSx for Lustre file system, which is mounted instead of downloaded."""
    efs: FileSystemId | None = Field(None, examples=["fs-0123456789abcdef0"])
    """Id of an EFS file system, which is mounted instead of downloaded."""
    path: str | None = Field(None, examples=["/fsx/tokens"])
    """Folder of the file system: on Lustre it begins with the mount name (/fsx/tokens); on EFS the default is /."""
    mount: Literal["ro", "rw"] = "ro"
    """Whether the code can only read the file system (ro), or also write to it (rw)."""
    mode: Literal["File", "FastFile", "Pipe"] = "File"
    """File downloads before the start; FastFile streams on read; Pipe is a FIFO."""
    sharded: bool = False
    """Give each instance its own share of the objects instead of a full copy."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        if [getattr(self, name) for name in _SOURCES].count(None) != len(_SOURCES) - 1:
            fields = tuple((name,) for name in _SOURCES)
            yield Diagnostic(
                "give exactly one of uri, fsx and efs",
                (),
                "for example uri: s3://bucket/prefix",
                fields,
            )
        elif self.uri is not None:
            yield from self._uri_errors(self.uri)
        else:
            yield from self._file_system_errors()

    def _uri_errors(self, uri: str) -> Iterator[Diagnostic]:
        error = s3_uri_error(uri)
        if not uri.strip():
            error = "expected s3://bucket/prefix or a path, got nothing"
        elif uri.startswith("file:"):
            error = f'expected a path, got the uri "{uri}"'
        elif uri.startswith(("arn:aws:s3", "s3:", "s3/")) and not uri.startswith("s3://"):
            error = f'expected s3://bucket/prefix, got "{uri}"'
        if error:
            yield Diagnostic(
                error, ("uri",), "for example s3://my-bucket/train, or a path on this machine"
            )
        for name in sorted(self.model_fields_set & {"path", "mount"}):
            yield Diagnostic(
                "is for file systems only (fsx, efs)", (name,), "remove it", is_key=True
            )

    def _file_system_errors(self) -> Iterator[Diagnostic]:
        if self.fsx is not None and (self.path or "/") == "/":
            message = "expected a folder that begins with the file system's mount name"
            hint = "aws fsx describe-file-systems prints it as MountName, for example path: /fsx/tokens"
            yield Diagnostic(message, ("path",), hint)
        elif self.path is not None and not self.path.startswith("/"):
            yield Diagnostic(
                f'expected an absolute path, got "{self.path}"', ("path",), f"write /{self.path}"
            )
        for name in ("mode", "sharded"):
            if getattr(self, name) not in ("File", False):
                message = "is for data in S3; a file system is mounted on every instance"
                yield Diagnostic(message, (name,), "remove it", is_key=True)

    @property
    def is_s3(self) -> bool:
        """Whether the data is in S3."""
        return (self.uri or "").startswith("s3://")

    @property
    def local_path(self) -> str | None:
        """Path on this machine as the job file has it, or None for data elsewhere."""
        return None if self.is_s3 else self.uri

    @property
    def file_system(self) -> str | None:
        """Field that names a file system, `fsx` or `efs`; None for other data."""
        if self.fsx is not None:
            return "fsx"
        if self.efs is not None:
            return "efs"
        return None

    @property
    def source(self) -> str:
        """The data's uri or path; `fsx://fs-.../folder` or `efs://fs-.../folder` for a file system."""
        if self.file_system is None:
            return self.uri or ""
        return f"{self.file_system}://{self.fsx or self.efs}{self.path or '/'}"


ChannelOrUri = Annotated[Channel, short_for("uri")]
"""A channel, or its uri alone as a short form."""
