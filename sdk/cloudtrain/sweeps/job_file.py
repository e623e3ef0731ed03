"""The job of a trial as a job file, with comments that name the sweep and the searched fields."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cloudtrain.job.document import parse_document
from cloudtrain.job.spec import JobSpec
from cloudtrain.sweeps.planning import describe
from cloudtrain.sweeps.space import Space
from cloudtrain.sweeps.stored_sweep import StoredSweep
from cloudtrain.sweeps.trial import Trial


def render_job(stored: StoredSweep, trial: Trial, job: JobSpec, folder: Path) -> str:
    """Return the text of a job file.

    Args:
        stored: The sweep.
        trial: The trial.
        job: Its job.
        folder: Folder of the file, where its relative paths start.
    """
    import yaml

    text = yaml.safe_dump(_plain(_document(job, folder)), sort_keys=False, allow_unicode=True, width=100)
    metric, objective = stored.sweep.spec.objective.metric, trial.objective
    score = "" if objective is None else f", {metric} {objective:.6g}"
    head = f"# Trial {trial.number} of the sweep {stored.id}{score}.\n# Its run: {trial.run}\n"
    return head + _with_comments(text, stored, trial)


def _document(job: JobSpec, folder: Path) -> dict[str, Any]:
    """Return the content of the job, with relative paths that start at a folder."""
    document = job.to_document()
    base, here = job.base, folder.resolve()
    if here == base.resolve():
        return document
    code = document["code"]
    code["directory"] = os.path.relpath(job.code_directory, here)
    if job.code.include:
        code["include"] = [os.path.relpath(path, here) for path in job.includes.values()]
    for name, channel in job.data.items():
        if channel.local_path is not None and ":/" not in channel.local_path:
            moved = os.path.relpath(base / channel.local_path, here)
            known = document["data"][name]
            document["data"][name] = {**known, "uri": moved} if isinstance(known, dict) else moved
    return document


def _with_comments(text: str, stored: StoredSweep, trial: Trial) -> str:
    """Add a comment to the line of each searched field."""
    lines, document = text.splitlines(), parse_document(text, "job")
    for dimension in Space.of(stored.sweep.spec.space).dimensions:
        at = document.keys.get(tuple(dimension.path.split(".")))
        if dimension.path in trial.values and at is not None and at.line is not None:
            lines[at.line - 1] += f"  # searched: {describe(dimension)}".replace("\n", " ")
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    """Return a value with Python's own types, which YAML's safe writer accepts."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, bool) or value is None:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return str(value)
