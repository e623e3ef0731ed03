"""The CreateTrainingJob document, rendered offline from what was decided, with the fields that an estimator sends."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cloudtrain import catalog
from cloudtrain.job.job_fields import JOB_TAG, NOTIFY_TAG, REQUEST_TAG
from cloudtrain.job.request_checks import valid_members
from cloudtrain.job.request_members import merge_members
from cloudtrain.job.sections.cluster import PrivateRegistry
from cloudtrain.job.sections.data import Channel
from cloudtrain.job.sections.reporting import PROGRESS_METRICS, qualified_name
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.cost import CostPlan, TimeLimits
from cloudtrain.planning.placement import LAUNCHER_CLOUDTRAIN, TORCH_DISTRIBUTED
from cloudtrain.planning.plan import ClusterPlan, CodeInfo
from cloudtrain.planning.storage_layout import Locations, ResumeSource, syncs_checkpoints
from cloudtrain.planning.targets import Target
from cloudtrain.planning.tracking import MLFLOW_URI_VARIABLE, tracking_variables
from cloudtrain_runtime.contract import (
    BUNDLE_FILE,
    CODE_CHANNEL,
    CONFIG_CHANNEL,
    EVENT_PREFIX,
    ML_ROOT_VARIABLE,
    WORKER_SCRIPT,
    RunConfig,
)
from cloudtrain_runtime.contract.metric_values import STEP_PARTS
from cloudtrain_runtime.contract.ml_tree import CONTAINER_TREE
from cloudtrain_runtime.contract.strict_json import dump_json

CONTAINER_ENTRYPOINT = (
    "/bin/bash",
    "-ec",
    # At most 256 characters without a newline (botocore's model, TrainingContainerEntrypointString).
    (
        f'trap "exit {128 + signal.SIGTERM}" TERM; '
        f'm="${{{ML_ROOT_VARIABLE}:-/opt/ml}}"; mkdir -p "$m/code"; cd "$m/code"; '
        f'tar -xzf "$m/input/data/{CODE_CHANNEL}/{BUNDLE_FILE}" --no-same-owner --no-same-permissions; '
        'exec "$(command -v python||echo python3)" -m cloudtrain_runtime.launch'
    ),
)
"""Starts cloudtrain's launcher as PID 1; tar unpacks the code, so that any image with bash, Python and torch works.

The kernel drops a SIGTERM to PID 1 without a handler, so bash sets one for the time until the launcher sets its own.
"""

FILE_SYSTEM_TYPES = {"fsx": "FSxLustre", "efs": "EFS"}
"""FileSystemType by the channel's field."""
_CONTAINER_LOG_LEVEL = 20
_CODE_IN_CHANNEL = str(CONTAINER_TREE.data / CODE_CHANNEL / BUNDLE_FILE)
_METRICS = (
    *(f"train/{name}" for name in ("loss", "samples_per_second", "tokens_per_second", "data_wait")),
    *(f"train/{part}_seconds" for part in STEP_PARTS),
    *(f"train/{name}" for name in ("mfu", "memory_bytes", "learning_rate", "grad_norm")),
    *(f"{split}/{name}" for split in ("validation", "test") for name in ("loss", "accuracy")),
)


@dataclass(frozen=True)
class Decisions:
    """Everything of a plan that does not depend on the run id.

    Attributes:
        image: Uri of the container image; empty when there is none, which is an error.
        resumed: The checkpoints that `checkpoint.resume` names.
        config: `run.json` without run, request and `checkpoint.uri`.
        identity: sha256 over everything that is sent and run, without the run id; empty before it is computed.
    """

    spec: JobSpec
    code: CodeInfo
    target: Target
    created: datetime
    cluster: ClusterPlan
    image: str
    limits: TimeLimits
    cost: CostPlan
    resumed: ResumeSource | None
    config: RunConfig
    identity: str = ""


def distribution_argument(distribution: str) -> dict[str, Any]:
    """Return the estimator's `distribution` argument. SDK v2 ignores a mistyped one, so it is built only here."""
    if distribution == "smdistributed":
        return {"smdistributed": {"dataparallel": {"enabled": True}}}
    return {distribution: {"enabled": True}}


