"""The members of CreateTrainingJob: the field that sets each one, and the sources and refusals of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHANNELS = "InputDataConfig"
CHANNEL_NAME = "ChannelName"

FIELDS: Mapping[str, str] = {
    "TrainingJobName": "name",
    "HyperParameters": "code.args",
    "AlgorithmSpecification.TrainingImage": "cluster.image",
    "AlgorithmSpecification.MetricDefinitions": "metrics",
    "AlgorithmSpecification.ContainerEntrypoint": "code.command",
    "AlgorithmSpecification.TrainingImageConfig": "cluster.image.private_registry",
    f"{CHANNELS}.{CHANNEL_NAME}": "data",
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


def merge_members(request: Mapping[str, Any], members: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with further members. Mappings are merged, channels by their names, and the rest is replaced."""
    merged = dict(request)
    for name, value in members.items():
        present = merged.get(name)
        if name == CHANNELS and isinstance(present, list):
            own = {channel[CHANNEL_NAME]: channel for channel in value}
            merged[name] = [
                merge_members(each, own.pop(each[CHANNEL_NAME], {})) for each in present
            ] + [*own.values()]
        elif isinstance(value, Mapping):
            merged[name] = merge_members(present if isinstance(present, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged
