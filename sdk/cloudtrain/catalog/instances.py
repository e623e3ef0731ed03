"""SageMaker's training instance types, and suggestions for an unknown name."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from cloudtrain.catalog.source import load

_NVME_TYPES = re.compile(
    r"ml\.(?:p3dn|p4|p5|p6|g4dn|g5|g6|gr6|g7|trn|[a-z]+\d+[a-z]*d)[a-z0-9-]*\."
)


@dataclass(frozen=True)
class Instance:
    """One SageMaker instance type. None means unknown.

    Attributes:
        name: The type, such as `ml.p4d.24xlarge`.
        gpus: NVIDIA GPUs per instance.
        gpu: Name of the GPU; also None if the instance has no GPU.
        gpu_memory_gb: Memory of one GPU, in GiB as EC2 reports it (an A10G is sold as 24 GB and reports 22.4).
        vcpus: Virtual CPUs.
        memory_gb: Memory of the instance in GiB.
        nvme_gb: Local NVMe storage in GB, or 0. With local storage, SageMaker provisions no EBS volume and ignores
            VolumeSizeInGB (botocore's ResourceConfig).
        network_gbps: Baseline bandwidth of all network cards together, in Gbit/s.
        efa: Whether EC2 offers the Elastic Fabric Adapter on it.
        toolkit_efa: Whether AWS's training toolkit configures NCCL for EFA on it. The toolkit's own list lacks newer
            types.
        smddp: Whether AWS's data-parallel library supports it.
        neuron: Whether it has Trainium chips, which PyTorch's CUDA containers cannot use.
        architecture: `x86_64`, which AWS's PyTorch training containers for SageMaker are built for, or `arm64`.
    """

    name: str
    gpus: int | None
    gpu: str | None = None
    gpu_memory_gb: float | None = None
    vcpus: int | None = None
    memory_gb: float | None = None
    nvme_gb: int | None = None
    network_gbps: float | None = None
    efa: bool | None = None
    toolkit_efa: bool = False
    smddp: bool = False
    neuron: bool = False
    architecture: str | None = None

    @property
    def is_accelerated(self) -> bool:
        """Whether SageMaker counts it as accelerated computing, which `MaxPendingTimeInSeconds` requires."""
        return bool(self.gpus) or self.neuron

    @property
    def has_images(self) -> bool:
        """Whether AWS's PyTorch containers work on it."""
        return not self.neuron and self.architecture != "arm64"


@functools.cache
def instance_names() -> tuple[str, ...]:
    """Return every instance type in the catalog."""
    return tuple(load("instances")["instances"])


def has_nvme(name: str) -> bool:
    """Return whether a type has local NVMe storage by its name, also one that the catalog does not list.

    Source: API reference of ResourceConfig, and EC2's pages of instance types, 2026-11.
    """
    return _NVME_TYPES.match(name) is not None


def find_instance(name: str) -> Instance | None:
    """Return an instance type, or None if the catalog does not have it."""
    entry = load("instances")["instances"].get(name)
    if entry is None:
        return None
    return Instance(name=name, **{key: value for key, value in entry.items() if key != "sources"})


_BYTES_PER_GBIT = 10**9 / 8
_SHARE_OF_NETWORK = 0.5
"""Share of an instance's baseline bandwidth that an upload gets, because collectives run at the same time."""


def s3_upload_bytes_per_second(instance_type: str) -> float:
    """Return the assumed upload rate of a checkpoint: that measured with two cores, or less on a slower network."""
    measured = float(load("transfers")["s3_upload_mb_per_second"]["value"]) * 10**6
    instance = find_instance(instance_type)
    if instance is None or instance.network_gbps is None:
        return measured
    return min(measured, instance.network_gbps * _BYTES_PER_GBIT * _SHARE_OF_NETWORK)


def suggest(name: str) -> tuple[str, ...]:
    """Return up to three instance types of the family that a name is, else with similar names, nearest first."""
    wanted = name.strip().lower()
    family = [each for each in instance_names() if each.startswith(f"{wanted}.")]
    if family:
        return tuple(family[:3])
    # Only a wrong name needs it.
    import difflib

    return tuple(difflib.get_close_matches(wanted, instance_names(), cutoff=0.75))
