"""Check of the run's checkpoint folder: it is empty, or the run can resume from it."""

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
class _FolderContent:
    """Content of a folder of checkpoints.

    Attributes:
        folders: Files and their sizes in bytes, by checkpoint (`step-00000500`).
        foreign: Keys below the folder that belong to no checkpoint.
    """

    folders: Mapping[str, Mapping[str, int]]
    foreign: tuple[str, ...]

    @property
    def complete_names(self) -> list[str]:
        """Names of checkpoints with a manifest and without a damage marker, newest step first."""
        found = [name for name, files in self.folders.items() if MANIFEST_FILE in files and DAMAGED_FILE not in files]
        return sorted(found, key=lambda name: step_of_folder_name(name) or 0, reverse=True)


def check_checkpoints(context: CheckContext) -> Iterator[Check]:
    """Check that this run can save its checkpoints without conflicts, and resume as requested."""
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
            f"{resume if resume.startswith('file://') else uri} is on this machine, where no cluster can read it",
            "copy it with aws s3 sync and resume from there: --set checkpoint.resume=s3://BUCKET/PREFIX",
        )
    own = _read_folder(context, uri)
    return _check_script(context, uri, own) if config.task is None else _check_task(context, uri, own)


def _check_task(context: CheckContext, uri: str, own: _FolderContent) -> Check:
    resume = context.plan.config.checkpoint.resume
    newest = _newest(context, uri, own)
    if newest is not None and _is_running(context, newest.run):
        return _reject_shared_folder(uri, newest, context.plan.run)
    if resume not in ("auto", "never"):
        return _check_resume(context, resume)
    if newest is None:
        return _check_no_checkpoint(uri, own, context.plan.run)
    if resume == "never":
        return _reject_resume_never(uri, newest, context.plan.run)
    return _check_training(context, find_continuation(context.plan.config, _manifests(context, uri, own)), uri)


def _check_training(context: CheckContext, found: Continuation, uri: str) -> Check:
    """Check that the newest checkpoints belong to this run's training; the user must name others to resume them."""
    if found.other_training is not None:
        saved = found.other_training
        return failed(
            "checkpoints",
            f"the checkpoints at {uri} belong to another training (step {saved.step} of run {saved.run}: "
            f"{found.differences})",
            f"to resume from them: --set checkpoint.resume={saved.run}; to start from scratch: "
            f"--set checkpoint.uri={uri}/{context.plan.run}",
        )
    if found.manifest is None:
        return _nothing_to_resume(uri)
    return _will_resume(found.manifest, found)


def _will_resume(saved: Manifest, found: Continuation, place: str = "") -> Check:
    """Return the check of a run that resumes: the checkpoint, differences of the job, and warnings."""
    start = f"will resume from step {saved.step} of run {saved.run}{place}"
    detail = "; ".join(part for part in (start, found.differences) if part)
    warning = "; ".join(part for part in (found.warning, found.note) if part)
    return passed("checkpoints", detail, warning=warning, is_shown=True)


def _read_folder(context: CheckContext, uri: str) -> _FolderContent:
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
    return _FolderContent(folders, tuple(foreign))


def _newest(context: CheckContext, uri: str, content: _FolderContent, run: str = "") -> Manifest | None:
    """Return the manifest of the newest complete checkpoint; with `run`, only of that run."""
    return next(_manifests(context, uri, content, run), None)


def _manifests(context: CheckContext, uri: str, content: _FolderContent, run: str = "") -> Iterator[Manifest]:
    """Yield the manifests of complete checkpoints, newest first. All files exist with the size in the manifest."""
    place = split_uri(uri)
    for name in content.complete_names:
        manifest = _read_manifest(context, place.bucket, f"{place.key.rstrip('/')}/{name}/{MANIFEST_FILE}")
        if (
            manifest is None
            or manifest.step != step_of_folder_name(name)
            or manifest.file_mismatches(content.folders[name])
        ):
            continue
        if run in ("", manifest.run):
            yield manifest


