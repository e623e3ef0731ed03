"""CreateTrainingJob through a real `sagemaker.pytorch.PyTorch` estimator, compared with the plan."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.sagemaker.sdk_import import NO_TELEMETRY, Sdk, load_sdk, suppress_output
from cloudtrain.errors import DriftError
from cloudtrain.job.request_members import merge_members
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.request import distribution_argument
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import CODE_CHANNEL
from cloudtrain_runtime.contract.strict_json import load_json

if TYPE_CHECKING:
    from boto3.session import Session
    from types_boto3_sagemaker import SageMakerClient

_default_session = threading.Lock()


def send_by_estimator(plan: Plan, session: Session, client: SageMakerClient) -> None:
    """Create the training job through a real `sagemaker.pytorch.PyTorch` estimator.

    Raises:
        DriftError: the estimator was about to send something else than the plan.
        MissingExtraError: the SageMaker SDK is not installed.
    """
    _fit(plan, session, client, _guard(plan))


def render_by_estimator(plan: Plan, session: Session, client: SageMakerClient) -> dict[str, Any]:
    """Return the document that a real estimator renders for AWS Batch, after a comparison with the plan. Send nothing.

    The SDK's own call for queues, `aws_batch.TrainingQueue.submit`, takes neither our session nor a client token, drops
    a priority of 0, and ends every run after a day by default.

    Raises:
        DriftError: the document differs from the plan.
        MissingExtraError: the SDK is not installed.
    """
    guard = _guard(plan)
    document: dict[str, Any] = {}

    def keep(params: dict[str, Any], **_event: Any) -> None:
        guard(params)
        document.update(params)
        raise _RenderedError

    with contextlib.suppress(_RenderedError):
        _fit(plan, session, client, keep)
    return document


class _RenderedError(Exception):
    """Ends `fit` when the request is complete, before it is sent."""


def _fit(plan: Plan, session: Session, client: SageMakerClient, hook: Callable[..., None]) -> None:
    """Call `fit` of the plan's estimator; the hook gets the parameters of CreateTrainingJob before they are sent."""
    event = "provide-client-params.sagemaker.CreateTrainingJob"
    with _estimator(plan, session, client) as (estimator, inputs):
        client.meta.events.register(event, hook)
        try:
            # wait=True would swallow Ctrl-C.
            estimator.fit(inputs, wait=False, job_name=plan.run)
        finally:
            client.meta.events.unregister(event, hook)


def _guard(plan: Plan) -> DriftGuard:
    return DriftGuard(plan.request, plan.job_document.get("request", {}))


