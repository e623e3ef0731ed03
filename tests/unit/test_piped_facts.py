"""What scripts read of `status` in a pipe: each fact is one line that begins with its key."""

import dataclasses

import pytest
from support.run_statuses import FAILED, INTERRUPTED, PENDING, STOPPED, TRAINING, at

from cloudtrain.console import command_name
from cloudtrain.console.facts import fact_lines
from cloudtrain.console.runs import print_status, status_rows
from cloudtrain.runs.status import Status, WarmPool

pytestmark = pytest.mark.promise

NOW = at(1400).timestamp()
HOSTS = {
    "algo-1": {"event": "environment", "host": "algo-1", "python": "3.11.7"},
    "algo-2": {"event": "environment", "host": "algo-2", "python": "3.13.0"},
}
POOL = WarmPool("Available", keep_alive_seconds=3600, until=at(3000))
FULL = dataclasses.replace(
    STOPPED,
    progress=dataclasses.replace(STOPPED.progress, host_environments=HOSTS),
    reason="the first line\nthe second line",
    warm_pool=POOL,
)
STATUSES = {
    "pending": PENDING,
    "training": TRAINING,
    "failed": FAILED,
    "interrupted": INTERRUPTED,
    "full": FULL,
}


@pytest.mark.parametrize("status", STATUSES.values(), ids=STATUSES)
def test_each_fact_is_a_line_with_its_key(
    status: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    print_status(status)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(status_rows(status))
    assert [line for line in lines if not line or line.startswith(" ")] == []


def test_several_values_repeat_their_key() -> None:
    rows = status_rows(FULL, NOW)
    names = [name for name, _ in rows]
    assert names.count("hosts") == 2
    # A script that looks for one of these finds one.
    for name in ("run", "state", "explain", "checkpoint", "checkpoint at", "warm pool", "end pool"):
        assert names.count(name) == 1, name
    assert dict(rows)["end pool"] == f"{command_name()} stop {FULL.reference} --pool"


def test_a_terminal_shows_equal_names_once() -> None:
    lines = fact_lines([("hosts", "a"), ("hosts", "b"), ("step", "c")], 80)
    assert lines == ["hosts  a", "       b", "step   c"]
    assert fact_lines([("hosts", "a"), ("hosts", "b")], None) == ["hosts  a", "hosts  b"]


def test_a_terminal_does_not_wrap_a_command() -> None:
    command = f"{command_name()} stop local:digits-261125-223727-71810a --pool"
    assert fact_lines([("end pool", command)], 40) == [f"end pool  {command}"]
