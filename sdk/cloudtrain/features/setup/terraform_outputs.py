"""Settings from `terraform output -json`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.errors import SettingsError, UserError
from cloudtrain.settings.settings import LIST_SETTINGS, SETTINGS, SWITCHES, expected_kind
from cloudtrain_runtime.contract.strict_json import load_json

STANDARD_INPUT = "-"
_PROGRAMS = ("terraform", "tofu")
_TIMEOUT_SECONDS = 120
_MAX_NAMES = 8


def read_outputs(source: str | Path) -> dict[str, str | tuple[str, ...]]:
    """Return the settings in Terraform's outputs, by name.

    Args:
        source: The folder of an applied configuration, a file with the output of `terraform output -json`, or `-` for
            standard input.

    Raises:
        UserError: the source does not exist, or Terraform fails.
        SettingsError: the outputs are not valid settings.
    """
    text, place = _read(source)
    try:
        outputs = load_json(text)
    except ValueError as error:
        raise SettingsError(
            f"{place}: not what terraform output -json prints: {error}", _HOW
        ) from None
    if not isinstance(outputs, dict):
        raise SettingsError(
            f"{place}: expected one JSON object, got {type(outputs).__name__}", _HOW
        )
    names = [name for name in SETTINGS if name not in SWITCHES]  # an account has no switches
    found = {name: _value(place, name, outputs[name]) for name in names if name in outputs}
    if not found:
        others = (
            f"it has {', '.join(sorted(outputs)[:_MAX_NAMES])}"
            if outputs
            else "it has none: was it applied?"
        )
        raise SettingsError(
            f"{place}: no output is a setting; {others}",
            f"outputs must be named {', '.join(names)}, as infra/examples/minimal writes them",
        )
    return found


_HOW = "write it so: terraform -chdir=infra output -json > outputs.json"


def _read(source: str | Path) -> tuple[str, str]:
    if str(source) == STANDARD_INPUT:
        return sys.stdin.read(), "standard input"
    path = Path(source)
    if path.is_dir():
        return _run_terraform(path), f"the outputs of {path}"
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(
            f"{path}: cannot be read: {reason}",
            f"give a folder that was applied, or a file: {_HOW}",
        ) from None


def _run_terraform(folder: Path) -> str:
    program = next((name for name in _PROGRAMS if shutil.which(name)), None)
    if program is None:
        raise UserError(
            f"{folder} is a folder, and there is no terraform on PATH to ask for its outputs", _HOW
        )
    command = [program, f"-chdir={folder}", "output", "-json", "-no-color"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
            env={**os.environ, "TF_IN_AUTOMATION": "1"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{' '.join(command)}: {error}", _HOW) from None
    if done.returncode != 0:
        reason = " ".join(done.stderr.replace("╷", "").replace("│", "").replace("╵", "").split())
        raise UserError(
            f"{' '.join(command)} failed: {reason[:400]}",
            f"prepare and apply it first: {program} -chdir={folder} init, then apply",
        )
    return done.stdout


def _value(place: str, name: str, output: Any) -> str | tuple[str, ...]:
    """Return an output's value. Terraform prints it with its type, or alone for the outputs of a module."""
    if isinstance(output, Mapping) and "value" in output:
        if output.get("sensitive") is True:
            raise SettingsError(
                f"{place}: {name} is marked as sensitive, and cloudtrain stores no secrets",
                f"no setting is one: remove sensitive = true from the output {name}",
            )
        output = output["value"]
    if output is None:
        return () if name in LIST_SETTINGS else ""
    if expected := expected_kind(name, output):
        raise SettingsError(
            f"{place}: {name} must be {expected}, got {type(output).__name__}", "correct the output"
        )
    value: str | tuple[str, ...] = tuple(output) if name in LIST_SETTINGS else output
    return value
