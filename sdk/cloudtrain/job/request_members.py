"""The members of CreateTrainingJob: the field that sets each one, and the check of `request`, which sets the others."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from cloudtrain.catalog import service_limits
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.support.field_path import FieldPath
from cloudtrain_runtime.contract import CODE_CHANNEL, CONFIG_CHANNEL

CHANNELS = "InputDataConfig"
_CHANNEL_NAME = "ChannelName"

FIELDS: Mapping[str, str] = {
    "TrainingJobName": "name",
    "HyperParameters": "code.args",
    "AlgorithmSpecification.TrainingImage": "cluster.image",
    "AlgorithmSpecification.MetricDefinitions": "metrics",
    "AlgorithmSpecification.ContainerEntrypoint": "code.command",
    "AlgorithmSpecification.TrainingImageConfig": "cluster.image.private_registry",
    f"{CHANNELS}.{_CHANNEL_NAME}": "data",
    f"{CHANNELS}.InputMode": "data.<name>.mode",
    f"{CHANNELS}.DataSource.S3DataSource.S3Uri": "data.<name>.uri",
    f"{CHANNELS}.DataSource.S3DataSource.S3DataDistributionType": "data.<name>.sharded",
    f"{CHANNELS}.DataSource.FileSystemDataSource.FileSystemId": "data.<name>.fsx",
    f"{CHANNELS}.DataSource.FileSystemDataSource.FileSystemType": "data.<name>.efs",
    f"{CHANNELS}.DataSource.FileSystemDataSource.FileSystemAccessMode": "data.<name>.mount",
    f"{CHANNELS}.DataSource.FileSystemDataSource.DirectoryPath": "data.<name>.path",
    "OutputDataConfig.S3OutputPath": "output.uri",
    "OutputDataConfig.CompressionType": "output.compress",
    "ResourceConfig.InstanceType": "cluster.instance_type",
    "ResourceConfig.InstanceCount": "cluster.instances",
    "ResourceConfig.InstancePreferences": "cluster.prefer",
    "ResourceConfig.TrainingPlanArn": "cluster.training_plan",
    "ResourceConfig.VolumeSizeInGB": "cluster.volume",
    "ResourceConfig.KeepAlivePeriodInSeconds": "cluster.keep_alive",
    "VpcConfig.Subnets": "cluster.network.subnets",
    "VpcConfig.SecurityGroupIds": "cluster.network.security_groups",
    "StoppingCondition.MaxRuntimeInSeconds": "limits.runtime",
    "StoppingCondition.MaxWaitTimeInSeconds": "cluster.spot",
    "StoppingCondition.MaxPendingTimeInSeconds": "cluster.max_pending",
    "Tags": "tags",
    "EnableNetworkIsolation": "cluster.network.isolation",
    "EnableInterContainerTrafficEncryption": "cluster.network.encrypt_traffic",
    "EnableManagedSpotTraining": "cluster.spot",
    "CheckpointConfig.S3Uri": "checkpoint.uri",
    "TensorBoardOutputConfig.S3OutputPath": "tracking.tensorboard",
    "Environment": "code.env",
    "RetryStrategy.MaximumRetryAttempts": "limits.retries",
    "RemoteDebugConfig.EnableRemoteDebug": "cluster.remote_debug",
    "InfraCheckConfig.EnableInfraCheck": "cluster.health_check",
    "MlflowConfig.MlflowResourceArn": "tracking.mlflow",
}
"""Field of job.yaml that sets a member, by the member's path without the places in lists."""

DERIVED: Mapping[str, str] = {
    "AlgorithmSpecification.TrainingInputMode": "`File`; a channel has its own: use data.<name>.mode",
    "RoleArn": "the setting `role`: use CLOUDTRAIN_ROLE or cloudtrain.toml",
    "OutputDataConfig.KmsKeyId": "the setting `kms_key`: use CLOUDTRAIN_KMS_KEY or cloudtrain.toml",
    "ResourceConfig.VolumeKmsKeyId": "the setting `kms_key`: use CLOUDTRAIN_KMS_KEY or cloudtrain.toml",
    "MlflowConfig.MlflowExperimentName": "the job's name: use name",
    "MlflowConfig.MlflowRunName": "the run id: use name",
}
"""Where cloudtrain takes a member from that has no field."""

