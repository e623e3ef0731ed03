"""Checks of the bucket, the data, and the size of the instances' volumes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from cloudtrain import catalog
from cloudtrain.aws.s3_objects import entries_of, list_pages
from cloudtrain.planning.plan import Plan
from cloudtrain.preflight.base import (
    Account,
    CheckContext,
    bucket_region,
    command,
    describe_error,
    is_denied,
    map_concurrently,
)
from cloudtrain.support.checks import Check, failed, passed, unknown
from cloudtrain.support.data_files import data_files
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.s3_uri import split_uri
from cloudtrain.support.units import format_size
from cloudtrain_runtime.contract import CODE_CHANNEL, CONFIG_CHANNEL
from cloudtrain_runtime.contract.aws_codes import MISSING_BUCKET, NOT_FOUND_STATUS, code_of

PAGES = 20
"""Most pages of 1,000 objects that are counted per prefix; with more pages the count is a lower bound."""

_SIZE_FACTOR = 1.1
"""Needed volume per byte of data, to leave space for the file system, the model and the outputs."""
# The unit of VolumeSizeInGB.
_GIB = 2**30
_MISSING_BUCKET_CODES = MISSING_BUCKET | NOT_FOUND_STATUS


def check_bucket(context: Account) -> Iterator[Check]:
    """Check that the settings' bucket exists, is in the job's region and belongs to the role's account."""
    from botocore.exceptions import ClientError

    bucket = str(context.settings.bucket)
    here = context.region
    account = context.settings.account
    try:
        region = bucket_region(context, bucket)
    except ClientError as error:
        yield _check_bucket_error(context, bucket, error)
        return
    if region != here:
        make = command("aws", "s3", "mb", f"s3://{bucket}-{here}", "--region", here)
        fix = f"{make} && export CLOUDTRAIN_BUCKET={bucket}-{here}, or export CLOUDTRAIN_REGION={region}"
        yield failed("bucket", f"{bucket} is in {region}, the job in {here}", fix)
        return
    yield passed(
        "bucket",
        f"s3://{bucket} is in {region}" + (f" and belongs to account {account}" if account else ""),
    )


def _check_bucket_error(context: Account, bucket: str, error: Any) -> Check:
    if code_of(error) in _MISSING_BUCKET_CODES:
        make = command("aws", "s3", "mb", f"s3://{bucket}", "--region", context.region)
        return failed("bucket", f"there is no bucket {bucket}", make)
    if not is_denied(error):
        raise error
    if _has_other_owner(context, bucket):
        return failed(
            "bucket",
            f"{bucket} belongs to another account than {context.settings.account}",
            f"export CLOUDTRAIN_BUCKET=... with a bucket of account {context.settings.account}",
        )
    return unknown(
        "bucket",
        f"{bucket} cannot be read: it belongs to another account, or s3:ListBucket is not allowed",
        "grant s3:ListBucket on it to these credentials; submit needs it to find uploaded code",
    )


def _has_other_owner(context: Account, bucket: str) -> bool:
    """Whether a bucket that S3 rejects with the expected owner exists under another owner."""
    from botocore.exceptions import ClientError

    try:
        context.client("s3", is_owned=False).head_bucket(Bucket=bucket)
    except ClientError:
        return False
    return context.settings.account is not None


@dataclass(frozen=True)
class Listing:
    """Objects below a prefix. `is_complete` is false if there are more objects than were counted."""

    sizes: Mapping[str, int]
    is_complete: bool

    @property
    def total_bytes(self) -> int:
        """Total size of the counted objects."""
        return sum(self.sizes.values())

    def __str__(self) -> str:
        at_least = "" if self.is_complete else "at least "
        return f"{at_least}{count(len(self.sizes), 'object')}, {format_size(self.total_bytes)}"


@dataclass(frozen=True)
class _Measured:
    """A channel's check, and the bytes that it needs on each instance's volume (None if unknown)."""

    check: Check
    bytes: float | None
    is_complete: bool = True


