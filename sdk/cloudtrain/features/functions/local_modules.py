"""The modules of a notebook's own folder that its code imports. Installed packages stay as they are."""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_EVERYWHERE = ("cloudtrain", "cloudtrain_runtime")
"""Packages that each run has, also where they are installed from a folder."""


@dataclass(frozen=True)
class LocalModules:
    """Modules that have to travel with the code.

    Attributes:
        files: Modules that are one file, which is copied.
        packages: Folders of packages, which are included.
    """

    files: tuple[Path, ...]
    packages: tuple[Path, ...]


def find_local_modules(names: Iterable[str], folder: Path) -> LocalModules:
    """Return the modules that are no installed packages, with those that they import themselves.

    Args:
        names: Full names of modules that the code imports.
        folder: The notebook's folder, whose modules are found first.
    """
    files, packages = dict[str, Path](), dict[str, Path]()
    waiting = {each.partition(".")[0] for each in names}
    seen = set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        origin = _origin(name, folder)
        if origin is None or _is_installed(origin):
            continue
        if origin.name == "__init__.py":
            packages[name] = origin.parent
            sources = sorted(origin.parent.rglob("*.py"))
        else:
            files[name] = origin
            sources = [origin]
        waiting |= {each for source in sources for each in _imported(source)} - seen
    return LocalModules(
        tuple(files[each] for each in sorted(files)),
        tuple(packages[each] for each in sorted(packages)),
    )


def is_local_module(name: str, folder: Path) -> bool:
    """Return whether a module is no installed package, so that its files travel.

    Args:
        name: Its full name.
        folder: The notebook's folder.
    """
    origin = _origin(name.partition(".")[0], folder)
    return origin is not None and not _is_installed(origin)


def _origin(name: str, folder: Path) -> Path | None:
    if name in sys.builtin_module_names or name in (*sys.stdlib_module_names, *_EVERYWHERE):
        return None
    for beside in (folder / f"{name}.py", folder / name / "__init__.py"):
        if beside.is_file():
            return beside
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin in (None, "built-in", "frozen"):
        return None
    return Path(str(spec.origin))


def installed_places() -> frozenset[str]:
    """Return the folders of installed packages, which a run gets by its requirements."""
    own = {sysconfig.get_path(each) for each in ("purelib", "platlib")}
    return frozenset(own) | {
        each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")
    }


def _is_installed(origin: Path) -> bool:
    places = {*installed_places(), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return any(origin.is_relative_to(place) for place in places)


def _imported(source: Path) -> Iterator[str]:
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]
