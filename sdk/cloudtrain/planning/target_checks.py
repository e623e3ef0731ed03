"""Checks of a job that only a plan for this machine needs, or only one for SageMaker with the account's settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import date

from cloudtrain import catalog
from cloudtrain.catalog import service_limits
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.job_fields import NOTIFY_TAG
from cloudtrain.job.sections.cluster import Choice
from cloudtrain.job.spec import JobSpec
from cloudtrain.job.static_analysis.conventions import ScriptConventions
from cloudtrain.planning.diagnostics import SETTING, decision, error, warning
from cloudtrain.planning.environment_checks import check_profiles
from cloudtrain.planning.placement import TORCH_DISTRIBUTED, Machine
from cloudtrain.planning.storage_layout import ResumeSource, synced_resume_folder
from cloudtrain.planning.tracking import check_cluster_tracking, check_local_tracking
from cloudtrain.settings.settings import Settings
from cloudtrain.settings.values import find_mismatch, find_unpaired
from cloudtrain.support.aws_names import parse_arn
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.units import format_duration, format_size
from cloudtrain_runtime.contract import STOP_GRACE_SECONDS

_MOST_NAMED = 3
_OLD_PRICE_DAYS = 180
_DEFAULT_RUNTIME_QUOTA_SECONDS = 5 * 86400
_DEFAULT_INSTANCES_QUOTA = 20
"""Default values of AWS's quotas "Longest run time for a training job" and "Maximum number of instances per training job".

Source: Service Quotas, as in `preflight.quota`. An account's own may be lower or higher.
"""
_RESERVED_STOP_SECONDS = 30
"""Part of the grace period that is not for the upload: the current step, the copy to the host, the manifest, exit."""


def check_local(
    spec: JobSpec,
    conventions: ScriptConventions,
    machine: Machine,
    *,
    installs: bool,
    cuda_on_cpu: bool,
) -> Iterator[Diagnostic]:
    """Check that a job can run on this machine, and describe what differs from SageMaker.

    Args:
        spec: The job.
        conventions: How its script expects to be started.
        machine: This machine.
        installs: Whether the run uses an environment with its requirements.
        cuda_on_cpu: Whether it uses a stand-in for CUDA.
    """
    if spec.cluster.distribution not in ("auto", TORCH_DISTRIBUTED):
        yield warning(
            f"{spec.cluster.distribution} uses AWS's mpirun and SMDDP on SageMaker; a local run uses torchrun, and "
            "Gloo or NCCL"
        )
    yield from check_folder_data(spec, "local runs", "a local run", "use a folder here")
    if (spec.checkpoint.uri or "").startswith("s3://") and spec.code.task is None:
        message = "a script's checkpoints stay on this machine in a local run"
        yield error(("checkpoint", "uri"), message, "leave it out: --set checkpoint.uri=null")
    yield from _describe_ml_root(conventions, machine)
    yield from _warn_of_own_data(spec, machine)
    if spec.cluster.queue is not None:
        yield warning("cluster.queue is ignored: a local run has no queue")
    if spec.output.uri is not None:
        yield warning("output.uri is ignored: the model of a local run is in the run's folder")
    for name, reference in spec.code.secrets.items():
        if name in machine.variables:
            yield decision(
                f"{name} is set on this machine: its value is used, and the secret {reference.secret} is not read"
            )
    yield from check_local_tracking(spec, machine, installs=installs)
    yield from _describe_requirements(spec, installs=installs)
    if cuda_on_cpu:
        yield warning(
            "--cuda-on-cpu: the CUDA devices of this run are the CPU, and NCCL is Gloo. It shows whether the code runs "
            "and trains, and not its speed, memory or numerics on a GPU"
        )


def check_folder_data(spec: JobSpec, runs: str, run: str, instead: str) -> Iterator[Diagnostic]:
    """Reject channels that cannot be a folder.

    Args:
        spec: The job.
        runs: The runs as part of a message, such as `local runs`.
        run: One of them.
        instead: What to do instead of mounting a file system.
    """
    for name, channel in spec.data.items():
        # `check_abilities` rejects it for a Task.
        if channel.mode == "Pipe" and spec.train is None:
            yield error(
                ("data", name, "mode"),
                f"{runs} do not support Pipe mode",
                "use File or FastFile",
            )
        if channel.file_system is not None:
            message = f"{run} cannot mount a file system"
            yield error(
                ("data", name, channel.file_system),
                message,
                f"{instead}: --set data.{name}=FOLDER",
            )


def _describe_requirements(spec: JobSpec, *, installs: bool) -> Iterator[Diagnostic]:
    """Describe where a local run finds its requirements, and warn about an installation of nothing."""
    requirements = spec.code.requirements
    if installs and requirements is None:
        yield warning("--install installs nothing: the job has no code.requirements")
    elif installs:
        yield decision(
            f"{requirements} is installed in an environment of its own, beside this one's packages"
        )
    elif requirements is not None:
        yield decision(
            f"{requirements} is not installed: the run uses this environment (or submit with --install)"
        )


def _describe_ml_root(conventions: ScriptConventions, machine: Machine) -> Iterator[Diagnostic]:
    """Describe how `/opt/ml` is provided, and warn about paths in the code that will not exist."""
    if machine.has_ml_namespace:
        yield decision(
            "/opt/ml is the run's own folder everywhere: each instance has a mount namespace"
        )
        return
    yield decision(
        "/opt/ml is the run's own folder in code.args and code.env only: there is no mount namespace here"
    )
    if conventions.ml_paths:
        named = name_paths(conventions.ml_paths)
        yield warning(
            f"{named}: /opt/ml in the code is this machine's own in a local run, because the machine allows no "
            "mount namespace. Read SM_MODEL_DIR, SM_OUTPUT_DATA_DIR and SM_CHANNEL_<NAME>, which are right everywhere"
        )


def name_paths(paths: Sequence[str]) -> str:
    """Return the first paths, and how many more there are."""
    named = ", ".join(paths[:_MOST_NAMED])
    others = len(paths) - _MOST_NAMED
    return f"{named} and {others} more" if others > 0 else named


def _warn_of_own_data(spec: JobSpec, machine: Machine) -> Iterator[Diagnostic]:
    """Warn where a job could change the user's data, which is a copy on an instance."""
    own = [name for name, channel in spec.data.items() if channel.local_path is not None]
    if machine.has_ml_namespace or not own:
        return
    names = ", ".join(f"data.{name}" for name in own)
    yield warning(
        f"{names}: the job reads your own files, because the machine allows no mount namespace. What it deletes or "
        "rewrites there, it deletes and rewrites in your folder; on an instance it would be a copy"
    )


