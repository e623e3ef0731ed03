"""Checks of a plan for what AWS or the container would reject later, and warnings about likely surprises."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import PurePosixPath
from typing import Any

from cloudtrain import catalog
from cloudtrain.catalog import service_limits
from cloudtrain.catalog.service_limits import Violation
from cloudtrain.errors import nearest
from cloudtrain.job.arguments import script_argv
from cloudtrain.job.document import dotted
from cloudtrain.job.fields import BUCKET_PATTERN
from cloudtrain.job.script_conventions import Conventions
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import Diagnostics
from cloudtrain.planning.placement import TORCH_DISTRIBUTED
from cloudtrain.planning.request import SETTING, source_of
from cloudtrain.planning.storage_layout import ResumeSource
from cloudtrain.settings.settings import Settings
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.units import format_duration, format_size
from cloudtrain_runtime.contract import OUTPUTS_FOLDER, STOP_GRACE_SECONDS
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.contract.strict_json import dump_json

_LARGE_CODE_BYTES = 100 * 10**6
_OLD_PRICE_DAYS = 180
_RESERVED_STOP_SECONDS = 30
"""Part of the grace period that is not for the upload: the current step, the copy to the host, the manifest, exit."""

_BUCKET = re.compile(BUCKET_PATTERN)
_QUEUE_ARN = re.compile(r"arn:[a-z-]+:batch:([a-z0-9-]+):\d{12}:job-queue/.+")
_PASSWORDS = r"(?:password|passwd|passphrase|(?:^|_)pwd|(?:^|_|ssh)pass)(?:$|_)"
_PASSWORD = re.compile(rf"(?i){_PASSWORDS}")
_SECRET_VARIABLE = re.compile(
    rf"(?i)(?:^|_)(?:secret|token|api_?key|access_key|private_key|credentials?)(?:$|_)|token$|apikey$|{_PASSWORDS}"
)
# Such names are often harmless, so the value must look random, too.
_MAYBE_SECRET = re.compile(r"(?i)(?:key|auth)$")
_SECRET_PART = re.compile(r"(?i)(?:account_?key|access_?key|password|pwd)=[^;&\s]{6,}")
"""Part of a connection string."""
_HEX = re.compile(r"[0-9a-fA-F]{32,}")
_BASE64 = re.compile(r"(?=.*\d.*\d)(?=.*[A-Z].*[A-Z])(?=.*[a-z].*[a-z])[\w+/=-]{20,}")
_AWS_SECRET = re.compile(r"(?=.*\d)(?=.*[A-Z])(?=.*[a-z])[A-Za-z0-9+/]{40}")
# `token` alone is not included: it is most often an argument of a tokenizer.
_SECRET_ARGUMENT = re.compile(
    r"(?i)(?:^|[-_])(?:secret|password|passwd|passphrase|(?:auth|access|api|bearer|hf|session)[-_]?token|api[-_]?key"
    r"|access[-_]key|private[-_]key)$"
)
_NUMBER = re.compile(r"(?i)[\d.,:e+-]*")
_HARMLESS = re.compile(r"(?i)true|false|yes|no|on|off|none|null|auto|[./~][^\n]*|[^\n]{0,5}")
"""Values that are never secrets, besides numbers: switches, paths and very short texts."""


def check_settings(settings: Settings, diagnostics: Diagnostics) -> None:
    """Check the form of the account's settings. `check_limits` checks the limits of AWS's model."""
    if settings.missing:
        names = ", ".join(settings.missing)
        diagnostics.add_warning(f"no {names} in the settings: the request has placeholders, and submit would reject it")
    if settings.untrusted:
        names = " and ".join(each.name for each in settings.untrusted)
        diagnostics.add_warning(
            f"{names}: from {settings.untrusted[0].file}; submit asks for confirmation before it uses this (or --trust)"
        )
    if settings.bucket is not None and not _BUCKET.fullmatch(settings.bucket):
        message = (
            f'expected a bucket name of 3 to 63 lowercase letters, digits, dots or hyphens, got "{settings.bucket}"'
        )
        diagnostics.add_setting_error("bucket", message, "give the name alone, without s3://")
    if bool(settings.subnets) != bool(settings.security_groups):
        given, missing = ("subnets", "security_groups") if settings.subnets else ("security_groups", "subnets")
        diagnostics.add_setting_error(given, "subnets and security_groups go together", f"give {missing}, too")
    if settings.region is not None and settings.region not in service_limits.regions():
        _check_unknown_region(settings.region, diagnostics)
    elif settings.region is not None:
        _check_arns(settings, settings.region, diagnostics)


def _check_arns(settings: Settings, region: str, diagnostics: Diagnostics) -> None:
    """Check that role and key belong to the region of the job."""
    partition = service_limits.partition_of(region)
    role = (settings.role or "").split(":")
    if len(role) > 1 and role[0] == "arn" and role[1] != partition:
        diagnostics.add_setting_error(
            "role", f"a role of {role[1]} does not work in {region}", f"its ARN begins with arn:{partition}:"
        )
    key = (settings.kms_key or "").split(":")
    if len(key) > 3 and key[0] == "arn" and key[3] != region:  # noqa: PLR2004 (arn:partition:kms:region:...)
        diagnostics.add_setting_error(
            "kms_key", f"the key is in {key[3]}, but the job is in {region}", f"use a key of {region}"
        )


def _check_unknown_region(region: str, diagnostics: Diagnostics) -> None:
    """Warn about a region that may be newer than the installed AWS model; reject a misspelt one."""
    if service_limits.is_newer_region(region):
        diagnostics.add_warning(f"the installed botocore does not know the region {region}")
        return
    near = nearest(region, service_limits.regions())
    hint = f'did you mean "{near}"?' if near else "for example us-west-2"
    diagnostics.add_setting_error("region", f'there is no AWS region "{region}"', hint)


def check_abilities(spec: JobSpec, diagnostics: Diagnostics) -> None:
    """Reject options that the launcher or the shared entrypoint does not support."""
    if spec.train is not None and spec.tracking.mlflow:
        message = "MLflow is supported for scripts only; a Task is tracked by event lines and TensorBoard"
        diagnostics.add_error(("tracking", "mlflow"), message, "remove it")
    if spec.code.outputs and spec.cluster.distribution not in ("auto", TORCH_DISTRIBUTED):
        message = f"cloudtrain's launcher saves outputs, and {spec.cluster.distribution} does not use that launcher"
        diagnostics.add_error(
            ("code", "outputs"), message, f"use distribution: {TORCH_DISTRIBUTED}, or write to SM_MODEL_DIR"
        )
    if spec.cluster.network.isolation and spec.cluster.instances > 1:
        _check_isolated_hosts(spec, diagnostics)
    for name, channel in spec.data.items() if spec.train is not None else ():
        if channel.mode == "Pipe":
            message = "a Task reads a channel's files, but Pipe mode delivers one stream without file names"
            diagnostics.add_error(("data", name, "mode"), message, "use FastFile, which streams on read, or File")


def _check_isolated_hosts(spec: JobSpec, diagnostics: Diagnostics) -> None:
    """Reject checkpoints of several hosts that cannot reach S3, because each host has its own /opt/ml/checkpoints."""
    if spec.train is not None:
        message = (
            f"a Task on {spec.cluster.instances} isolated instances could not save a checkpoint: without network "
            "access its ranks write to /opt/ml/checkpoints, which is a separate disk on each host"
        )
        hint = "use isolation: false with subnets that reach only S3, or one instance"
        diagnostics.add_error(("cluster", "network", "isolation"), message, hint)
    else:
        diagnostics.add_warning(
            "isolated instances cannot save one checkpoint together by cloudtrain_runtime.checkpoint; SageMaker keeps "
            "the files that the script writes to /opt/ml/checkpoints, those of all hosts in one folder"
        )


def check_resume(spec: JobSpec, resumed: ResumeSource | None, diagnostics: Diagnostics) -> None:
    """Reject a single checkpoint in `checkpoint.resume` where only the newest of a folder can be loaded."""
    if resumed is not None and resumed.is_single_checkpoint and spec.cluster.network.isolation:
        message = "an isolated container resumes from the newest checkpoint of a folder, not from a single one"
        hint = "name the folder, or set cluster.network.isolation: false"
        diagnostics.add_error(("checkpoint", "resume"), message, hint)


def check_queue(spec: JobSpec, settings: Settings, *, is_local: bool, diagnostics: Diagnostics) -> None:
    """Check the job queue together with the settings and the rest of the job."""
    queue = spec.cluster.queue
    if queue is None:
        return
    if is_local:
        diagnostics.add_warning("cluster.queue has no effect on a local run")
        return
    arn = _QUEUE_ARN.fullmatch(queue.name)
    if arn is not None and settings.region is not None and arn[1] != settings.region:
        message = f"the queue is in {arn[1]}, but the job is in {settings.region}"
        diagnostics.add_error(("cluster", "queue", "name"), message, f"use a queue of {settings.region}")
    if queue.priority is not None and queue.share is None:
        diagnostics.add_warning(
            "cluster.queue.priority has no effect without a share: such a queue is first in, first out"
        )
    if spec.cluster.max_pending is not None:
        # Source: AWS Batch user guide, service job retry strategies, 2026-11: these retries are not counted.
        diagnostics.add_warning(
            "cluster.max_pending ends one attempt only: AWS Batch retries while there is no capacity"
        )
    if spec.cluster.prefer:
        # By the reference of DescribeServiceJob, capacityUsage is the payload's InstanceCount, which preferences lack.
        diagnostics.add_warning("cluster.prefer: AWS Batch does not document how it counts preferred instance types")


def check_limits(spec: JobSpec, request: dict[str, Any], *, is_local: bool, diagnostics: Diagnostics) -> None:
    """Reject what CreateTrainingJob would reject. A local run has the same limits, except for its `file://` uris."""
    for found in service_limits.check_request(_with_s3_uris(request) if is_local else request):
        violation = _in_job_units(found, spec)
        if request["AlgorithmSpecification"]["TrainingImage"] == "" and "TrainingImage" in violation.path:
            continue  # no image was found, which is already reported
        if violation.path[-1] == "InstanceType":
            continue  # already reported, with the nearest types
        source = source_of(violation.path, request, spec)
        if source[:1] == (SETTING,):
            diagnostics.add_setting_error(str(source[1]), violation.message, violation.hint)
        else:
            is_key = violation.is_key or violation.path[-1] in ("ChannelName", "Key")
            diagnostics.add_error(source, violation.message, violation.hint, is_key=is_key)


def check_secrets(spec: JobSpec, diagnostics: Diagnostics) -> None:
    """Reject values that look like keys or tokens, because everyone who may describe a job can read its request."""
    message = "looks like a secret, and everyone who may describe the job can read it"
    for name, value in spec.code.variables.items():
        if _is_secret(name, value):
            diagnostics.add_error(("code", "env", name), message, _reference(name))
    for name, value in spec.tags.items():
        if _is_secret(name, value):
            diagnostics.add_error(("tags", name), message, _reference(_variable(name)))
    for at, name, value in _arguments(spec):
        if _SECRET_ARGUMENT.search(name) and not _is_harmless(name, value):
            diagnostics.add_error(
                at, message, f"have the code read it from its environment: {_reference(_variable(name))}"
            )
    refused = {problem.path for problem in diagnostics.problems}
    for at, value in _texts(spec.to_document(), ()):
        if redact(value) != value and dotted(at) not in refused:
            variable = str(at[-1]) if at[:2] == ("code", "env") else "NAME"
            diagnostics.add_error(at, f"contains a value that {message}", _reference(variable))


def _is_secret(name: str, value: str) -> bool:
    """Return whether a variable or tag looks like a secret by its name and value."""
    if _SECRET_PART.search(value):
        return True
    if _SECRET_VARIABLE.search(name):
        return not _is_harmless(name, value)
    return _MAYBE_SECRET.search(name) is not None and any(form.fullmatch(value) for form in (_HEX, _BASE64))


def _is_harmless(name: str, value: str) -> bool:
    """Return whether a value is harmless, although its variable has the name of a secret."""
    if _AWS_SECRET.fullmatch(value):
        return False  # AWS's keys may begin with a slash, as paths do, but paths hardly have this form
    if _PASSWORD.search(name) is None and _NUMBER.fullmatch(value):
        return True
    return _HARMLESS.fullmatch(value) is not None


def _variable(name: str) -> str:
    """Return the name of an environment variable for a tag or argument."""
    return re.sub(r"\W", "_", name).upper()


def _reference(variable: str) -> str:
    return f"store it in AWS Secrets Manager, and write code.env.{variable}: {{secret: <its name or ARN>}}"


def _arguments(spec: JobSpec) -> Iterator[tuple[FieldPath, str, str]]:
    """Yield path, name and value of each argument of the Task or script."""
    args = spec.code.args
    if isinstance(args, dict):
        yield from ((("code", "args", name), str(name), str(value)) for name, value in args.items())
        return
    for index, (word, following) in enumerate(zip(args, [*args, "--"][1:], strict=True)):
        name, equals, value = str(word).partition("=")
        if name.startswith("-") and (equals or not str(following).startswith("-")):
            at = index if equals else index + 1
            yield ("code", "args", at), name.lstrip("-"), value if equals else str(following)


def _texts(value: Any, at: FieldPath) -> Iterator[tuple[FieldPath, str]]:
    """Yield every text of a document with its path."""
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in pairs:
            yield from _texts(part, (*at, key))


_DURATIONS = ("KeepAlivePeriodInSeconds", "MaxPendingTimeInSeconds", "MaxRuntimeInSeconds", "MaxWaitTimeInSeconds")


def _in_job_units(violation: Violation, spec: JobSpec) -> Violation:
    """Return a violation with the values of job.yaml: durations with units, and counts without cloudtrain's own."""
    if violation.bound is None or violation.got is None:
        return violation
    side = "at most" if violation.got > violation.bound else "at least"
    if violation.path[-1] in _DURATIONS:
        limit = format_duration(violation.bound)
        message = f"AWS allows {side} {limit}, got {format_duration(violation.got)}"
        return replace(violation, message=message, hint=f"use {side} {limit}")
    if violation.path in (("InputDataConfig",), ("Tags",)):
        given = len(spec.data if violation.path == ("InputDataConfig",) else spec.tags)
        most = violation.bound - (violation.got - given)
        message = f"AWS allows at most {most} besides cloudtrain's own, got {given}"
        return replace(violation, message=message, hint=f"use {most} or fewer")
    return violation


