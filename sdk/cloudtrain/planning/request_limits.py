"""Check of a request against the limits of AWS's model, with errors in the fields of the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from cloudtrain.catalog import service_limits
from cloudtrain.catalog.service_limits import Violation
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.request_checks import valid_members
from cloudtrain.job.request_members import CHANNELS, FIELDS
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import SETTING, error
from cloudtrain.planning.storage_layout import PLACEHOLDER_ROLE
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.units import format_duration
from cloudtrain_runtime.contract import CODE_CHANNEL, CONFIG_CHANNEL
from cloudtrain_runtime.contract.strict_json import dump_json, load_json


def check_limits(spec: JobSpec, request: dict[str, Any]) -> Iterator[Diagnostic]:
    """Reject what CreateTrainingJob would reject, in the field of the job or the setting that the value comes from."""
    # AWS's model requires `s3://` uris: replace the `file://` uris of a local run by uris of equal length.
    with_s3_uris = load_json(dump_json(request).replace('"file://', '"s3://hh'))
    for found in service_limits.check_request(with_s3_uris):
        violation = _in_job_units(found, spec)
        if _is_reported_elsewhere(violation, request, spec):
            continue
        is_key = violation.is_key or violation.path[-1] in ("ChannelName", "Key")
        yield error(
            _source_of(violation.path, request, spec),
            violation.message,
            violation.hint,
            is_key=is_key,
        )


def _is_reported_elsewhere(violation: Violation, request: dict[str, Any], spec: JobSpec) -> bool:
    """Return whether another check of the plan reports the same fault, with a better message."""
    path = violation.path
    # No image was found.
    if "TrainingImage" in path and request["AlgorithmSpecification"]["TrainingImage"] == "":
        return True
    # A setting is missing.
    if path == ("RoleArn",) and request["RoleArn"] == PLACEHOLDER_ROLE:
        return True
    # An unknown type is reported with the nearest types.
    if path[0] == "ResourceConfig" and path[-1] == "InstanceType":
        return True
    if path == ("OutputDataConfig", "S3OutputPath"):
        uri = spec.output.uri or ""
        return uri != "" and not uri.startswith("s3:")
    # A channel has no source.
    is_channel_uri = path[0] == CHANNELS and path[-1] == "S3Uri"
    return is_channel_uri and violation.message.startswith("''")


_DURATIONS = (
    "KeepAlivePeriodInSeconds",
    "MaxPendingTimeInSeconds",
    "MaxRuntimeInSeconds",
    "MaxWaitTimeInSeconds",
)


def _in_job_units(violation: Violation, spec: JobSpec) -> Violation:
    if violation.bound is None or violation.got is None:
        return violation
    side = "at most" if violation.got > violation.bound else "at least"
    if violation.path[-1] in _DURATIONS:
        limit = format_duration(violation.bound)
        message = f"AWS allows {side} {limit}, got {format_duration(violation.got)}"
        return replace(violation, message=message, hint=f"use {side} {limit}")
    if violation.path in ((CHANNELS,), ("Tags",)):
        given = len(spec.data if violation.path == (CHANNELS,) else spec.tags)
        most = violation.bound - (violation.got - given)
        message = f"AWS allows at most {most} besides cloudtrain's own, got {given}"
        return replace(violation, message=message, hint=f"use {most} or fewer")
    return violation


_SOURCES: Mapping[str, FieldPath] = {
    **{member: tuple(field.split(".")) for member, field in FIELDS.items()},
    "RoleArn": (SETTING, "role"),
    "OutputDataConfig.KmsKeyId": (SETTING, "kms_key"),
    "ResourceConfig.VolumeKmsKeyId": (SETTING, "kms_key"),
    "StoppingCondition.MaxWaitTimeInSeconds": ("cluster", "spot", "max_wait"),
    "MlflowConfig": ("tracking", "mlflow"),
}
"""Path of the job's field, or `(SETTING, name)`, by the member of the request that it sets."""


def _source_of(path: FieldPath, request: dict[str, Any], spec: JobSpec) -> FieldPath:
    """Return the path of the job's field, or `(SETTING, name)`, that the value at a path of the request comes from."""
    if given := _given_member(path, request, spec):
        return given
    member = ".".join(part for part in path if isinstance(part, str))
    if path[0] == CHANNELS:
        return _channel_source(path, member, request)
    if (
        path[0] == "Tags"
        and len(path) > 1
        and (key := request["Tags"][path[1]]["Key"]) in spec.tags
    ):
        return ("tags", key)
    if path[0] == "VpcConfig" and not spec.cluster.network.subnets:
        return (SETTING, "subnets" if path[1] == "Subnets" else "security_groups")
    while member and member not in _SOURCES:
        member = member.rpartition(".")[0]
    source = _SOURCES.get(member, ())
    if source == ("output", "uri") and spec.output.uri is None:
        # The default of the field.
        return (SETTING, "prefix")
    if source[-1:] in (("env",), ("prefer",), ("subnets",), ("security_groups",)):
        # These fields have entries: name the one that the value comes from.
        depth = member.count(".") + 1
        source = (*source, *path[depth : depth + 1])
    return source


def _given_member(path: FieldPath, request: dict[str, Any], spec: JobSpec) -> FieldPath:
    """Return the path in the job's `request` of a member that comes from there; an empty path for others."""
    given: Any = valid_members(spec.request, spec.data)
    planned: Any = request
    found: FieldPath = ("request",)
    for depth, part in enumerate(path):
        key = part
        if path[0] == CHANNELS and depth == 1:
            name = planned[part]["ChannelName"]
            key = next(
                (at for at, channel in enumerate(given) if channel["ChannelName"] == name), -1
            )
        if not _has(given, key):
            # A required member that is missing belongs to the one above it.
            is_planned = not isinstance(planned, Mapping) or part in planned
            is_below_given = depth > 0 and depth == len(path) - 1
            if is_below_given and not is_planned:
                return (*found, part)
            return ()
        found = (*found, key)
        given = given[key]
        planned = planned[part]
    return found


def _has(given: Any, key: str | int) -> bool:
    if isinstance(given, Mapping):
        return key in given
    return isinstance(key, int) and 0 <= key < len(given)


def _channel_source(path: FieldPath, member: str, request: dict[str, Any]) -> FieldPath:
    if len(path) == 1:
        return ("data",)
    name = str(request[CHANNELS][path[1]]["ChannelName"])
    if name in (CODE_CHANNEL, CONFIG_CHANNEL):
        return (SETTING, "prefix")
    return ("data", name, *_SOURCES.get(member, ())[2:])
