"""The command that a hint gives installs the extra: each is executed, with an index of empty packages."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.jobs import REPOSITORY
from support.wheels import write_wheel

PROGRAM = (
    "from cloudtrain.support.installation import install_command; print(install_command('local'))"
)
NOTE = "from cloudtrain.support.installation import torch_note; print(torch_note())"
VERSIONS = (
    "import importlib.metadata, json; "
    "print(json.dumps({each.name: each.version for each in importlib.metadata.distributions()}))"
)
NEWEST = {"pydantic": "2.99", "rich": "14.9"}
"""Versions of empty packages that have an upper bound."""
LOCAL = {"torch", "psutil", "numpy"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, *build, str(REPOSITORY)], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an empty package for each that the core and two extras need."""
    folder = tmp_path_factory.mktemp("packages")
    for text in importlib.metadata.requires("cloudtrain") or ():
        requirement = Requirement(text)
        marker = requirement.marker
        extras = ("", "local", "sweep")
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            write_wheel(folder, requirement.name, NEWEST.get(requirement.name, "99"))
    write_wheel(folder, "beside")
    return folder


@pytest.fixture
def environ(packages: Path, tmp_path: Path) -> dict[str, str]:
    return {
        "HOME": str(tmp_path / "home"),
        "PATH": os.defpath,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_FIND_LINKS": str(packages),
        "PIP_NO_INDEX": "1",
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_FIND_LINKS": str(packages),
        "UV_NO_INDEX": "1",
        "UV_OFFLINE": "1",
        "UV_PYTHON": sys.executable,
        "UV_TOOL_BIN_DIR": str(tmp_path / "bin"),
        "UV_TOOL_DIR": str(tmp_path / "tools"),
    }


@pytest.fixture
def uv(environ: dict[str, str]) -> str:
    """Put uv on the PATH: that of `make release`, or the machine's own."""
    found = shutil.which("uv", path=f"{REPOSITORY}/.venv-release/bin:{os.environ['PATH']}")
    if found is None:
        pytest.skip("uv is not installed: make .venv-release/.installed")
    environ["PATH"] = f"{Path(found).parent}:{environ['PATH']}"
    return found


