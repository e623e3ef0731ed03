"""What AWS or the container would refuse later: the account's settings, our own abilities, AWS's limits."""

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
_BESIDE_UPLOAD_SECONDS = 30
"""Of a notice's time kept for the step that is under way, the copy to the host, the manifest and the end."""

_BUCKET = re.compile(BUCKET_PATTERN)
_QUEUE_ARN = re.compile(r"arn:[a-z-]+:batch:([a-z0-9-]+):\d{12}:job-queue/.+")
_PASSWORDS = r"(?:password|passwd|passphrase|(?:^|_)pwd|(?:^|_|ssh)pass)(?:$|_)"
_PASSWORD = re.compile(rf"(?i){_PASSWORDS}")
_SECRET_VARIABLE = re.compile(
    rf"(?i)(?:^|_)(?:secret|token|api_?key|access_key|private_key|credentials?)(?:$|_)|token$|apikey$|{_PASSWORDS}"
)
# Most are names of something else: what is drawn at random tells.
_MAYBE_SECRET = re.compile(r"(?i)(?:key|auth)$")
_SECRET_PART = re.compile(r"(?i)(?:account_?key|access_?key|password|pwd)=[^;&\s]{6,}")
"""In the middle of a value: a connection string's."""
_HEX = re.compile(r"[0-9a-fA-F]{32,}")
_BASE64 = re.compile(r"(?=.*\d.*\d)(?=.*[A-Z].*[A-Z])(?=.*[a-z].*[a-z])[\w+/=-]{20,}")
_AWS_SECRET = re.compile(r"(?=.*\d)(?=.*[A-Z])(?=.*[a-z])[A-Za-z0-9+/]{40}")
# An argument called `token` is most often one of a tokenizer.
_SECRET_ARGUMENT = re.compile(
    r"(?i)(?:^|[-_])(?:secret|password|passwd|passphrase|(?:auth|access|api|bearer|hf|session)[-_]?token|api[-_]?key"
    r"|access[-_]key|private[-_]key)$"
)
_NUMBER = re.compile(r"(?i)[\d.,:e+-]*")
_HARMLESS = re.compile(r"(?i)true|false|yes|no|on|off|none|null|auto|[./~][^\n]*|[^\n]{0,5}")
"""Values that no secret has, besides numbers: switches, paths, a handful of characters."""


def check_settings(settings: Settings, diagnostics: Diagnostics) -> None:
    """Check the form of the account's settings; what AWS's model limits is checked in the request."""
    if settings.missing:
        names = ", ".join(settings.missing)
        diagnostics.add_warning(
            f"no {names} in the settings: placeholders stand in the request, and submit would refuse"
        )
    if settings.untrusted:
        names = " and ".join(each.name for each in settings.untrusted)
        diagnostics.add_warning(
            f"{names}: from {settings.untrusted[0].file}; submit asks before it uses this (or --trust)"
        )
    if settings.bucket is not None and not _BUCKET.fullmatch(settings.bucket):
        message = f'expected a bucket name of 3 to 63 small letters, digits, dots or hyphens, got "{settings.bucket}"'
        diagnostics.add_setting_error("bucket", message, "give the name alone, without s3://")
    if bool(settings.subnets) != bool(settings.security_groups):
        given, missing = ("subnets", "security_groups") if settings.subnets else ("security_groups", "subnets")
        diagnostics.add_setting_error(given, "subnets and security_groups go together", f"give {missing}, too")
    if settings.region is not None and settings.region not in service_limits.regions():
        _unknown_region(settings.region, diagnostics)
    elif settings.region is not None:
        _check_arns(settings, settings.region, diagnostics)


def _check_arns(settings: Settings, region: str, diagnostics: Diagnostics) -> None:
    """Check that role and key belong to the region that the job runs in."""
    partition = service_limits.partition_of(region)
    role = (settings.role or "").split(":")
    if len(role) > 1 and role[0] == "arn" and role[1] != partition:
        diagnostics.add_setting_error(
            "role", f"a role of {role[1]} does not serve {region}", f"its ARN begins with arn:{partition}:"
        )
    key = (settings.kms_key or "").split(":")
    if len(key) > 3 and key[0] == "arn" and key[3] != region:  # noqa: PLR2004 (arn:partition:kms:region:...)
        diagnostics.add_setting_error(
            "kms_key", f"the key is in {key[3]}, and the job in {region}", f"use a key of {region}"
        )