@contextlib.contextmanager
def _estimator(
    plan: Plan, session: Session, client: SageMakerClient
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the estimator of a plan and its inputs, and suppress the SDK's output."""
    sdk = load_sdk()
    with suppress_output():
        sagemaker_session = sdk.Session(
            boto_session=session,
            sagemaker_client=client,
            # Not used for training jobs. The SDK would otherwise create these three clients, which takes time.
            sagemaker_runtime_client=client,
            sagemaker_featurestore_runtime_client=client,
            sagemaker_metrics_client=client,
            # Without it, the SDK calls STS at a hard-coded address.
            default_bucket=split_uri(plan.locations.base).bucket,
            sagemaker_config=NO_TELEMETRY,
        )
        board = plan.request.get("TensorBoardOutputConfig")
        board_config = None
        if board:
            board_config = sdk.TensorBoardOutputConfig(board["S3OutputPath"])
        with _as_default_session(session):
            estimator = sdk.PyTorch(
                **estimator_arguments(plan),
                sagemaker_session=sagemaker_session,
                tensorboard_output_config=board_config,
            )
        inputs = {
            channel["ChannelName"]: _training_input(sdk, channel)
            for channel in plan.request["InputDataConfig"]
            # With network isolation the SDK adds this channel itself and rejects it as an input.
            if not (
                channel["ChannelName"] == CODE_CHANNEL
                and plan.request.get("EnableNetworkIsolation")
            )
            # The guard adds the channels of `request`, for which the SDK has no class.
            and not channel["DataSource"]
            .keys()
            .isdisjoint(("S3DataSource", "FileSystemDataSource"))
        }
        yield estimator, inputs


@contextlib.contextmanager
def _as_default_session(session: Session) -> Iterator[None]:
    """Make a session boto3's default one for a moment.

    An estimator creates a client of the default session, which it does not use. Without this, a missing profile or a
    proxy that does not answer would end a submit to a sandbox, which needs neither.
    """
    import boto3

    with _default_session:
        before = boto3.DEFAULT_SESSION
        boto3.DEFAULT_SESSION = session
        try:
            yield
        finally:
            boto3.DEFAULT_SESSION = before


def _training_input(sdk: Sdk, channel: Mapping[str, Any]) -> Any:
    mount, source = (
        channel["DataSource"].get(f"{kind}DataSource") for kind in ("FileSystem", "S3")
    )
    if mount is not None:
        names = {"FileSystemId": "file_system_id", "FileSystemType": "file_system_type"}
        names |= {
            "DirectoryPath": "directory_path",
            "FileSystemAccessMode": "file_system_access_mode",
        }
        return sdk.FileSystemInput(**{names[member]: value for member, value in mount.items()})
    return sdk.TrainingInput(
        s3_data=source["S3Uri"],
        distribution=source["S3DataDistributionType"],
        input_mode=channel.get("InputMode"),
    )


def estimator_arguments(plan: Plan) -> dict[str, Any]:
    """Return the estimator's arguments for a plan. v2 silently accepts mistyped arguments."""
    request = plan.request
    algorithm = request["AlgorithmSpecification"]
    resources = request["ResourceConfig"]
    stopping = request["StoppingCondition"]
    hyperparameters = {name: load_json(value) for name, value in request["HyperParameters"].items()}
    network = request.get("VpcConfig", {})
    registry = algorithm.get("TrainingImageConfig", {})
    is_uncompressed = "CompressionType" in request["OutputDataConfig"]
    optional = {
        "container_entry_point": algorithm.get("ContainerEntrypoint"),
        "environment": request.get("Environment"),
        "subnets": network.get("Subnets"),
        "security_group_ids": network.get("SecurityGroupIds"),
        "checkpoint_s3_uri": request.get("CheckpointConfig", {}).get("S3Uri"),
        "max_retry_attempts": request.get("RetryStrategy", {}).get("MaximumRetryAttempts"),
        "enable_network_isolation": request.get("EnableNetworkIsolation"),
        "encrypt_inter_container_traffic": request.get("EnableInterContainerTrafficEncryption"),
        "use_spot_instances": request.get("EnableManagedSpotTraining"),
        "max_wait": stopping.get("MaxWaitTimeInSeconds"),
        "keep_alive_period_in_seconds": resources.get("KeepAlivePeriodInSeconds"),
        "volume_kms_key": resources.get("VolumeKmsKeyId"),
        "output_kms_key": request["OutputDataConfig"].get("KmsKeyId"),
        "disable_output_compression": True if is_uncompressed else None,
        "training_plan": resources.get("TrainingPlanArn"),
        "enable_remote_debug": request.get("RemoteDebugConfig", {}).get("EnableRemoteDebug"),
        "enable_infra_check": request.get("InfraCheckConfig", {}).get("EnableInfraCheck"),
        "training_repository_access_mode": registry.get("TrainingRepositoryAccessMode"),
        "training_repository_credentials_provider_arn": registry.get(
            "TrainingRepositoryAuthConfig", {}
        ).get("TrainingRepositoryCredentialsProviderArn"),
    }
    return {
        "entry_point": hyperparameters["sagemaker_program"],
        "source_dir": plan.locations.code,
        "role": request["RoleArn"],
        "image_uri": algorithm["TrainingImage"],
        "instance_type": plan.cluster.instance_type,
        "instance_count": plan.cluster.instances,
        "distribution": distribution_argument(plan.cluster.distribution),
        "output_path": request["OutputDataConfig"]["S3OutputPath"],
        "code_location": plan.locations.base,
        "volume_size": resources["VolumeSizeInGB"],
        "max_run": stopping["MaxRuntimeInSeconds"],
        "metric_definitions": algorithm["MetricDefinitions"],
        "tags": request["Tags"],
        "debugger_hook_config": False,
        "disable_profiler": True,
        **{name: value for name, value in optional.items() if value is not None},
    }


class DriftGuard:
    """Botocore hook that compares the estimator's request with the plan before it is sent.

    It first adds the fields for which v2 has no argument, and the members in the job's `request`.
    """

    def __init__(
        self, planned: Mapping[str, Any], members: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.planned = planned
        self.members = members

    def __call__(self, params: dict[str, Any], **_event: Any) -> None:
        """Complete the parameters and compare them with the plan.

        Raises:
            DriftError: the parameters differ from the plan.
        """
        self._complete(params)
        differences = list(compare(self.planned, params))
        if differences:
            lines = "\n    ".join(differences)
            raise DriftError(
                f"the SageMaker SDK was about to send something else than the plan; nothing was sent:\n    {lines}",
                "use CLOUDTRAIN_TRANSPORT=boto3 to send the plan itself, and report this with your sagemaker version",
            )

    def _complete(self, params: dict[str, Any]) -> None:
        pending = self.planned["StoppingCondition"].get("MaxPendingTimeInSeconds")
        if pending is not None:
            params["StoppingCondition"].setdefault("MaxPendingTimeInSeconds", pending)
        preferences = self.planned["ResourceConfig"].get("InstancePreferences")
        if "MlflowConfig" in self.planned:
            params.setdefault("MlflowConfig", copy.deepcopy(self.planned["MlflowConfig"]))
        if preferences is not None:
            resources = params["ResourceConfig"]
            resources.pop("InstanceType", None)
            resources.pop("InstanceCount", None)
            resources["InstancePreferences"] = copy.deepcopy(preferences)
        params.update(merge_members(params, copy.deepcopy(dict(self.members))))


def compare(planned: Any, sent: Any, path: str = "") -> Iterator[str]:
    """Yield the differences between two documents, one line each. Items of lists are compared by name."""
    if isinstance(planned, Mapping) and isinstance(sent, Mapping):
        for key in sorted({*planned, *sent}):
            below = f"{path}.{key}" if path else str(key)
            if key not in sent:
                yield f"{below}: planned {planned[key]!r}, not sent"
            elif key not in planned:
                yield f"{below}: not planned, sent {sent[key]!r}"
            else:
                yield from compare(planned[key], sent[key], below)
    elif isinstance(planned, list) and isinstance(sent, list):
        yield from compare(_by_name(planned), _by_name(sent), path)
    elif planned != sent or isinstance(planned, bool) != isinstance(sent, bool):
        yield f"{path}: planned {planned!r}, sent {sent!r}"


def _by_name(items: list[Any]) -> dict[str, Any]:
    """Key list items by their name if they have one (their order is irrelevant), or else by position."""
    named: dict[str, Any] = {}
    for index, item in enumerate(items):
        name = str(index)
        if isinstance(item, Mapping):
            name = next(
                (str(item[key]) for key in ("ChannelName", "Key", "Name") if key in item), name
            )
        if f"[{name}]" in named:
            name = f"{name}, again at {index}"
        named[f"[{name}]"] = item
    return named
