"""Commands that install packages into the environment of this interpreter."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.strict_json import load_json

if TYPE_CHECKING:
    from importlib.metadata import Distribution

MODULES_OF_LOCAL_RUNS = ("torch", "psutil", "numpy")
"""What local runs import of the extra `local`."""
_NAME = "cloudtrain"
_ORIGIN_FILE = "direct_url.json"
"""Where installers record what they have installed, unless it came from an index:
https://packaging.python.org/en/latest/specifications/direct-url/"""
_REQUIREMENT_OF_EXTRA = re.compile(
    r"(?P<requirement>[^;]+);\s*extra\s*==\s*['\"](?P<extra>[^'\"]+)"
)


def install_command(*extras: str, distribution: Distribution | None = None) -> str:
    """Return the command that installs extras of cloudtrain beside it, from where it was installed itself.

    Args:
        extras: Names of extras, such as `local`.
        distribution: The installed distribution; by default that of this interpreter.
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import distribution as find_distribution

    try:
        found = distribution or find_distribution(_NAME)
    except PackageNotFoundError:
        # The source tree is on the path, and nothing is installed.
        return pip_install(f"{_NAME}[{','.join(extras)}]")
    return pip_install(*_requirements(found, extras))


def is_installed(module: str) -> bool:
    """Return whether a top-level module can be imported, without its import."""
    return importlib.util.find_spec(module) is not None


def pip_install(*arguments: str) -> str:
    """Return the command by which pip installs into the environment of this interpreter."""
    if importlib.util.find_spec("pip") is None:
        # Environments that uv has made have no pip.
        if shutil.which("uv") is not None:
            return shlex.join(["uv", "pip", "install", "--python", sys.executable, *arguments])
        ensure = shlex.join([sys.executable, "-m", "ensurepip"])
        return f"{ensure} && {shlex.join([sys.executable, '-m', 'pip', 'install', *arguments])}"
    on_path = shutil.which("pip")
    if on_path is not None and Path(on_path).parent == Path(sys.executable).parent:
        return shlex.join(["pip", "install", *arguments])
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def _requirements(distribution: Distribution, extras: tuple[str, ...]) -> list[str]:
    """Return pip's arguments that install extras of a distribution."""
    named = f"[{','.join(extras)}]"
    origin = _read_origin(distribution)
    url = origin.get("url")
    if not isinstance(url, str):
        return [f"{_NAME}{named}"]
    if url.startswith("file:"):
        path = path_of(url)
        if (path / "pyproject.toml").is_file() and _is_editable(origin):
            return ["-e", f"{path}{named}"]
        if path.is_file() or (path / "pyproject.toml").is_file():
            return [f"{path}{named}"]
        # The folder or wheel was deleted, and an index need not have cloudtrain; it has what the extras consist of.
        return sorted(set(_packages_of(distribution, extras)))
    commit = origin.get("vcs_info")
    if isinstance(commit, dict):
        return [f"{_NAME}{named} @ {commit.get('vcs')}+{url}@{commit.get('commit_id')}"]
    return [f"{_NAME}{named} @ {url}"]


def _read_origin(distribution: Distribution) -> Mapping[str, Any]:
    """Return what the installer has recorded, or nothing."""
    try:
        origin = load_json(distribution.read_text(_ORIGIN_FILE) or "{}")
    except (OSError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}


def _is_editable(origin: Mapping[str, Any]) -> bool:
    folder = origin.get("dir_info")
    return isinstance(folder, dict) and folder.get("editable") is True


def _packages_of(distribution: Distribution, extras: tuple[str, ...]) -> Iterator[str]:
    for text in distribution.requires or ():
        found = _REQUIREMENT_OF_EXTRA.match(text)
        if found is not None and found["extra"] in extras:
            yield found["requirement"].strip()
