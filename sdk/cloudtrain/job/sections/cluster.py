"""The `cluster` section of job.yaml: instances, container image, capacity and network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from cloudtrain.job.diagnostics import Diagnostic, field_error
from cloudtrain.job.fields import (
    Duration,
    GigaBytes,
    Integer,
    Section,
    Text,
    matching,
    parse_switch,
    short_for,
)
from cloudtrain.support.aws_names import arn_pattern
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_INSTANCE_TYPE = lazy_pattern(r"ml\.[a-z0-9-]+\.[a-z0-9]+")
# Source: API reference of CreateJobQueue and ShareAttributes, 2026-11. botocore's model accepts any text here.
_QUEUE = lazy_pattern(
    rf"(?:{arn_pattern('batch', 'job-queue/')})?[A-Za-z0-9][A-Za-z0-9_-]{{0,127}}"
)
_SHARE_FORM = matching(
    lazy_pattern(r"[A-Za-z0-9]{1,255}"),
    "1 to 255 letters and digits",
    "to list them: aws batch describe-scheduling-policies",
)
_LIST_QUOTA_SHARES = "to list them: aws batch list-quota-shares --job-queue QUEUE"
# Source: CreateQuotaShareRequest in botocore 1.44.5.
_QUOTA_SHARE_FORM = matching(
    lazy_pattern(r"[A-Za-z0-9_-]{1,128}"),
    "1 to 128 letters, digits, hyphens and underscores",
    _LIST_QUOTA_SHARES,
)
_IMAGE = lazy_pattern(r"[^@]*(?:@sha256:[0-9a-f]{64})?")
_PLAN_FORM = matching(
    lazy_pattern(arn_pattern("sagemaker", "training-plan/[A-Za-z0-9-]{1,64}")),
    "the ARN of a training plan",
    "to list them: aws sagemaker list-training-plans",
)
_LAMBDA_FORM = matching(
    lazy_pattern(arn_pattern("lambda", "function:.+")),
    "the ARN of a Lambda function",
    "to list them: aws lambda list-functions",
)


def _check_instance_type(value: object) -> object:
    if isinstance(value, str) and not _INSTANCE_TYPE.fullmatch(value):
        lacks_prefix = re.fullmatch(r"[a-z0-9-]+\.[a-z0-9]+", value)
        hint = f'did you mean "ml.{value}"?' if lacks_prefix else "for example ml.p4d.24xlarge"
        if _INSTANCE_TYPE.fullmatch(value.lower()):
            hint = f'did you mean "{value.lower()}"?'
        if value in ("local", "local_gpu"):
            hint = "give the type of the SageMaker run; to run on this machine: --local"
        raise field_error(
            f'expected a SageMaker instance type such as ml.p4d.24xlarge, got "{value}"', hint=hint
        )
    return value


InstanceType = Annotated[str, BeforeValidator(_check_instance_type)]
TrainingPlan = Annotated[str, _PLAN_FORM]
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
            yield Diagnostic(
                "subnets and security_groups go together", (), f"give {missing}, too", fields
            )


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
    share: Annotated[str, _SHARE_FORM] | None = Field(None, examples=["research"])
    """Fair-share identifier: required by a queue with a fair-share policy, rejected by one without."""
    quota_share: Annotated[str, _QUOTA_SHARE_FORM] | None = Field(None, examples=["vision"])
    """Quota share: required by a queue with a quota-share policy, rejected by one without."""
    preempt: Annotated[Integer, Field(ge=0)] | None = Field(None, examples=[3])
    """How often jobs of a quota share may preempt this one; the next preemption ends it; default: without limit."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        if not _QUEUE.fullmatch(self.name):
            hint = "to list them: aws batch describe-job-queues"
            message = f'expected the name or ARN of a job queue, got "{self.name}"'
            yield Diagnostic(message, ("name",), hint)
        if self.quota_share is not None and self.share is not None:
            message = "a queue has fair shares or quota shares: give share or quota_share, not both"
            yield Diagnostic(
                message, ("quota_share",), "remove one of them", (("share",), ("quota_share",))
            )
        if self.preempt is not None and self.quota_share is None:
            message = "only jobs of a quota share are preempted"
            yield Diagnostic(
                message,
                ("preempt",),
                f"give quota_share, too; {_LIST_QUOTA_SHARES}",
                (("preempt",), ("quota_share",)),
            )


class Preference(Section):
    """One instance type that may be chosen; a type alone is short for {instance_type: ...}."""

    instance_type: InstanceType = Field(examples=["ml.p4d.24xlarge"])
    """SageMaker instance type, such as ml.p4d.24xlarge."""
    instances: Annotated[Integer, Field(ge=1)] | None = Field(None, examples=[4])
    """Number of instances of this type; default: cluster.instances. All types must give the same number of ranks."""
    training_plan: TrainingPlan | None = None
    """ARN of the training plan whose reserved instances of this type are used; default: on-demand capacity."""


