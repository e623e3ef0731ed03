"""What AWS offers: instances, containers and prices, as data files with source and date."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Instance:
    """One SageMaker instance type.

    Attributes:
        gpus: GPUs per instance; None when this catalog does not know.
        efa: Whether it has an Elastic Fabric Adapter.
        smddp: Whether AWS's data-parallel library supports it.
        neuron: Whether it carries Trainium or Inferentia, which PyTorch's CUDA containers cannot use.
    """

    name: str
    gpus: int | None
    gpu: str | None = None
    gpu_memory_gb: int | None = None
    efa: bool = False
    smddp: bool = False
    neuron: bool = False


@dataclass(frozen=True)
class Image:
    """One AWS PyTorch container.

    Attributes:
        framework: PyTorch version, major and minor.
        gpu: Repository and tag with CUDA.
        cpu: Repository and tag without.
        smddp: Whether AWS's data-parallel library is inside.
        mpi4py: Whether mpi4py is inside, which the mpirun launchers need.
        end_of_patch: Day after which AWS no longer patches it, as YYYY-MM-DD.
    """

    framework: str
    gpu: str
    cpu: str
    smddp: bool
    mpi4py: bool
    end_of_patch: str | None = None


@functools.cache
def _data(name: str) -> Any:
    return json.loads(resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8"))


def instance_names() -> tuple[str, ...]:
    """Return every instance type in the catalog."""
    return tuple(_data("instances")["instances"])


def find_instance(name: str) -> Instance | None:
    """Return an instance type, or None when the catalog does not have it."""
    entry = _data("instances")["instances"].get(name)
    return Instance(name=name, **entry) if entry is not None else None


@functools.cache
def images() -> tuple[Image, ...]:
    """Return AWS's PyTorch containers, newest first."""
    return tuple(Image(**entry) for entry in _data("images")["images"])


def image_uri(image: Image, *, region: str, gpu: bool) -> str:
    """Return the full uri of a container in a region."""
    data = _data("images")
    account = data["registries"].get(region, data["registry"])
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"{account}.dkr.ecr.{region}.{domain}/{image.gpu if gpu else image.cpu}"


def image_date() -> str:
    """Return the day of the list of containers, as YYYY-MM-DD."""
    return str(_data("images")["as_of"])


def usd_per_hour(instance_type: str, region: str) -> float | None:
    """Return the on-demand price of one instance, or None when the catalog does not know it."""
    price = _data("prices")["usd_per_hour"].get(region, {}).get(instance_type)
    return float(price) if price is not None else None


def price_date() -> str:
    """Return the day of the prices, as YYYY-MM-DD."""
    return str(_data("prices")["as_of"])


def priced_regions() -> tuple[str, ...]:
    """Return the regions whose prices the catalog has."""
    return tuple(_data("prices")["usd_per_hour"])
