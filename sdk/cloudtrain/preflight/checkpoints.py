"""The checkpoints' place: empty, or something that this run can go on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cloudtrain.planning.continuation import Continuation, find_continuation
from cloudtrain.planning.storage_layout import split_checkpoint
from cloudtrain.preflight.base import (
    Check,
    CheckContext,
    UnansweredError,
    command,
    error_code,
    failed,
    passed,
)
from cloudtrain.preflight.storage import list_objects
from cloudtrain.support.run_id import is_run_id
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract.manifest import (
    DAMAGED_FILE,
    MANIFEST_FILE,
    Manifest,
    step_of_folder_name,
)


@dataclass(frozen=True)
class _Held:
    """What lies in a checkpoints folder.

    Attributes:
        folders: Files and their sizes in bytes, by checkpoint (`step-00000500`).
        foreign: Keys that belong to no checkpoint, below the folder.
    """

    folders: Mapping[str, Mapping[str, int]]
    foreign: tuple[str, ...]

    @property
    def finished(self) -> list[str]:
        """Names of the checkpoints with a manifest that were not found damaged, newest step first."""
        found = [name for name, files in self.folders.items() if MANIFEST_FILE in files and DAMAGED_FILE not in files]
        return sorted(found, key=lambda name: step_of_folder_name(name) or 0, reverse=True)


def check_checkpoints(context: CheckContext) -> Iterator[Check]:
    """Check that nothing in the way of this run's checkpoints is lost, mixed up or missed."""
    from botocore.exceptions import ClientError

    uri = context.plan.locations.checkpoints
    try:
        yield _check(context, uri)
    except ClientError as error:
        if error_code(error) != "NoSuchBucket":
            raise
        if split_uri(uri).bucket == context.settings.bucket:
            raise UnansweredError("needs the bucket") from None
        yield failed(
            "checkpoints",
            f"there is no bucket {split_uri(uri).bucket}",
            command("aws", "s3", "mb", f"s3://{split_uri(uri).bucket}", "--region", context.region),
        )


def _check(context: CheckContext, uri: str) -> Check:
    config = context.plan.config
    resume = config.checkpoint.resume
    if resume.startswith("file://") or uri.startswith("file://"):
        return failed(
            "checkpoints",
            f"{resume if resume.startswith('file://') else uri} lies on this machine, where no cluster can read it",
            "copy it with aws s3 sync and resume from there: --set checkpoint.resume=s3://BUCKET/PREFIX",
        )
    own = _hold(context, uri)
    return _check_of_script(context, uri, own) if config.task is None else _check_of_task(context, uri, own)


def _check_of_task(context: CheckContext, uri: str, own: _Held) -> Check:
    resume = context.plan.config.checkpoint.resume
    newest = _newest(context, uri, own)
    if newest is not None and _goes_on(context, newest.run):
        return _refuse_company(uri, newest, context.plan.run)
    if resume not in ("auto", "never"):
        return _check_resume(context, resume)
    if newest is None:
        return _check_without(uri, own, context.plan.run)
    if resume == "never":
        return _refuse_mixture(uri, newest, context.plan.run)
    return _judge_training(context, find_continuation(context.plan.config, _manifests(context, uri, own)), uri)


def _judge_training(context: CheckContext, found: Continuation, place: str) -> Check:
    """Judge whose training the checkpoints in a place are: a run continues only from its own training by itself."""
    if found.stranger is not None:
        saved = found.stranger
        return failed(
            "checkpoints",
            f"the checkpoints at {place} are another training's (step {saved.step} of run {saved.run}: "
            f"{found.differences})",
            f"to continue from them: --set checkpoint.resume={saved.run}; to start anew: "
            f"--set checkpoint.uri={place}/{context.plan.run}",
        )
    if found.manifest is None:
        return _nothing_to_resume(place)
    return _will_resume(found.manifest, found)


def _will_resume(saved: Manifest, found: Continuation, place: str = "") -> Check:
    """Return the check of a run that continues: from what, how that differs, and what a submit warns of."""
    start = f"will resume from step {saved.step} of run {saved.run}{place}"
    detail = "; ".join(part for part in (start, found.differences) if part)
    warning = "; ".join(part for part in (found.warning, found.doubt) if part)
    return passed("checkpoints", detail, warning=warning, is_shown=True)


def _hold(context: CheckContext, uri: str) -> _Held:
    prefix = split_uri(uri).key.rstrip("/")
    prefix = f"{prefix}/" if prefix else ""
    folders: dict[str, dict[str, int]] = {}
    foreign: list[str] = []
    for key, size in list_objects(context, f"s3://{split_uri(uri).bucket}/{prefix}").sizes.items():
        folder, _, file = key.removeprefix(prefix).partition("/")
        if file and step_of_folder_name(folder) is not None:
            folders.setdefault(folder, {})[file] = size
        else:
            foreign.append(key)
    return _Held(folders, tuple(foreign))


def _newest(context: CheckContext, uri: str, held: _Held, run: str = "") -> Manifest | None:
    """Return the manifest of the newest complete checkpoint, of one run if it is given."""
    return next(_manifests(context, uri, held, run), None)


