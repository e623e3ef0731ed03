"""Python packages of AWS's containers, and names of packages and of the modules that they provide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cloudtrain.catalog.images import Image
from cloudtrain.catalog.source import Source, load, sources
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_SEPARATORS = lazy_pattern(r"[-_.]+")
_FIRST_WHEELS = {
    "3.12": {"numpy": "1.26.0", "pandas": "2.1.1", "scikit-learn": "1.3.1", "scipy": "1.11.2"},
    "3.13": {"numpy": "2.1.0", "pandas": "2.2.3", "scikit-learn": "1.5.2", "scipy": "1.14.1"},
}
"""By version of Python, the first releases with a wheel for Linux on x86-64 on PyPI. Older ones are compiled by pip.

Source: the files of each release on PyPI, 2026-11-29."""


@dataclass(frozen=True)
class PackageList:
    """Packages of a container.

    Attributes:
        names: Those that it is known to have, in normalised form.
        is_complete: Whether it has no others.
        absent: Those that it is known not to have, besides all others of a complete list.
        source: Where AWS publishes the list.
    """

    names: frozenset[str]
    is_complete: bool
    source: Source
    absent: frozenset[str] = frozenset()

    def surely_lacks(self, package: str) -> bool:
        """Return whether the container is known not to have a package."""
        return package in self.absent or (self.is_complete and package not in self.names)


def normalized(package: str) -> str:
    """Return a package's name as package indexes compare it: `PyTorch_Lightning` is `pytorch-lightning`."""
    return _SEPARATORS.sub("-", package).lower()


def image_packages(image: Image, *, gpu: bool) -> PackageList:
    """Return the packages of a container of `images()`, with CUDA or without."""
    entry = next(
        each for each in load("packages")["lists"] if image.framework in each["frameworks"]
    )
    return PackageList(
        names=frozenset((*entry["packages"], *entry["gpu" if gpu else "cpu"])),
        is_complete=entry["is_complete"],
        source=sources("packages")[entry["source"]],
        absent=frozenset(entry.get("absent", ())),
    )


def first_wheel(package: str, python: str) -> str | None:
    """Return the first release of a package with a wheel for a version of Python; None where it is not known.

    Args:
        package: Name in normalised form.
        python: Version of Python, major and minor.
    """
    return _FIRST_WHEELS.get(python, {}).get(package)


def packages_of(module: str) -> tuple[str, ...]:
    """Return the packages that provide a module, the usual one first; empty for one that no index has.

    Args:
        module: Name of a top-level module, or of a module of a namespace package, such as `google.protobuf`.
    """
    known = load("packages")["modules"].get(module)
    if known is None:
        # Most packages have the name of their module.
        return (normalized(module),)
    return tuple(known)


def known_package_of(module: str) -> str | None:
    """Return the package that provides a module, if it is known what pip installs with it."""
    return next(filter(is_known_package, packages_of(module)), None)


def installed_with(packages: Iterable[str]) -> frozenset[str]:
    """Return the packages that pip is known to install with these, which it installs itself."""
    brings = load("packages")["brings"]
    return frozenset(name for each in packages for name in brings.get(each, ()))


def is_known_package(package: str) -> bool:
    """Return whether it is known what pip installs with a package."""
    if package in load("packages")["brings"]:
        return True
    # What pip installs with a package of an image is in the image, too.
    lists = load("packages")["lists"]
    return any(package in each[kind] for each in lists for kind in ("packages", "gpu", "cpu"))
