"""The CreateTrainingJob document, rendered offline, field by field as a real estimator sends it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from cloudtrain import catalog
from cloudtrain.job.sections.data import Channel
from cloudtrain.job.spec import JOB_TAG, JobSpec
from cloudtrain.settings.settings import Settings
from cloudtrain.support.field_path import FieldPath
from cloudtrain_runtime.contract import (
    BUNDLE_FILE,
    CODE_CHANNEL,
    CONFIG_CHANNEL,
    EVENT_PREFIX,
    ML_ROOT_VARIABLE,
    WORKER_SCRIPT,
)
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
"""Starts our launcher as PID 1. Unpacking is left to tar so that any image with bash, Python and torch works.

The kernel drops a SIGTERM to PID 1 without a handler, so bash has one while tar runs; the launcher sets its own first.
"""

LAUNCHER_CLOUDTRAIN = "cloudtrain"
LAUNCHER_TOOLKIT = "toolkit"

_CONTAINER_LOG_LEVEL = 20
_CODE_IN_CHANNEL = f"/opt/ml/input/data/{CODE_CHANNEL}/{BUNDLE_FILE}"
_METRICS = (
    ("train/loss", "step", "loss"),
    ("train/samples_per_second", "step", "samples_per_second"),
    ("train/tokens_per_second", "step", "tokens_per_second"),
    ("train/data_wait", "step", "data_wait"),
    ("train/data_seconds", "step", "data"),
    ("train/forward_seconds", "step", "forward"),
    ("train/backward_seconds", "step", "backward"),
    ("train/optimizer_seconds", "step", "optimizer"),
    ("train/checkpoint_seconds", "step", "checkpoint"),
    ("train/mfu", "step", "mfu"),
    ("train/memory_bytes", "step", "memory_bytes"),
    ("train/learning_rate", "step", "learning_rate"),
    ("train/grad_norm", "step", "grad_norm"),
    ("validation/loss", "evaluation", "loss"),
    ("validation/accuracy", "evaluation", "accuracy"),
    ("test/loss", "evaluation", "loss"),
    ("test/accuracy", "evaluation", "accuracy"),
)


@dataclass(frozen=True)
class Locations:
    """Where things lie: `s3://` uris, or `file://` uris of a local run.

    Attributes:
        code: The bundle's archive.
        config: Folder that holds run.json.
        output: Prefix below which `<run>/output/model.tar.gz` appears.
        checkpoints: Folder of this run's checkpoints.
        channels: The user's input channels by name.
    """

    code: str
    config: str
    output: str
    checkpoints: str
    channels: dict[str, str]


@dataclass(frozen=True)
class RequestOptions:
    """What the plan decided and the document needs.

    Attributes:
        sync_checkpoints: Whether SageMaker keeps /opt/ml/checkpoints in step with S3 (scripts and isolated jobs;
            the shared entrypoint writes to S3 itself).
        max_runtime_seconds: After which the job is stopped.
        max_wait_seconds: Waiting and training together, with spot.
    """

    run: str
    role: str
    region: str
    image: str
    launcher: str
    distribution: str
    locations: Locations
    sync_checkpoints: bool
    max_runtime_seconds: int
    max_wait_seconds: int | None


def distribution_argument(distribution: str) -> dict[str, Any]:
    """Return the estimator's `distribution` argument. v2 ignores a mistyped one, so it is built only here."""
    if distribution == "smdistributed":
        return {"smdistributed": {"dataparallel": {"enabled": True}}}
    return {distribution: {"enabled": True}}


def render_request(spec: JobSpec, settings: Settings, choices: RequestOptions) -> dict[str, Any]:
    """Return the CreateTrainingJob document of a job.

    Every field stands exactly as `sagemaker.pytorch.PyTorch` 2.257 sends it; tests compare the two.
    """
    cluster = spec.cluster
    request: dict[str, Any] = {
        "TrainingJobName": choices.run,
        "RoleArn": choices.role,
        "AlgorithmSpecification": _algorithm(choices),
        "HyperParameters": _hyperparameters(spec, choices),
        "InputDataConfig": _channels(spec, choices),
        "OutputDataConfig": _drop_empty({"S3OutputPath": choices.locations.output, "KmsKeyId": settings.kms_key}),
        "ResourceConfig": _resources(spec, settings),
        "StoppingCondition": _drop_empty(
            {
                "MaxRuntimeInSeconds": choices.max_runtime_seconds,
                "MaxWaitTimeInSeconds": choices.max_wait_seconds,
                "MaxPendingTimeInSeconds": cluster.max_pending,
            }
        ),
        "Tags": [{"Key": key, "Value": value} for key, value in sorted({**spec.tags, JOB_TAG: spec.name}.items())],
        "ProfilerConfig": {"DisableProfiler": True},
    }
    optional = {
        "Environment": {**spec.code.variables, **_mlflow_variables(spec)},
        "VpcConfig": _network(spec, settings),
        "CheckpointConfig": {"S3Uri": choices.locations.checkpoints} if choices.sync_checkpoints else None,
        # Below the run's name, as AWS's container copies what is written to /opt/ml/output/tensorboard.
        "TensorBoardOutputConfig": {"S3OutputPath": choices.locations.output} if spec.tracking.tensorboard else None,
        "MlflowConfig": _mlflow(spec, choices.run),
        "RetryStrategy": {"MaximumRetryAttempts": spec.limits.retries} if spec.limits.retries else None,
        "EnableNetworkIsolation": cluster.network.isolation,
        "EnableInterContainerTrafficEncryption": cluster.network.encrypt_traffic,
        "EnableManagedSpotTraining": cluster.spot is not None,
    }
    return {**request, **_drop_empty(optional)}


