"""Checks of `code.command`: its placeholders, its files in the code folder, and its program on this machine."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.errors import did_you_mean, nearest
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.support.field_path import FieldPath
from cloudtrain_runtime.contract.placeholders import PLACEHOLDERS, names_in

if TYPE_CHECKING:
    from cloudtrain.job.spec import JobSpec

_SOURCE = re.compile(r"[^\s$/-][^\s$]*\.(?:py|sh)")
"""A word that names a Python or shell script below the working folder."""


def check_command(spec: JobSpec) -> Iterator[Diagnostic]:
    """Yield an error for each unknown placeholder, and for a script or program that the code folder lacks."""
    command, directory = spec.code.command, spec.code_directory
    if not command:
        return
    channels = [f"SM_CHANNEL_{name.upper()}" for name in spec.data]
    known = [*PLACEHOLDERS, *channels, *spec.code.env]
    arguments = spec.code.args.items() if isinstance(spec.code.args, dict) else enumerate(spec.code.args)
    words: list[tuple[FieldPath, object]] = [(("code", "command", index), word) for index, word in enumerate(command)]
    words += [(("code", "args", key), value) for key, value in arguments]
    for at, value in words:
        for name in names_in(str(value)):
            if name not in known:
                near = nearest(name, known)
                hint = f"did you mean ${near}?" if near else f"for the text ${name} write $${name}"
                yield Diagnostic(f"there is no variable ${name} for commands", at, hint)
    source = next(((index, word) for index, word in enumerate(command) if _SOURCE.fullmatch(word)), None)
    if source is not None and not (directory / source[1]).is_file():
        yield _missing(directory / source[1], source[0])
    program = directory / command[0]
    if source == (0, command[0]) and "/" not in command[0]:
        hint = f"write ./{command[0]}, or [bash, {command[0]}]"
        yield Diagnostic(f"{command[0]} is not on the search path of programs", ("code", "command", 0), hint)
    elif command[0].startswith("./") and not program.is_file():
        yield _missing(program, 0)
    elif "/" in command[0] and not command[0].startswith("/") and program.is_file() and not os.access(program, os.X_OK):
        hint = f"chmod +x {command[0]}, or start it by its interpreter: [bash, {command[0]}]"
        yield Diagnostic(f"{program} is not executable", ("code", "command", 0), hint)


def check_program(spec: JobSpec) -> Iterator[Diagnostic]:
    """Yield an error if this machine lacks the program that a local run would start."""
    program = spec.code.command[0] if spec.code.command else ""
    is_own = "/" in program and not program.startswith("/")
    path = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    if program and "$" not in program and not is_own and shutil.which(program, path=path) is None:
        hint = "install it, or run the job where it is installed"
        yield Diagnostic(f"this machine has no program {program}", ("code", "command", 0), hint)


def _missing(path: Path, index: int) -> Diagnostic:
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = did_you_mean(path.name, names, "name a file of the code folder; the command starts there")
    return Diagnostic(f"no such file: {path}", ("code", "command", index), hint)
