"""Commands that install packages into the environment of this interpreter."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import MissingExtraError
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.strict_json import load_json

if TYPE_CHECKING:
    from importlib.metadata import Distribution

MODULES_OF_LOCAL_RUNS = ("torch", "psutil", "numpy")
"""What local runs import of the extra `local`."""
_NAME = "cloudtrain"
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of builds without CUDA."""
_ORIGIN_FILE = "direct_url.json"
"""Where installers record what they have installed, unless it came from an index:
https://packaging.python.org/en/latest/specifications/direct-url/"""
_UV_RECEIPT = "uv-receipt.toml"
"""Where uv records what `uv tool install` was asked for, in the tool's environment."""
_EXTERNALLY_MANAGED = "EXTERNALLY-MANAGED"
"""What a system's Python has beside its standard library if pip is to refuse to install into it (PEP 668)."""
_REQUIREMENT_OF_EXTRA = lazy_pattern(
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
    source = _source(found, extras)
    if source is None:
        # The folder or wheel was deleted, and an index need not have cloudtrain; it has what the extras consist of.
        return pip_install(*sorted(set(_packages_of(found, extras))))
    return _uv_tool_install(found, extras) or pip_install(*source)


def torch_note() -> str | None:
    """Return how to get PyTorch without CUDA's packages, below a command that installs it; None where it has none."""
    if sys.platform != "linux" or is_installed("torch"):
        return None
    if install_command("local").startswith("uv "):
        way = "add --torch-backend cpu"
    else:
        way = f"first: {pip_install('torch', '--index-url', _CPU_INDEX)}"
    return f"PyTorch from PyPI brings CUDA's packages, which are gigabytes; without a GPU, {way}"


def require_local_modules(runs: str) -> None:
    """Check that what runs with this Python import is installed.

    Args:
        runs: What needs it, such as `local runs`.

    Raises:
        MissingExtraError: torch, psutil or numpy is not installed.
    """
    missing = next((each for each in MODULES_OF_LOCAL_RUNS if not is_installed(each)), None)
    if missing is None:
        return
    error = MissingExtraError(f"{runs} need {missing}", install_command("local"))
    note = torch_note()
    if note is not None:
        error.add_note(note)
    raise error


def is_installed(module: str) -> bool:
    """Return whether a top-level module can be imported, without its import."""
    return importlib.util.find_spec(module) is not None


def pip_install(*arguments: str) -> str:
    """Return the command by which pip installs into the environment of this interpreter."""
    # Not importlib.util.find_spec, at which a hook of setuptools replaces distutils.
    if importlib.machinery.PathFinder.find_spec("pip") is None:
        # Environments that uv has made have no pip.
        if shutil.which("uv") is not None:
            return shlex.join(["uv", "pip", "install", "--python", sys.executable, *arguments])
        ensure = shlex.join([sys.executable, "-m", "ensurepip"])
        return f"{ensure} && {shlex.join([sys.executable, '-m', 'pip', 'install', *arguments])}"
    if _is_externally_managed():
        # cloudtrain is in it already, so whoever installed it has decided to.
        arguments = ("--break-system-packages", *arguments)
    on_path = shutil.which("pip")
    if on_path is not None and Path(on_path).parent == Path(sys.executable).parent:
        return shlex.join(["pip", "install", *arguments])
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def _source(distribution: Distribution, extras: tuple[str, ...]) -> list[str] | None:
    """Return an installer's arguments that name cloudtrain with extras; None if its source no longer exists."""
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
        return None
    commit = origin.get("vcs_info")
    if isinstance(commit, dict):
        return [f"{_NAME}{named} @ {commit.get('vcs')}+{url}@{commit.get('commit_id')}"]
    return [f"{_NAME}{named} @ {url}"]


def _uv_tool_install(distribution: Distribution, extras: tuple[str, ...]) -> str | None:
    """Return the command that adds extras to a tool of uv; None if cloudtrain is no such tool.

    It names all that the tool has. `uv pip install` would work until `uv tool upgrade` removes what it has added.
    """
    receipt = Path(sys.prefix, _UV_RECEIPT)
    if not receipt.is_file() or shutil.which("uv") is None:
        return None
    installed = _read_receipt(receipt)
    if installed is None:
        return None
    present, others = installed
    every = tuple(dict.fromkeys((*present, *extras)))
    source = _source(distribution, every) or []
    beside = [argument for other in others for argument in ("--with", other)]
    return shlex.join(["uv", "tool", "install", *source, *beside])


def _read_receipt(path: Path) -> tuple[tuple[str, ...], list[str]] | None:
    """Return the extras of cloudtrain and the other requirements of a tool; None if a requirement has another form."""
    import tomllib

    try:
        requirements = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["requirements"]
        own = [each for each in requirements if each["name"] == _NAME]
        others = [each for each in requirements if each["name"] != _NAME]
        if any(each.keys() - {"name", "specifier"} for each in others):
            return None
        extras = tuple(str(extra) for each in own for extra in each.get("extras", ()))
        return extras, [f"{each['name']}{each.get('specifier', '')}" for each in others]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _is_externally_managed() -> bool:
    if sys.prefix != sys.base_prefix:
        return False
    return Path(sysconfig.get_path("stdlib"), _EXTERNALLY_MANAGED).is_file()


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
