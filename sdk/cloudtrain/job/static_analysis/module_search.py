"""Where the modules of a job are: its entry, what that imports, and what only an installed package can have."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from cloudtrain import catalog
from cloudtrain.job.job_fields import JobFields
from cloudtrain.job.standard_library import STANDARD_LIBRARY
from cloudtrain.job.static_analysis.syntax import Module, read_module
from cloudtrain_runtime.contract.python_source import find_module

_MOST_FILES = 200
_MOST_FOLDERS = 2000
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})


def entry_file(spec: JobFields) -> Path | None:
    """Return the file of the code folder or an include that is started or imported first; None if there is none."""
    code = spec.code
    if code.script is not None:
        return spec.code_directory / code.script
    if code.module is not None:
        return runnable_file(spec.import_root(code.module), code.module)
    if code.task is not None:
        return find_module(spec.import_root(code.task), code.task.partition(":")[0])
    return None


def runnable_file(directory: Path, module: str) -> Path | None:
    """Return the file that `python -m module` would run, or None: of a package its `__main__.py`."""
    found = find_module(directory, module)
    if found is not None and found.name != "__init__.py":
        return found
    main = directory / module.replace(".", "/") / "__main__.py"
    return main if main.is_file() else None


def read_modules(directory: Path, entry: str, includes: Mapping[str, Path]) -> list[Module]:
    """Return the modules of the code folder and its includes that an entry imports, itself first, then the nearest.

    Args:
        directory: The code folder.
        entry: The entry's path, relative to the code folder.
        includes: Folders outside of the code folder, by the name under which they are imported.
    """
    script = Path(os.path.normpath(directory / entry))
    found: list[Module] = []
    waiting, seen = [script], {script}
    while waiting and len(seen) <= _MOST_FILES:
        path = waiting.pop(0)
        module = read_module(path, os.path.relpath(path, directory))
        if module is None:
            continue
        found.append(module)
        for name in module.imports:
            folders = [script.parent, directory, path.parent]
            included = includes.get(name.partition(".")[0])
            if included is not None:
                folders.append(included.parent)
            for folder in folders:
                imported = find_module(folder, name)
                if imported is not None and imported not in seen:
                    seen.add(imported)
                    waiting.append(imported)
    return found


def find_own(directory: Path, module: str) -> Path | None:
    """Return the file of a module below a folder, or the folder of a package without one; None if there is none."""
    found = find_module(directory, module)
    if found is not None:
        return found
    folder = directory / module.replace(".", "/")
    return folder if _has_modules(folder) else None


def is_below(directory: Path, name: str) -> bool:
    """Return whether a code folder has a module or package of this name anywhere, outside of virtual environments."""
    for count, (path, folders, files) in enumerate(os.walk(directory)):
        if count > _MOST_FOLDERS:
            break
        if f"{name}.py" in files or (name in folders and _has_modules(Path(path) / name)):
            return True
        folders[:] = [each for each in folders if _may_have_code(Path(path, each))]
    return False


def is_in_src(directory: Path, package: str) -> bool:
    """Return whether a package is in the folder `src` of a code folder, and not in the code folder itself."""
    name = package.partition(":")[0]
    src = directory / "src"
    is_there = find_module(src, name) is not None or (src / name).is_dir()
    return is_there and not (directory / name).exists()


def may_be_installed(module: str, directory: Path) -> bool:
    """Return whether a package that is installed here, or that is widely used, has a module of this name."""
    top = module.partition(".")[0]
    if top in STANDARD_LIBRARY or catalog.known_package_of(module) is not None:
        return True
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    places = [] if found is None else [found.origin, *(found.submodule_search_locations or ())]
    own = directory.resolve()
    return any(each is not None and not Path(each).resolve().is_relative_to(own) for each in places)


def _may_have_code(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in _SKIPPED_FOLDERS:
        return False
    return not (folder / "pyvenv.cfg").exists()


def _has_modules(folder: Path) -> bool:
    """Return whether a folder has Python modules, in itself or in a folder of it, so that it can be imported."""
    try:
        if not folder.is_dir():
            return False
        return any(folder.glob("*.py")) or any(folder.glob("*/*.py"))
    except (OSError, ValueError):
        return False
