"""`make release`: the same bytes on each machine, nothing else in them, and a refusal that says what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.jobs import REPOSITORY

PROGRAM = Path(__file__).with_name("release.py")
VENDOR = REPOSITORY / "sdk" / "cloudtrain" / "features" / "dashboard" / "static" / "vendor"
FOREIGN = (
    "shared/tests/notes.md",
    "notes/docs/page.md",
    ".venv/lib/sdk/module.py",
    ".cloudtrain/runs/one/run.json",
    "build/lib/tests/test_one.py",
    "docs/_build/html/index.html",
    "sdk/cloudtrain/__pycache__/cli.cpython-311.pyc",
    "sdk/cloudtrain.egg-info/PKG-INFO",
)
"""Files of a working folder that are no part of a release."""


def build(folder: Path, out: Path, *, umask: int = 0o022, **environ: str) -> tuple[Path, Path]:
    """Build sdist and wheel of a folder as `make release` does; return their paths."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    kept = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    subprocess.run(
        command, cwd=folder, env=kept | environ, umask=umask, check=True, capture_output=True
    )
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(REPOSITORY, tmp_path_factory.mktemp("built"))


def test_two_builds_are_equal_byte_for_byte(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The second is of the sdist, in another folder, by a user with another umask and time zone."""
    tree = unpack(built[0], tmp_path / "elsewhere")
    for path in tree.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(path.stat().st_mode & 0o700)
    again = build(tree, tmp_path / "again", umask=0o077, TZ="Asia/Kathmandu", HOME=str(tmp_path))
    assert [path.name for path in again] == [path.name for path in built]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]


def test_the_sdist_has_only_files_of_the_project(built: tuple[Path, Path], tmp_path: Path) -> None:
    tree = unpack(built[0], tmp_path / "tree")
    before = {path.relative_to(tree) for path in tree.rglob("*") if path.is_file()}
    for name in FOREIGN:
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("foreign\n")
    sdist, wheel = build(tree, tmp_path / "out")
    assert sdist.read_bytes() == built[0].read_bytes()
    assert wheel.read_bytes() == built[1].read_bytes()
    assert {Path("Makefile"), Path("constraints.txt"), Path("locks/dev.txt")} <= before


def test_the_wheel_names_what_it_contains_of_others(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = {Path(name).name: name for name in wheel.namelist() if ".dist-info/" in name}
        metadata = wheel.read(names["METADATA"]).decode()
        assert "License-Expression: Apache-2.0 AND MIT\n" in metadata
        assert wheel.read(names["uPlot-LICENSE"]) == (VENDOR / "uPlot-LICENSE").read_bytes()
        bundled = json.loads(wheel.read(names["bundled.cdx.json"]))
    assert ".dist-info/sboms/" in names["bundled.cdx.json"]
    (component,) = bundled["components"]
    assert f"uPlot {component['version']} (MIT" in (VENDOR / "README.md").read_text()
    assert component["licenses"][0]["license"]["id"] == "MIT"


def test_each_vendored_library_has_its_license() -> None:
    """A folder `vendor` is where code of others is, and each library there is in the SBOM."""
    folders = [path for path in REPOSITORY.glob("*/**/vendor") if ".venv" not in str(path)]
    assert folders == [VENDOR]
    libraries = {path.name.partition(".")[0].lower() for path in VENDOR.glob("*.min.*")}
    bundled = json.loads((VENDOR / "bundled.cdx.json").read_text())
    assert {component["name"] for component in bundled["components"]} == libraries
    assert {path.name.lower() for path in VENDOR.glob("*-LICENSE")} == {
        f"{name}-license" for name in libraries
    }


@pytest.fixture
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(tree: Path, *arguments: str) -> None:
    user = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", tree, *user, *arguments], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a checkout that may be released: version 1.2.0."""
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "pyproject.toml").write_text('[project]\nname = "cloudtrain"\nversion = "1.2.0"\n')
    (folder / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\nNothing yet.\n\n## [1.2.0]\n\n- New.\n\n## [1.1.0]\n\n- Old.\n"
    )
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    return folder


def test_a_committed_version_may_be_released(release: ModuleType, tree: Path) -> None:
    assert release.problems_of(tree) == []
    git(tree, "tag", "v1.2.0")
    assert release.problems_of(tree) == []


def _edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(tree: Path) -> None:
        path = tree / name
        path.write_text(path.read_text().replace(old, new))
        git(tree, "commit", "-q", "-a", "-m", "two")

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tree: (tree / "notes.txt").touch(), "not committed: notes.txt; commit or remove"),
        (lambda tree: (tree / "CHANGELOG.md").unlink(), "not committed: CHANGELOG.md"),
        (lambda tree: git(tree, "tag", "v9.0.0"), "this commit has the tag v9.0.0, and"),
        (lambda tree: shutil.rmtree(tree / ".git"), "this folder is no git checkout"),
        (
            _edit("pyproject.toml", "1.2.0", "1.3.0"),
            "pyproject.toml has version 1.3.0, and the newest section of CHANGELOG.md is 1.2.0",
        ),
        (
            _edit("CHANGELOG.md", "Nothing yet.", "- Newer."),
            "CHANGELOG.md has changes under [Unreleased]; move them to the section [1.2.0]",
        ),
    ],
)
def test_another_tree_is_refused(change: Callable[[Path], Any], expected: str, tree: Path) -> None:
    change(tree)
    done = subprocess.run(
        [sys.executable, PROGRAM, "check"], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"make release: {expected}")
    assert "Traceback" not in done.stderr


def test_the_sbom_gets_what_the_wheel_contains(release: ModuleType) -> None:
    document: dict[str, Any] = {
        "metadata": {"component": {"bom-ref": "root"}},
        "components": [{"bom-ref": "click==8"}],
        "dependencies": [{"ref": "root", "dependsOn": ["click==8"]}, {"ref": "click==8"}],
    }
    release.add_bundled(document, {"components": [{"bom-ref": "a-library"}]})
    assert [each["bom-ref"] for each in document["components"]] == ["click==8", "a-library"]
    assert document["dependencies"][0]["dependsOn"] == ["a-library", "click==8"]
