"""The check that a checkpoint exists before a run resumes from it."""

from __future__ import annotations

from collections.abc import Mapping

from cloudtrain.backends.container.folder_sync import runtime_folders
from cloudtrain.errors import UserError
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.checkpoints import CheckpointFolder
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.manifest import step_of_folder_name


def require_checkpoint(plan: Plan, environ: Mapping[str, str], restart: str) -> None:
    """Check that there is a complete checkpoint where a plan names one, in a process with this environment.

    Args:
        plan: The plan.
        environ: The environment, with credentials for S3.
        restart: Command that starts the job without a checkpoint.

    Raises:
        UserError: There is none.
        CloudError: It is in S3, which refused or cannot be reached.
    """
    if "://" not in plan.resume:
        return
    config = plan.config
    is_folder = config.task is None and step_of_folder_name(plan.resume.rpartition("/")[2]) is None
    if is_folder and _has_own_form(plan.locations.checkpoints):
        return
    try:
        CheckpointFolder(plan.resume, config.checkpoint.resume_run, environ).find()
    except UserError as error:
        raise UserError(error.message, f"{error.hint}; to start anew: {restart}") from None


def _has_own_form(uri: str) -> bool:
    """Return whether a script has saved files to a folder, besides checkpoints of the runtime."""
    if not uri.startswith("file:"):
        return False
    folder = path_of(uri)
    names = {each.name for each in folder.glob("*")}
    return bool(names.difference(runtime_folders(str(folder), list(names))))