def _mlflow(spec: JobSpec, run: str) -> dict[str, str] | None:
    """Return where a tracking server of SageMaker's own lies; the service then tells the container."""
    server = spec.tracking.mlflow
    if server is None or not server.startswith("arn:"):
        return None
    return {"MlflowResourceArn": server, "MlflowExperimentName": spec.name, "MlflowRunName": run}


def _mlflow_variables(spec: JobSpec) -> dict[str, str]:
    """Return the variables by which MLflow's client finds a server that is not SageMaker's."""
    server = spec.tracking.mlflow
    if server is None or server.startswith("arn:"):
        return {}
    return {"MLFLOW_TRACKING_URI": server, "MLFLOW_EXPERIMENT_NAME": spec.name}


def _drop_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, False, (), {}, [])}


def _algorithm(choices: RequestOptions) -> dict[str, Any]:
    algorithm: dict[str, Any] = {
        "TrainingImage": choices.image,
        "TrainingInputMode": "File",
        "MetricDefinitions": metric_definitions(),
    }
    if choices.launcher == LAUNCHER_CLOUDTRAIN:
        algorithm["ContainerEntrypoint"] = list(CONTAINER_ENTRYPOINT)
    return algorithm


def metric_definitions() -> list[dict[str, str]]:
    """Return the regular expressions by which CloudWatch reads our event lines."""
    number = r"([-+0-9.eE]+)"
    definitions = []
    for name, event, field in _METRICS:
        split = f'"split": "{name.partition("/")[0]}".*' if event == "evaluation" else ""
        regex = f'{EVENT_PREFIX}\\{{"event": "{event}".*{split}"{field}": {number}'
        definitions.append({"Name": name, "Regex": regex})
    return definitions


def _hyperparameters(spec: JobSpec, choices: RequestOptions) -> dict[str, str]:
    """Return what the framework estimator adds by itself; values are JSON, as it encodes them."""
    isolated = spec.cluster.network.isolation
    parameters: dict[str, Any] = {
        # An isolated container cannot download; the SDK then brings the code through a channel.
        "sagemaker_submit_directory": _CODE_IN_CHANNEL if isolated else choices.locations.code,
        "sagemaker_program": WORKER_SCRIPT,
        "sagemaker_container_log_level": _CONTAINER_LOG_LEVEL,
        "sagemaker_job_name": choices.run,
        "sagemaker_region": choices.region,
    }
    if choices.distribution == "torch_distributed":
        parameters["sagemaker_torch_distributed_enabled"] = True
    else:
        parameters["sagemaker_distributed_dataparallel_enabled"] = True
        parameters["sagemaker_distributed_dataparallel_custom_mpi_options"] = ""
    parameters["sagemaker_instance_type"] = spec.cluster.first_choice
    return {name: dump_json(value) for name, value in parameters.items()}


def _channels(spec: JobSpec, choices: RequestOptions) -> list[dict[str, Any]]:
    # The slash keeps S3Prefix, which matches prefixes of keys, from taking in a neighbour of the folder.
    channels = [_channel(CONFIG_CHANNEL, f"{choices.locations.config}/", None)]
    if choices.launcher == LAUNCHER_CLOUDTRAIN or spec.cluster.network.isolation:
        channels.append(_channel(CODE_CHANNEL, choices.locations.code, None))
    channels += [_channel(name, choices.locations.channels[name], channel) for name, channel in spec.data.items()]
    return channels


def _channel(name: str, uri: str, channel: Channel | None) -> dict[str, Any]:
    """Return one channel; those of our own have no entry in the job."""
    is_sharded = channel is not None and channel.sharded
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": uri,
        "S3DataDistributionType": "ShardedByS3Key" if is_sharded else "FullyReplicated",
    }
    mode = {} if channel is None or channel.mode == "File" else {"InputMode": channel.mode}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, **mode}


