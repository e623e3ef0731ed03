"""Checks before a local run starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from cloudtrain.errors import MissingExtraError, UserError
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.checkpoints import CheckpointFolder
from cloudtrain.support.file_uri import path_of
from cloudtrain_runtime.contract import GRACE_VARIABLE
from cloudtrain_runtime.contract.manifest import step_of_folder_name


def check_machine(environ: Mapping[str, str]) -> None:
    """Check that local runs can start on this machine.

    Raises:
        MissingExtraError: torch or psutil is not installed.
        UserError: The grace period in the environment is no number.
    """
    for module in ("torch", "psutil"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"local runs need {module}", "pip install 'cloudtrain[local]'")
    grace = environ.get(GRACE_VARIABLE, "0")
    if not grace.replace(".", "", 1).isdigit():
        raise UserError(f"{GRACE_VARIABLE}: expected seconds, got {grace!r}", "for example 120")


def check_checkpoint(plan: Plan, environ: Mapping[str, str]) -> None:
    """Check that there is a complete checkpoint where a plan names one.

    Args:
        plan: The plan.
        environ: Environment of the process that reads the checkpoint.

    Raises:
        UserError: There is none.
        CloudError: It is in S3, which refused or cannot be reached.
    """
    if "://" not in plan.resume:
        return
    config = plan.config
    own_files = plan.locations.checkpoints  # a script may save files of any form there
    is_folder = config.script is not None and step_of_folder_name(plan.resume.rpartition("/")[2]) is None
    if is_folder and own_files.startswith("file:") and any(path_of(own_files).glob("*")):
        return
    try:
        CheckpointFolder(plan.resume, config.checkpoint.resume_run, environ).find()
    except UserError as error:
        raise UserError(error.message, f"{error.hint}; or start anew: cloudtrain submit --local JOB") from None