def _read_manifest(context: CheckContext, bucket: str, key: str) -> Manifest | None:
    answer = context.client("s3").get_object(Bucket=bucket, Key=key.lstrip("/"))
    try:
        return Manifest.from_json(answer["Body"].read())
    except ValueError:
        return None  # the runtime ignores such a checkpoint, too


def _check_script(context: CheckContext, uri: str, own: _FolderContent) -> Check:
    """Check what SageMaker copies to a script's /opt/ml/checkpoints, and the script's own checkpoints in S3.

    Only the script can interpret the copied files.
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
    """Return the manifest of the newest complete checkpoint of a folder, or of the checkpoint that the URI names."""
    folder, name = split_checkpoint(uri)
    content = _read_folder(context, folder)
    if name:
        content = _FolderContent({name: content.folders.get(name, {})}, ())
    return _newest(context, folder, content, run)


def _check_empty(uri: str, run: str) -> Check:
    """Check an empty folder: fail if it is another run's, which `checkpoint.resume` named."""
    owner = uri.rstrip("/").split("/")[-2]
    if is_run_id(owner) and owner != run:
        return _nothing_to_resume(uri)
    return passed("checkpoints", f"{uri} is empty: the run starts from scratch")


def _check_resume(context: CheckContext, resume: str) -> Check:
    """Check that the URI in `checkpoint.resume` holds a complete checkpoint, or is one."""
    newest = _newest_at(context, resume, context.plan.config.checkpoint.resume_run)
    if newest is None:
        return _nothing_to_resume(resume)
    return _will_resume(newest, find_continuation(context.plan.config, [newest]), f", in {resume}")


def _nothing_to_resume(uri: str) -> Check:
    return failed(
        "checkpoints",
        f"there is no complete checkpoint at {uri} to resume from",
        f"list the folder: {command('aws', 's3', 'ls', uri.rstrip('/') + '/')}; "
        "or submit the job without checkpoint.resume",
    )


def _check_no_checkpoint(uri: str, own: _FolderContent, run: str) -> Check:
    if own.foreign:
        return failed(
            "checkpoints",
            f"{len(own.foreign):,} objects below {uri} do not belong to checkpoints, such as {own.foreign[0]}",
            f"give the run its own folder: --set checkpoint.uri={uri}/{run}",
        )
    if own.folders:
        return passed("checkpoints", f"no checkpoint below {uri} is complete: the run starts from scratch")
    return _check_empty(uri, run)


def _is_running(context: CheckContext, run: str) -> bool:
    """Whether a run's training job is in progress. Jobs of a queue have other names, so they are not found."""
    from botocore.exceptions import ClientError

    try:
        job = context.client("sagemaker").describe_training_job(TrainingJobName=run)
    except ClientError as error:
        if error_code(error) in ("ValidationException", "ResourceNotFound"):
            return False  # there is no such job, or the name is invalid
        raise
    return job["TrainingJobStatus"] in ("InProgress", "Stopping")


def _reject_shared_folder(uri: str, newest: Manifest, run: str) -> Check:
    return failed(
        "checkpoints",
        f"run {newest.run} is still running and also saves to {uri} (step {newest.step}): "
        "each would delete the other's checkpoints, and resume from them",
        f"wait until it ends, stop it: {command('cloudtrain', 'stop', newest.run)}; "
        f"or give this run its own folder: --set checkpoint.uri={uri}/{run}",
    )


def _reject_resume_never(uri: str, newest: Manifest, run: str) -> Check:
    # After a restart the runtime resumes from the newest checkpoint of the folder, which would be the other run's.
    return failed(
        "checkpoints",
        f"checkpoint.resume is never, and {uri} holds step {newest.step} of run {newest.run}: "
        "after an interruption this run would resume from it",
        f"give the run its own folder: --set checkpoint.uri={uri}/{run}",
    )