def check_sagemaker(
    spec: JobSpec, settings: Settings, resumed: ResumeSource | None
) -> Iterator[Diagnostic]:
    """Check that a job can run on SageMaker with these settings."""
    yield from _warn_about_cluster(spec)
    yield from _check_settings(settings)
    yield from _check_checkpoints(spec, resumed)
    yield from _warn_about_last_checkpoint(spec)
    yield from _check_queue(spec)
    yield from check_cluster_tracking(spec)
    yield from _check_training_plans(spec)
    yield from _check_regions(spec, settings)
    yield from _check_network(spec, settings)
    yield from check_profiles(spec)
    yield from _describe_quotas(spec)
    if spec.notify is not None:
        yield decision(
            f"notify: the run has the tag {NOTIFY_TAG}; the EventBridge rule of infra/ sends its end to "
            f"{spec.notify.sns} where notify_topics names that topic"
        )


def _check_training_plans(spec: JobSpec) -> Iterator[Diagnostic]:
    """Reject a training plan for a type that none can reserve. Unknown types are reported elsewhere."""
    reservable = service_limits.reservable_types()
    for at, choice in _training_plans(spec):
        name = choice.instance_type
        if name in service_limits.instance_types() and name not in reservable:
            version = service_limits.model_version()
            yield error(
                at,
                f"no training plan can reserve {name} (model of botocore {version})",
                f"remove it, or use one of {', '.join(sorted(reservable))}",
            )


def _training_plans(spec: JobSpec) -> Iterator[tuple[FieldPath, Choice]]:
    """Yield each choice that has a training plan, with the place of its ARN."""
    for index, choice in enumerate(spec.cluster.choices):
        at: FieldPath = ("prefer", index) if spec.cluster.prefer else ()
        if choice.training_plan is not None:
            yield ("cluster", *at, "training_plan"), choice


