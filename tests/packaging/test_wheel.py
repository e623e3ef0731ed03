"""The wheel that users install, as opposed to the source folders."""

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.jobs import REPOSITORY

import cloudtrain
import cloudtrain_runtime

pytestmark = pytest.mark.promise


def test_the_tests_run_on_the_installed_wheel() -> None:
    for package in (cloudtrain, cloudtrain_runtime):
        assert "site-packages" in str(package.__file__)
        assert not str(package.__file__).startswith(str(REPOSITORY / "sdk"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        str(folder),
    ]
    subprocess.run([*command, str(REPOSITORY)], check=True)
    return zipfile.Path(next(folder.glob("*.whl")))


def test_it_holds_both_packages_and_their_data(wheel: zipfile.Path) -> None:
    assert {path.name for path in wheel.iterdir()} == {
        "cloudtrain",
        "cloudtrain_runtime",
        f"cloudtrain-{cloudtrain.__version__}.dist-info",
    }
    for package in ("sdk/cloudtrain", "entrypoints/cloudtrain_runtime"):
        for source in (REPOSITORY / package).rglob("*"):
            if source.is_file() and "__pycache__" not in source.parts:
                name = f"{Path(package).name}/{source.relative_to(REPOSITORY / package).as_posix()}"
                assert wheel.joinpath(*name.split("/")).exists(), name


def test_the_version_is_one() -> None:
    assert importlib.metadata.version("cloudtrain") == cloudtrain.__version__


def test_installed_files_equal_this_tree() -> None:
    """Otherwise the tests run on older code."""
    for package, module in (
        ("sdk/cloudtrain", cloudtrain),
        ("entrypoints/cloudtrain_runtime", cloudtrain_runtime),
    ):
        installed = Path(str(module.__file__)).parent
        for source in (REPOSITORY / package).rglob("*.py"):
            assert (
                installed / source.relative_to(REPOSITORY / package)
            ).read_bytes() == source.read_bytes(), source


def test_core_dependencies_are_the_promised_ones() -> None:
    requirements = importlib.metadata.requires("cloudtrain") or []
    core = {line.split(">")[0].split("<")[0] for line in requirements if "extra ==" not in line}
    assert core == {"boto3", "click", "pathspec", "pydantic", "pyyaml", "rich", "tomlkit"}
