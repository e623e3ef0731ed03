"""A sample of a job's data in S3, for a rehearsal on this machine.

The objects of a sample are spread over those of the channel. Each is fetched completely or the rehearsal ends with an
error that names it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.aws.errors import aws_errors
from cloudtrain.aws.s3_download import (
    FoundObject,
    fetch_objects,
    find_objects,
    make_s3_client,
    names_file,
)
from cloudtrain.errors import UserError
from cloudtrain.features.rehearsal.runs import STARTS
from cloudtrain.job.sections.data import Channel
from cloudtrain.job.spec import JobSpec
from cloudtrain.support.checks import Check, failed, passed
from cloudtrain.support.s3_uri import split_uri
from cloudtrain.support.units import format_size, parse_size

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_MOST_LISTED = 20_000
"""Objects of a channel that are listed: 20 requests."""


@dataclass(frozen=True)
class Sample:
    """How much of each channel in S3 a rehearsal reads; the smaller of both counts.

    Attributes:
        objects: Largest number of objects; None for all.
        bytes: Largest number of bytes; None for no limit.
    """

    objects: int | None = 64
    bytes: int | None = 10**9


def parse_sample(text: str) -> Sample:
    """Return the sample that an option such as `64` (objects) or `200MB` asks for.

    Raises:
        ValueError: neither a number of objects from 1 on nor a size.
    """
    if text.strip().isdigit() and int(text) > 0:
        return Sample(int(text), None)
    try:
        size = parse_size(text)
    except ValueError:
        size = 0
    if size <= 0:
        raise ValueError(
            f'expected a number of objects such as 64, or a size such as 200MB, got "{text}"'
        )
    return Sample(None, size)


def sample_channels(
    spec: JobSpec, sample: Sample, folder: Path, deadline: float
) -> tuple[JobSpec, tuple[Check, ...]]:
    """Replace a job's data in S3 by a sample on this machine; return the changed job, and checks about its data.

    Mode and distribution of the channels stay: the local run shares out the sample as SageMaker shares out the data.

    Args:
        spec: The job.
        sample: How much of each channel is read.
        folder: Folder for the sample.
        deadline: Time on the monotonic clock at which the rehearsal ends.
    """
    remote = {name: channel for name, channel in spec.data.items() if channel.is_s3}
    if not remote:
        return spec, ()
    with aws_errors("connect to S3"):
        s3 = make_s3_client({})
    data = dict(spec.data)
    checks = []
    for name, channel in remote.items():
        fetch = _Fetch(s3, name, channel, deadline)
        target = folder / "data" / name
        checks.append(fetch.provide(target, sample, spec.cluster.preferred_instances))
        data[name] = channel.model_copy(update={"uri": str(target)})
    return spec.model_copy(update={"data": data}), tuple(checks)


class _Fetch:
    """Reads a sample of one channel."""

    def __init__(self, s3: S3Client, name: str, channel: Channel, deadline: float) -> None:
        self._s3 = s3
        self._name = name
        self._channel = channel
        self._deadline = deadline
        self._uri = channel.source
        self._bucket = split_uri(self._uri).bucket

    def provide(self, target: Path, sample: Sample, instances: int) -> Check:
        """Write the sample to a folder; return whether the cluster's instances can start with the channel.

        Raises:
            CloudError: S3 refused to list the channel or to send an object. The message names it and the permission.
            UserError: There are no objects, the sample is too small for one, or there was not enough time.
        """
        listed = self._list()
        is_complete = len(listed) < _MOST_LISTED
        chosen = _choose(listed, sample)
        if not chosen:
            least = min(listed, key=lambda each: each.bytes)
            raise UserError(
                f"data.{self._name}: the smallest object, s3://{self._bucket}/{least.key}, has "
                f"{format_size(least.bytes)}, and an object is fetched completely or not at all",
                f"use a larger sample, such as --sample {least.bytes // 10**6 + 1}MB or --sample 1",
            )
        self._fetch(chosen, target)
        return self._check(listed, chosen, instances, is_complete=is_complete)

    def _list(self) -> list[FoundObject]:
        permission = f"s3:ListBucket on arn:aws:s3:::{self._bucket}"
        with aws_errors(f"list {self._uri} (channel {self._name}; it needs {permission})"):
            listed = list(islice(find_objects(self._s3, self._uri), _MOST_LISTED))
        if not listed:
            raise UserError(
                f"data.{self._name}: there are no objects below {self._uri}",
                "upload them, or correct the uri",
            )
        wrong = next((each for each in listed if not names_file(each.name)), None)
        if wrong is not None:
            raise UserError(
                f"data.{self._name}: the key {wrong.key!r} does not name a file inside its folder",
                'rename the object: no part between slashes may be empty, "." or ".."',
            )
        return sorted(listed, key=lambda each: each.key)

    def _fetch(self, chosen: Sequence[FoundObject], target: Path) -> None:
        paths = [target / each.name for each in chosen]
        wanted = [(self._bucket, each.key, path) for each, path in zip(chosen, paths, strict=True)]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        # No progress is shown.
        done = fetch_objects(self._s3, wanted, lambda count: None)  # noqa: ARG005
        try:
            for each, path in zip(chosen, paths, strict=True):
                self._fetch_next(done, each, path)
                if self._channel.mode == "FastFile":
                    # A FastFile channel is mounted for reading.
                    path.chmod(0o444)
        finally:
            done.close()  # type: ignore[attr-defined]

    def _fetch_next(self, done: Iterator[None], wanted: FoundObject, path: Path) -> None:
        uri = f"s3://{self._bucket}/{wanted.key}"
        permission = f"s3:GetObject on arn:aws:s3:::{self._bucket}/{wanted.key}"
        if time.monotonic() > self._deadline:
            raise UserError(
                f"data.{self._name}: the rehearsal's time ended before {uri}",
                "use a smaller --sample",
            )
        with aws_errors(
            f"read {uri} (channel {self._name}; it needs {permission}, and kms:Decrypt where a key encrypts it)"
        ):
            next(done)
        size = path.stat().st_size
        if size != wanted.bytes:
            raise UserError(
                f"data.{self._name}: {uri} had {wanted.bytes} bytes when it was listed, and {size} were read",
                "it changes at the same time: rehearse again when it is complete",
            )

    def _check(
        self,
        listed: Sequence[FoundObject],
        chosen: Sequence[FoundObject],
        instances: int,
        *,
        is_complete: bool,
    ) -> Check:
        if self._channel.sharded and len(listed) < instances:
            detail = (
                f"channel {self._name} is sharded over {instances} instances and has {len(listed)} objects: some "
                f"instances would get none. Store it as at least {instances} objects, or use sharded: false"
            )
            return failed(STARTS, detail)
        count = f"{len(listed)}" if is_complete else f"more than {len(listed)}"
        total = f" of {format_size(_bytes(listed))}" if is_complete else ""
        detail = f"channel {self._name}: {len(chosen)} of {count} objects ({format_size(_bytes(chosen))}{total}) were read"
        return passed(STARTS, detail)


def _choose(listed: Sequence[FoundObject], sample: Sample) -> list[FoundObject]:
    """Return objects that are spread evenly over a sorted listing, within the sample's limits.

    An object that exceeds the bytes that are left is left out, never cut.
    """
    most = min(sample.objects or len(listed), len(listed))
    # Without a number of objects: as many as fit at the mean size.
    if sample.objects is None:
        mean = max(1.0, _bytes(listed) / len(listed))
        most = max(1, min(len(listed), int((sample.bytes or 0) / mean)))
    spread = [listed[index * len(listed) // most] for index in range(most)]
    chosen = []
    left = sample.bytes
    for each in spread:
        if left is None or each.bytes <= left:
            chosen.append(each)
            if left is not None:
                left -= each.bytes
    if not chosen and left is not None:
        chosen = [each for each in listed if each.bytes <= left][:1]
    return chosen


def _bytes(objects: Iterable[FoundObject]) -> int:
    return sum(each.bytes for each in objects)
