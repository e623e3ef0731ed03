"""AWS's PyTorch containers for SageMaker training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

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

    @property
    def sources(self) -> Mapping[str, Source]:
        """The source of each known attribute, by the attribute's name."""
        entry = next(entry for entry in load("images")["images"] if entry["framework"] == self.framework)
        known = (field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None)
        return {name: sources("images")[entry["sources"][name]] for name in known}


@functools.cache
def images() -> tuple[Image, ...]:
    """Return AWS's PyTorch containers, newest first."""
    return tuple(
        Image(**{key: value for key, value in entry.items() if key != "sources"}) for entry in load("images")["images"]
    )


def image_uri(image: Image, *, region: str, gpu: bool) -> str:
    """Return the image URI of a container in a region."""
    data = load("images")
    account = data["registries"].get(region, data["registry"])
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"{account}.dkr.ecr.{region}.{domain}/{image.gpu if gpu else image.cpu}"
