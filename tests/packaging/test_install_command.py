"""The command that a hint gives for a missing package works for this installation, also of a clone or a wheel."""

import importlib.metadata
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import REPOSITORY

from cloudtrain.support import installation
from cloudtrain.support.installation import install_command

OFFLINE = ("--dry-run", "--no-index", "--no-build-isolation")
"""Everything that the extra `local` needs is installed, so pip resolves it without an index."""


@pytest.fixture
def installed(tmp_path: Path) -> tuple[importlib.metadata.Distribution, Path]:
    """Build a wheel and install it into a folder; return its distribution and the wheel."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([*pip, *build, str(REPOSITORY)], check=True)
    wheel = next(tmp_path.glob("*.whl"))
    target = tmp_path / "site"
    install = ["install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run([*pip, *install], check=True)
    return importlib.metadata.Distribution.at(next(target.glob("*.dist-info"))), wheel


def test_the_command_of_this_installation_resolves() -> None:
    command = shlex.split(install_command("local"))
    assert command[-1] == f"{REPOSITORY}[local]"
    done = subprocess.run([*command, *OFFLINE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_of_a_wheel_resolves(
    installed: tuple[importlib.metadata.Distribution, Path],
) -> None:
    distribution, wheel = installed
    command = shlex.split(install_command("local", distribution=distribution))
    assert command[-1] == f"{wheel}[local]"
    done = subprocess.run([*command, *OFFLINE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_the_wheel_the_packages_are_named(
    installed: tuple[importlib.metadata.Distribution, Path],
) -> None:
    distribution, wheel = installed
    wheel.unlink()
    command = shlex.split(install_command("local", "examples", distribution=distribution))
    assert sorted(command[-4:]) == ["numpy>=1.26", "psutil>=5.9", "scikit-learn>=1.5", "torch>=2.5"]
    done = subprocess.run([*command, *OFFLINE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "cloudtrain[serve,local]"),
        ({"url": "https://host/c.whl", "archive_info": {}}, "cloudtrain[serve,local] @ https://host/c.whl"),
        (
            {
                "url": "https://host/c.git",
                "vcs_info": {"vcs": "git", "commit_id": "0a1b", "requested_revision": "main"},
            },
            "cloudtrain[serve,local] @ git+https://host/c.git@0a1b",
        ),
        ("not JSON", "cloudtrain[serve,local]"),
        (["a list"], "cloudtrain[serve,local]"),
        ({"url": 5}, "cloudtrain[serve,local]"),
        ({"url": "https://host/c.git", "vcs_info": 1}, "cloudtrain[serve,local] @ https://host/c.git"),
    ],
)  # fmt: skip
def test_other_origins_have_their_own_form(origin: object, expected: str, tmp_path: Path) -> None:
    folder = tmp_path / "cloudtrain-1.dist-info"
    folder.mkdir()
    if origin is not None:
        text = origin if isinstance(origin, str) else json.dumps(origin)
        (folder / "direct_url.json").write_text(text)
    found = importlib.metadata.Distribution.at(folder)
    assert shlex.split(install_command("serve", "local", distribution=found))[-1] == expected


def test_an_editable_clone_stays_editable(tmp_path: Path) -> None:
    clone, folder = tmp_path / "a clone", tmp_path / "cloudtrain-1.dist-info"
    clone.mkdir()
    folder.mkdir()
    (clone / "pyproject.toml").touch()
    origin = {"url": clone.as_uri(), "dir_info": {"editable": True}}
    (folder / "direct_url.json").write_text(json.dumps(origin))
    command = install_command("local", distribution=importlib.metadata.Distribution.at(folder))
    assert shlex.split(command)[-2:] == ["-e", f"{clone}[local]"]


def test_pip_is_that_of_this_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of an activated environment `pip` is enough; another one on PATH would install elsewhere."""
    other = tmp_path / "pip"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    by_path = [sys.executable, "-m", "pip", "install"]
    assert shlex.split(install_command("local"))[:4] == by_path
    monkeypatch.setattr(installation.sys, "executable", str(tmp_path / "python"))
    assert install_command("local").startswith("pip install ")


def test_without_pip_uv_or_ensurepip_is_named(tmp_path: Path) -> None:
    """An environment that uv has made has no pip."""
    program = "from cloudtrain.support.installation import install_command; print(install_command('sweep'))"
    hide = (
        "import importlib.machinery as m; real = m.PathFinder.find_spec; "
        "m.PathFinder.find_spec = lambda name, *more: None if name == 'pip' else real(name, *more); "
    )
    found = {}
    for name in ("without", "with"):
        (tmp_path / name).mkdir()
    uv = tmp_path / "with" / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    for name in ("without", "with"):
        done = subprocess.run(
            [sys.executable, "-c", hide + program],
            env={"PATH": str(tmp_path / name)},
            capture_output=True,
            text=True,
            check=True,
        )
        found[name] = done.stdout.strip()
    python = shlex.quote(sys.executable)
    assert found["with"].startswith(f"uv pip install --python {python} ")
    assert found["without"].startswith(f"{python} -m ensurepip && {python} -m pip install ")
    assert shutil.which("uv", path=str(tmp_path / "without")) is None