def _unknown_region(region: str, diagnostics: Diagnostics) -> None:
    """Warn of a region that may be newer than the installed AWS model, refuse one that is a typo."""
    if service_limits.is_newer_region(region):
        diagnostics.add_warning(f"the installed botocore does not know the region {region}")
        return
    near = nearest(region, service_limits.regions())
    hint = f'did you mean "{near}"?' if near else "for example us-west-2"
    diagnostics.add_setting_error("region", f'there is no AWS region "{region}"', hint)


def check_abilities(spec: JobSpec, diagnostics: Diagnostics) -> None:
    """Refuse what the shared entrypoint does not do: ignored, it would be paid for and not had."""
    if spec.train is not None and spec.tracking.mlflow:
        message = "this version tracks a Task by event lines and TensorBoard; a script may write what it likes"
        diagnostics.add_error(("tracking", "mlflow"), message, "remove it")
    if spec.code.outputs and spec.cluster.distribution not in ("auto", TORCH_DISTRIBUTED):
        message = f"cloudtrain's launcher keeps them, and {spec.cluster.distribution} starts ranks without it"
        diagnostics.add_error(
            ("code", "outputs"), message, f"use distribution: {TORCH_DISTRIBUTED}, or write to SM_MODEL_DIR"
        )
    if spec.cluster.network.isolation and spec.cluster.instances > 1:
        _refuse_isolated_hosts(spec, diagnostics)
    for name, channel in spec.data.items() if spec.train is not None else ():
        if channel.mode == "Pipe":
            message = "a Task reads a channel's files, and Pipe mode brings one stream without their names"
            diagnostics.add_error(
                ("data", name, "mode"), message, "use FastFile, which streams while it is read, or File"
            )


def _refuse_isolated_hosts(spec: JobSpec, diagnostics: Diagnostics) -> None:
    """Refuse checkpoints of several hosts that cannot reach S3: /opt/ml/checkpoints is a disk of each host's own."""
    if spec.train is not None:
        message = (
            f"a Task on {spec.cluster.instances} isolated instances could not save a checkpoint: without a network its "
            "ranks write to /opt/ml/checkpoints, which is a disk of each host's own"
        )
        hint = "use isolation: false with subnets that reach nothing but S3, or one instance"
        diagnostics.add_error(("cluster", "network", "isolation"), message, hint)
    else:
        diagnostics.add_warning(
            "isolated instances cannot save by cloudtrain_runtime.checkpoint together; files that the script writes to "
            "/opt/ml/checkpoints are kept, those of all hosts in one folder"
        )


def check_resume(spec: JobSpec, resumed: ResumeSource | None, diagnostics: Diagnostics) -> None:
    """Refuse one checkpoint where the newest is all that can be had."""
    if resumed is not None and resumed.is_one and spec.cluster.network.isolation:
        message = "an isolated container goes on from the newest checkpoint of a folder, and this names one of them"
        diagnostics.add_error(
            ("checkpoint", "resume"), message, "name the folder, or set cluster.network.isolation: false"
        )


def check_queue(spec: JobSpec, settings: Settings, *, is_local: bool, diagnostics: Diagnostics) -> None:
    """Check what a job queue says together with the settings and the rest of the job."""
    queue = spec.cluster.queue
    if queue is None:
        return
    if is_local:
        diagnostics.add_warning("cluster.queue: a local run waits in no queue")
        return
    arn = _QUEUE_ARN.fullmatch(queue.name)
    if arn is not None and settings.region is not None and arn[1] != settings.region:
        message = f"the queue is in {arn[1]}, and the job in {settings.region}"
        diagnostics.add_error(("cluster", "queue", "name"), message, f"use a queue of {settings.region}")
    if queue.priority is not None and queue.share is None:
        diagnostics.add_warning(
            "cluster.queue.priority counts only in a queue with shares: this one is first in, first out"
        )
    if spec.cluster.max_pending is not None:
        # Service job retry strategies, AWS Batch user guide, 2026-11: such retries count as none and have no end.
        diagnostics.add_warning(
            "cluster.max_pending ends one attempt only: AWS Batch tries again while there is no capacity"
        )
    if spec.cluster.prefer:
        # DescribeServiceJob says of capacityUsage that it is the payload's InstanceCount; preferences have none there.
        diagnostics.add_warning(
            "cluster.prefer: AWS does not say how AWS Batch counts instances that are a choice of types"
        )


