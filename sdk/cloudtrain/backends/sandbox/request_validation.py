"""Validation of CreateTrainingJob requests, with SageMaker's own messages where they are known.

Bounds and patterns come from botocore's model (`cloudtrain.catalog.service_limits`), rules between fields from the API
reference. Messages about features that only the sandbox lacks begin with `cloudtrain sandbox:`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.backends.sandbox.process import ACCOUNT
from cloudtrain.catalog.service_limits import TRAINING_JOB, Violation, check_request
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract.ml_tree import CONTAINER_TREE

# StoppingCondition, API reference 2026: 28 days.
MAX_RUNTIME_SECONDS = 28 * 86400
_SANDBOX_PREFIX = "cloudtrain sandbox:"
_MAPPING_FIELDS = ("Environment", "HyperParameters", "StaticHyperParameters")
_CHECKPOINTS_PATH = str(CONTAINER_TREE.checkpoints)


class ServiceError(Exception):
    """An error response of AWS's JSON protocol.

    Args:
        code: Name of the exception, such as `ValidationException`.
        message: AWS's message.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def validation_error(message: str) -> ServiceError:
    """Return a ValidationException."""
    return ServiceError("ValidationException", message)


def check_create(request: Mapping[str, Any]) -> None:
    """Validate the request itself, without its role and inputs.

    Raises:
        ServiceError: The request is invalid; the message names every value that violates a limit.
    """
    check_model(request, TRAINING_JOB)
    for rule in (_algorithm, _cluster, _times, _inputs, _tags, _sandbox_only):
        for message in rule(request):
            raise validation_error(message)


def check_model(request: Mapping[str, Any], shape: str) -> None:
    """Validate a request by the shape of its operation's input in AWS's model.

    Raises:
        ServiceError: The request is invalid; the message names every value that violates a limit.
    """
    try:
        violations = check_request(request, shape)
    except (TypeError, AttributeError, KeyError) as error:
        raise ServiceError(
            "SerializationException", f"a field has the wrong type: {error}"
        ) from None
    if violations:
        errors = "error" if len(violations) == 1 else "errors"
        found = "; ".join(_constraint(each) for each in violations)
        raise validation_error(f"{len(violations)} validation {errors} detected: {found}")


def check_role(request: Mapping[str, Any], trust: str | None) -> None:
    """Check that SageMaker can assume the role. `trust` is its policy as JSON, or None if it does not exist.

    Raises:
        ServiceError: SageMaker cannot assume it.
    """
    arn = str(request["RoleArn"])
    if f":{ACCOUNT}:" not in arn:
        raise ServiceError("AccessDeniedException", "Cross-account pass role is not allowed.")
    if trust is None or "sagemaker.amazonaws.com" not in trust:
        raise validation_error(
            f"Could not assume role {arn}. Please ensure that the role exists and allows principal "
            "'sagemaker.amazonaws.com' to assume the role."
        )


def missing_input_error(uri: str, region: str, role: str, cause: str) -> ServiceError:
    """Return the error about an input without objects."""
    bucket = split_uri(uri).bucket
    return validation_error(
        f'No S3 objects found under S3 URL "{uri}" given in input data source. Please ensure that the bucket exists in '
        f'the selected region ({region}), that objects exist under that S3 prefix, and that the role "{role}" has '
        f'"s3:ListBucket" permissions on bucket "{bucket}". Error message from S3: {cause}'
    )


def _constraint(violation: Violation) -> str:
    path = violation.path
    mapping = next((index for index, part in enumerate(path) if part in _MAPPING_FIELDS), len(path))
    # The keys of a mapping are the user's.
    name = ".".join(
        str(part) if index > mapping else _camel(part) for index, part in enumerate(path)
    )
    return f"Value at '{name}' failed to satisfy constraint: {violation.message}"


def _camel(part: str | int) -> str:
    if isinstance(part, int):
        return f"{part + 1}.member"
    return part[:1].lower() + part[1:]


def _algorithm(request: Mapping[str, Any]) -> Iterator[str]:
    algorithm = request["AlgorithmSpecification"]
    if ("TrainingImage" in algorithm) == ("AlgorithmName" in algorithm):
        yield "Either TrainingImage or AlgorithmName, and not both, must be specified in AlgorithmSpecification"
    names = [definition["Name"] for definition in algorithm.get("MetricDefinitions", ())]
    if len(set(names)) < len(names):
        yield "Duplicate metric names are not allowed in MetricDefinitions"
    for definition in algorithm.get("MetricDefinitions", ()):
        try:
            groups = re.compile(definition["Regex"]).groups
        except re.error as error:
            yield f"Invalid regex for metric {definition['Name']}: {error}"
        else:
            if groups == 0:
                yield f"Regex of metric {definition['Name']} must have a capturing group"