def render_request(decisions: Decisions, run: str, locations: Locations) -> dict[str, Any]:
    """Return the CreateTrainingJob document of a run.

    Every field is equal to what `sagemaker.pytorch.PyTorch` 2.257 sends; tests compare the two.
    """
    spec = decisions.spec
    settings = decisions.target.settings
    limits = decisions.limits
    algorithm: dict[str, Any] = {
        "TrainingImage": decisions.image,
        "TrainingInputMode": "File",
        "MetricDefinitions": metric_definitions(spec.metrics),
    }
    if decisions.cluster.launcher == LAUNCHER_CLOUDTRAIN:
        algorithm["ContainerEntrypoint"] = list(CONTAINER_ENTRYPOINT)
    image = spec.cluster.image
    if image is not None and image.private_registry is not None:
        algorithm["TrainingImageConfig"] = _registry(image.private_registry)
    tags = {**spec.tags, JOB_TAG: spec.name, REQUEST_TAG: decisions.identity}
    if spec.notify is not None:
        tags[NOTIFY_TAG] = spec.notify.sns
    request: dict[str, Any] = {
        "TrainingJobName": run,
        "RoleArn": decisions.target.role,
        "AlgorithmSpecification": algorithm,
        "HyperParameters": _hyperparameters(decisions, run, locations),
        "InputDataConfig": _channels(decisions, locations),
        "OutputDataConfig": _drop_empty(
            {
                "S3OutputPath": locations.output,
                "KmsKeyId": settings.kms_key,
                "CompressionType": None if spec.output.compress else "NONE",
            }
        ),
        "ResourceConfig": _resources(decisions),
        "StoppingCondition": _drop_empty(
            {
                "MaxRuntimeInSeconds": limits.runtime_seconds,
                "MaxWaitTimeInSeconds": decisions.target.max_wait_seconds(spec, limits),
                "MaxPendingTimeInSeconds": spec.cluster.max_pending,
            }
        ),
        "Tags": [
            {"Key": key, "Value": tags[key]}
            for key in sorted(tags)
            if key != REQUEST_TAG or tags[key]
        ],
        "ProfilerConfig": {"DisableProfiler": True},
    }
    tracked = tracking_variables(spec, decisions.config, run, decisions.resumed)
    server = tracked.get(MLFLOW_URI_VARIABLE, "")
    mlflow = {"MlflowResourceArn": server, "MlflowExperimentName": spec.name, "MlflowRunName": run}
    network = spec.cluster.network
    subnets = network.subnets or settings.subnets
    groups = network.security_groups or settings.security_groups
    vpc = None
    # `check_settings` and the job's validation reject one without the other.
    if subnets and groups:
        vpc = {"Subnets": list(subnets), "SecurityGroupIds": list(groups)}
    checkpoints = None
    if syncs_checkpoints(spec):
        checkpoints = {"S3Uri": locations.checkpoints}
    tensorboard = None
    if spec.tracking.tensorboard:
        # Below the run's name, as AWS's container copies what is written to /opt/ml/output/tensorboard.
        tensorboard = {"S3OutputPath": locations.output}
    retries = None
    if spec.limits.retries:
        retries = {"MaximumRetryAttempts": spec.limits.retries}
    optional = {
        "Environment": {**spec.code.variables, **tracked},
        "VpcConfig": vpc,
        "CheckpointConfig": checkpoints,
        "TensorBoardOutputConfig": tensorboard,
        "MlflowConfig": mlflow if server.startswith("arn:") else None,
        "RetryStrategy": retries,
        "EnableNetworkIsolation": network.isolation,
        "EnableInterContainerTrafficEncryption": network.encrypt_traffic,
        "EnableManagedSpotTraining": spec.cluster.spot is not None,
        "RemoteDebugConfig": {"EnableRemoteDebug": True} if spec.cluster.remote_debug else None,
        "InfraCheckConfig": {"EnableInfraCheck": True} if spec.cluster.health_check else None,
    }
    request |= _drop_empty(optional)
    return merge_members(request, valid_members(spec.request, spec.data))


def _registry(registry: PrivateRegistry) -> dict[str, Any]:
    access: dict[str, Any] = {"TrainingRepositoryAccessMode": "Vpc"}
    if registry.credentials:
        access["TrainingRepositoryAuthConfig"] = {
            "TrainingRepositoryCredentialsProviderArn": registry.credentials
        }
    return access


def _drop_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, False, (), {}, [])}


