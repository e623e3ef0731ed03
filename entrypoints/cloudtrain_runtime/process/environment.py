"""This process's environment: run configuration, paths and ranks. Without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from cloudtrain_runtime.contract import (
    ADDRESSES_VARIABLE,
    DEFAULT_RENDEZVOUS_PORT,
    HOST_RANK_VARIABLE,
    ML_ROOT_VARIABLE,
    PORT_VARIABLE,
    MlTree,
    RunConfig,
    sort_hosts,
)
from cloudtrain_runtime.contract.ml_tree import CONTAINER_TREE
from cloudtrain_runtime.contract.strict_json import load_json
from cloudtrain_runtime.contract.trial import TrialError, apply_trial
from cloudtrain_runtime.errors import JobError


def ml_tree(environ: Mapping[str, str]) -> MlTree:
    """Return this host's /opt/ml."""
    return MlTree(Path(environ.get(ML_ROOT_VARIABLE, CONTAINER_TREE.root)))


def read_run_config(environ: Mapping[str, str]) -> RunConfig | None:
    """Return the run's configuration, in a trial of a tuning job with its values, or None outside of a run.

    Raises:
        JobError: The hyperparameters of the trial do not fit the job.
    """
    config = _read_shared_config(environ)
    if config is None or not config.searched:
        return config
    path = ml_tree(environ).config / "hyperparameters.json"
    name = trial_name(environ)
    if not name:
        raise JobError(
            "a trial of a tuning job needs TRAINING_JOB_NAME, which SageMaker sets", is_common=True
        )
    try:
        return apply_trial(config, load_json(path.read_text(encoding="utf-8")), name)
    except TrialError as error:
        raise JobError(str(error), is_common=True) from None


def _read_shared_config(environ: Mapping[str, str]) -> RunConfig | None:
    try:
        text = ml_tree(environ).run_config.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return RunConfig.from_json(text)


def trial_name(environ: Mapping[str, str]) -> str:
    """Return the name of this training job, which SageMaker puts into the container's environment, or an empty text."""
    of_arn = environ.get("TRAINING_JOB_ARN", "").rpartition("/")[2]
    return environ.get("TRAINING_JOB_NAME") or of_arn


def is_toolkit_trial(environ: Mapping[str, str]) -> bool:
    """Return whether AWS's toolkit has started this process by torchrun, as it does for trials of a tuning job.

    cloudtrain's own launcher gives torchrun the run id, which torchrun passes on.
    """
    config = _read_shared_config(environ)
    if config is None or not config.searched:
        return False
    return environ.get("TORCHELASTIC_RUN_ID") != trial_name(environ)


def include_variables(tree: MlTree, environ: Mapping[str, str]) -> dict[str, str]:
    """Return PYTHONPATH with the folders of `code.include` in front; nothing if the bundle has none."""
    if not tree.include.is_dir():
        return {}
    folders = (str(tree.include), environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def is_mpirun_rank(environ: Mapping[str, str]) -> bool:
    """Return whether mpirun started this process, as AWS's toolkit does for SMDDP."""
    return "OMPI_COMM_WORLD_RANK" in environ


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch's `env://` initialization needs and the environment lacks.

    torchrun sets all of them. Under AWS's mpirun only `OMPI_COMM_WORLD_*` is set, and the master is the first host.
    """
    if "RANK" in environ or not is_mpirun_rank(environ):
        return {}
    master = sort_hosts(load_json(environ.get("SM_HOSTS", '["localhost"]')))[0]
    addresses = load_json(environ.get(ADDRESSES_VARIABLE, "{}"))
    own = {
        "RANK": environ["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": environ["OMPI_COMM_WORLD_SIZE"],
        "LOCAL_RANK": environ["OMPI_COMM_WORLD_LOCAL_RANK"],
        "LOCAL_WORLD_SIZE": environ["OMPI_COMM_WORLD_LOCAL_SIZE"],
        "MASTER_ADDR": addresses.get(master, master),
        "MASTER_PORT": environ.get(PORT_VARIABLE, str(DEFAULT_RENDEZVOUS_PORT)),
    }
    return {name: value for name, value in own.items() if name not in environ}


_OF_RANK = re.compile(
    r"(?:LOCAL_|GROUP_|ROLE_)?(?:RANK|WORLD_SIZE)|ROLE_NAME|MASTER_PORT|TORCHELASTIC_(?!ERROR_FILE$)\w+"
)
"""Variables that torchrun sets for each rank, by which programs take themselves for one of several.

Not MASTER_ADDR, the address of the first host, and not the file from which the agent reads the cause of a failure.
"""


def own_launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command that starts its own ranks, by that of the rank that it replaces."""
    found = {name: value for name, value in environ.items() if not _OF_RANK.fullmatch(name)}
    return {**found, HOST_RANK_VARIABLE: environ.get("GROUP_RANK", environ.get("RANK", "0"))}