def _check_regions(spec: JobSpec, settings: Settings) -> Iterator[Diagnostic]:
    """Reject ARNs of another region where AWS uses only those of the job's own.

    Secrets and MLflow servers are not among them: the run asks each in the region of its ARN.
    """
    queue = spec.cluster.queue
    image = spec.cluster.image
    found: list[tuple[FieldPath, str, str | None]] = [
        (at, "training plan", choice.training_plan) for at, choice in _training_plans(spec)
    ]
    if queue is not None:
        found.append((("cluster", "queue", "name"), "queue", queue.name))
    if image is not None and image.private_registry is not None:
        # SageMaker invokes it by Lambda's endpoint of the job's region, which has no functions of other regions.
        field = ("cluster", "image", "private_registry", "credentials")
        found.append((field, "function", image.private_registry.credentials))
    if spec.notify is not None:
        # Source: Amazon EventBridge user guide, "Sending and receiving events between AWS Regions", 2026-11: a rule's
        # only target in another region is an event bus. The rule is in the region of the job, whose event it matches.
        found.append((("notify", "sns"), "topic", spec.notify.sns))
    for at, what, text in found:
        arn = parse_arn(text or "")
        if arn is not None and settings.region is not None and arn.region != settings.region:
            message = f"the {what} is in {arn.region}, but the job is in {settings.region}"
            yield error(at, message, f"use a {what} of {settings.region}")


def _describe_quotas(spec: JobSpec) -> Iterator[Diagnostic]:
    """Note a job that needs more than AWS's default quotas. An account can raise them, so it is no error."""
    most = max(choice.instances for choice in spec.cluster.choices)
    over = []
    if spec.limits.runtime > _DEFAULT_RUNTIME_QUOTA_SECONDS:
        longest = format_duration(_DEFAULT_RUNTIME_QUOTA_SECONDS)
        over.append(f"limits.runtime is {format_duration(spec.limits.runtime)} (default {longest})")
    if most > _DEFAULT_INSTANCES_QUOTA:
        over.append(f"{most} instances (default {_DEFAULT_INSTANCES_QUOTA})")
    if over:
        yield decision(
            f"quotas: more than AWS's default for a training job: {' and '.join(over)}; cloudtrain check reads the account's"
        )


def _check_network(spec: JobSpec, settings: Settings) -> Iterator[Diagnostic]:
    """Check that a job has the subnets through which SageMaker reaches its file systems and its registry."""
    image = spec.cluster.image
    network = spec.cluster.network
    if spec.cluster.remote_debug and network.isolation:
        yield warning(
            "cluster.remote_debug: an isolated container cannot reach AWS Systems Manager"
        )
    has_subnets = network.subnets or settings.subnets
    has_groups = network.security_groups or settings.security_groups
    if has_subnets and has_groups:
        return
    found: list[tuple[FieldPath, str]] = [
        (
            ("data", name, channel.file_system),
            "a file system is mounted through the job's subnets, and it has none",
        )
        for name, channel in spec.data.items()
        if channel.file_system is not None
    ]
    if image is not None and image.private_registry is not None:
        message = "SageMaker pulls this image through the job's subnets, and it has none"
        found.append((("cluster", "image", "private_registry"), message))
    hint = "give cluster.network {subnets, security_groups}, or CLOUDTRAIN_SUBNETS and CLOUDTRAIN_SECURITY_GROUPS"
    for path, message in found:
        if settings.missing:
            # The settings are incomplete, so they may get subnets, too, before the submit.
            yield warning(f"{'.'.join(map(str, path))}: {message}")
        else:
            yield error(path, message, hint)


def _warn_about_cluster(spec: JobSpec) -> Iterator[Diagnostic]:
    cluster = spec.cluster
    if cluster.distribution not in ("auto", TORCH_DISTRIBUTED):
        retries = " (limits.retries)" if spec.limits.retries else ""
        yield warning(
            f"{cluster.distribution}: AWS's toolkit starts the ranks. It does not forward SIGTERM, so a stop, a spot "
            "interruption and the end of limits.runtime lose the work since the last checkpoint; it does not restart "
            f"ranks{retries}; and it does not detect hangs"
        )
    instances = [catalog.find_instance(name) for name in cluster.types]
    # A type that is newer than the catalog may have GPUs.
    may_wait = any(instance is None or instance.is_accelerated for instance in instances)
    if cluster.max_pending is not None and not may_wait:
        # Source: botocore 1.44.5's model of StoppingCondition, MaxPendingTimeInSeconds.
        yield warning(
            f"cluster.max_pending is ignored for {' and '.join(cluster.types)}: AWS applies it only to types with GPUs "
            "or other accelerators"
        )
    for name, count, _ in cluster.choices:
        instance = catalog.find_instance(name)
        if instance is None:
            continue
        if count > 1 and instance.gpus and instance.efa is False:
            yield warning(f"{name} has no EFA: its {count} instances exchange gradients by TCP")
        if instance.nvme_gb and "volume" in cluster.model_fields_set:
            yield warning(
                f"{name} has {instance.nvme_gb} GB of local NVMe: AWS attaches no other volume"
            )