def metric_definitions(own: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the metric definitions: the job's `own` regular expressions, else those that match the event lines.

    They have the names that `status` shows; `step` and `total` are progress, which CloudWatch does not need.
    """
    if own:
        named = {
            qualified_name(name): regex
            for name, regex in own.items()
            if name not in PROGRESS_METRICS
        }
        return [{"Name": name, "Regex": regex} for name, regex in named.items()]
    return list(map(metric_definition, _METRICS))


def metric_definition(name: str) -> dict[str, str]:
    """Return the definition of a metric in the event lines, such as `validation/f1` of a Task."""
    split, _, field = name.partition("/")
    if split == "train":
        # The event has the parts of a step by their names alone.
        part = field.removesuffix("_seconds")
        key = part if part in STEP_PARTS else field
        pattern = f'"step".*"{key}"'
    else:
        pattern = f'"evaluation".*"split": "{split}".*"{field}"'
    return {"Name": name, "Regex": f'{EVENT_PREFIX}\\{{"event": {pattern}: ([-+0-9.eE]+)'}


def _hyperparameters(decisions: Decisions, run: str, locations: Locations) -> dict[str, str]:
    """Return the hyperparameters that the framework estimator adds, as JSON values."""
    isolated = decisions.spec.cluster.network.isolation
    parameters: dict[str, Any] = {
        # An isolated container cannot download the code, so the SDK uses a channel.
        "sagemaker_submit_directory": _CODE_IN_CHANNEL if isolated else locations.code,
        "sagemaker_program": WORKER_SCRIPT,
        "sagemaker_container_log_level": _CONTAINER_LOG_LEVEL,
        "sagemaker_job_name": run,
        "sagemaker_region": decisions.target.region,
    }
    if decisions.cluster.distribution == TORCH_DISTRIBUTED:
        parameters["sagemaker_torch_distributed_enabled"] = True
    else:
        parameters["sagemaker_distributed_dataparallel_enabled"] = True
        parameters["sagemaker_distributed_dataparallel_custom_mpi_options"] = ""
    parameters["sagemaker_instance_type"] = decisions.cluster.instance_type
    return {name: dump_json(value) for name, value in parameters.items()}


def _channels(decisions: Decisions, locations: Locations) -> list[dict[str, Any]]:
    spec = decisions.spec
    # S3Prefix matches prefixes of keys: the slash excludes folders whose names begin like this one.
    channels = [_channel(CONFIG_CHANNEL, f"{locations.config}/", None)]
    if decisions.cluster.launcher == LAUNCHER_CLOUDTRAIN or spec.cluster.network.isolation:
        channels.append(_channel(CODE_CHANNEL, locations.code, None))
    channels += [
        _channel(name, locations.channels[name], channel) for name, channel in spec.data.items()
    ]
    return channels


def _channel(name: str, uri: str, channel: Channel | None) -> dict[str, Any]:
    """Return one channel; `channel` is None for cloudtrain's own channels."""
    if channel is not None and channel.file_system is not None:
        file_system = {
            "FileSystemId": channel.fsx or channel.efs,
            "FileSystemType": FILE_SYSTEM_TYPES[channel.file_system],
            "DirectoryPath": channel.path or "/",
            "FileSystemAccessMode": channel.mount,
        }
        return {"ChannelName": name, "DataSource": {"FileSystemDataSource": file_system}}
    is_sharded = channel is not None and channel.sharded
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": uri,
        "S3DataDistributionType": "ShardedByS3Key" if is_sharded else "FullyReplicated",
    }
    entry: dict[str, Any] = {"ChannelName": name, "DataSource": {"S3DataSource": source}}
    # File is the job's own mode, TrainingInputMode.
    if channel is not None and channel.mode != "File":
        entry["InputMode"] = channel.mode
    return entry


def _resources(decisions: Decisions) -> dict[str, Any]:
    spec = decisions.spec
    settings = decisions.target.settings
    cluster = spec.cluster
    resources: dict[str, Any] = {
        "VolumeSizeInGB": cluster.volume,
        "VolumeKmsKeyId": None if has_local_storage(spec) else settings.kms_key,
        "KeepAlivePeriodInSeconds": cluster.keep_alive,
    }
    if not decisions.cluster.instance_type:
        # Nodes of a cluster have no type.
        resources["InstanceCount"] = decisions.cluster.instances
    elif cluster.prefer:
        resources["InstancePreferences"] = [
            _drop_empty(
                {
                    "InstanceType": name,
                    "InstanceCount": count,
                    "TrainingPlanArns": [plan] if plan else None,
                }
            )
            for name, count, plan in cluster.choices
        ]
    else:
        resources["InstanceType"] = cluster.instance_type
        resources["InstanceCount"] = cluster.instances
        resources["TrainingPlanArn"] = cluster.training_plan
    return _drop_empty(resources)


def has_local_storage(spec: JobSpec) -> bool:
    """Return whether one of the instance types has local NVMe storage.

    Its hardware encrypts it, and AWS rejects a volume key. Source: botocore's model of ResourceConfig, VolumeKmsKeyId.
    """
    found = (catalog.find_instance(name) for name in spec.cluster.types)
    return any(instance is not None and bool(instance.nvme_gb) for instance in found)
