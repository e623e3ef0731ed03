"""Checks of the packages that a job's code needs, against those of its container and its requirements."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from cloudtrain import catalog
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.requirements import Requirements, excludes_from, rejects
from cloudtrain.job.spec import JobSpec
from cloudtrain.job.standard_library import STANDARD_LIBRARY
from cloudtrain.job.static_analysis.module_search import entry_file, may_be_installed
from cloudtrain.planning.diagnostics import decision, error, warning
from cloudtrain.planning.plan import CodeInfo
from cloudtrain.planning.tracking import wandb_mode
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_MLFLOW_PLUGIN = "sagemaker-mlflow"
_MOST_NAMED = 3
_PACKAGE = lazy_pattern(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def warn_about_packages(spec: JobSpec, code: CodeInfo, image_uri: str) -> Iterator[Diagnostic]:
    """Warn about packages that the code certainly needs and that neither AWS's image nor code.requirements has.

    Where it is not known, because AWS publishes no complete list of the image's packages, or the requirements may bring
    others, the plan says that instead.
    """
    image = catalog.find_image(image_uri)
    if image is None:
        return
    listed = catalog.image_packages(image, gpu=image_uri.endswith(image.gpu))
    required = code.requirements.names
    has = {*listed.names, *(required or ())}
    if not any(_imported(code, has)) and all(name in has for name, _ in _wanted(spec)):
        return
    brought, unknown = _packages_below(required or frozenset())
    undescribed = (*unknown, *code.requirements.extras)
    has |= brought
    missing = {name: place for name, place in _wanted(spec) if name not in has}
    for name, place in _imported(code, has):
        missing.setdefault(name, place)
    if not missing:
        return
    if required is None or undescribed:
        yield _describe_doubt(missing, spec, undescribed, image.framework)
        return
    sure = {name: place for name, place in missing.items() if listed.surely_lacks(name)}
    if sure:
        yield warning(_describe(sure, spec, image.framework))
    unsure = {name: place for name, place in missing.items() if name not in sure}
    if unsure:
        yield decision(
            f"{_listing(unsure)}: AWS publishes no complete list of the packages in the image of PyTorch "
            f"{image.framework}; code.requirements makes sure of them"
        )


def _imported(code: CodeInfo, has: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the packages that the code imports and that are not there, each with the place."""
    for module, place in code.conventions.imports:
        packages = catalog.packages_of(module)
        # A module of a namespace may be in a package whose name has a suffix, such as nvidia-cudnn-cu13.
        similar = has if "." in module else code.requirements.names or ()
        if any(each in has for each in packages) or _is_part(module, similar):
            continue
        yield packages[0] if packages else module, place


