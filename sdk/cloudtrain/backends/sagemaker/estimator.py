"""The CreateTrainingJob call as a real `sagemaker.pytorch.PyTorch` makes it, held to the plan."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.backends.sagemaker.sdk_check import NO_TELEMETRY, load_sdk, quiet
from cloudtrain.errors import DriftError
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.request import distribution_argument
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import CODE_CHANNEL


def send_by_estimator(plan: Plan, session: Any, client: Any) -> None:
    """Create the training job through a real `sagemaker.pytorch.PyTorch` estimator.

    Raises:
        DriftError: it was about to send something else than the plan.
        MissingExtraError: the SageMaker SDK is not installed.
    """
    guard = DriftGuard(plan.request)
    with _estimator(plan, session, client) as (estimator, inputs):
        events = client.meta.events
        events.register("provide-client-params.sagemaker.CreateTrainingJob", guard)
        try:
            # wait=True would swallow Ctrl-C; we watch ourselves.
            estimator.fit(inputs, wait=False, job_name=plan.run)
        finally:
            events.unregister("provide-client-params.sagemaker.CreateTrainingJob", guard)


def render_by_estimator(plan: Plan, session: Any, client: Any) -> dict[str, Any]:
    """Return the document that a real estimator makes for AWS Batch, once it is known to be the plan's; send nothing.

    These are the calls of the SDK's own `aws_batch.TrainingQueue.submit`. Its last one is left to us: it takes neither
    our session nor a client token, drops a priority of 0, and ends every run after a day unless it is told otherwise.

    Raises:
        DriftError: it is something else than the plan.
        MissingExtraError: the SDK is not installed.
    """
    with _estimator(plan, session, client) as (estimator, inputs):
        import sagemaker.estimator

        training_job: Any = sagemaker.estimator._TrainingJob  # noqa: SLF001 (as TrainingQueue takes it)
        estimator.prepare_workflow_for_training(plan.run)
        arguments = training_job.get_train_args(estimator, inputs, {})
        document: dict[str, Any] = estimator.sagemaker_session.get_train_request(**arguments)
    DriftGuard(plan.request)(document)
    return document


@contextlib.contextmanager
def _estimator(plan: Plan, session: Any, client: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the estimator of a plan, and its inputs, with the SDK kept quiet meanwhile."""
    sdk = load_sdk()
    with quiet():
        sagemaker_session = sdk.Session(
            boto_session=session,
            sagemaker_client=client,
            # No training job is created with these three, but each would take its time to be made.
            sagemaker_runtime_client=client,
            sagemaker_featurestore_runtime_client=client,
            sagemaker_metrics_client=client,
            default_bucket=split_uri(plan.locations.output)[0],  # else it asks STS at a fixed address
            sagemaker_config=NO_TELEMETRY,
        )
        board = plan.request.get("TensorBoardOutputConfig")
        estimator = sdk.PyTorch(
            **estimator_arguments(plan),
            sagemaker_session=sagemaker_session,
            tensorboard_output_config=sdk.TensorBoardOutputConfig(board["S3OutputPath"]) if board else None,
        )
        inputs = {
            channel["ChannelName"]: sdk.TrainingInput(
                s3_data=channel["DataSource"]["S3DataSource"]["S3Uri"],
                distribution=channel["DataSource"]["S3DataSource"]["S3DataDistributionType"],
                input_mode=channel.get("InputMode"),
            )
            for channel in plan.request["InputDataConfig"]
            # With network isolation the SDK adds this one itself and refuses it as an input.
            if not (channel["ChannelName"] == CODE_CHANNEL and plan.request.get("EnableNetworkIsolation"))
        }
        yield estimator, inputs


def estimator_arguments(plan: Plan) -> dict[str, Any]:
    """Return the estimator's arguments, read off the request; v2 takes a mistyped one without a word."""
    request = plan.request
    algorithm, resources, stopping = (
        request["AlgorithmSpecification"],
        request["ResourceConfig"],
        request["StoppingCondition"],
    )
    hyperparameters = {name: json.loads(value) for name, value in request["HyperParameters"].items()}
    network = request.get("VpcConfig", {})
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
        "code_location": request["OutputDataConfig"]["S3OutputPath"],
        "volume_size": resources["VolumeSizeInGB"],
        "max_run": stopping["MaxRuntimeInSeconds"],
        "metric_definitions": algorithm["MetricDefinitions"],
        "tags": request["Tags"],
        "debugger_hook_config": False,
        "disable_profiler": True,
        **{name: value for name, value in optional.items() if value is not None},
    }


class DriftGuard:
    """Compares what the estimator is about to send with the plan, and adds what v2 has no argument for.

    Registered as a botocore hook: it runs after the estimator has decided and before anything is sent.
    """

    def __init__(self, planned: Mapping[str, Any]) -> None:
        self.planned = planned

    def __call__(self, params: dict[str, Any], **_event: Any) -> None:
        """Complete the parameters; stop the call when they differ from the plan.

        Raises:
            DriftError: they differ.
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


def compare(planned: Any, sent: Any, path: str = "") -> Iterator[str]:
    """Yield the differences between two documents, a line each. Lists of named things are compared by name."""
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
    """Key list items by their name where they have one (their order means nothing), else by position."""
    named: dict[str, Any] = {}
    for index, item in enumerate(items):
        name = str(index)
        if isinstance(item, Mapping):
            name = next((str(item[key]) for key in ("ChannelName", "Key", "Name") if key in item), name)
        if f"[{name}]" in named:
            name = f"{name}, again at {index}"
        named[f"[{name}]"] = item
    return named
