"""A job as the text of a job file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.job.spec import JobSpec
from cloudtrain_runtime.contract.strict_json import dump_json, load_json


def job_text(job: JobSpec, folder: Path) -> str:
    """Return the text of a job file in a folder: relative paths start there."""
    return document_text(job_document(job, folder))


def document_text(document: Mapping[str, Any]) -> str:
    """Return the content of a job file as YAML."""
    import yaml

    # YAML's safe writer takes no subclasses.
    plain = load_json(dump_json(document, default=str))
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)
    return text


def job_document(job: JobSpec, folder: Path) -> dict[str, Any]:
    """Return the content of a job file in a folder: relative paths start there."""
    document = job.to_document()
    base = job.base
    here = folder.resolve()
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
