"""SageMaker's training instance types, and suggestions for an unknown name."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

from cloudtrain.catalog.source import load
from cloudtrain.errors import nearest
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_NVME_TYPES = lazy_pattern(
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


_TYPE = lazy_pattern(
    r"(?:ml[.\-_ ]?)?([a-z]+)(\d+)([a-z]*(?:-(?:flex|[a-z]+\d+))?)(?:[.\-_ ]?(\d*[a-z]*))?"
)
_SIZES = {"medium": 0.25, "large": 0.5, "xlarge": 1.0}

_OTHER_LETTERS = 3.0
_PER_GENERATION = 1.0
_OTHER_VARIANT = 0.75
# p4d and p4de, g6 and g6e: one begins like the other.
_SAME_FAMILY_VARIANT = 0.5
_MAX_DISTANCE = 3.0
_MAX_EXTRA_DISTANCE = 0.5


@dataclass(frozen=True)
class _Parsed:
    """Parts of a name: `ml.p4de.24xlarge` is letters `p`, generation 4, variant `de`, size 24 (in units of xlarge)."""

    letters: str
    generation: int
    variant: str
    size: float | None

    def distance(self, other: _Parsed) -> float:
        """Return the distance to another type. A factor of two in size counts as much as one generation."""
        total = _PER_GENERATION * abs(self.generation - other.generation)
        if self.letters != other.letters:
            total += _OTHER_LETTERS
        if self.variant != other.variant:
            alike = self.variant.startswith(other.variant) or other.variant.startswith(self.variant)
            total += _SAME_FAMILY_VARIANT if alike else _OTHER_VARIANT
        if self.size is not None and other.size is not None:
            total += abs(math.log2(self.size / other.size))
        return total


def suggest(name: str) -> tuple[str, ...]:
    """Return up to three instance types that are similar to an unknown name, nearest first.

    Family, generation and size are compared, not common letters: `ml.p4d.48xlarge` is nearer to `ml.p5.48xlarge` than
    to `ml.m4.4xlarge`. For a misspelled instance type, only the type itself is returned.
    """
    wanted = _parse(name.strip().lower())
    if wanted is None:
        # Only a wrong name needs it.
        import difflib

        return tuple(difflib.get_close_matches(name, instance_names(), n=3, cutoff=0.7))
    # Sorted by distance only: types at the same distance stay in the catalog's order.
    distances = sorted(
        ((wanted.distance(parsed), legal) for legal, parsed in _legal()), key=lambda pair: pair[0]
    )
    nearest = distances[0][0]
    if nearest > _MAX_DISTANCE:
        return ()
    limit = 0.0
    if nearest > 0:
        # Other types are alternatives only where none has exactly these parts.
        limit = nearest + _MAX_EXTRA_DISTANCE
    return tuple(legal for distance, legal in distances[:3] if distance <= limit)


def _parse(name: str) -> _Parsed | None:
    found = _TYPE.fullmatch(name)
    if found is None:
        return None
    letters, generation, variant, size = found.groups()
    return _Parsed(
        letters=letters,
        generation=int(generation),
        variant=variant,
        size=_parse_size(size or ""),
    )


def _parse_size(text: str) -> float | None:
    """Return a size in units of xlarge: 24 for `24xlrge`, and the nearest known size for a misspelled word."""
    digits = re.match(r"\d+", text)
    if digits is not None:
        return float(digits[0]) or None
    word = nearest(text, _SIZES)
    if word is None:
        return None
    return _SIZES[word]


@functools.cache
def _legal() -> tuple[tuple[str, _Parsed], ...]:
    parsed = ((name, _parse(name)) for name in instance_names())
    return tuple((name, entry) for name, entry in parsed if entry is not None)
