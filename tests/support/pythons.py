"""Other Pythons of this machine, each with an environment that has the core dependencies only.

`python -m support.pythons FOLDER WHEEL` builds the environments, which needs the package index. The tests of
tests/packaging/test_pythons.py use them. What pytest needs is in a folder beside each environment.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENTS = REPOSITORY / ".venv-pythons"
OLDEST = (3, 11)
_TOOLS = ("certifi", "hypothesis", "jsonschema", "psutil", "pytest", "pytest-timeout")
_NEWEST_MINOR = 30
"""The search for `python3.N` ends here."""
_VERSION = "import sys, venv; print(*sys.version_info[:2], sys.executable)"


def other_pythons() -> dict[str, Path]:
    """Return the interpreters that cloudtrain supports, by version such as `3.13`, without this process's own.

    They are `python3.N` on PATH and the interpreters of pyenv. A pyenv version that is installed but not selected has
    a program on PATH that only fails, and a Python without `venv` builds no environment: both are left out.
    """
    found: dict[str, Path] = {}
    for candidate in _candidates():
        asked = subprocess.run(
            [candidate, "-Ic", _VERSION], capture_output=True, text=True, check=False
        )
        if asked.returncode != 0:
            continue
        major, minor, executable = asked.stdout.split(maxsplit=2)
        version = (int(major), int(minor))
        if version >= OLDEST and version != sys.version_info[:2]:
            found.setdefault(f"{major}.{minor}", Path(executable.strip()))
    return dict(sorted(found.items()))


def _candidates() -> list[Path]:
    names = [f"python3.{minor}" for minor in range(OLDEST[1], _NEWEST_MINOR)]
    on_path = [Path(path) for name in names if (path := shutil.which(name))]
    # Not Path.home(): tests have a home folder of their own.
    pyenv = Path(pwd.getpwuid(os.getuid()).pw_dir, ".pyenv", "versions")
    return [*on_path, *sorted(pyenv.glob("3.*/bin/python"))]


def tools_of(environment: Path) -> Path:
    """Return the folder with the packages that the unit tests need besides cloudtrain's."""
    return environment.with_name(f"{environment.name}-tools")


def build(folder: Path, wheel: Path) -> None:
    """Build an environment for each other Python, or replace cloudtrain in the existing one.

    Where the index has no packages for a Python, its environment is missing afterwards, and its test says so.

    Args:
        folder: Where to; one folder per version is created.
        wheel: The wheel of cloudtrain.
    """
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor() as pool:
        builds = [
            pool.submit(_build_one, folder / version, python, wheel)
            for version, python in other_pythons().items()
        ]
    for build_of_one in builds:
        build_of_one.result()  # raises its error


def _build_one(environment: Path, python: Path, wheel: Path) -> None:
    if not (environment / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", "--without-pip", environment], check=True)
    # This environment's pip installs into the other one, which saves it the installation of its own.
    pip = [sys.executable, "-m", "pip", "--python", environment, "--quiet"]
    constraints = ["--constraint", REPOSITORY / "constraints.txt"]
    steps = [
        [*pip, "install", "--no-compile", *constraints, wheel],
        [*pip, "install", "--no-compile", "--no-deps", "--force-reinstall", wheel],
    ]
    tools = tools_of(environment)
    if not tools.exists():
        steps.append([*pip, "install", "--no-compile", *constraints, "--target", tools, *_TOOLS])
    if any(subprocess.run(step, check=False).returncode != 0 for step in steps):
        shutil.rmtree(environment)
        shutil.rmtree(tools, ignore_errors=True)


if __name__ == "__main__":
    _, target, built = sys.argv
    build(Path(target), Path(built))