def _manifests(context: CheckContext, uri: str, held: _Held, run: str = "") -> Iterator[Manifest]:
    """Yield the manifests of complete checkpoints, the newest first: every file is there in its size."""
    place = split_uri(uri)
    for name in held.finished:
        manifest = _read_manifest(context, place.bucket, f"{place.key.rstrip('/')}/{name}/{MANIFEST_FILE}")
        if (
            manifest is None
            or manifest.step != step_of_folder_name(name)
            or manifest.file_mismatches(held.folders[name])
        ):
            continue
        if run in ("", manifest.run):
            yield manifest


def _read_manifest(context: CheckContext, bucket: str, key: str) -> Manifest | None:
    answer = context.client("s3").get_object(Bucket=bucket, Key=key.lstrip("/"))
    try:
        return Manifest.from_json(answer["Body"].read())
    except ValueError:
        return None  # no checkpoint for the runtime either


def _check_of_script(context: CheckContext, uri: str, own: _Held) -> Check:
    """Judge what SageMaker will copy to a script's /opt/ml/checkpoints, and what it has saved to S3 itself.

    Only the script knows what the first means.
    """
    found = []
    if count := sum(len(files) for files in own.folders.values()) + len(own.foreign):
        found.append(f"{count:,} objects below {uri} are copied to /opt/ml/checkpoints first")
    config = context.plan.config.checkpoint
    place = config.uri if config.resume in ("auto", "never") else config.resume
    newest = _newest_at(context, place, config.resume_run) if place and config.resume != "never" else None
    if newest is not None:
        found.append(f"cloudtrain_runtime.checkpoint will resume from step {newest.step} of run {newest.run}")
    elif split_checkpoint(place)[1]:
        return _nothing_to_resume(place)
    if found:
        return passed("checkpoints", "; ".join(found))
    if "://" in context.plan.resume:
        return _nothing_to_resume(uri)
    return _check_empty(uri, context.plan.run)


def _newest_at(context: CheckContext, uri: str, run: str) -> Manifest | None:
    """Return the manifest of the newest whole checkpoint of a folder, or of the one that the uri names."""
    folder, name = split_checkpoint(uri)
    held = _hold(context, folder)
    if name:
        held = _Held({name: held.folders.get(name, {})}, ())
    return _newest(context, folder, held, run)


def _check_empty(uri: str, run: str) -> Check:
    """Judge an empty folder: another run's was named by `checkpoint.resume`, and there is nothing to resume."""
    owner = uri.rstrip("/").split("/")[-2]
    if is_run_id(owner) and owner != run:
        return _nothing_to_resume(uri)
    return passed("checkpoints", f"{uri} is empty: the run starts anew")


def _check_resume(context: CheckContext, resume: str) -> Check:
    """Check that the place which `checkpoint.resume` names holds a whole checkpoint, or is one."""
    newest = _newest_at(context, resume, context.plan.config.checkpoint.resume_run)
    if newest is None:
        return _nothing_to_resume(resume)
    return _will_resume(newest, find_continuation(context.plan.config, [newest]), f", in {resume}")


def _nothing_to_resume(uri: str) -> Check:
    return failed(
        "checkpoints",
        f"there is no complete checkpoint at {uri} to resume from",
        f"see what is there: {command('aws', 's3', 'ls', uri.rstrip('/') + '/')}; "
        "or submit the job without checkpoint.resume",
    )


def _check_without(uri: str, own: _Held, run: str) -> Check:
    if own.foreign:
        return failed(
            "checkpoints",
            f"{len(own.foreign):,} objects below {uri} are no checkpoints, such as {own.foreign[0]}",
            f"give the run a folder of its own: --set checkpoint.uri={uri}/{run}",
        )
    if own.folders:
        return passed("checkpoints", f"no checkpoint below {uri} is complete: the run starts anew")
    return _check_empty(uri, run)


def _goes_on(context: CheckContext, run: str) -> bool:
    """Tell whether a run's training job has not ended. Of a run from a queue nothing is known by its own name."""
    from botocore.exceptions import ClientError

    try:
        job = context.client("sagemaker").describe_training_job(TrainingJobName=run)
    except ClientError as error:
        if error_code(error) in ("ValidationException", "ResourceNotFound"):
            return False  # there is none, or the name could not be one
        raise
    return job["TrainingJobStatus"] in ("InProgress", "Stopping")


def _refuse_company(uri: str, newest: Manifest, run: str) -> Check:
    return failed(
        "checkpoints",
        f"run {newest.run} goes on and saves to {uri}, too (step {newest.step}): "
        "each would delete the other's checkpoints, and resume from them",
        f"wait for its end, stop it: {command('cloudtrain', 'stop', newest.run)}; "
        f"or give this run a folder of its own: --set checkpoint.uri={uri}/{run}",
    )


def _refuse_mixture(uri: str, newest: Manifest, run: str) -> Check:
    # After a restart the runtime goes on from the newest checkpoint of the folder, which would be the other run's.
    return failed(
        "checkpoints",
        f"checkpoint.resume is never, and {uri} holds step {newest.step} of run {newest.run}: "
        "after an interruption this run would go on from that",
        f"give the run a folder of its own: --set checkpoint.uri={uri}/{run}",
    )
