"""The requests of an endpoint: CreateModel, CreateEndpointConfig, CreateEndpoint and its scaling."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cloudtrain import catalog
from cloudtrain.catalog import service_limits
from cloudtrain.catalog.source import load
from cloudtrain.errors import UserError
from cloudtrain.job.job_fields import RUN_TAG
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract.strict_json import dump_json

RAY = "ray"
VLLM = "vllm"
ENGINES: Final = (RAY, VLLM)
GPU_AMI: Final = "al2-ami-sagemaker-inference-gpu-3-1"
"""AMI with a driver for the CUDA of AWS's images. Source: documentation of AWS's Deep Learning Containers, 2026."""
VARIANT: Final = "main"
SCALING: Final = "sagemaker:variant:DesiredInstanceCount"

_TAGS: Final = {
    (RAY, False): "ray:serve-ml-sagemaker-cpu-v1",
    (RAY, True): "ray:serve-ml-sagemaker-cuda-v1",
    (VLLM, True): "vllm:server-sagemaker-cuda-v2",
}
"""Tags of AWS's images. Source: image_uris of the SageMaker SDK's repository, 2026-11."""
_GPU_TYPE: Final = re.compile(r"ml\.(g|p)[0-9]")
_NAME: Final = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
_DIGITS: Final = 8
_MOST_CHARACTERS: Final = 63 - 1 - _DIGITS


@dataclass(frozen=True)
class EndpointOptions:
    """What an endpoint runs on.

    Attributes:
        name: Its name; None takes the run id.
        instance_type: Type of its instances.
        instances: Their number.
        serverless: Memory in MB and most concurrent requests of a serverless endpoint, which has no instances.
        scaling: Least and most instances, between which the endpoint scales.
        target_invocations: Invocations per minute and instance that scaling aims at.
        ami: InferenceAmiVersion; None takes the one that the image needs on a GPU.
        image: URI of the image; None takes AWS's.
        engine: `ray` for a Task, `vllm` for a language model in Hugging Face's layout.
        skip_check: Whether the account's quotas and permissions are not checked first.
    """

    name: str | None = None
    instance_type: str = "ml.m5.xlarge"
    instances: int = 1
    serverless: tuple[int, int] | None = None
    scaling: tuple[int, int] | None = None
    target_invocations: int = 100
    ami: str | None = None
    image: str | None = None
    engine: str = RAY
    skip_check: bool = False

    @property
    def has_gpu(self) -> bool:
        """Whether the instances have NVIDIA GPUs."""
        known = catalog.find_instance(self.instance_type) if self.serverless is None else None
        if known is not None:
            return bool(known.gpus)
        return self.serverless is None and _GPU_TYPE.match(self.instance_type) is not None


@dataclass(frozen=True)
class EndpointRequests:
    """The requests of an endpoint.

    Attributes:
        name: Name of the endpoint.
        model: CreateModel.
        config: CreateEndpointConfig.
        endpoint: CreateEndpoint.
        scaling: RegisterScalableTarget and PutScalingPolicy, by operation; empty without scaling.
    """

    name: str
    model: Mapping[str, Any]
    config: Mapping[str, Any]
    endpoint: Mapping[str, Any]
    scaling: Mapping[str, Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return the requests by operation."""
        first = {
            "CreateModel": self.model,
            "CreateEndpointConfig": self.config,
            "CreateEndpoint": self.endpoint,
        }
        return {**first, **self.scaling}

    def problems(self) -> list[str]:
        """Return what AWS's model refuses in them."""
        own = (
            (operation, request)
            for operation, request in self.to_json().items()
            if operation not in self.scaling
        )
        return [
            f"{'.'.join(map(str, each.path))}: {each.message}; {each.hint}"
            for operation, request in own
            for each in service_limits.check_request(request, f"{operation}Input")
        ]


