"""The file in which a job's code starts: its script, its module, or the module of its Task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain_runtime.contract.task_signatures import find_module

if TYPE_CHECKING:
    from cloudtrain.job.spec import JobSpec


def entry_file(spec: JobSpec) -> Path | None:
    """Return the file of the code folder or an include that is started or imported first; None if there is none."""
    code = spec.code
    if code.script is not None:
        return spec.code_directory / code.script
    if code.module is not None:
        return runnable_file(spec.import_root(code.module), code.module)
    return find_module(spec.import_root(code.task), code.task.partition(":")[0]) if code.task is not None else None


def runnable_file(directory: Path, module: str) -> Path | None:
    """Return the file that `python -m module` would run, or None: of a package its `__main__.py`."""
    found = find_module(directory, module)
    main = directory / module.replace(".", "/") / "__main__.py"
    if found is not None and found.name != "__init__.py":
        return found
    return main if main.is_file() else None


def is_in_src(directory: Path, package: str) -> bool:
    """Return whether a package is in the folder `src` of a code folder, and not in the code folder itself."""
    name = package.partition(":")[0]
    found = find_module(directory / "src", name) is not None or (directory / "src" / name).is_dir()
    return found and not (directory / name).exists()
