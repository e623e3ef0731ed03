"""`poll`, and all loops over statuses that use it: they survive an outage, and slow down without changes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.run_logs import LoggedRun
from support.run_statuses import PENDING, RUN, TRAINING

from cloudtrain.aws.retry import Backoff, OutageTolerance, poll
from cloudtrain.console.follow import FOLLOW_OUTAGES, follow
from cloudtrain.errors import UnreachableError
from cloudtrain.features.dashboard import report
from cloudtrain.features.sweeps.handle import Sweep
from cloudtrain.features.sweeps.results import SweepState
from cloudtrain.runs.following import shown_part
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State
from cloudtrain.support.backend_facts import DEFAULT_BACKEND

OUTAGE = UnreachableError("AWS does not answer")
DONE = dataclasses.replace(TRAINING, state=State.SUCCEEDED)


def answers(*found: Any) -> Callable[[], Any]:
    """Return a function that returns these in turn; an exception is raised."""
    left = iter(found)

    def ask() -> Any:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits of `poll` without jitter, which take no time."""
    found: list[float] = []
    monkeypatch.setattr("cloudtrain.aws.retry.time.sleep", found.append)
    monkeypatch.setattr("cloudtrain.aws.retry.random.uniform", lambda _, most: most)
    return found


def test_waits_grow_until_an_answer_changes(waits: list[float]) -> None:
    polled = poll(answers("a", "a", "a", "b", "b"), Backoff(5.0))
    assert list(itertools.islice(polled, 5)) == ["a", "a", "a", "b", "b"]
    assert waits == [5, 10, 20, 5]


def test_an_outage_has_waits_of_its_own(waits: list[float]) -> None:
    messages: list[str] = []
    outages = OutageTolerance(messages.append, note="retrying")
    polled = poll(answers("a", OUTAGE, OUTAGE, "a", "a"), Backoff(1.0), outages)
    assert list(itertools.islice(polled, 3)) == ["a", "a", "a"]
    assert waits == [1, 5, 10, 2]
    assert messages[0] == "AWS does not answer (retrying)"
    assert messages[1].startswith("recovered after ")


def test_a_pause_can_end_the_loop() -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == 2

    assert list(poll(lambda: "a", Backoff(0.0), least_seconds=0.5, pause=pause)) == ["a", "a"]
    assert pauses == [0.5, 0.5]


def test_a_time_limit_asks_at_least_once(waits: list[float]) -> None:
    assert list(poll(lambda: "a", Backoff(1.0), timeout_seconds=0)) == ["a"]
    assert waits == []


def test_time_and_cost_alone_are_no_change() -> None:
    later = dataclasses.replace(TRAINING, cost_usd=99.0, billable_seconds=9999)
    assert shown_part(later) == shown_part(TRAINING)
    assert shown_part(PENDING) != shown_part(TRAINING)


def wait(run: Run) -> None:
    assert run.wait().state is State.SUCCEEDED


def follow_in_python(run: Run) -> None:
    run.follow()


def follow_in_terminal(run: Run) -> None:
    policy = dataclasses.replace(FOLLOW_OUTAGES, first_seconds=0.0, longest_seconds=0.0)
    assert follow(run, as_json=True, outages=policy) == 0


@pytest.mark.parametrize("loop", [wait, follow_in_python, follow_in_terminal])
@pytest.mark.usefixtures("waits")
def test_each_loop_over_a_run_survives_an_outage(loop: Callable[[Run], None]) -> None:
    loop(Run(RUN, LoggedRun(statuses=[TRAINING, OUTAGE, OUTAGE, TRAINING, DONE])))


def test_a_watched_report_survives_an_outage(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    monkeypatch.setattr(report, "write_report", lambda _, path: written.append(path) or 7)
    cloud = LoggedRun(statuses=[TRAINING, OUTAGE, OUTAGE, TRAINING, DONE])
    cloud.name = DEFAULT_BACKEND
    assert report.watch_report([Run(RUN, cloud)], Path("report.html")) == 7
    assert len(written) == 3, "it is written after each answer"
    assert waits == [30, 5, 10, 30]


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """A sweep with a tuning job, whose status cannot be read twice."""
    running, ended = (
        SimpleNamespace(state=each) for each in (SweepState.RUNNING, SweepState.FAILED)
    )
    ask = answers(running, OUTAGE, OUTAGE, running, ended)

    def look(_: object) -> tuple[Any, bool]:
        status = ask()
        return status, not status.state.is_final

    engine = SimpleNamespace(look=look, poll_seconds=30.0)
    monkeypatch.setattr("cloudtrain.features.sweeps.service.engine_of_stored", lambda *_: engine)
    return Sweep(SimpleNamespace(id="tuned"))  # type: ignore[arg-type]


def test_a_wait_for_a_sweep_survives_an_outage(tuned: Sweep, waits: list[float]) -> None:
    assert tuned.wait().state is SweepState.FAILED
    assert waits == [30, 5, 10, 30]


@pytest.mark.usefixtures("waits")
def test_a_followed_sweep_survives_an_outage(tuned: Sweep) -> None:
    messages: list[str] = []
    found = [str(status.state) for status in tuned.statuses(messages.append)]
    assert found == ["RUNNING", "RUNNING", "FAILED"]
    assert messages[0] == "AWS does not answer (retrying; the sweep continues)"