def _check_settings(settings: Settings) -> Iterator[Diagnostic]:
    """Check the form of the account's settings. `check_limits` checks the limits of AWS's model."""
    if settings.missing:
        names = ", ".join(settings.missing)
        yield warning(
            f"no {names} in the settings: the request has placeholders, and submit would reject it"
        )
    if settings.untrusted:
        names = " and ".join(each.name for each in settings.untrusted)
        yield warning(
            f"{names}: from {settings.untrusted[0].file}; submit asks for confirmation before it uses this (or --trust)"
        )
    region = settings.region if settings.region in service_limits.regions() else None
    if settings.region is not None and service_limits.is_newer_region(settings.region):
        yield warning(f"the installed botocore does not know the region {settings.region}")
    for name in ("bucket", "region", "role", "kms_key"):
        value = getattr(settings, name)
        if value is not None and (wrong := find_mismatch(name, value, region)):
            yield error((SETTING, name), *wrong)
    if unpaired := find_unpaired(settings.subnets, settings.security_groups):
        name, *message_and_hint = unpaired
        yield error((SETTING, name), *message_and_hint)


def _check_checkpoints(spec: JobSpec, resumed: ResumeSource | None) -> Iterator[Diagnostic]:
    uri = spec.checkpoint.uri
    folder = synced_resume_folder(spec, resumed)
    if uri is not None and not uri.startswith("s3://"):
        yield error(
            ("checkpoint", "uri"),
            "a cluster saves checkpoints to S3",
            "use s3://bucket/prefix, or leave it out",
        )
    if folder is not None and uri is not None and uri.rstrip("/") != folder.rstrip("/"):
        yield warning(
            f"a script or isolated job has one folder: it resumes and saves in {folder}, not in {uri}"
        )
    if spec.checkpoint.resume.startswith(("/", "file:")):
        yield error(
            ("checkpoint", "resume"),
            "a cluster cannot read a path on this machine",
            "copy it to S3 first",
        )


def _warn_about_last_checkpoint(spec: JobSpec) -> Iterator[Diagnostic]:
    """Warn when the last checkpoint cannot be uploaded to S3 in the grace period after a stop request."""
    size = spec.checkpoint.size
    if size is None:
        return
    # With preferences, the fewest instances and the slowest type, because any of them may be taken.
    hosts = min(choice.instances for choice in spec.cluster.choices)
    rate = min(catalog.s3_upload_bytes_per_second(name) for name in spec.cluster.types)
    usable_seconds = STOP_GRACE_SECONDS - _RESERVED_STOP_SECONDS
    seconds = size * 10**9 / (hosts * rate)
    if seconds <= usable_seconds:
        return
    enough = math.ceil(size * 10**9 / (usable_seconds * rate))
    plural = "" if hosts == 1 else "s"
    yield warning(
        f"checkpoint.size: {size} GB take about {format_duration(seconds)} to upload from {hosts} "
        f"instance{plural} at {format_size(rate)}/s each, but a stop leaves {usable_seconds} s "
        f"of its {STOP_GRACE_SECONDS} s for the upload: the last checkpoint would be lost, and the work since the one "
        f"before. Use {enough} instances, which share the upload; a shorter checkpoint.every (now "
        f"{spec.checkpoint.every}), to lose less; or a smaller checkpoint"
    )


def _check_queue(spec: JobSpec) -> Iterator[Diagnostic]:
    queue = spec.cluster.queue
    if queue is None:
        return
    if queue.priority is not None and queue.share is None and queue.quota_share is None:
        yield warning(
            "cluster.queue.priority is ignored without a share: such a queue is first in, first out"
        )
    if spec.cluster.max_pending is not None:
        # Source: AWS Batch user guide, service job retry strategies, 2026-11: these retries are not counted.
        yield warning(
            "cluster.max_pending ends one attempt only: AWS Batch retries while there is no capacity"
        )
    if spec.notify is not None:
        yield warning(
            "notify: AWS Batch does not document whether the training job gets the tag that the rule matches"
        )
    if spec.cluster.prefer:
        # By the reference of DescribeServiceJob, capacityUsage is the payload's InstanceCount, which preferences lack.
        yield warning(
            "cluster.prefer: AWS Batch does not document how it counts preferred instance types"
        )


def warn_about_price(
    settings: Settings, region: str, as_of: str | None, today: date
) -> Iterator[Diagnostic]:
    """Warn about an old price, and about a price of a default region."""
    if settings.region is None:
        yield warning(f"no region in the settings: image and price are for {region}")
    if as_of is not None and (today - date.fromisoformat(as_of)).days > _OLD_PRICE_DAYS:
        yield warning(f"the price is from {as_of}; to update it: cloudtrain prices --refresh")
