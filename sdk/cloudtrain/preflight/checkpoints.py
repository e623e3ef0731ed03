"""Checks of what the run starts from: its checkpoint folder, and initial weights in S3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cloudtrain.aws.errors import SuppressCodes
from cloudtrain.aws.s3_objects import find_object
from cloudtrain.planning.continuation import Continuation, find_continuation
from cloudtrain.planning.storage_layout import split_checkpoint
from cloudtrain.preflight.base import CheckContext, UnansweredError, command, find
from cloudtrain.preflight.storage import count_objects
from cloudtrain.support.checks import Check, failed, passed
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.run_id import is_run_id
from cloudtrain.support.s3_uri import split_uri
from cloudtrain.support.units import format_size
from cloudtrain_runtime.contract import MODEL_FILE, WEIGHT_FILES
from cloudtrain_runtime.contract.aws_codes import (
    MISSING_BUCKET,
    MISSING_IN_SAGEMAKER,
)
from cloudtrain_runtime.contract.checkpoint_folder import complete_manifests
from cloudtrain_runtime.contract.manifest import Manifest, step_of_folder_name


@dataclass(frozen=True)
class _FolderContent:
    """Content of a folder of checkpoints: the sizes of files in bytes by checkpoint, and keys of no checkpoint."""

    folders: Mapping[str, Mapping[str, int]]
    foreign: tuple[str, ...]


def check_checkpoints(context: CheckContext) -> Iterator[Check]:
    """Check that this run can save its checkpoints without conflicts, and resume as requested."""
    uri = context.plan.locations.checkpoints
    resume = context.plan.config.checkpoint.resume
    local = next((each for each in (resume, uri) if each.startswith("file://")), None)
    if local is not None:
        message = f"{local} is on this machine, where no cluster can read it"
        fix = "copy it with aws s3 sync and resume from there: --set checkpoint.resume=s3://BUCKET/PREFIX"
        yield failed("checkpoints", message, fix)
        return
    with SuppressCodes(MISSING_BUCKET):
        own = _read_folder(context, uri)
        yield (_check_script if context.plan.config.task is None else _check_task)(
            context, uri, own
        )
        return
    bucket = split_uri(uri).bucket
    if bucket == context.settings.bucket:
        raise UnansweredError("needs the bucket")
    make = command("aws", "s3", "mb", f"s3://{bucket}", "--region", context.region)
    yield failed("checkpoints", f"there is no bucket {bucket}", make)


def check_initial_weights(context: CheckContext) -> Iterator[Check]:
    """Check that the weights that `train.init_from` names exist, unless the run resumes and has its own."""
    name = "initial weights"
    config = context.plan.config
    uri = str(config.train and config.train.init_from).rstrip("/")
    if config.checkpoint.resume not in ("auto", "never"):
        yield passed(name, "the run resumes with its own weights")
        return
    found = ""
    is_new = True
    with SuppressCodes(MISSING_BUCKET):
        found = _find_weights(context, uri)
        is_new = config.checkpoint.resume == "never" or not _newest_at(
            context, context.plan.locations.checkpoints, ""
        )
    if found:
        yield passed(name, f"the run starts with {found}")
    elif not is_new:
        yield passed(name, f"there are none at {uri}; the run resumes with its own weights")
    elif uri.endswith(WEIGHT_FILES):
        yield failed(
            name, f"there is no object {uri}", f"copy it: {command('aws', 's3', 'cp', 'FILE', uri)}"
        )
    else:
        message = f"there is neither {MODEL_FILE} nor a complete checkpoint at {uri}"
        yield failed(name, message, f"list the folder: {command('aws', 's3', 'ls', uri + '/')}")


def _find_weights(context: CheckContext, uri: str) -> str:
    """Return what a uri of initial weights names; empty if there is nothing. The runtime looks in the same order."""
    file = uri if uri.endswith(WEIGHT_FILES) else f"{uri}/{MODEL_FILE}"
    size = count_objects(context, file).sizes.get(split_uri(file).key)
    if size is not None or file == uri:
        return "" if size is None else f"{file} ({format_size(size)})"
    saved = _newest_at(context, uri, "")
    return f"step {saved.step} of run {saved.run}" if saved is not None else ""


def _check_task(context: CheckContext, uri: str, own: _FolderContent) -> Check:
    config = context.plan.config
    run = context.plan.run
    resume = config.checkpoint.resume
    newest = next(_manifests(context, uri, own), None)
    if newest is not None and _is_running(context, newest.run):
        message = (
            f"run {newest.run} is still running and also saves to {uri} (step {newest.step}): "
            "each would delete the other's checkpoints, and resume from them"
        )
        stop = command("cloudtrain", "stop", newest.run)
        fix = f"wait until it ends, stop it: {stop}; or give this run its own folder: --set checkpoint.uri={uri}/{run}"
        return failed("checkpoints", message, fix)
    if resume not in ("auto", "never"):
        named = _newest_at(context, resume, config.checkpoint.resume_run)
        if named is None:
            return _nothing_to_resume(resume)
        return _will_resume(named, find_continuation(config, [named]), f", in {resume}")
    if newest is None:
        return _check_no_checkpoint(uri, own, run)
    if resume == "never":
        # After a restart the runtime resumes from the newest checkpoint of the folder, which would be the other run's.
        message = (
            f"checkpoint.resume is never, and {uri} holds step {newest.step} of run {newest.run}: "
            "after an interruption this run would resume from it"
        )
        return failed(
            "checkpoints", message, f"give the run its own folder: --set checkpoint.uri={uri}/{run}"
        )
    return _check_training(context, find_continuation(config, _manifests(context, uri, own)), uri)


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
    start = f"will resume from step {saved.step} of run {saved.run}{place}"
    detail = "; ".join(part for part in (start, found.differences) if part)
    return passed("checkpoints", detail, warning="; ".join(found.warnings), is_shown=True)


def _read_folder(context: CheckContext, uri: str) -> _FolderContent:
    prefix = split_uri(uri).key.rstrip("/")
    prefix = f"{prefix}/" if prefix else ""
    folders: dict[str, dict[str, int]] = {}
    foreign: list[str] = []
    for key, size in count_objects(context, f"s3://{split_uri(uri).bucket}/{prefix}").sizes.items():
        folder, _, file = key.removeprefix(prefix).partition("/")
        if file and step_of_folder_name(folder) is not None:
            folders.setdefault(folder, {})[file] = size
        else:
            foreign.append(key)
    return _FolderContent(folders, tuple(foreign))


def _manifests(context: CheckContext, uri: str, content: _FolderContent) -> Iterator[Manifest]:
    """Yield the manifests of complete checkpoints, newest first."""
    return complete_manifests(_S3Store(context, uri, content))


@dataclass(frozen=True)
class _S3Store:
    """A folder of checkpoints in S3 that has been listed."""

    context: CheckContext
    uri: str
    content: _FolderContent

    def folders(self) -> Mapping[str, Mapping[str, int]]:
        return self.content.folders

    def read(self, folder: str, name: str) -> bytes | None:
        # It may have been deleted since it was listed.
        uri = f"{self.uri.rstrip('/')}/{folder}/{name}"
        found = find_object(self.context.client("s3"), uri)
        return None if found is None else found.body


def _check_script(context: CheckContext, uri: str, own: _FolderContent) -> Check:
    """Check what SageMaker copies to a script's /opt/ml/checkpoints, and the script's own checkpoints in S3.

    Only the script can interpret the copied files.
    """
    found = []
    if number := sum(len(files) for files in own.folders.values()) + len(own.foreign):
        found.append(f"{count(number, 'object')} below {uri} to copy to /opt/ml/checkpoints first")
    config = context.plan.config.checkpoint
    place = config.uri if config.resume in ("auto", "never") else config.resume
    newest = None
    if place and config.resume != "never":
        newest = _newest_at(context, place, config.resume_run)
    if newest is not None:
        found.append(
            f"cloudtrain_runtime.checkpoint will resume from step {newest.step} of run {newest.run}"
        )
    elif split_checkpoint(place)[1]:
        return _nothing_to_resume(place)
    if found:
        return passed("checkpoints", "; ".join(found))
    if "://" in context.plan.resume:
        return _nothing_to_resume(uri)
    return _check_no_checkpoint(uri, own, context.plan.run)


def _newest_at(context: CheckContext, uri: str, run: str) -> Manifest | None:
    """Return the manifest of the newest complete checkpoint of a folder, or of the checkpoint that the URI names.

    With `run`, only a checkpoint of that run counts.
    """
    folder, name = split_checkpoint(uri)
    content = _read_folder(context, folder)
    if name:
        content = _FolderContent({name: content.folders.get(name, {})}, ())
    return next(
        (each for each in _manifests(context, folder, content) if run in ("", each.run)), None
    )


def _check_no_checkpoint(uri: str, own: _FolderContent, run: str) -> Check:
    """Check a folder without a complete checkpoint: fail if it is another run's, which `checkpoint.resume` named."""
    if own.foreign:
        objects = count(len(own.foreign), "object")
        message = f"{objects} below {uri} outside of checkpoints, such as {own.foreign[0]}"
        return failed(
            "checkpoints", message, f"give the run its own folder: --set checkpoint.uri={uri}/{run}"
        )
    if own.folders:
        return passed(
            "checkpoints", f"no checkpoint below {uri} is complete: the run starts from scratch"
        )
    owner = uri.rstrip("/").split("/")[-2]
    if is_run_id(owner) and owner != run:
        return _nothing_to_resume(uri)
    return passed("checkpoints", f"{uri} is empty: the run starts from scratch")


def _nothing_to_resume(uri: str) -> Check:
    return failed(
        "checkpoints",
        f"there is no complete checkpoint at {uri} to resume from",
        f"list the folder: {command('aws', 's3', 'ls', uri.rstrip('/') + '/')}; "
        "or submit the job without checkpoint.resume",
    )


def _is_running(context: CheckContext, run: str) -> bool:
    """Whether a run's training job is in progress. Jobs of a queue have other names, so they are not found."""
    describe = context.client("sagemaker").describe_training_job
    job = find(MISSING_IN_SAGEMAKER, describe, TrainingJobName=run)
    return job is not None and job["TrainingJobStatus"] in ("InProgress", "Stopping")