class PrivateRegistry(Section):
    """A Docker registry outside of ECR, which SageMaker reaches through the job's subnets."""

    credentials: Annotated[str, _LAMBDA_FORM] | None = None
    """ARN of the Lambda function that gives SageMaker the registry's user name and password; default: none needed."""


class Image(Section):
    """A container image; its uri alone is short for {uri: ...}."""

    uri: str = Field(examples=["123456789012.dkr.ecr.us-west-2.amazonaws.com/train:1"])
    """Image in ECR, in public.ecr.aws or in a private registry; `@sha256:...` at its end pins the image."""
    private_registry: PrivateRegistry | None = None
    """For an image in a registry that is neither ECR nor public.ecr.aws: {} or {credentials: ...}."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        if not _IMAGE.fullmatch(self.uri):
            message = "expected an image whose digest is sha256: and 64 digits of 0-9 and a-f"
            hint = "write it as docker push prints it: repository@sha256:0123..."
            yield Diagnostic(message, ("uri",), hint)


class Choice(NamedTuple):
    """A type that may be chosen, its number of instances, and the ARN of its training plan."""

    instance_type: str
    instances: int
    training_plan: str | None


_EXCLUSIVE = (
    (
        "prefer",
        "spot",
        "SageMaker does not accept instance preferences with spot",
        "use instance_type",
    ),
    (
        *("training_plan", "prefer", "with prefer, each type has a training plan of its own"),
        "prefer: [{instance_type: ..., training_plan: ...}]",
    ),
    (
        *(
            "training_plan",
            "spot",
            "a training plan has reserved instances, and spot uses spare ones",
        ),
        "remove training_plan or spot",
    ),
    (
        "keep_alive",
        "spot",
        "SageMaker has no warm pools for spot training",
        "remove keep_alive or spot",
    ),
    ("framework", "image", "give framework or image, not both", "remove one of them"),
)
"""Fields that exclude each other, the message about the first one, and its hint."""


def wrong_types() -> Diagnostic:
    """Return the error about both of instance_type and prefer, or, where a place needs a type, about neither."""
    message = "give exactly one of instance_type and prefer"
    fields = (("instance_type",), ("prefer",))
    return Diagnostic(message, (), "instance_type: ml.p4d.24xlarge", fields)


class Cluster(Section):
    """The instances that the job runs on."""

    instance_type: InstanceType | None = Field(None, examples=["ml.p4d.24xlarge"])
    """SageMaker instance type, such as ml.p4d.24xlarge (exactly one of instance_type and prefer; on Slurm neither is needed)."""
    prefer: tuple[Annotated[Preference, short_for("instance_type")], ...] = Field(
        (), examples=[["ml.p4d.24xlarge", "ml.p4de.24xlarge"]]
    )
    """Instance types in order of preference, at most 5; the first with capacity is used (not with spot)."""
    training_plan: TrainingPlan | None = None
    """ARN of a training plan: the job uses instances that it has reserved and paid in advance (not with spot)."""
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
    image: Annotated[Image | None, short_for("uri")] = Field(
        None, examples=["123456789012.dkr.ecr.us-west-2.amazonaws.com/train:1"]
    )
    """Container image instead of framework: its uri, or {uri, private_registry}."""
    volume: Annotated[GigaBytes, Field(ge=1)] = 30
    """Storage volume of each instance (ignored by AWS on types with local NVMe)."""
    keep_alive: Duration | None = None
    """How long to keep the cluster warm, and billed, for another job after the end, at most 6h."""
    max_pending: Duration | None = None
    """Longest wait for capacity, 30m to 28d; the job fails after it."""
    queue: Annotated[Queue | None, short_for("name")] = None
    """AWS Batch job queue to wait in: a name or ARN, or {name, priority, share, quota_share, preempt}."""
    remote_debug: bool = False
    """Allow a shell in the running containers through AWS Systems Manager (aws ssm start-session)."""
    health_check: bool = False
    """Have SageMaker check the instances' GPUs and network before the job starts on them."""
    network: Network = Field(default_factory=Network.model_construct)
    """Subnets, security groups, isolation and traffic encryption."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        if self.instance_type is not None and self.prefer:
            yield wrong_types()
        if len({each.instance_type for each in self.prefer}) < len(self.prefer):
            yield Diagnostic("a type is given twice", ("prefer",), "name each type once")
        for name, other, message, hint in _EXCLUSIVE:
            if all(getattr(self, each) not in (None, (), False) for each in (name, other)):
                yield Diagnostic(message, (name,), hint, ((name,), (other,)))

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Every instance type that may be chosen, with its count and training plan, the preferred first."""
        if self.instance_type is not None:
            return (Choice(self.instance_type, self.instances, self.training_plan),)
        return tuple(
            Choice(each.instance_type, each.instances or self.instances, each.training_plan)
            for each in self.prefer
        )

    @property
    def preferred_instances(self) -> int:
        """Number of instances of the preferred type."""
        return self.choices[0].instances if self.choices else self.instances

    @property
    def types(self) -> tuple[str, ...]:
        """Every instance type that may be chosen, the preferred first."""
        return tuple(each.instance_type for each in self.choices)
