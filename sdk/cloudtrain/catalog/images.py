"""AWS's PyTorch containers for SageMaker training."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cloudtrain.catalog import service_limits
from cloudtrain.catalog.source import Source, load, sources


@dataclass(frozen=True)
class Image:
    """One AWS PyTorch container.

    Attributes:
        framework: PyTorch version, major and minor.
        gpu: Repository and tag with CUDA.
        cpu: Repository and tag without CUDA.
        smddp: Whether the container with CUDA has AWS's data-parallel library.
        mpi4py: Whether the container with CUDA has mpi4py, which the mpirun launchers need.
        cuda: CUDA version, major and minor.
        python: Python version, major and minor.
        released: Day of general availability, as YYYY-MM-DD.
        end_of_patch: Day after which AWS no longer patches it, as YYYY-MM-DD.
        absent_in: Regions whose registry does not have it.
    """

    framework: str
    gpu: str
    cpu: str
    smddp: bool
    mpi4py: bool
    cuda: str | None = None
    python: str = ""
    released: str | None = None
    end_of_patch: str | None = None
    absent_in: tuple[str, ...] = ()

    @property
    def sources(self) -> Mapping[str, Source]:
        """The source of each known attribute, by the attribute's name."""
        entry = next(
            entry for entry in load("images")["images"] if entry["framework"] == self.framework
        )
        known = (
            field.name
            for field in dataclasses.fields(self)
            if getattr(self, field.name) is not None
        )
        return {name: sources("images")[entry["sources"][name]] for name in known}


@functools.cache
def images() -> tuple[Image, ...]:
    """Return AWS's PyTorch containers, newest first."""
    entries = (
        {**entry, "absent_in": tuple(entry["absent_in"])} for entry in load("images")["images"]
    )
    return tuple(
        Image(**{key: value for key, value in entry.items() if key != "sources"})
        for entry in entries
    )


def newer_image(version: str) -> Image | None:
    """Return the likely container of a PyTorch version that is newer than the catalog, or None if it is not newer.

    Its tags are those of the newest container with the other version, because AWS kept their form since 2.11.
    """
    newest = images()[0]
    major, minor = newest.framework.split(".")
    wanted = re.fullmatch(r"(\d+)\.(\d+)", version)
    if wanted is None or wanted[1] != major or int(wanted[2]) <= int(minor):
        return None
    gpu, cpu = (
        tag.replace(f":{newest.framework}-", f":{version}-") for tag in (newest.gpu, newest.cpu)
    )
    return dataclasses.replace(
        newest, framework=version, gpu=gpu, cpu=cpu, released=None, end_of_patch=None
    )


@functools.cache
def image_regions() -> tuple[str, ...]:
    """Return the regions with a registry of AWS's containers."""
    return tuple(load("images")["registries"])


def find_image(uri: str) -> Image | None:
    """Return AWS's container with this URI, or None for any other image."""
    name = uri.rpartition("/")[2]
    return next((image for image in images() if name in (image.gpu, image.cpu)), None)


def image_uri(image: Image, *, region: str, gpu: bool) -> str:
    """Return the image URI of a container in one of `image_regions()`."""
    account = load("images")["registries"][region]
    domain = service_limits.dns_suffix(region)
    name = image.gpu if gpu else image.cpu
    return f"{account}.dkr.ecr.{region}.{domain}/{name}"
