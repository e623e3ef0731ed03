"""The job file that a path means."""

from __future__ import annotations

import os

JOB_FILES = ("job.yaml", "job.yml")

_NOTEBOOK = ".ipynb"


def names_notebook(path: str) -> bool:
    """Return whether a path is that of a notebook, with or without `:` and the name of a function of it."""
    return path.endswith(_NOTEBOOK) or f"{_NOTEBOOK}:" in path


def find_job_files(path: str) -> tuple[str, ...]:
    """Return the job files that a path can mean, the one to use first: itself, those of a folder, or job.yml for job.yaml.

    A path without a job file is returned as it is.
    """
    # os.path, because commands start faster without pathlib.
    folder, name = (path, "") if os.path.isdir(path) else os.path.split(path)  # noqa: PTH112
    if name not in ("", JOB_FILES[0]):
        return (path,)
    files = (os.path.join(folder, each) for each in JOB_FILES)  # noqa: PTH118
    return tuple(each for each in files if os.path.isfile(each)) or (path,)  # noqa: PTH113
