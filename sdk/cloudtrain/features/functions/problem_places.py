"""Problems of a job's code, named by the cells that it comes from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cloudtrain.errors import Problem
from cloudtrain.job.spec import LoadedJob
from cloudtrain_runtime.contract.cell_format import is_written, split_cells


def with_cells(loaded: LoadedJob, folder: Path) -> LoadedJob:
    """Return a job whose problems name cells and their lines, in place of files in its code folder.

    Args:
        loaded: The job.
        folder: Its code folder.
    """
    problems = tuple(in_cell(each, folder) for each in loaded.problems)
    return replace(loaded, problems=problems)


def in_cell(problem: Problem, folder: Path) -> Problem:
    """Return a problem that names the cell, if it is of a file that was written from cells.

    Args:
        problem: The problem.
        folder: The folder of such files.
    """
    path = Path(problem.file)
    if problem.line is None or path.parent != folder or not is_written(str(path)):
        return problem
    for part in split_cells(path.read_text(encoding="utf-8")):
        line = problem.line - part.start
        if 0 <= line < part.code.count("\n"):
            return replace(problem, file=part.place, line=part.line + line)
    return problem
