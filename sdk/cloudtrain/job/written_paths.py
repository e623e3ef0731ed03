"""Hints for paths that are written as a shell, a command line or Windows would take them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from cloudtrain.job.diagnostics import options_as_fields
from cloudtrain.job.rank_starters import TRAINING_PROGRAMS
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_DRIVE = lazy_pattern(r"[A-Za-z]:(?:\\|$)")
_LAUNCHERS = ("python", *TRAINING_PROGRAMS, "srun", "mpirun", "mpiexec")
"""Words that come before a script."""


def hint_of_written_path(path: Path, field: str) -> str:
    """Return what to write in place of a path that does not exist; an empty string if nothing explains it.

    Args:
        path: The path as it is looked for.
        field: The field of the job file that names it.
    """
    for index, part in enumerate(path.parts):
        if os.path.exists(Path(*path.parts[: index + 1])):  # noqa: PTH110 (a name that no file system takes is missing)
            continue
        rest = os.path.join(*path.parts[index:])  # noqa: PTH118 (pathlib has no expansion of variables)
        if part.startswith("~"):
            expanded = os.path.expanduser(rest)  # noqa: PTH111 (pathlib raises for an unknown user)
            meant = expanded if expanded != rest else "the whole path"
            return f"~ is not expanded in a job file: write {meant}"
        if "$" in part:
            expanded = os.path.expandvars(rest)
            meant = expanded if "$" not in expanded else "the whole path"
            by_shell = f'let your shell do it on the command line: --set {field}="{rest}"'
            return f"variables are not expanded in a job file: write {meant}, or {by_shell}"
        if _DRIVE.match(part):
            return "this is a path of Windows: name a folder of this machine"
        if "\\" in part:
            return f"write / between folders: {rest.replace(chr(92), '/')}"
    return _hint_of_command(path)


def _hint_of_command(path: Path) -> str:
    """Return a hint for a script with its launcher or its options, such as `python train.py --lr 1`."""
    if " " not in path.name:
        return ""
    try:
        words = shlex.split(path.name)
    except ValueError:
        # An open quote.
        return ""
    is_python = bool(words) and words[0].startswith("python")
    if is_python and words[1:2] == ["-m"] and len(words) > len(words[:2]):
        return f"write module: {words[2]} in place of script"
    files = (index for index, word in enumerate(words) if (path.parent / word).is_file())
    at = next(files, None)
    if at is None:
        return ""
    if at > 0 and not words[0].startswith(_LAUNCHERS):
        return ""
    text = f"write {words[at]} alone"
    if at > 0 and not is_python:
        text += " (cloudtrain starts the ranks)"
    if options := options_as_fields(words[at + 1 :]):
        text += f", and the options below it: args: {options}"
    return text
