"""The small curves of the list of runs, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support.jobs import until
from support.recorded_runs import step_events, write_run

import cloudtrain
from cloudtrain.errors import RunNotFoundError
from cloudtrain.features.dashboard.feed import RunFeed
from cloudtrain.features.dashboard.sparklines import MOST_POINTS, Sparklines
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.runs.progress import Progress
from cloudtrain.runs.status import State, Status
from cloudtrain_runtime.contract import format_event

RUN = "demo-261120-101500-1a2b3c"
LONG_AGO = float("-inf")


def status_of(step: int, backend: str = "local", **metrics: float | None) -> Status:
    named = {name.replace("_", "/"): value for name, value in metrics.items()}
    progress = Progress(last_step=step, metrics=named)
    return Status(run=RUN, backend=backend, state=State.RUNNING, reason="", progress=progress)


class Log:
    """A run whose log counts how many lines of it are read."""

    def __init__(self, losses: Iterable[float | None]) -> None:
        self.losses = list(losses)
        self.read_lines = self.readings = 0

    def logs(self, **_: object) -> Iterator[LogLine]:
        self.readings += 1
        for step, loss in enumerate(self.losses, 1):
            self.read_lines += 1
            yield LogLine("algo-1", format_event("step", {"step": step, "loss": loss}))


def test_a_log_becomes_few_points_with_its_extremes() -> None:
    losses: list[float | None] = [1.0] * 1000
    losses[500], losses[700] = 9.0, None
    sparklines = Sparklines()
    sparklines.note(status_of(1000, train_loss=1.0))
    assert not sparklines.is_complete(f"local:{RUN}")
    assert sparklines.read(Log(losses), f"local:{RUN}", time.monotonic() + 60)
    curve = sparklines.curve(f"local:{RUN}")
    assert curve is not None
    assert len(curve["steps"]) == len(curve["values"]) <= MOST_POINTS
    assert (curve["steps"][0], curve["steps"][-1]) == (1, 1000)
    assert {9.0, None} <= set(curve["values"])


def test_a_long_log_is_read_once_in_several_parts() -> None:
    log, sparklines = Log(float(each) for each in range(1000)), Sparklines()
    sparklines.note(status_of(1000, train_loss=1.0))
    parts = 1
    while not sparklines.read(log, f"local:{RUN}", LONG_AGO):
        parts += 1
    assert (log.readings, log.read_lines) == (1, 1000)
    assert parts > 2
    assert sparklines.is_complete(f"local:{RUN}")


def test_an_accounts_curve_grows_with_its_statuses() -> None:
    sparklines, reference = Sparklines(), f"sagemaker:{RUN}"
    for step in range(1, 500):
        sparklines.note(status_of(step, "sagemaker", validation_loss=1 / step))
        # Its log would cost calls.
        assert sparklines.is_complete(reference)
    curve = sparklines.curve(reference)
    assert curve is not None
    assert (curve["values"][0], curve["values"][-1]) == (1.0, round(1 / 499, 6))
    assert len(curve["values"]) <= MOST_POINTS


def test_a_value_of_an_evaluation_is_one_point() -> None:
    sparklines, reference = Sparklines(), f"sagemaker:{RUN}"
    for step, value in ((10, 0.5), (11, 0.5), (12, 0.5), (20, 0.4)):
        sparklines.note(status_of(step, "sagemaker", validation_loss=value))
    assert sparklines.curve(reference) == {"steps": [10, 20], "values": [0.5, 0.4]}


def test_a_later_attempt_replaces_the_steps_it_repeats() -> None:
    sparklines, reference = Sparklines(), f"sagemaker:{RUN}"
    for step, value in ((1, 3.0), (2, 2.0), (3, 1.0), (2, 2.5)):
        sparklines.note(status_of(step, "sagemaker", train_loss=value))
    assert sparklines.curve(reference) == {"steps": [1, 2], "values": [3.0, 2.0]}
    sparklines.note(status_of(4, "sagemaker", train_loss=0.5))
    assert sparklines.curve(reference) == {"steps": [1, 2, 4], "values": [3.0, 2.0, 0.5]}


def test_another_key_metric_begins_another_curve() -> None:
    sparklines, reference = Sparklines(), f"local:{RUN}"
    sparklines.note(status_of(5, train_loss=1.0))
    sparklines.read(Log([3.0, 2.0]), reference, time.monotonic() + 60)
    assert sparklines.curve(reference) is not None
    sparklines.note(status_of(6, train_loss=1.0, validation_loss=0.9))
    assert sparklines.curve(reference) is None
    assert not sparklines.is_complete(reference)


def test_a_run_without_metric_has_no_curve() -> None:
    sparklines = Sparklines()
    sparklines.note(status_of(5))
    assert sparklines.is_complete(f"local:{RUN}")
    assert sparklines.curve(f"local:{RUN}") is None


def test_a_log_that_is_gone_is_not_asked_for_again() -> None:
    class Gone(Log):
        def logs(self, **_: object) -> Iterator[LogLine]:
            raise RunNotFoundError("there is no such run", "")

    sparklines = Sparklines()
    sparklines.note(status_of(5, train_loss=1.0))
    assert sparklines.read(Gone([]), f"local:{RUN}", time.monotonic() + 60)
    assert sparklines.is_complete(f"local:{RUN}")


def test_the_list_reads_an_ended_log_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.features.dashboard.feed._ALL_AGAIN_SECONDS", 0.0)
    home = tmp_path / "runs-home"
    write_run(home, RUN, step_events(50))
    readings = list[str]()
    logs = cloudtrain.Run.logs

    def counted(run: cloudtrain.Run, **options: object) -> Iterator[LogLine]:
        readings.append(run.id)
        return logs(run, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cloudtrain.Run, "logs", counted)
    feed = RunFeed()

    def has_curve(run: str) -> bool:
        return any(row["run"] == run and row["curve"] for row in feed.changes(0)[1])

    until(lambda: has_curve(RUN))
    version, _, _ = feed.changes(0)
    later = ("demo-261120-101600-4d5e6f", "demo-261120-101700-7a8b9c")
    for other in later:
        # It is found by a new list of all runs.
        write_run(home, other, step_events(50))
        until(lambda other=other: has_curve(other))  # type: ignore[misc]
    assert sorted(readings) == [RUN, *later]
    assert {row["run"] for row in feed.changes(version)[1]} == set(later)


def test_trials_name_their_sweep_in_the_row(tmp_path: Path) -> None:
    home = tmp_path / "runs-home"
    tags = {"sweep": "rates-261120-101400-0000aa", "trial": "3"}
    write_run(home, RUN, step_events(5), job={"tags": tags})
    other = "demo-261120-101600-4d5e6f"
    write_run(home, other, step_events(5), job={"tags": {"sweep": "a tag of the user"}})
    feed = RunFeed()
    until(lambda: len(feed.changes(0)[1]) == 2)
    rows = {row["run"]: row for row in feed.changes(0)[1]}
    # From the first moment on, so that a page folds them at once.
    assert (rows[RUN]["sweep"], rows[RUN]["tags"]) == (tags["sweep"], tags)
    assert rows[other]["sweep"] == ""