def check_limits(spec: JobSpec, request: dict[str, Any], *, is_local: bool, diagnostics: Diagnostics) -> None:
    """Refuse what CreateTrainingJob would; a local run keeps the same limits, but for where things lie."""
    for found in service_limits.check_request(_as_if_in_s3(request) if is_local else request):
        violation = _in_the_jobs_words(found, spec)
        if request["AlgorithmSpecification"]["TrainingImage"] == "" and "TrainingImage" in violation.path:
            continue  # no container was found, which is told already
        if violation.path[-1] == "InstanceType":
            continue  # told with the nearest types
        source = source_of(violation.path, request, spec)
        if source[:1] == (SETTING,):
            diagnostics.add_setting_error(str(source[1]), violation.message, violation.hint)
        else:
            is_key = violation.is_key or violation.path[-1] in ("ChannelName", "Key")
            diagnostics.add_error(source, violation.message, violation.hint, is_key=is_key)


def check_secrets(spec: JobSpec, diagnostics: Diagnostics) -> None:
    """Refuse values that look like keys or tokens: whoever may describe a job reads its document."""
    told = "looks like a secret, and whoever may describe the job can read it"
    for name, value in spec.code.variables.items():
        if _is_secret(name, value):
            diagnostics.add_error(("code", "env", name), told, _reference(name))
    for name, value in spec.tags.items():
        if _is_secret(name, value):
            diagnostics.add_error(("tags", name), told, _reference(_variable(name)))
    for at, name, value in _arguments(spec):
        if _SECRET_ARGUMENT.search(name) and not _is_harmless(name, value):
            diagnostics.add_error(
                at, told, f"have the code read it from its environment: {_reference(_variable(name))}"
            )
    refused = {problem.path for problem in diagnostics.problems}
    for at, value in _texts(spec.to_document(), ()):
        if redact(value) != value and dotted(at) not in refused:
            variable = str(at[-1]) if at[:2] == ("code", "env") else "NAME"
            diagnostics.add_error(at, f"holds what {told}", _reference(variable))


def _is_secret(name: str, value: str) -> bool:
    """Tell whether a variable or a tag is one that should not be shown, by its name, or by its name and value."""
    if _SECRET_PART.search(value):
        return True
    if _SECRET_VARIABLE.search(name):
        return not _is_harmless(name, value)
    return _MAYBE_SECRET.search(name) is not None and any(form.fullmatch(value) for form in (_HEX, _BASE64))


def _is_harmless(name: str, value: str) -> bool:
    """Tell whether no secret of this name looks so."""
    if _AWS_SECRET.fullmatch(value):
        return False  # a path may begin as one of 64 of AWS's keys do, but hardly has their length and letters
    if _PASSWORD.search(name) is None and _NUMBER.fullmatch(value):
        return True
    return _HARMLESS.fullmatch(value) is not None


def _variable(name: str) -> str:
    """Return the variable that would hold what has another name elsewhere."""
    return re.sub(r"\W", "_", name).upper()


def _reference(variable: str) -> str:
    return f"keep it in AWS Secrets Manager, and write code.env.{variable}: {{secret: <its name or ARN>}}"


def _arguments(spec: JobSpec) -> Iterator[tuple[FieldPath, str, str]]:
    """Yield place, name and value of the arguments of the Task or the script."""
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
    """Yield every text of a document with its place."""
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in pairs:
            yield from _texts(part, (*at, key))


_DURATIONS = ("KeepAlivePeriodInSeconds", "MaxPendingTimeInSeconds", "MaxRuntimeInSeconds", "MaxWaitTimeInSeconds")


def _in_the_jobs_words(violation: Violation, spec: JobSpec) -> Violation:
    """Return a violation with the numbers that the user wrote: durations as such, without what cloudtrain adds."""
    if violation.bound is None or violation.got is None:
        return violation
    side = "at most" if violation.got > violation.bound else "at least"
    if violation.path[-1] in _DURATIONS:
        limit = format_duration(violation.bound)
        message = f"AWS takes {side} {limit}, got {format_duration(violation.got)}"
        return replace(violation, message=message, hint=f"use {side} {limit}")
    if violation.path in (("InputDataConfig",), ("Tags",)):
        written = len(spec.data if violation.path == ("InputDataConfig",) else spec.tags)
        most = violation.bound - (violation.got - written)
        message = f"AWS takes at most {most} besides cloudtrain's own, got {written}"
        return replace(violation, message=message, hint=f"use {most} or fewer")
    return violation


def _as_if_in_s3(request: dict[str, Any]) -> dict[str, Any]:
    """Return the document of a local run with its folders as AWS's model would have them."""
    document: dict[str, Any] = json.loads(dump_json(request).replace('"file://', '"s3://here'))
    return document