def count_objects(context: CheckContext, uri: str, *, pages: int = PAGES) -> Listing:
    """Return the objects whose keys begin with a URI's key, as SageMaker's S3Prefix does, without folder markers."""
    read = list(islice(list_pages(context.client("s3"), uri), pages))
    sizes = {entry["Key"]: entry["Size"] for page in read for entry in entries_of(page)}
    return Listing(sizes, is_complete=not read[-1].get("IsTruncated"))


def data_check_names(plan: Plan) -> tuple[str, ...]:
    """Return the names of the checks of a plan's data."""
    return (*(f"data.{channel['ChannelName']}" for channel in _channels(plan)), "volume")


def _channels(plan: Plan) -> list[dict[str, Any]]:
    """Return the channels whose objects must exist; a submit uploads the others."""
    uploaded = {upload.uri for upload in plan.uploads}
    return [
        channel
        for channel in plan.request["InputDataConfig"]
        if channel["ChannelName"] not in (CODE_CHANNEL, CONFIG_CHANNEL)
        and "S3DataSource" in channel["DataSource"]
        and _uri(channel) not in uploaded
    ]


def _uri(channel: Mapping[str, Any]) -> str:
    return str(channel["DataSource"]["S3DataSource"]["S3Uri"])


def check_data(context: CheckContext) -> Iterator[Check]:
    """Check each channel, then whether the downloaded data fits the volume."""
    channels = _channels(context.plan)
    measured = map_concurrently(partial(_measure, context), channels)
    yield from (found.check for found in measured)
    yield _check_volume(context, measured)


def _measure(context: CheckContext, channel: Mapping[str, Any]) -> _Measured:
    from botocore.exceptions import BotoCoreError, ClientError

    name = f"data.{channel['ChannelName']}"
    uri = _uri(channel)
    try:
        return _measure_objects(context, channel, name)
    except (ClientError, BotoCoreError) as error:
        if not isinstance(error, ClientError) or code_of(error) not in _MISSING_BUCKET_CODES:
            return _Measured(unknown(name, *describe_error(error)), None)
        fix = f"correct {name}, or copy the data: {command('aws', 's3', 'sync', 'FOLDER', uri)}"
        return _Measured(failed(name, f"there is no bucket {split_uri(uri).bucket}", fix), None)


def _measure_objects(context: CheckContext, channel: Mapping[str, Any], name: str) -> _Measured:
    uri = _uri(channel)
    here = context.region
    region = bucket_region(context, split_uri(uri).bucket)
    if region != here:
        message = f"{uri} is in {region}; SageMaker reads only buckets of the job's region, {here}"
        near = f"s3://BUCKET-IN-{here}/{split_uri(uri).key}"
        fix = command("aws", "s3", "sync", uri, near, "--source-region", region, "--region", here)
        return _Measured(failed(name, message, fix), None)
    listing = count_objects(context, uri)
    neighbours = _neighbours(context, uri)
    sharded = channel["DataSource"]["S3DataSource"]["S3DataDistributionType"] == "ShardedByS3Key"
    instances = context.plan.cluster.instances
    on_volume: float = 0
    # Other modes read the objects from S3 while the job runs.
    if channel.get("InputMode", "File") == "File":
        on_volume = listing.total_bytes / (instances if sharded else 1)
    if neighbours and listing.sizes:
        check = _check_neighbours(name, uri, listing, neighbours)
    elif not listing.sizes:
        check = failed(
            name, f"there are no objects below {uri}", command("aws", "s3", "sync", "FOLDER", uri)
        )
    elif sharded and len(listing.sizes) < instances:
        message = (
            f"{listing} below {uri}, sharded across {instances} instances: some would get no object"
        )
        fix = f"--set {name}.sharded=false, or store the data as at least {instances} objects"
        check = failed(name, message, fix)
    else:
        check = passed(name, f"{listing} below {uri}")
    return _Measured(check, on_volume, listing.is_complete)


