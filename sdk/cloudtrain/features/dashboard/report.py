"""The report: the page of runs, with their data, as one HTML file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cloudtrain.aws.retry import Backoff, OutageTolerance, poll
from cloudtrain.errors import UserError
from cloudtrain.features.dashboard.model_cards import make_card
from cloudtrain.features.dashboard.page import MARK, report_page
from cloudtrain.features.dashboard.run_record import RunRecord, run_document
from cloudtrain.runs.comparison import Comparison, known_evaluations, read_plan
from cloudtrain.runs.run import Run
from cloudtrain.support.atomic_write import write_atomically

_MOST_POINTS: Final = 2_000
_ALL_POINTS: Final = 30_000
"""Points of all curves together: about 30 bytes each, so that a report stays below 2 MB."""

_HEAD_BYTES: Final = 2**18
_OLD_MARK: Final = b" - cloudtrain</title>"
"""The mark of reports that version 0.1 has written."""

_PAUSE_SECONDS: Final = 5.0
_BILLED_PAUSE_SECONDS: Final = 30.0
_LEAST_POINTS: Final = 50
_ALL_LINES: Final = 3_000


def watch_report(
    runs: Sequence[Run], path: Path, on_trouble: Callable[[str], None] | None = None
) -> int:
    """Write the report again every few seconds until all runs have ended; return its size.

    Args:
        runs: At least one run.
        path: The file.
        on_trouble: Called with a message when AWS cannot be reached any more, and when it can again.

    Raises:
        CloudError: AWS refused, or could not be reached at first or for an hour.
        UserError: see `write_report`.
    """

    def write() -> tuple[bool, int]:
        is_over = all(run.status().state.is_final for run in runs)
        return is_over, write_report(runs, path)

    is_billed = any(run.is_billed for run in runs)
    pause = _BILLED_PAUSE_SECONDS if is_billed else _PAUSE_SECONDS
    written = poll(
        write,
        Backoff(pause, pause),
        OutageTolerance(on_trouble, note="retrying; the runs continue"),
    )
    return next(size for is_over, size in written if is_over)


def write_report(runs: Sequence[Run], path: Path) -> int:
    """Write the page of runs, and with several runs their comparison, into one HTML file.

    Args:
        runs: At least one run.
        path: The file. A report that is there is replaced.

    Returns:
        Size of the file in bytes.

    Raises:
        CloudError: AWS refused or cannot be reached.
        UserError: The file cannot be written, or is there and no report.
    """
    _refuse_other_file(path)
    records = [RunRecord.read(run) for run in runs]
    curves = max(1, sum(len(record.history.metrics) for record in records))
    points = max(_LEAST_POINTS, min(_MOST_POINTS, _ALL_POINTS // curves))
    plans = [read_plan(run) for run in runs]
    documents = [
        _document(run, record, plan, points=points, most_lines=_ALL_LINES // len(runs))
        for run, record, plan in zip(runs, records, plans, strict=True)
    ]
    content: dict[str, Any] = {"created": time.time(), "documents": documents, "comparison": None}
    if len(runs) > 1:
        histories = [record.history for record in records]
        evaluations = [known_evaluations(run) for run in runs]
        found = Comparison.of([run.reference for run in runs], plans, histories, evaluations)
        content["comparison"] = found.to_page()
    title = runs[0].id if len(runs) == 1 else f"{len(runs)} runs"
    html = report_page(f"{title} - cloudtrain", content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, html)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}", "choose another file: -o FILE"
        ) from None
    return len(html.encode())


def _refuse_other_file(path: Path) -> None:
    """Raise a UserError for a file that is no report of cloudtrain."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        # There is none, or writing will show the problem.
        return
    if head and not any(mark in head for mark in (MARK.encode(), _OLD_MARK)):
        raise UserError(
            f"{path} exists already, and is no report of cloudtrain",
            "give another name with -o FILE, or delete it",
        )


def _document(
    run: Run, record: RunRecord, plan: Mapping[str, Any], *, points: int, most_lines: int
) -> dict[str, Any]:
    """Return what the page of a run shows, with its model card."""
    status = run.status()
    events = [*record.events_after(0), *([] if record.analysis is None else [record.analysis])]
    document = run_document(run, record, status, plan, points=points, most_lines=most_lines)
    return {**document, "card": make_card(run, status, plan, events)}
