import ast
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import cloudtrain
import cloudtrain_runtime
from cloudtrain.features.rehearsal.report import REQUIRED, judge
from cloudtrain.support.checks import failed, passed

PUBLIC_MODULES = {
    "checkpoint"
}  # `from cloudtrain_runtime import checkpoint` gives the package itself
REPOSITORY = Path(__file__).parent.parent.parent


def test_every_public_name_can_be_imported() -> None:
    for name in cloudtrain.__all__:
        assert getattr(cloudtrain, name) is not None, name
    assert dir(cloudtrain) == sorted(cloudtrain.__all__)
    with pytest.raises(AttributeError):
        cloudtrain.nonsense  # noqa: B018


def test_type_checkers_see_the_public_names() -> None:
    source = (REPOSITORY / "sdk" / "cloudtrain" / "__init__.py").read_text()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    typed = {
        alias.asname: node.module
        for node in imports
        for alias in node.names
        if alias.asname is not None
    }
    assert sorted(typed) == cloudtrain.__all__
    for name, module in typed.items():
        assert getattr(importlib.import_module(str(module)), name) is getattr(cloudtrain, name), (
            name
        )


@pytest.mark.parametrize("package", [cloudtrain, cloudtrain_runtime])
def test_no_public_name_is_also_a_submodule(package: ModuleType) -> None:
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules.isdisjoint(set(package.__all__) - PUBLIC_MODULES)


@pytest.mark.parametrize("package", [cloudtrain, cloudtrain_runtime])
def test_packages_have_few_top_level_modules(package: ModuleType) -> None:
    most = {"cloudtrain": 20, "cloudtrain_runtime": 15}[package.__name__]
    assert (
        len(
            [
                module
                for module in pkgutil.iter_modules(package.__path__)
                if module.name != "__main__"
            ]
        )
        <= most
    )


@pytest.mark.parametrize("name", cloudtrain_runtime.__all__)
def test_every_public_name_of_the_runtime_exists(name: str) -> None:
    pytest.importorskip("torch")
    assert getattr(cloudtrain_runtime, name) is not None


def test_checks_and_rehearsals_have_one_result() -> None:
    assert failed("role", "missing").result is cloudtrain.Result.FAIL is cloudtrain.Result.FAILED
    rehearsed = judge([passed(name, "") for name in REQUIRED])
    assert rehearsed is cloudtrain.Result.PASS is cloudtrain.Result.PROVEN


def test_the_heartbeat_has_its_name_of_version_0_1_too() -> None:
    assert cloudtrain_runtime.watch is cloudtrain_runtime.heartbeat
