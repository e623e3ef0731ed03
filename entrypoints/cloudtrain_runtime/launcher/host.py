"""The host: its position among the job's hosts, its GPUs, CPUs and network interface.

Standard library only, like the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cloudtrain_runtime.contract import GPUS_VARIABLE, MlTree, sort_hosts
from cloudtrain_runtime.contract.gpu_sharing import visible_devices
from cloudtrain_runtime.launcher.sagemaker_environment import read_config


@dataclass(frozen=True)
class Host:
    """This host among the job's hosts. `interface` is the network interface between them, or an empty string."""

    name: str
    hosts: tuple[str, ...]
    interface: str

    @property
    def rank(self) -> int:
        """Index in SageMaker's order; 0 is the master."""
        return self.hosts.index(self.name)


def read_host(tree: MlTree) -> Host:
    """Return this host's description from resourceconfig.json."""
    resources = read_config(tree, "resourceconfig")
    hosts = tuple(sort_hosts(list(resources.get("hosts", ["algo-1"]))))
    return Host(
        name=resources.get("current_host", hosts[0]),
        hosts=hosts,
        interface=resources.get("network_interface_name", ""),
    )


def is_on_sagemaker(environ: Mapping[str, str]) -> bool:
    """Return whether this container belongs to a SageMaker training job, here or in the sandbox."""
    arn = environ.get("TRAINING_JOB_ARN", "")
    return bool(arn) and ":sagemaker:local:" not in arn


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that this host's processes may use, without loading CUDA."""
    if GPUS_VARIABLE in os.environ:
        return int(os.environ[GPUS_VARIABLE])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len(visible_devices(visible))
    devices = Path("/proc/driver/nvidia/gpus")
    return len(list(devices.iterdir())) if devices.is_dir() else 0
