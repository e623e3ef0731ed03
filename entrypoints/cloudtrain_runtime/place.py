"""What the environment says about this process, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from cloudtrain_runtime.contract import DEFAULT_RENDEZVOUS_PORT, ML_ROOT_VARIABLE, MlTree, RunConfig, sort_hosts


def ml_tree(environ: Mapping[str, str]) -> MlTree:
    """Return this host's /opt/ml."""
    return MlTree(Path(environ.get(ML_ROOT_VARIABLE, "/opt/ml")))


def read_run_config(environ: Mapping[str, str]) -> RunConfig | None:
    """Return the run's configuration, or None outside of a run."""
    path = ml_tree(environ).run_config
    return RunConfig.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch's `env://` start needs and that are not there yet.

    torchrun sets them all. Under AWS's mpirun only `OMPI_COMM_WORLD_*` are there, and the master is the first host.
    """
    if "RANK" in environ:
        return {}
    if "OMPI_COMM_WORLD_RANK" in environ:
        hosts = sort_hosts(json.loads(environ.get("SM_HOSTS", '["localhost"]')))
        own = {
            "RANK": environ["OMPI_COMM_WORLD_RANK"],
            "WORLD_SIZE": environ["OMPI_COMM_WORLD_SIZE"],
            "LOCAL_RANK": environ["OMPI_COMM_WORLD_LOCAL_RANK"],
            "LOCAL_WORLD_SIZE": environ["OMPI_COMM_WORLD_LOCAL_SIZE"],
            "MASTER_ADDR": hosts[0],
            "MASTER_PORT": str(DEFAULT_RENDEZVOUS_PORT),
        }
        return {name: value for name, value in own.items() if name not in environ}
    return {}
