"""The `cluster` section of job.yaml: instances, container image, capacity and network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from cloudtrain.job.diagnostics import Diagnostic, field_error
from cloudtrain.job.fields import Duration, GigaBytes, Integer, Section, Text, parse_switch, short_for
from cloudtrain.support.aws_names import arn_pattern

_INSTANCE_TYPE = re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9]+")
# Source: API reference of CreateJobQueue and ShareAttributes, 2026-11. botocore's model accepts any text here.
_QUEUE = re.compile(rf"(?:{arn_pattern('batch', 'job-queue/')})?[A-Za-z0-9][A-Za-z0-9_-]{{0,127}}")
_SHARE = re.compile(r"[A-Za-z0-9]{1,255}")
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


def _check_instance_type(value: object) -> object:
    if isinstance(value, str) and not _INSTANCE_TYPE.fullmatch(value):
        lacks_prefix = re.fullmatch(r"[a-z0-9-]+\.[a-z0-9]+", value)
        hint = f'did you mean "ml.{value}"?' if lacks_prefix else "for example ml.p4d.24xlarge"
        raise field_error(f'expected a SageMaker instance type such as ml.p4d.24xlarge, got "{value}"', hint=hint)
    return value


InstanceType = Annotated[str, BeforeValidator(_check_instance_type)]
Distribution = Literal["auto", "torch_distributed", "pytorchddp", "smdistributed"]


class Network(Section):
    """The instances' network. Empty subnets and security groups are taken from the settings."""

    subnets: tuple[str, ...] = Field((), examples=[["subnet-0123456789abcdef0"]])
    """Subnet ids for the instances; empty takes the settings' subnets."""
    security_groups: tuple[str, ...] = Field((), examples=[["sg-0123456789abcdef0"]])
    """Security group ids; for EFA the group must allow all traffic to itself."""
    isolation: bool = False
    """Give the containers no network access except to each other (no S3 from the job's code)."""
    encrypt_traffic: bool = False
    """Encrypt traffic between instances; slows collectives."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        if bool(self.subnets) != bool(self.security_groups):
            missing = "security_groups" if self.subnets else "subnets"
            fields = (("subnets",), ("security_groups",))
            yield Diagnostic("subnets and security_groups go together", (), f"give {missing}, too", fields)


class Spot(Section):
    """Managed spot training."""

    max_wait: Duration | None = None
    """Longest time from submit to end, waiting included; default: twice limits.runtime."""


def _expand_spot(value: object) -> object:
    value = parse_switch(value)
    if isinstance(value, bool):
        return {} if value else None
    if isinstance(value, str | int | float):
        text = getattr(value, "text", value)
        message = f'expected true, false or a mapping with max_wait, got "{text}"'
        raise field_error(message, hint="write spot: {max_wait: 36h}")
    return value


class Queue(Section):
    """AWS Batch job queue that the job waits in; a name alone is short for {name: ...}."""

    name: str = Field(examples=["ml-training"])
    """Name or ARN of a job queue of type SAGEMAKER_TRAINING, in the job's region."""
    priority: Annotated[Integer, Field(ge=0, le=9999)] | None = Field(None, examples=[100])
    """Priority among the jobs of one share, 0 to 9999, highest first; a first-in-first-out queue has no priorities."""
    share: str | None = Field(None, examples=["research"])
    """Fair-share identifier: required by a queue with a fair-share policy, rejected by one without."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        if not _QUEUE.fullmatch(self.name):
            hint = "to list them: aws batch describe-job-queues"
            yield Diagnostic(f'expected the name or ARN of a job queue, got "{self.name}"', ("name",), hint)
        if self.share is not None and not _SHARE.fullmatch(self.share):
            message = f'expected 1 to 255 letters and digits, got "{self.share}"'
            yield Diagnostic(message, ("share",), "to list them: aws batch describe-scheduling-policies")


class Cluster(Section):
    """The instances that the job runs on."""

    instance_type: InstanceType | None = Field(None, examples=["ml.p4d.24xlarge"])
    """SageMaker instance type, such as ml.p4d.24xlarge (exactly one of instance_type and prefer)."""
    prefer: tuple[InstanceType, ...] = Field((), examples=[["ml.p4d.24xlarge", "ml.p4de.24xlarge"]])
    """Instance types in order of preference, at most 5; the first with capacity is used (not with spot)."""
    instances: Integer = Field(default=1, ge=1, examples=[2])
    """Number of instances."""
    distribution: Distribution = "auto"
    """How ranks are started and connected; auto is torch_distributed, the others need AWS's SMDDP."""
    processes_per_instance: Annotated[Integer, Field(ge=1)] | Literal["auto"] = "auto"
    """Ranks per instance; auto is one per GPU, or 2 on a machine without GPUs."""
    spot: Annotated[Spot | None, BeforeValidator(_expand_spot)] = None
    """true, false or {max_wait: 36h}: spare capacity at a discount, with interruptions."""
    framework: Text | None = Field(None, examples=["2.13"])
    """PyTorch version of the AWS container, such as "2.13"; default: the newest that supports the distribution."""
    image: str | None = Field(None, examples=["123456789012.dkr.ecr.us-west-2.amazonaws.com/train:1"])
    """Container image uri instead of framework; `@sha256:...` at its end pins the image."""
    volume: Annotated[GigaBytes, Field(ge=1)] = 30
    """Storage volume of each instance (ignored by AWS on types with local NVMe)."""
    keep_alive: Duration | None = None
    """How long to keep the cluster warm, and billed, for another job after the end, at most 6h."""
    max_pending: Duration | None = None
    """Longest wait for capacity, 30m to 28d; the job fails after it."""
    queue: Annotated[Queue | None, short_for("name")] = None
    """AWS Batch job queue to wait in: a name or ARN, or {name, priority, share}; default: no queue."""
    network: Network = Field(default_factory=Network.model_construct)
    """Subnets, security groups, isolation and traffic encryption."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        if (self.instance_type is None) == (not self.prefer):
            message = "give exactly one of instance_type and prefer"
            fields = (("instance_type",), ("prefer",))
            yield Diagnostic(message, (), "instance_type: ml.p4d.24xlarge", fields)
        if len(set(self.prefer)) < len(self.prefer):
            yield Diagnostic("a type is given twice", ("prefer",), "name each type once")
        if self.spot is not None and self.prefer:
            fields = (("prefer",), ("spot",))
            message = "SageMaker does not accept instance preferences with spot"
            yield Diagnostic(message, ("prefer",), "use instance_type", fields)
        if self.spot is not None and self.keep_alive:
            fields = (("keep_alive",), ("spot",))
            message = "SageMaker has no warm pools for spot training"
            yield Diagnostic(message, ("keep_alive",), "remove keep_alive or spot", fields)
        if self.image is not None and self.framework is not None:
            fields = (("framework",), ("image",))
            yield Diagnostic("give framework or image, not both", ("framework",), "remove one of them", fields)
        if self.image is not None and (error := _digest_error(self.image)) is not None:
            yield Diagnostic(error, ("image",), "write it as docker push prints it: repository@sha256:0123...")

    @property
    def types(self) -> tuple[str, ...]:
        """Every instance type that may be chosen, the preferred first."""
        return (self.instance_type,) if self.instance_type is not None else self.prefer


def _digest_error(image: str) -> str | None:
    _, has_digest, digest = image.partition("@")
    if not has_digest or _DIGEST.fullmatch(digest):
        return None
    algorithm, _, digits = digest.partition(":")
    if algorithm != "sha256":
        return f'the digest must begin with "sha256:", got "{digest}"'
    if re.fullmatch("[0-9a-f]*", digits):
        return f"a sha256 digest has 64 hexadecimal digits, got {len(digits)}"
    return f'a sha256 digest has 64 digits of 0-9 and a-f, got "{digits}"'