def _cluster(request: Mapping[str, Any]) -> Iterator[str]:
    resources = request["ResourceConfig"]
    preferences = resources.get("InstancePreferences", ())
    ways = ["InstanceType" in resources, "InstanceGroups" in resources, bool(preferences)]
    lacks_count = "InstanceType" in resources and "InstanceCount" not in resources
    if sum(ways) != 1 or lacks_count:
        yield (
            "ResourceConfig must have InstanceType and InstanceCount, or InstanceGroups, or InstancePreferences, "
            "and only one of them"
        )
    counts = sum("InstanceCount" in each for each in preferences)
    if preferences and counts != (0 if "InstanceCount" in resources else len(preferences)):
        yield "InstanceCount must be specified either in ResourceConfig or in every entry of InstancePreferences"
    if len({each["InstanceType"] for each in preferences}) < len(preferences):
        yield "An instance type can appear only once in InstancePreferences"
    keep_alive = resources.get("KeepAlivePeriodInSeconds")
    if keep_alive and "InstanceGroups" in resources:
        yield "KeepAlivePeriodInSeconds is not supported with InstanceGroups"
    is_spot = bool(request.get("EnableManagedSpotTraining"))
    if is_spot and "InstancePreferences" in resources:
        yield "InstancePreferences is not supported with managed spot training"
    plans = [
        "TrainingPlanArn" in resources,
        any("TrainingPlanArns" in each for each in preferences),
    ]
    if all(plans):
        yield "TrainingPlanArn and TrainingPlanArns of InstancePreferences are mutually exclusive"
    if is_spot and any(plans):
        yield "TrainingPlanArn is not supported with managed spot training"
    if is_spot and keep_alive:
        yield "KeepAlivePeriodInSeconds is not supported with managed spot training"


def _times(request: Mapping[str, Any]) -> Iterator[str]:
    stopping = request["StoppingCondition"]
    runtime = stopping.get("MaxRuntimeInSeconds", 86400)
    wait = stopping.get("MaxWaitTimeInSeconds")
    if request.get("EnableManagedSpotTraining"):
        if wait is None or wait < runtime:
            yield (
                "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to MaxRuntimeInSeconds"
            )
    elif wait is not None:
        # AWS's message, quoted in a public report (Kenza-AI/sagify#111).
        yield "Invalid MaxWaitTimeInSeconds. It is only supported when EnableManagedSpotTraining is set to true"
    if runtime > MAX_RUNTIME_SECONDS:
        yield f"MaxRuntimeInSeconds must be at most {MAX_RUNTIME_SECONDS}"


def _inputs(request: Mapping[str, Any]) -> Iterator[str]:
    names = [channel["ChannelName"] for channel in request.get("InputDataConfig", ())]
    if len(set(names)) < len(names):
        yield "Duplicate channel names are not allowed in InputDataConfig"
    for channel in request.get("InputDataConfig", ()):
        if len(channel["DataSource"]) != 1:
            yield f"Channel {channel['ChannelName']} must have exactly one DataSource"
        if "FileSystemDataSource" in channel["DataSource"] and "VpcConfig" not in request:
            yield f"VpcConfig must be specified for the FileSystemDataSource of channel {channel['ChannelName']}"
    for uri in (
        request["OutputDataConfig"]["S3OutputPath"],
        request.get("CheckpointConfig", {}).get("S3Uri", "s3://a"),
    ):
        if not re.match(r"s3://[a-z0-9]", uri):
            yield f"{uri!r} is not an S3 URI"


def _tags(request: Mapping[str, Any]) -> Iterator[str]:
    keys = [tag["Key"].lower() for tag in request.get("Tags", ())]
    if len(set(keys)) < len(keys):
        yield "Duplicate tag keys found. Please note that Tag keys are case insensitive."
    if any(key.startswith("aws:") for key in keys):
        yield "Tag keys that start with aws: are reserved"


def _sandbox_only(request: Mapping[str, Any]) -> Iterator[str]:
    """Yield messages about features that AWS supports and the sandbox lacks."""
    algorithm = request["AlgorithmSpecification"]
    parameters = request.get("HyperParameters", {})
    if "InstanceGroups" in request["ResourceConfig"]:
        yield f"{_SANDBOX_PREFIX} InstanceGroups are not supported"
    for channel in request.get("InputDataConfig", ()):
        name = channel["ChannelName"]
        source = channel["DataSource"].get("S3DataSource")
        if "FileSystemDataSource" in channel["DataSource"]:
            continue
        if source is None:
            yield f"{_SANDBOX_PREFIX} channel {name}: only S3DataSource and FileSystemDataSource are supported"
        elif source["S3DataType"] != "S3Prefix":
            yield f"{_SANDBOX_PREFIX} channel {name}: S3DataType {source['S3DataType']} is not supported, only S3Prefix"
        elif channel.get("InputMode", algorithm.get("TrainingInputMode")) == "Pipe":
            yield f"{_SANDBOX_PREFIX} channel {name}: Pipe mode is not supported; use File or FastFile"
    if "ContainerEntrypoint" not in algorithm and not {
        "sagemaker_program",
        "sagemaker_submit_directory",
    } <= set(parameters):
        yield (
            f"{_SANDBOX_PREFIX} the sandbox starts no image and ignores its entry point: give ContainerEntrypoint, or "
            "the hyperparameters sagemaker_program and sagemaker_submit_directory of a framework estimator"
        )
    if (
        request.get("CheckpointConfig", {}).get("LocalPath", _CHECKPOINTS_PATH).rstrip("/")
        != _CHECKPOINTS_PATH
    ):
        yield f"{_SANDBOX_PREFIX} CheckpointConfig.LocalPath must be {_CHECKPOINTS_PATH}"