def _with_s3_uris(request: dict[str, Any]) -> dict[str, Any]:
    """Return the request of a local run with `s3://` uris, which AWS's model requires."""
    document: dict[str, Any] = json.loads(dump_json(request).replace('"file://', '"s3://here'))
    return document


def warn_about_code(spec: JobSpec, size: int, diagnostics: Diagnostics) -> None:
    """Warn about large code, and about intervals of checkpoints and evaluations that have no effect."""
    if size > _LARGE_CODE_BYTES:
        diagnostics.add_warning(
            f"the code folder has {format_size(size)}: list data in .cloudtrainignore, and make it a channel"
        )
    every, train = spec.checkpoint.every, spec.train
    if train is None:
        given = sorted(spec.checkpoint.model_fields_set & {"every", "keep"})
        if given:
            names = " and ".join(f"checkpoint.{name}" for name in given)
            have = "has" if len(given) == 1 else "have"
            diagnostics.add_warning(
                f"{names} {have} an effect only where the script saves by cloudtrain_runtime.checkpoint"
            )
        return
    if train.steps is not None and every.steps is not None and every.steps > train.steps:
        diagnostics.add_warning(
            f"the run ends after {train.steps} steps, before the first checkpoint at step {every.steps}"
        )
    if every.seconds is not None and every.seconds > spec.limits.runtime:
        diagnostics.add_warning(
            "checkpoint.every is longer than limits.runtime: only the last checkpoint would be written"
        )
    if train.steps is not None and train.evaluate and (train.evaluate.every.steps or 0) > train.steps:
        diagnostics.add_warning(f"the run ends after {train.steps} steps, before the first evaluation")