def _neighbours(context: CheckContext, uri: str) -> tuple[str, ...]:
    """Return names that S3Prefix matches besides the URI's own object or folder: `train-old/` for `s3://b/train`.

    Returns at most 1,000 names: keys, and folders with a slash at the end.
    """
    key = split_uri(uri).key
    if not key or key.endswith("/"):
        return ()
    page = next(list_pages(context.client("s3"), uri, Delimiter="/"))
    names = [entry["Key"] for entry in page.get("Contents", [])]
    names += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
    own = key if key in names else f"{key}/"
    return tuple(sorted(name for name in names if name != own))


def _check_neighbours(name: str, uri: str, listing: Listing, neighbours: tuple[str, ...]) -> Check:
    bucket, key = split_uri(uri)
    examples = ", ".join(f"s3://{bucket}/{each}" for each in neighbours[:3]) + (
        ", ..." if len(neighbours) > 3 else ""  # noqa: PLR2004
    )
    message = f"SageMaker takes every key that begins with {key}, so {uri} also includes {examples}"
    if any(found.startswith(f"{key}/") for found in listing.sizes):
        return failed(name, message, f"for the folder only, write {uri}/")
    if key in listing.sizes:
        folder = uri.rpartition("/")[0]
        move = command("aws", "s3", "cp", uri, f"{folder}/FOLDER/")
        return failed(
            name,
            message,
            f"move the object to a separate folder ({move}) and write {folder}/FOLDER/",
        )
    nearest = next((each for each in neighbours if each.endswith("/")), neighbours[0])
    return failed(
        name, f"there is no object or folder {uri}; {message}", f"write s3://{bucket}/{nearest}"
    )


def _check_volume(context: CheckContext, measured: list[_Measured]) -> Check:
    known = [found.bytes for found in measured if found.bytes is not None]
    uploads = (file for upload in context.plan.uploads for file in data_files(Path(upload.path)))
    needed = (
        sum(known) + sum(file.path.stat().st_size for file in uploads) + context.plan.bundle.bytes
    )
    is_complete = len(known) == len(measured) and all(found.is_complete for found in measured)
    size = (
        "" if is_complete else "at least "
    ) + f"{format_size(needed)} are downloaded to each instance"
    volume, capacity_bytes = _volume_capacity(context)
    if capacity_bytes is None:
        return passed("volume", f"{size}; {volume}")
    if needed * _SIZE_FACTOR > capacity_bytes:
        return failed(
            "volume", f"{size}, and {volume} is too small", _larger_volume_hint(context, needed)
        )
    if not is_complete:
        return unknown("volume", f"{size}, and not all of the data could be counted; {volume}")
    return passed("volume", f"{size}; {volume}")


def _volume_capacity(context: CheckContext) -> tuple[str, int | None]:
    """Return name and bytes of the storage on the type with the least of it; None if its size is unknown."""
    sizes = []
    for name in context.instance_types:
        if local_gb := _local_gb(name):
            sizes.append((f"the {local_gb} GB of local NVMe of {name}", local_gb * 10**9))
        elif catalog.has_nvme(name):
            return f"{name} has local NVMe, whose size is unknown", None
        else:
            volume = int(context.plan.request["ResourceConfig"]["VolumeSizeInGB"])
            sizes.append((f"the volume of {volume} GB", volume * _GIB))
    return min(sizes, key=lambda size: size[1])


def _local_gb(instance_type: str) -> int:
    instance = catalog.find_instance(instance_type)
    return (instance.nvme_gb or 0) if instance is not None else 0


def _larger_volume_hint(context: CheckContext, needed: float) -> str:
    volume_gb = 10 * math.ceil(needed * _SIZE_FACTOR / _GIB / 10 + 1)
    stream = "or stream it: mode: FastFile in the channel"
    if any(map(_local_gb, context.instance_types)):
        return f"use a type with more local storage, {stream}, or shard the data: sharded: true"
    return f"--set cluster.volume={volume_gb}GB (in the job file: cluster.volume: {volume_gb}GB), {stream}"
