"""A new job folder from a template: job.yaml, code, README, ignore file and the schema for editors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from cloudtrain.errors import UserError, did_you_mean
from cloudtrain.support.installation import MODULES_OF_LOCAL_RUNS
from cloudtrain_runtime.contract.strict_json import dump_json

TEMPLATES = ("task", "script", "lightning", "accelerate", "huggingface")
_FOLDER = Path(__file__).parent / "templates"
_COMMON = "common"
_SCHEMA_FILE = "job.schema.json"
_REQUIREMENTS_FILE = "requirements.txt"


def create_job(folder: Path, template: str) -> list[str]:
    """Write a new job, which `submit` can run at once, into a folder. No existing file is changed.

    Args:
        folder: The folder, which need not exist. Its name becomes that of the job.
        template: `task`, `script`, `lightning`, `accelerate` or `huggingface`.

    Returns:
        The names of its files.

    Raises:
        UserError: There is no such template, or a file exists already; nothing was written.
    """
    if template not in TEMPLATES:
        raise UserError(f"there is no template {template!r}", did_you_mean(template, TEMPLATES))
    contents = _contents(template, _job_name(folder))
    existing = [
        name for name in contents if (folder / name).exists() or (folder / name).is_symlink()
    ]
    if existing or (folder.exists() and not folder.is_dir()):
        found = (
            f"{folder} is no folder"
            if not existing
            else f"{folder} has {', '.join(existing)} already"
        )
        raise UserError(
            f"{found}; nothing was written", "choose another folder: cloudtrain init DIR"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
    return list(contents)


def lacks_packages(folder: Path, files: Iterable[str]) -> bool:
    """Return whether this machine lacks a package that the code of a new job imports, and --install adds it."""
    from cloudtrain.job.missing_packages import find_missing

    if _REQUIREMENTS_FILE not in files:
        return False
    code = next(folder / name for name in files if name.endswith(".py"))
    return any(each.module not in MODULES_OF_LOCAL_RUNS for each in find_missing(code))


def _contents(template: str, name: str) -> dict[str, str]:
    """Return the files by name, those of the template first."""
    paths = [
        path
        for kind in (template, _COMMON)
        for path in sorted((_FOLDER / kind).iterdir())
        if path.is_file()
    ]
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    code = next(text for name, text in texts.items() if name.endswith(".py"))
    values = {
        "NAME": name,
        "DESCRIPTION": ast.get_docstring(ast.parse(code)) or "",
        "INSTALL": f"--install adds the packages of {_REQUIREMENTS_FILE}"
        if _REQUIREMENTS_FILE in texts
        else "what it needs: cloudtrain doctor",
    }
    pattern = re.compile(rf"\b({'|'.join(values)})\b")
    for file in ("job.yaml", "README.md"):
        texts[file] = pattern.sub(lambda match: values[match[1]], texts[file])
    from cloudtrain.job.schema import (
        job_schema,
    )  # imports pydantic, which other set-up commands do not need

    return {**texts, _SCHEMA_FILE: dump_json(job_schema(), indent=2) + "\n"}


def _job_name(folder: Path) -> str:
    """Return the folder's name as the name of a job: letters, digits and single hyphens."""
    name = re.sub(r"[^a-zA-Z0-9]+", "-", folder.absolute().resolve().name).strip("-")
    from cloudtrain.job.job_fields import MAX_NAME_CHARACTERS

    return name[:MAX_NAME_CHARACTERS].rstrip("-") or "job"