@functools.lru_cache
def _packages_below(names: frozenset[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return what pip installs with packages, and those of which this is unknown.

    It is read from the catalog and from the records of the packages that are installed here, which takes a millisecond
    for each. No package is imported.
    """
    # The import takes as long as a tenth of a plan.
    from importlib import metadata

    brought = set(catalog.installed_with(names))
    undescribed = []
    for name in sorted(names):
        seen = {name}
        waiting = [name]
        while waiting:
            each = waiting.pop()
            try:
                needed = metadata.requires(each) or []
            except (metadata.PackageNotFoundError, ValueError, OSError):
                if each == name and not catalog.is_known_package(name):
                    undescribed.append(name)
                continue
            found = {
                catalog.normalized(match[0])
                for line in needed
                if "extra ==" not in line and (match := _PACKAGE.match(line))
            }
            waiting += found - seen
            seen |= found
        brought |= seen
    return frozenset(brought), tuple(undescribed)


def _listing(packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({place})" for name, place in sorted(packages.items()))


def _describe_doubt(
    missing: Mapping[str, str], spec: JobSpec, undescribed: Sequence[str], framework: str
) -> Diagnostic:
    """Return a note about packages that the requirements may bring without naming them.

    `undescribed` are the packages in them of which it is unknown what pip installs with them; without any, the
    requirements have lines without a name.
    """
    file = spec.code.requirements
    start = f"{_listing(missing)}: not in AWS's image of PyTorch {framework}"
    if not undescribed:
        return decision(
            f"{start}, and {file} has lines without a name of a package, so that it is unknown whether it brings them"
        )
    several = ", ".join(undescribed[:_MOST_NAMED])
    if len(undescribed) > _MOST_NAMED:
        several += " and others"
    return decision(
        f"{start}, and not named in {file}. It is unknown here what pip installs with {several}; if not these, add them "
        f"to {file}"
    )


def _describe(missing: Mapping[str, str], spec: JobSpec, framework: str) -> str:
    verb, them = ("are", "them") if len(missing) > 1 else ("is", "it")
    file = spec.code.requirements
    fix = f"name {them} in a file, and the file in code.requirements"
    if file:
        fix = f"add {them} to {file}"
    return (
        f"{_listing(missing)} {verb} needed, and neither in AWS's image of PyTorch {framework} nor in "
        f"code.requirements: {fix}"
    )


def _wanted(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the packages that features of the job need, each with the field."""
    if spec.train is not None and spec.tracking.tensorboard:
        yield "tensorboard", "tracking.tensorboard"
    if wandb_mode(spec):
        yield "wandb", "tracking.wandb"
    if spec.train is not None and (spec.train.init_from or "").endswith(".safetensors"):
        yield "safetensors", "train.init_from"


def _is_part(module: str, required: Iterable[str]) -> bool:
    """Return whether a required package's name contains that of a module, as `umap-learn` does that of `umap`."""
    packages = catalog.packages_of(module)
    name = packages[0] if packages else module
    return any(name in each or module.lower() in each for each in required)


def warn_about_mlflow(
    spec: JobSpec, requirements: Requirements, image_uri: str
) -> Iterator[Diagnostic]:
    """Warn where the container may lack the package by which a SageMaker MLflow server is reached."""
    if not (spec.tracking.mlflow or "").startswith("arn:"):
        return
    image = catalog.find_image(image_uri)
    has = {line.name for line in requirements.lines}
    if image is not None:
        has |= catalog.image_packages(image, gpu=image_uri.endswith(image.gpu)).names
    if _MLFLOW_PLUGIN not in has:
        yield warning(
            f"tracking.mlflow: the image needs {_MLFLOW_PLUGIN}: add it to code.requirements"
        )


def warn_about_torch(requirements: Requirements, image_uri: str) -> Iterator[Diagnostic]:
    """Warn about requirements that replace the PyTorch of AWS's image."""
    image = catalog.find_image(image_uri)
    if image is None:
        return
    major, minor = map(int, image.framework.split("."))
    for line in requirements.lines:
        if line.name != "torch" or line.is_conditional or not rejects(line.versions, major, minor):
            continue
        wanted = [
            each.framework
            for each in catalog.images()
            if not rejects(line.versions, *map(int, each.framework.split(".")))
        ]
        fix = "remove the line to use the image's"
        if wanted:
            fix = f'use the image that has it, cluster.framework: "{wanted[0]}"'
        yield warning(
            f"{line.place}: {line.text} replaces PyTorch {image.framework} of AWS's image, for which its other packages "
            f"and its network libraries were built: {fix}"
        )


def warn_about_wheels(requirements: Requirements, image_uri: str) -> Iterator[Diagnostic]:
    """Warn about pinned releases that have no wheel for the Python of AWS's image, so that pip compiles them."""
    image = catalog.find_image(image_uri)
    if image is None:
        return
    for line in requirements.lines:
        first = catalog.first_wheel(line.name or "", image.python)
        if first is None or line.is_conditional or not excludes_from(line.versions, first):
            continue
        yield warning(
            f"{line.place}: {line.text}: PyPI has no wheel of it for Python {image.python} of AWS's image, so pip compiles "
            f"it before the start, which often fails. The first release with one is {line.name}=={first}"
        )


def check_installed_module(spec: JobSpec, image_uri: str) -> Iterator[Diagnostic]:
    """Reject a module that is neither in the code folder nor in AWS's image, where no requirements can bring it."""
    module = spec.code.module
    image = catalog.find_image(image_uri)
    if module is None or image is None or spec.code.requirements is not None:
        return
    top = module.partition(".")[0]
    if entry_file(spec) is not None or top in STANDARD_LIBRARY:
        return
    if not may_be_installed(module, spec.code_directory):
        # Already reported, with the names that are similar.
        return
    listed = catalog.image_packages(image, gpu=image_uri.endswith(image.gpu))
    packages = catalog.packages_of(top)
    if not listed.names.isdisjoint(packages):
        return
    package = packages[0] if packages else top
    hint = f"name {package} in code.requirements"
    if listed.is_complete:
        message = f"neither the code folder nor AWS's image of PyTorch {image.framework} has {top}"
        yield error(("code", "module"), message, hint)
    else:
        yield decision(
            f"code.module: it is unknown whether AWS's image of PyTorch {image.framework} has {top}: {hint}"
        )
