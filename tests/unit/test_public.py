import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import cloudtrain
import cloudtrain_runtime
from cloudtrain.settings.settings import profile_file

PUBLIC_MODULES = {
    "checkpoint"
}  # `from cloudtrain_runtime import checkpoint` gives the package itself
REPOSITORY = Path(__file__).parent.parent.parent
HEAVY = ("torch", "sagemaker", "boto3", "botocore", "moto", "numpy")


def imported_by(*arguments: str) -> tuple[int, set[str]]:
    """Run the command line in a separate process; return its exit code and the modules that it imported."""
    program = (
        "import sys; from cloudtrain.cli import run; code = run(sys.argv[1:]); "
        "print('\\n'.join(sys.modules), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    return done.returncode, {name.partition(".")[0] for name in done.stderr.splitlines()}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["validate", "examples/digits/job.yaml"],
        ["plan", "examples/digits/job.yaml", "--json"],
        ["plan", "examples/digits/job.yaml", "--local"],
        ["files", "examples/digits/job.yaml"],
        ["list", "--local"],
        ["prices"],
        ["configure", "--show"],
        ["configure", "--set", "bucket=my-bucket", "--offline"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_offline_commands_import_no_heavy_module(arguments: list[str]) -> None:
    code, modules = imported_by(*arguments)
    assert code == 0
    assert "cloudtrain" in modules
    assert modules.isdisjoint(HEAVY)
    assert "rich" not in modules


def test_help_imports_no_pydantic() -> None:
    assert imported_by("--help")[1].isdisjoint({"pydantic", "yaml", "rich"})


def test_only_an_edit_of_settings_imports_tomlkit() -> None:
    file = profile_file(os.environ)
    file.parent.mkdir(parents=True)
    file.write_text("bucket = 'one'\n")
    for arguments in (
        ["plan", "examples/digits/job.yaml"],
        ["configure", "--show"],
        ["configure", "--list"],
    ):
        assert "tomlkit" not in imported_by(*arguments)[1], arguments
    assert "tomlkit" in imported_by("configure", "--set", "region=us-west-2", "--offline")[1]


def test_importing_the_package_imports_nothing_else() -> None:
    program = "import sys, cloudtrain; print(sorted(m for m in sys.modules if m.startswith(('cloudtrain', 'pydantic'))))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['cloudtrain']"


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


def test_the_heartbeat_has_its_name_of_version_0_1_too() -> None:
    assert cloudtrain_runtime.watch is cloudtrain_runtime.heartbeat
