"""This process's environment: run configuration, paths and ranks. Without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from cloudtrain_runtime.contract import (
    ADDRESSES_VARIABLE,
    DEFAULT_RENDEZVOUS_PORT,
    ML_ROOT_VARIABLE,
    PORT_VARIABLE,
    MlTree,
    RunConfig,
    sort_hosts,
)


def ml_tree(environ: Mapping[str, str]) -> MlTree:
    """Return this host's /opt/ml."""
    return MlTree(Path(environ.get(ML_ROOT_VARIABLE, "/opt/ml")))


def read_run_config(environ: Mapping[str, str]) -> RunConfig | None:
    """Return the run's configuration, or None outside of a run."""
    path = ml_tree(environ).run_config
    return RunConfig.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None


def include_variables(tree: MlTree, environ: Mapping[str, str]) -> dict[str, str]:
    """Return PYTHONPATH with the folders of `code.include` in front; nothing if the bundle has none."""
    if not tree.include.is_dir():
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(tree.include), environ.get("PYTHONPATH"))))}


def is_mpirun_rank(environ: Mapping[str, str]) -> bool:
    """Return whether mpirun started this process, as AWS's toolkit does for SMDDP."""
    return "OMPI_COMM_WORLD_RANK" in environ


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch's `env://` initialization needs and the environment lacks.

    torchrun sets all of them. Under AWS's mpirun only `OMPI_COMM_WORLD_*` is set, and the master is the first host.
    """
    if "RANK" in environ or not is_mpirun_rank(environ):
        return {}
    master = sort_hosts(json.loads(environ.get("SM_HOSTS", '["localhost"]')))[0]
    addresses = json.loads(environ.get(ADDRESSES_VARIABLE, "{}"))
    own = {
        "RANK": environ["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": environ["OMPI_COMM_WORLD_SIZE"],
        "LOCAL_RANK": environ["OMPI_COMM_WORLD_LOCAL_RANK"],
        "LOCAL_WORLD_SIZE": environ["OMPI_COMM_WORLD_LOCAL_SIZE"],
        "MASTER_ADDR": addresses.get(master, master),
        "MASTER_PORT": environ.get(PORT_VARIABLE, str(DEFAULT_RENDEZVOUS_PORT)),
    }
    return {name: value for name, value in own.items() if name not in environ}