def make_requests(
    run: str, uri: str, digest: str, options: EndpointOptions, settings: Settings
) -> EndpointRequests:
    """Return the requests of an endpoint for a run's model.

    Equal models and options give equal names, so that a repeated deploy finds what exists.

    Args:
        run: The run.
        uri: `s3://` uri of the package: model.tar.gz, or a folder for vLLM.
        digest: Digest of the package.
        options: Options of the endpoint.
        settings: Role, region, network and key.

    Raises:
        UserError: the options contradict each other, or the name has a form that AWS refuses.
    """
    check_options(options)
    name = options.name or run[:_MOST_CHARACTERS].rstrip("-")
    if len(name) > _MOST_CHARACTERS or not _NAME.fullmatch(name):
        hint = f"at most {_MOST_CHARACTERS} letters, digits and single hyphens"
        raise UserError(f"{name!r} cannot be the name of an endpoint", hint)
    tags = [{"Key": RUN_TAG, "Value": run}]
    model: dict[str, Any] = {
        "PrimaryContainer": {"Image": _image(options, settings), **_data(uri, options)},
        "ExecutionRoleArn": settings.role or "",
        "Tags": tags,
    }
    if settings.subnets and options.serverless is None:
        model["VpcConfig"] = {
            "Subnets": list(settings.subnets),
            "SecurityGroupIds": list(settings.security_groups),
        }
    model = {"ModelName": f"{name}-{_digest({**model, 'package': digest})}", **model}
    config: dict[str, Any] = {
        "ProductionVariants": [_variant(str(model["ModelName"]), options)],
        "Tags": tags,
    }
    # A type with NVMe encrypts its own disks, so AWS refuses a key for them.
    if (
        settings.kms_key
        and options.serverless is None
        and not catalog.has_nvme(options.instance_type)
    ):
        config["KmsKeyId"] = settings.kms_key
    config = {"EndpointConfigName": f"{name}-{_digest(config)}", **config}
    endpoint = {
        "EndpointName": name,
        "EndpointConfigName": config["EndpointConfigName"],
        "Tags": tags,
    }
    return EndpointRequests(
        name=name,
        model=model,
        config=config,
        endpoint=endpoint,
        scaling=_scaling(name, options),
    )


def check_options(options: EndpointOptions) -> None:
    """Raise a UserError if options contradict each other."""
    if options.engine not in ENGINES:
        raise UserError(f"there is no engine {options.engine!r}", f"one of {', '.join(ENGINES)}")
    if options.serverless is not None and options.scaling is not None:
        raise UserError("a serverless endpoint scales by itself", "leave out --autoscale")
    if options.serverless is not None and options.engine == VLLM:
        raise UserError(
            "vLLM needs a GPU, which serverless endpoints lack",
            "name a type: --instance-type ml.g5.xlarge",
        )
    if options.engine == VLLM and not options.has_gpu:
        raise UserError(
            f"vLLM needs a GPU, which {options.instance_type} lacks", "for example ml.g5.xlarge"
        )
    if (
        options.scaling is not None
        and not 1 <= options.scaling[0] <= options.instances <= options.scaling[1]
    ):
        least, most = options.scaling
        raise UserError(
            f"{options.instances} instances are not between {least} and {most}",
            "change --instances or --autoscale",
        )


def scaling_resource(name: str) -> dict[str, str]:
    """Return the members that name an endpoint's scaling target."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{name}/variant/{VARIANT}",
        "ScalableDimension": SCALING,
    }


def _variant(model: str, options: EndpointOptions) -> dict[str, Any]:
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        "ModelName": model,
        "InitialVariantWeight": 1.0,
    }
    if options.serverless is not None:
        memory, concurrency = options.serverless
        return {
            **variant,
            "ServerlessConfig": {"MemorySizeInMB": memory, "MaxConcurrency": concurrency},
        }
    variant |= {"InstanceType": options.instance_type, "InitialInstanceCount": options.instances}
    ami = options.ami or (GPU_AMI if options.has_gpu else None)
    return {**variant, **({"InferenceAmiVersion": ami} if ami else {})}


def _data(uri: str, options: EndpointOptions) -> dict[str, Any]:
    if options.engine == RAY:
        return {"ModelDataUrl": uri}
    # vLLM's image finds the model where SageMaker puts it. Weights are not packed: they need no unpacking.
    return {
        "ModelDataSource": {
            "S3DataSource": {"S3Uri": uri, "S3DataType": "S3Prefix", "CompressionType": "None"}
        }
    }


def _image(options: EndpointOptions, settings: Settings) -> str:
    if options.image:
        return options.image
    registries: Mapping[str, str] = load("images")["registries"]
    region = settings.region or ""
    if region not in registries:
        raise UserError(
            f"AWS has no registry of its containers in {region or 'no region'}",
            "name an image: --image URI",
        )
    tag = _TAGS[options.engine, options.has_gpu]
    return f"{registries[region]}.dkr.ecr.{region}.{service_limits.dns_suffix(region)}/{tag}"


def _scaling(name: str, options: EndpointOptions) -> dict[str, Mapping[str, Any]]:
    if options.scaling is None:
        return {}
    least, most = options.scaling
    resource = scaling_resource(name)
    metric = {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"}
    policy = {
        "TargetValue": float(options.target_invocations),
        "PredefinedMetricSpecification": metric,
    }
    return {
        "RegisterScalableTarget": {**resource, "MinCapacity": least, "MaxCapacity": most},
        "PutScalingPolicy": {
            **resource,
            "PolicyName": f"{name}-invocations",
            "PolicyType": "TargetTrackingScaling",
            "TargetTrackingScalingPolicyConfiguration": policy,
        },
    }


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump_json(content, sort_keys=True).encode()).hexdigest()[:_DIGITS]
