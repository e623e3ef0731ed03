"""The runs that this user's machine knows: those in the folders of local runs, and one recorded line per submit.

Nothing here asks a backend, so that names are resolved and completed quickly, without credentials.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cloudtrain.settings.settings import profile_file
from cloudtrain.support.records import append_record, read_records
from cloudtrain.support.run_id import is_run_id, job_of, submit_order, submitted_at, written_order

LATEST = "latest"
RUNS_FOLDER = "runs"
_LOCAL = "local:"


def record_run(environ: Mapping[str, str], reference: str, home: Path) -> None:
    """Append a submitted run and its folder of local runs to the user's record; a failure is ignored.

    Args:
        environ: Environment variables, which name the user's configuration folder.
        reference: `<backend>:<run id>`.
        home: Folder of local runs.
    """
    content = {"run": reference, "home": str(home.absolute())}
    # The run has started, and the record only helps to find it.
    with contextlib.suppress(OSError):
        append_record(_record_file(environ), content)


def recorded_homes(environ: Mapping[str, str]) -> list[Path]:
    """Return the existing folders of local runs that the user's submits have used, the newest first."""
    homes = dict.fromkeys(home for _, home in reversed(_read_record(environ)))
    return [Path(home) for home in homes if Path(home, RUNS_FOLDER).is_dir()]


def known_runs(environ: Mapping[str, str], homes: Iterable[Path]) -> list[str]:
    """Return the references of the runs in these folders and of the recorded runs elsewhere, the newest first."""
    folders = [home / RUNS_FOLDER for home in homes]
    found = {
        f"{_LOCAL}{run}": written_order(run, folder / run)
        for folder in folders
        for run in _names_in(folder)
        if is_run_id(run)
    }
    for reference, _ in _read_record(environ):
        if not reference.startswith(_LOCAL):
            submitted = submitted_at(reference)
            time = 0.0 if submitted is None else submitted.timestamp()
            found[reference] = (time, submit_order(reference))
    return sorted(found, key=found.__getitem__, reverse=True)


def matching_runs(name: str, runs: Sequence[str]) -> tuple[list[str], bool]:
    """Return the runs that a short name can mean, and whether the first of them is meant.

    Args:
        name: A job's name, or the beginning or end of a run id.
        runs: References of runs, the newest first.

    Returns:
        All runs of the job, of which the newest is meant; without such a job, the runs whose ids begin or end so, of
        which none is meant unless there is only one.
    """
    of_job = [run for run in runs if job_name(run) == name]
    if of_job:
        return of_job, True
    ids = [(run, run.rpartition(":")[2]) for run in runs]
    return [run for run, id_ in ids if name and (id_.startswith(name) or id_.endswith(name))], False


def job_name(reference: str) -> str:
    """Return the job's name in a run id or reference."""
    return job_of(reference.rpartition(":")[2])


def _record_file(environ: Mapping[str, str]) -> Path:
    return profile_file(environ).with_name("runs.jsonl")


def _read_record(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return reference and home of the recorded runs, the oldest first; damaged lines are skipped."""
    found = []
    for content in read_records(_record_file(environ)):
        with contextlib.suppress(TypeError, KeyError):
            reference = str(content["run"])
            home = os.fspath(content["home"])
            if is_run_id(reference.rpartition(":")[2]):
                found.append((reference, home))
    return found


def _names_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except OSError:
        return []