def describe_outputs(spec: JobSpec, checkpoints: str, diagnostics: Diagnostics) -> None:
    """Add where a script's outputs are kept, and warn about names that look like folders without a slash."""
    if spec.code.outputs:
        kept = f"{checkpoints.rstrip('/')}/{OUTPUTS_FOLDER}"
        diagnostics.add_decision(f"code.outputs: kept in {kept}; a run that resumes finds them in its code folder")
    for name in spec.code.outputs:
        if not name.endswith("/") and not PurePosixPath(name).suffix:
            diagnostics.add_warning(f"code.outputs: {name} is treated as a file; a folder ends with a slash: {name}/")


def find_local_rank_option(spec: JobSpec, conventions: Conventions, diagnostics: Diagnostics) -> str | None:
    """Return the option that passes each rank of a script its local rank, or None when it needs none.

    `python -m torch.distributed.launch` passed this option; torchrun does not. It is not added when the script does not
    define it, or the job passes it.
    """
    option = conventions.local_rank
    if option is None or spec.code.script is None:
        return None
    given = [word.partition("=")[0].replace("_", "-") for word in script_argv(spec.code.args)]
    if "--local-rank" in given:
        return None
    diagnostics.add_decision(
        f"{spec.code.script} defines {option}: each rank gets {option}=<its local rank>, as torch.distributed.launch "
        "passes it"
    )
    return option


