"""The CreateTrainingJob document, rendered offline with the fields that a real estimator sends."""

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
"""Starts cloudtrain's launcher as PID 1; tar unpacks the code, so that any image with bash, Python and torch works.

The kernel drops a SIGTERM to PID 1 without a handler, so bash sets one for the time until the launcher sets its own.
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
    """Uris of a run's files: `s3://` uris, or `file://` uris for a local run.

    Attributes:
        code: The bundle's archive.
        config: Folder of run.json.
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
    """Values of the request that the plan decides.

    Attributes:
        run: Run id.
        role: ARN of the execution role.
        region: AWS region.
        image: Uri of the container image.
        launcher: `LAUNCHER_CLOUDTRAIN` or `LAUNCHER_TOOLKIT`.
        distribution: `torch_distributed`, `pytorchddp` or `smdistributed`.
        locations: Uris of the run's files.
        sync_checkpoints: Whether SageMaker syncs /opt/ml/checkpoints with S3, as for scripts and isolated jobs. The
            shared entrypoint writes to S3 itself.
        max_runtime_seconds: Training time after which the job is stopped.
        max_wait_seconds: Limit of waiting and training together, with spot; else None.
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
    """Return the estimator's `distribution` argument. SDK v2 ignores a mistyped one, so it is built only here."""
    if distribution == "smdistributed":
        return {"smdistributed": {"dataparallel": {"enabled": True}}}
    return {distribution: {"enabled": True}}


def render_request(spec: JobSpec, settings: Settings, options: RequestOptions) -> dict[str, Any]:
    """Return the CreateTrainingJob document of a job.

    Every field is equal to what `sagemaker.pytorch.PyTorch` 2.257 sends; tests compare the two.
    """
    cluster = spec.cluster
    request: dict[str, Any] = {
        "TrainingJobName": options.run,
        "RoleArn": options.role,
        "AlgorithmSpecification": _algorithm(options),
        "HyperParameters": _hyperparameters(spec, options),
        "InputDataConfig": _channels(spec, options),
        "OutputDataConfig": _drop_empty({"S3OutputPath": options.locations.output, "KmsKeyId": settings.kms_key}),
        "ResourceConfig": _resources(spec, settings),
        "StoppingCondition": _drop_empty(
            {
                "MaxRuntimeInSeconds": options.max_runtime_seconds,
                "MaxWaitTimeInSeconds": options.max_wait_seconds,
                "MaxPendingTimeInSeconds": cluster.max_pending,
            }
        ),
        "Tags": [{"Key": key, "Value": value} for key, value in sorted({**spec.tags, JOB_TAG: spec.name}.items())],
        "ProfilerConfig": {"DisableProfiler": True},
    }
    optional = {
        "Environment": {**spec.code.variables, **_mlflow_variables(spec)},
        "VpcConfig": _network(spec, settings),
        "CheckpointConfig": {"S3Uri": options.locations.checkpoints} if options.sync_checkpoints else None,
        # Below the run's name, as AWS's container copies what is written to /opt/ml/output/tensorboard.
        "TensorBoardOutputConfig": {"S3OutputPath": options.locations.output} if spec.tracking.tensorboard else None,
        "MlflowConfig": _mlflow(spec, options.run),
        "RetryStrategy": {"MaximumRetryAttempts": spec.limits.retries} if spec.limits.retries else None,
        "EnableNetworkIsolation": cluster.network.isolation,
        "EnableInterContainerTrafficEncryption": cluster.network.encrypt_traffic,
        "EnableManagedSpotTraining": cluster.spot is not None,
    }
    return {**request, **_drop_empty(optional)}


def _mlflow(spec: JobSpec, run: str) -> dict[str, str] | None:
    """Return the MlflowConfig for a SageMaker tracking server, which SageMaker passes to the container."""
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


def _algorithm(options: RequestOptions) -> dict[str, Any]:
    algorithm: dict[str, Any] = {
        "TrainingImage": options.image,
        "TrainingInputMode": "File",
        "MetricDefinitions": metric_definitions(),
    }
    if options.launcher == LAUNCHER_CLOUDTRAIN:
        algorithm["ContainerEntrypoint"] = list(CONTAINER_ENTRYPOINT)
    return algorithm


def metric_definitions() -> list[dict[str, str]]:
    """Return the metric definitions whose regular expressions match the event lines."""
    number = r"([-+0-9.eE]+)"
    definitions = []
    for name, event, field in _METRICS:
        split = f'"split": "{name.partition("/")[0]}".*' if event == "evaluation" else ""
        regex = f'{EVENT_PREFIX}\\{{"event": "{event}".*{split}"{field}": {number}'
        definitions.append({"Name": name, "Regex": regex})
    return definitions


def _hyperparameters(spec: JobSpec, options: RequestOptions) -> dict[str, str]:
    """Return the hyperparameters that the framework estimator adds, as JSON values."""
    isolated = spec.cluster.network.isolation
    parameters: dict[str, Any] = {
        # An isolated container cannot download the code, so the SDK uses a channel.
        "sagemaker_submit_directory": _CODE_IN_CHANNEL if isolated else options.locations.code,
        "sagemaker_program": WORKER_SCRIPT,
        "sagemaker_container_log_level": _CONTAINER_LOG_LEVEL,
        "sagemaker_job_name": options.run,
        "sagemaker_region": options.region,
    }
    if options.distribution == "torch_distributed":
        parameters["sagemaker_torch_distributed_enabled"] = True
    else:
        parameters["sagemaker_distributed_dataparallel_enabled"] = True
        parameters["sagemaker_distributed_dataparallel_custom_mpi_options"] = ""
    parameters["sagemaker_instance_type"] = spec.cluster.first_choice
    return {name: dump_json(value) for name, value in parameters.items()}


def _channels(spec: JobSpec, options: RequestOptions) -> list[dict[str, Any]]:
    # S3Prefix matches prefixes of keys: the slash excludes folders whose names begin like this one.
    channels = [_channel(CONFIG_CHANNEL, f"{options.locations.config}/", None)]
    if options.launcher == LAUNCHER_CLOUDTRAIN or spec.cluster.network.isolation:
        channels.append(_channel(CODE_CHANNEL, options.locations.code, None))
    channels += [_channel(name, options.locations.channels[name], channel) for name, channel in spec.data.items()]
    return channels


def _channel(name: str, uri: str, channel: Channel | None) -> dict[str, Any]:
    """Return one channel; `channel` is None for cloudtrain's own channels."""
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
    """Return whether one of the instance types has local NVMe storage.

    Its hardware encrypts it, and AWS rejects a volume key. Source: botocore's model of ResourceConfig, VolumeKmsKeyId.
    """
    found = (catalog.find_instance(name) for name in spec.cluster.types)
    return any(instance is not None and bool(instance.nvme_gb) for instance in found)


def _network(spec: JobSpec, settings: Settings) -> dict[str, Any] | None:
    network = spec.cluster.network
    subnets = network.subnets or settings.subnets
    groups = network.security_groups or settings.security_groups
    if not subnets or not groups:  # `check_settings` and the job's validation reject one without the other
        return None
    return {"Subnets": list(subnets), "SecurityGroupIds": list(groups)}


SETTING = "setting"
"""First part of the path of an account setting, in place of a field of the job."""

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
    """Return the path of the job's field, or `(SETTING, name)`, that a value of the request comes from.

    Args:
        path: Path in the request, such as `("Tags", 3, "Value")`.
        request: The request.
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