REFUSED: Mapping[str, str] = {
    "AlgorithmSpecification.AlgorithmName": "an algorithm of AWS has no PyTorch container: use cluster.image",
    "AlgorithmSpecification.ContainerArguments": "the arguments travel in run.json: use code.args",
    "CheckpointConfig.LocalPath": "the runtime saves to /opt/ml/checkpoints: leave it out",
    "TensorBoardOutputConfig.LocalPath": "the runtime writes to /opt/ml/output/tensorboard: leave it out",
    # Source: Terraform's aws_sagemaker_training_job, 2026-11: it conflicts with AlgorithmSpecification and Environment.
    "ServerlessJobConfig": (
        "a serverless job has no container and no instances, and this job has both: leave it out; AWS's SDK for Python "
        "starts serverless jobs"
    ),
    "ResourceConfig.InstanceGroups": "a job has instances of one type: use cluster.instance_type or cluster.prefer",
    "ResourceConfig.SelectedInstanceType": "AWS reports it: leave it out",
    "ResourceConfig.SelectedInstanceCount": "AWS reports it: leave it out",
}
"""Why no job can have a member."""


def request_errors(members: Mapping[str, Any], data: Container[str]) -> Iterator[Diagnostic]:
    """Yield what is wrong with a job's `request`: unknown or refused members, and values of a wrong type.

    The limits of the values are checked with the whole request, as those of every other field.

    Args:
        members: The value of `request`.
        data: Names of the job's channels.
    """
    refused: list[FieldPath] = []
    for path in _paths(members):
        reason = _reason(".".join(part for part in path if isinstance(part, str)))
        if reason and not any(path[: len(above)] == above for above in refused):
            is_channel_name = (
                path[-1] == _CHANNEL_NAME
            )  # names the channel that the other members belong to
            if not is_channel_name:
                refused.append(path)
                message, _, hint = reason.partition(": ")
                yield Diagnostic(message, ("request", *path), hint, is_key=True)
    for violation in service_limits.check_types(members):
        path = violation.path
        if not any(path[: len(above)] == above for above in refused):
            yield Diagnostic(
                violation.message, ("request", *path), violation.hint, is_key=violation.is_key
            )
    yield from _channel_errors(members.get(CHANNELS), data)


def valid_members(members: Mapping[str, Any], data: Container[str]) -> Mapping[str, Any]:
    """Return a job's `request` without the members that have errors, which cannot be merged."""
    wrong = {error.path[1] for error in request_errors(members, data)}
    return {name: value for name, value in members.items() if name not in wrong}


def _reason(member: str) -> str:
    """Return why `request` must not set a member, and after a colon what to do; an empty text where it may."""
    if member in FIELDS:
        return f"cloudtrain sets this member from {FIELDS[member]}: use {FIELDS[member]}"
    if member in DERIVED:
        return f"cloudtrain sets this member from {DERIVED[member]}"
    return REFUSED.get(member, "")


def _paths(value: Any, path: FieldPath = ()) -> Iterator[FieldPath]:
    """Yield the path of every member, those above before those below."""
    items = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    for key, below in items:
        if isinstance(key, str):
            yield (*path, key)
        yield from _paths(below, (*path, key))


def _channel_errors(channels: Any, data: Container[str]) -> Iterator[Diagnostic]:
    for index, channel in enumerate(channels if isinstance(channels, list | tuple) else ()):
        name = channel.get(_CHANNEL_NAME) if isinstance(channel, Mapping) else None
        at: FieldPath = ("request", CHANNELS, index)
        if name is None:
            hint = f"write {_CHANNEL_NAME}: and the name of a channel in data"
            yield Diagnostic(f"{_CHANNEL_NAME} is missing, which names the channel", at, hint)
        elif name in (CODE_CHANNEL, CONFIG_CHANNEL):
            yield Diagnostic(
                "cloudtrain uses this channel itself",
                (*at, _CHANNEL_NAME),
                "name a channel in data",
            )
        elif name not in data and "DatasetSource" not in (channel.get("DataSource") or ()):
            yield Diagnostic(
                f"there is no channel {name} in data",
                (*at, _CHANNEL_NAME),
                f"add data.{name}, or rename it",
            )


def merge_members(request: Mapping[str, Any], members: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with further members. Mappings are merged, channels by their names, and the rest is replaced."""
    merged = dict(request)
    for name, value in members.items():
        present = merged.get(name)
        if name == CHANNELS and isinstance(present, list):
            own = {channel[_CHANNEL_NAME]: channel for channel in value}
            merged[name] = [
                merge_members(each, own.pop(each[_CHANNEL_NAME], {})) for each in present
            ] + [*own.values()]
        elif isinstance(value, Mapping):
            merged[name] = merge_members(present if isinstance(present, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged
