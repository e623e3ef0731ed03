"""`Run.follow` outside of a notebook: lines for changes. tests/local/test_notebooks.py tests it in a kernel."""

import dataclasses
from typing import Any

import pytest
from support.run_logs import LoggedRun

from cloudtrain import CloudError, Run, State, Status
from cloudtrain.errors import UnreachableError
from cloudtrain.runs.progress import fold_events

STEPS = fold_events(
    [
        {"event": "started", "total_steps": 100},
        {"event": "step", "step": 60, "time": 1.0, "loss": 0.5},
    ]
)
QUEUED = Status("x", "local", State.QUEUED, "waiting for its turn\x1b[2J")
RUNNING = Status("x", "local", State.RUNNING, progress=STEPS)
DONE = dataclasses.replace(RUNNING, state=State.SUCCEEDED)


def lines_of(capsys: pytest.CaptureFixture[str], *statuses: Any) -> list[str]:
    Run("x", LoggedRun(statuses=statuses)).follow()
    return capsys.readouterr().out.splitlines()


def test_changes_of_the_state_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    without_steps = dataclasses.replace(RUNNING, progress=fold_events([]))
    assert lines_of(capsys, QUEUED, QUEUED, without_steps, RUNNING, RUNNING, DONE) == [
        "QUEUED  waiting for its turn\\x1b[2J",
        "RUNNING",
        "RUNNING  60/100 steps  train/loss 0.5",
        "Status local:x",
        "  state     SUCCEEDED",
        "  progress  60/100 steps",
        "  metrics   train/loss 0.5",
    ]


def test_an_interrupt_leaves_the_run_running(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        Run("x", LoggedRun(statuses=[RUNNING, KeyboardInterrupt()])).follow()
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last
        == 'interrupted; the run continues. To follow it again: cloudtrain.get_run("local:x").follow()'
    )


def test_an_outage_is_reported_and_waited_through(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("cloudtrain.aws.retry.time.sleep", waits.append)
    lines = lines_of(capsys, RUNNING, UnreachableError("AWS does not answer"), RUNNING, DONE)
    assert lines[1] == "AWS does not answer (retrying; the run continues)"
    assert lines[2].startswith("recovered after ")
    assert waits[1] > waits[0] == 0.5


def test_a_refusal_is_raised() -> None:
    with pytest.raises(CloudError, match="denied"):
        Run("x", LoggedRun(statuses=[RUNNING, CloudError("denied")])).follow()