def warn_about_last_checkpoint(spec: JobSpec, diagnostics: Diagnostics) -> None:
    """Warn when the last checkpoint cannot be uploaded to S3 in the grace period after a stop request."""
    size, hosts, every = spec.checkpoint.size, spec.cluster.instances, spec.checkpoint.every
    if size is None:
        return
    rate = min(catalog.s3_upload_bytes_per_second(name) for name in spec.cluster.types)
    usable_seconds = STOP_GRACE_SECONDS - _RESERVED_STOP_SECONDS
    seconds = size * 10**9 / (hosts * rate)
    if seconds <= usable_seconds:
        return
    enough = math.ceil(size * 10**9 / (usable_seconds * rate))
    diagnostics.add_warning(
        f"checkpoint.size: {size} GB take about {format_duration(seconds)} to upload from {hosts} "
        f"instance{'' if hosts == 1 else 's'} at {format_size(rate)}/s each, but a stop leaves {usable_seconds} s "
        f"of its {STOP_GRACE_SECONDS} s for the upload: the last checkpoint would be lost, and the work since the one "
        f"before. Use {enough} instances, which share the upload; a shorter checkpoint.every (now {every}), to lose "
        "less; or a smaller checkpoint"
    )


def warn_about_price(settings: Settings, region: str, as_of: str | None, today: date, diagnostics: Diagnostics) -> None:
    """Warn about an old price, and about a price of a default region."""
    if settings.region is None:
        diagnostics.add_warning(f"no region in the settings: image and price are for {region}")
    if as_of is not None and (today - date.fromisoformat(as_of)).days > _OLD_PRICE_DAYS:
        diagnostics.add_warning(f"the price is from {as_of}; to update it: cloudtrain prices --refresh")
