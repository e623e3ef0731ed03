"""Checks of the checkpoint that a run would continue from."""

from __future__ import annotations

import dataclasses
import os

from cloudtrain.client.account import find_settings
from cloudtrain.client.sandbox import SANDBOX, find_sandbox
from cloudtrain.errors import UserError
from cloudtrain.planning.continuation import AUTO, Continuation, find_continuation, manifests_in
from cloudtrain.planning.plan import LOCAL, SAGEMAKER, Plan
from cloudtrain.runs.checkpoints import CheckpointFolder
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract.bucket_owner import OWNERS_VARIABLE
from cloudtrain_runtime.contract.manifest import step_of_folder_name
from cloudtrain_runtime.contract.strict_json import dump_json


def add_continuation(decided: Plan) -> Plan:
    """Return a plan that names the checkpoint that its run continues from, and the differences to that run."""
    found = _local_continuation(decided)
    decisions, warnings = list(decided.decisions), list(decided.warnings)
    if found.manifest is not None:
        differences = f"; {found.differences}" if found.differences else ""
        decisions.append(f"continues from step {found.manifest.step} of run {found.manifest.run}{differences}")
    if found.other_training is not None:
        warnings.append(f"submit refuses this: {_describe_other_training(found)}")
    warnings += [text for text in (found.warning, found.note) if text]
    return dataclasses.replace(decided, decisions=tuple(decisions), warnings=tuple(warnings))


def reject_other_training(decided: Plan) -> None:
    """Reject a local run whose checkpoint folder holds only checkpoints of another training.

    Raises:
        UserError: It does.
    """
    found = _local_continuation(decided)
    if found.other_training is not None:
        hint = (
            f"to continue from them: --set checkpoint.resume={found.other_training.run}; to start anew: another "
            "checkpoint.uri, or --set checkpoint.resume=never"
        )
        raise UserError(_describe_other_training(found), hint)


def reject_missing_checkpoint(decided: Plan, settings: Settings) -> None:
    """Reject a local run that is to continue from a place without a complete checkpoint.

    Raises:
        UserError: The place holds no complete checkpoint.
        CloudError: The place is in S3, which refused or cannot be reached.
    """
    from cloudtrain.backends.container.filesystem import path_of

    config = decided.config
    if "://" not in decided.resume:
        return
    own_files = decided.locations.checkpoints  # a script may save files of any form there
    is_folder = config.script is not None and step_of_folder_name(decided.resume.rpartition("/")[2]) is None
    if is_folder and own_files.startswith("file:") and any(path_of(own_files).glob("*")):
        return
    try:
        folder = CheckpointFolder(decided.resume, config.checkpoint.resume_run, storage_environ(LOCAL, settings))
        folder.find()
    except UserError as error:
        raise UserError(error.message, f"{error.hint}; or start anew: cloudtrain submit --local JOB") from None


def storage_environ(backend: str, settings: Settings | None) -> dict[str, str]:
    """Return the environment of a process that reads the checkpoints of a backend's runs.

    Args:
        backend: Name of the backend.
        settings: The account; by default from environment and files.
    """
    if backend == SANDBOX and (found := find_sandbox()) is not None:
        # A profile or an endpoint of the real account would redirect the process there.
        own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        return {**own, **found.environment, OWNERS_VARIABLE: dump_json(found.settings(Settings()).bucket_owners)}
    account = settings or find_settings()
    region = {"AWS_DEFAULT_REGION": account.region} if account.region and backend == SAGEMAKER else {}
    return {**os.environ, **region, OWNERS_VARIABLE: dump_json(account.bucket_owners)}


def _local_continuation(decided: Plan) -> Continuation:
    """Return the checkpoint that a run would continue from, where it is in a folder of this machine."""
    from cloudtrain.backends.container.filesystem import path_of

    checkpoint = decided.config.checkpoint
    place = checkpoint.uri if checkpoint.resume in (AUTO, "never") else checkpoint.resume
    if checkpoint.resume == "never" or not place.startswith("file:"):
        return Continuation()
    return find_continuation(decided.config, manifests_in(path_of(place), checkpoint.resume_run))


def _describe_other_training(found: Continuation) -> str:
    saved = found.other_training
    whose = f"step {saved.step} of run {saved.run}" if saved is not None else ""
    return f"the checkpoints in checkpoint.uri are another training's ({whose}: {found.differences})"