def run(*command: str | Path, environ: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def versions_in(python: Path, environ: Mapping[str, str]) -> dict[str, str]:
    return dict(json.loads(run(python, "-c", VERSIONS, environ=environ)))


def follow_hint(python: Path, environ: Mapping[str, str]) -> str:
    """Execute the command that the hint of an environment gives, and return it."""
    hint = run(python, "-c", PROGRAM, environ=environ).strip()
    run("sh", "-c", hint, environ=environ)
    return hint


def make_environment(folder: Path, environ: dict[str, str]) -> Path:
    run(sys.executable, "-m", "venv", folder, environ=environ)
    return folder / "bin" / "python"


@pytest.mark.usefixtures("uv")
def test_a_tool_of_uv_gets_the_extra(wheel: Path, environ: dict[str, str], tmp_path: Path) -> None:
    run("uv", "tool", "install", f"{wheel}[sweep]", "--with", "beside>=1", environ=environ)
    python = tmp_path / "tools" / "cloudtrain" / "bin" / "python"
    before = versions_in(python, environ).keys()
    hint = follow_hint(python, environ)
    assert shlex.split(hint)[:4] == ["uv", "tool", "install", f"{wheel}[sweep,local]"]
    assert versions_in(python, environ).keys() - before == LOCAL
    assert {"optuna", "beside"} <= before
    # An upgrade removes what uv has not recorded.
    run("uv", "tool", "upgrade", "cloudtrain", environ=environ)
    assert LOCAL | {"optuna", "beside"} <= versions_in(python, environ).keys()


@pytest.mark.usefixtures("uv")
@pytest.mark.parametrize("loss", ["wheel", "receipt"])
def test_a_tool_without_its_source_gets_packages(
    loss: str, wheel: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    copy = tmp_path / wheel.name
    shutil.copyfile(wheel, copy)
    run("uv", "tool", "install", copy, environ=environ)
    python = tmp_path / "tools" / "cloudtrain" / "bin" / "python"
    if loss == "wheel":
        copy.unlink()
    else:
        (tmp_path / "tools" / "cloudtrain" / "uv-receipt.toml").write_text(
            "[tool]\nrequirements = 1\n"
        )
    assert follow_hint(python, environ).startswith("uv pip install --python ")
    assert versions_in(python, environ).keys() >= LOCAL


@pytest.mark.usefixtures("uv")
def test_an_environment_of_uv_gets_the_extra(
    wheel: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    run("uv", "venv", tmp_path / "made", environ=environ)
    python = tmp_path / "made" / "bin" / "python"
    run("uv", "pip", "install", "--python", python, wheel, environ=environ)
    assert follow_hint(python, environ).startswith("uv pip install --python ")
    assert versions_in(python, environ).keys() >= LOCAL


@pytest.mark.parametrize("activated", [False, True])
def test_an_environment_of_pip_gets_the_extra(
    activated: bool, wheel: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    python = make_environment(tmp_path / "made", environ)
    run(python, "-m", "pip", "install", wheel, environ=environ)
    if activated:
        environ["PATH"] = f"{python.parent}:{environ['PATH']}"
    hint = follow_hint(python, environ)
    assert hint.startswith("pip install ") == activated
    assert versions_in(python, environ).keys() >= LOCAL


def test_the_note_of_pip_installs_torch_alone(
    wheel: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    """It names an index, in whose place the test has its folder of packages."""
    python = make_environment(tmp_path / "made", environ)
    run(python, "-m", "pip", "install", wheel, environ=environ)
    before = versions_in(python, environ)
    note = run(python, "-c", NOTE, environ=environ).strip()
    reason, _, command = note.partition(", first: ")
    assert "CUDA's packages, which are gigabytes" in reason
    assert command.endswith(" torch --index-url https://download.pytorch.org/whl/cpu")
    run("sh", "-c", command, environ=environ)
    assert versions_in(python, environ).keys() - before.keys() == {"torch"}
    # Whoever has a PyTorch is not told to get another one.
    assert run(python, "-c", NOTE, environ=environ).strip() == "None"


@pytest.mark.usefixtures("uv")
def test_the_note_of_uv_ends_its_command(
    wheel: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    run("uv", "tool", "install", wheel, environ=environ)
    python = tmp_path / "tools" / "cloudtrain" / "bin" / "python"
    hint = run(python, "-c", PROGRAM, environ=environ).strip()
    note = run(python, "-c", NOTE, environ=environ).strip()
    added = note.partition(", add ")[2]
    assert added == "--torch-backend cpu"
    run("sh", "-c", f"{hint} {added}", environ=environ)
    assert versions_in(python, environ).keys() >= LOCAL


def test_an_environment_without_pip_gets_the_extra(
    wheel: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    python = make_environment(tmp_path / "made", environ)
    run(python, "-m", "pip", "install", wheel, environ=environ)
    run(python, "-m", "pip", "uninstall", "--yes", "pip", environ=environ)
    assert " -m ensurepip && " in follow_hint(python, environ)
    assert versions_in(python, environ).keys() >= LOCAL


def test_the_pip_of_a_package_from_an_index_gets_it(
    wheel: Path, packages: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    index = tmp_path / "index"
    shutil.copytree(packages, index)
    shutil.copy(wheel, index)
    environ["PIP_FIND_LINKS"] = str(index)
    python = make_environment(tmp_path / "made", environ)
    run(python, "-m", "pip", "install", "cloudtrain", environ=environ)
    assert follow_hint(python, environ).endswith(" 'cloudtrain[local]'")
    assert versions_in(python, environ).keys() >= LOCAL


def test_a_managed_python_is_installed_into_on_request(
    wheel: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    """There pip refuses to install without the option with which cloudtrain was installed."""
    python = make_environment(tmp_path / "made", environ)
    run(python, "-m", "pip", "install", wheel, environ=environ)
    marker = tmp_path / "stdlib" / "EXTERNALLY-MANAGED"
    marker.parent.mkdir()
    marker.touch()
    as_system = (
        "import sys, sysconfig; sys.base_prefix = sys.prefix; "
        f"sysconfig.get_path = lambda name: {str(marker.parent)!r}; "
    )
    hint = run(python, "-c", as_system + PROGRAM, environ=environ).strip()
    assert " -m pip install --break-system-packages " in hint
    run("sh", "-c", hint, environ=environ)
    assert versions_in(python, environ).keys() >= LOCAL