def warn_about_code(spec: JobSpec, size: int, diagnostics: Diagnostics) -> None:
    """Note what of the code and the schedule would surprise."""
    if size > _LARGE_CODE_BYTES:
        diagnostics.add_warning(
            f"the code folder has {format_size(size)}: name data in .cloudtrainignore, and make it a channel"
        )
    every, train = spec.checkpoint.every, spec.train
    if train is None:
        given = sorted(spec.checkpoint.model_fields_set & {"every", "keep"})
        if given:
            names = " and ".join(f"checkpoint.{name}" for name in given)
            counts = "this counts" if len(given) == 1 else "these count"
            diagnostics.add_warning(
                f"{names}: {counts} where the script saves by cloudtrain_runtime.checkpoint, and nowhere else"
            )
        return
    if train.steps is not None and every.steps is not None and every.steps > train.steps:
        diagnostics.add_warning(
            f"the run ends after {train.steps} steps, before the first checkpoint at step {every.steps}"
        )
    if every.seconds is not None and every.seconds > spec.limits.runtime:
        diagnostics.add_warning("checkpoint.every is longer than limits.runtime: only the last one would be written")
    if train.steps is not None and train.evaluate and (train.evaluate.every.steps or 0) > train.steps:
        diagnostics.add_warning(f"the run ends after {train.steps} steps, before the first evaluation")


def describe_outputs(spec: JobSpec, checkpoints: str, diagnostics: Diagnostics) -> None:
    """Note where the outputs of a script are kept, and which of them may be a folder that is written as a file."""
    if spec.code.outputs:
        kept = f"{checkpoints.rstrip('/')}/{OUTPUTS_FOLDER}"
        diagnostics.add_decision(f"code.outputs: kept in {kept}; a run that resumes finds them in its code folder")
    for name in spec.code.outputs:
        if not name.endswith("/") and not PurePosixPath(name).suffix:
            diagnostics.add_warning(f"code.outputs: {name} is taken for a file; a folder ends with a slash: {name}/")


def find_local_rank_option(spec: JobSpec, conventions: Conventions, diagnostics: Diagnostics) -> str | None:
    """Return the option by which each rank of a script gets its local rank, or None.

    `python -m torch.distributed.launch` has passed it, torchrun does not. Where the job passes it itself, or the script
    does not ask for it, nothing is added.
    """
    option = conventions.local_rank
    if option is None or spec.code.script is None:
        return None
    given = [word.partition("=")[0].replace("_", "-") for word in script_argv(spec.code.args)]
    if "--local-rank" in given:
        return None
    diagnostics.add_decision(
        f"{spec.code.script} defines {option}: each rank gets {option}=<its local rank>, as torch.distributed.launch "
        "passed it"
    )
    return option


def warn_about_last_checkpoint(spec: JobSpec, diagnostics: Diagnostics) -> None:
    """Note that the last checkpoint will not be in S3 before a notice to stop is over."""
    size, hosts, every = spec.checkpoint.size, spec.cluster.instances, spec.checkpoint.every
    if size is None:
        return
    rate = min(catalog.s3_upload_bytes_per_second(name) for name in spec.cluster.types)
    usable = STOP_GRACE_SECONDS - _BESIDE_UPLOAD_SECONDS
    seconds = size * 10**9 / (hosts * rate)
    if seconds <= usable:
        return
    enough = math.ceil(size * 10**9 / (usable * rate))
    diagnostics.add_warning(
        f"checkpoint.size: {size} GB take about {format_duration(seconds)} to upload from {hosts} "
        f"instance{'' if hosts == 1 else 's'} at {format_size(rate)}/s each, and a notice to stop leaves {usable} s of "
        f"its {STOP_GRACE_SECONDS} s for it: the last checkpoint would be lost, and the work since the one before. "
        f"What helps: {enough} instances, which share the upload; a shorter checkpoint.every, which loses less "
        f"(now {every}); a smaller checkpoint"
    )


def warn_about_price(settings: Settings, region: str, as_of: str | None, today: date, diagnostics: Diagnostics) -> None:
    """Note a price that is old, or of a region that nobody asked for."""
    if settings.region is None:
        diagnostics.add_warning(f"no region in the settings: image and price are those of {region}")
    if as_of is not None and (today - date.fromisoformat(as_of)).days > _OLD_PRICE_DAYS:
        diagnostics.add_warning(f"the price is of {as_of}: cloudtrain prices --refresh")