def _resources(spec: JobSpec, settings: Settings) -> dict[str, Any]:
    cluster = spec.cluster
    resources: dict[str, Any] = {
        "VolumeSizeInGB": cluster.volume,
        "VolumeKmsKeyId": None if has_local_storage(spec) else settings.kms_key,
        "KeepAlivePeriodInSeconds": cluster.keep_alive,
    }
    if cluster.prefer:
        resources["InstancePreferences"] = [
            {"InstanceType": name, "InstanceCount": cluster.instances} for name in cluster.prefer
        ]
    else:
        resources["InstanceType"] = cluster.instance_type
        resources["InstanceCount"] = cluster.instances
    return _drop_empty(resources)


def has_local_storage(spec: JobSpec) -> bool:
    """Whether one of the types has NVMe of its own, which its hardware encrypts: AWS then refuses a volume key.

    Source: botocore's model of ResourceConfig, VolumeKmsKeyId.
    """
    found = (catalog.find_instance(name) for name in spec.cluster.types)
    return any(instance is not None and bool(instance.nvme_gb) for instance in found)


def _network(spec: JobSpec, settings: Settings) -> dict[str, Any] | None:
    network = spec.cluster.network
    subnets = network.subnets or settings.subnets
    groups = network.security_groups or settings.security_groups
    if not subnets or not groups:  # one without the other is refused elsewhere
        return None
    return {"Subnets": list(subnets), "SecurityGroupIds": list(groups)}


# ---------------------------------------------------------------- where a value of the document came from

SETTING = "setting"
"""First part of a source that is not a field of the job but one of the account's settings."""

_SOURCES: tuple[tuple[tuple[str, ...], FieldPath], ...] = (
    (("TrainingJobName",), ("name",)),
    (("RoleArn",), (SETTING, "role")),
    (("Environment",), ("code", "env")),
    (("AlgorithmSpecification", "TrainingImage"), ("cluster", "image")),
    (("OutputDataConfig", "KmsKeyId"), (SETTING, "kms_key")),
    (("OutputDataConfig", "S3OutputPath"), (SETTING, "prefix")),
    (("ResourceConfig", "InstanceType"), ("cluster", "instance_type")),
    (("ResourceConfig", "InstancePreferences"), ("cluster", "prefer")),
    (("ResourceConfig", "InstanceCount"), ("cluster", "instances")),
    (("ResourceConfig", "VolumeSizeInGB"), ("cluster", "volume")),
    (("ResourceConfig", "VolumeKmsKeyId"), (SETTING, "kms_key")),
    (("ResourceConfig", "KeepAlivePeriodInSeconds"), ("cluster", "keep_alive")),
    (("StoppingCondition", "MaxRuntimeInSeconds"), ("limits", "runtime")),
    (("StoppingCondition", "MaxWaitTimeInSeconds"), ("cluster", "spot", "max_wait")),
    (("StoppingCondition", "MaxPendingTimeInSeconds"), ("cluster", "max_pending")),
    (("VpcConfig", "Subnets"), ("cluster", "network", "subnets")),
    (("VpcConfig", "SecurityGroupIds"), ("cluster", "network", "security_groups")),
    (("CheckpointConfig", "S3Uri"), ("checkpoint", "uri")),
    (("RetryStrategy", "MaximumRetryAttempts"), ("limits", "retries")),
    (("MlflowConfig",), ("tracking", "mlflow")),
    (("TensorBoardOutputConfig",), ("tracking", "tensorboard")),
)
_CHANNEL_FIELDS = {"S3Uri": "uri", "InputMode": "mode", "S3DataDistributionType": "sharded"}


def source_of(path: FieldPath, request: dict[str, Any], spec: JobSpec) -> FieldPath:
    """Return the field of the job, or `(SETTING, name)`, that a value of the document was rendered from.

    Args:
        path: Place in the document, such as `("Tags", 3, "Value")`.
        request: The document.
        spec: The job.
    """
    if path[0] == "InputDataConfig":
        return _channel_source(path, request)
    if path[0] == "Tags":
        key = request["Tags"][path[1]]["Key"] if len(path) > 1 else None
        return ("tags", key) if key in spec.tags else ("tags",)
    if path[0] == "VpcConfig" and not spec.cluster.network.subnets:
        return (SETTING, "subnets" if path[1] == "Subnets" else "security_groups")
    for prefix, source in _SOURCES:
        if path[: len(prefix)] == prefix:
            rest = path[len(prefix) :] if source[-1] in ("env", "subnets", "security_groups") else ()
            index = path[len(prefix) : len(prefix) + 1] if source[-1] == "prefer" else ()
            return (*source, *rest, *index)
    return ()


def _channel_source(path: FieldPath, request: dict[str, Any]) -> FieldPath:
    if len(path) == 1:
        return ("data",)
    name = str(request["InputDataConfig"][path[1]]["ChannelName"])
    if name in (CODE_CHANNEL, CONFIG_CHANNEL):
        return (SETTING, "prefix")
    field = _CHANNEL_FIELDS.get(str(path[-1]))
    return ("data", name) if field is None else ("data", name, field)
