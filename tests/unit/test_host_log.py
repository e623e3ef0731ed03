"""Times of the lines of local logs: those of events, else the newest one before."""

import contextlib
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cloudtrain import State, Status
from cloudtrain.backends.container.host_log import HostLog
from cloudtrain.failure_rules import Explanation, explain_run
from cloudtrain.runs.log_lines import LogLine

RUN = "demo-261120-101500-1a2b3c"
BEGIN = datetime(2026, 11, 20, 10, 15, tzinfo=UTC).timestamp()
END = BEGIN + 1000


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "algo-1.log"


def seconds(log: Path, *lines: str, at_least: float = 0.0) -> list[float]:
    """Write lines; return their times in seconds since the submit."""
    log.write_text("".join(f"{line}\n" for line in lines))
    os.utime(log, (END, END))
    with contextlib.closing(HostLog(log, RUN)) as host:
        return [(line.time or 0.0) - BEGIN for line in host.read(final=True, at_least=at_least)]


def event(after: float) -> str:
    return f'CLOUDTRAIN {{"event": "step", "step": 1, "time": {BEGIN + after}}}'


def test_lines_have_the_newest_time_before_them(log: Path) -> None:
    assert seconds(log, "start", event(10), "text", event(20), "text") == [0, 10, 10, 20, 20]


def test_times_never_decrease(log: Path) -> None:
    assert seconds(log, event(20), event(10), "text") == [20, 20, 20]


@pytest.mark.parametrize("text", ["2026-11-20T10:15:30Z INFO", "2020-01-01 00:00:00"])
def test_dates_that_a_job_prints_are_no_times(log: Path, text: str) -> None:
    assert seconds(log, f"{text} value") == [0]


def test_lines_of_a_followed_log_are_newer_than_the_poll(log: Path) -> None:
    assert seconds(log, "text", event(10), at_least=BEGIN + 50) == [50, 50]


def test_a_growing_log_is_read_once(log: Path) -> None:
    log.write_text("one\ntw")
    host = HostLog(log, RUN)
    assert [line.text for line in host.read(final=False, at_least=0.0)] == ["one"]
    with log.open("a") as file:
        file.write("o\nthree")
    assert [line.text for line in host.read(final=True, at_least=BEGIN + 5)] == ["two", "three"]
    host.close()


def test_estimated_times_do_not_order_errors_of_hosts() -> None:
    """The host that failed first is known from the reports of the launchers, not from estimated times."""

    def failure(host: str, error: str, failed_at: float, estimated: float) -> list[LogLine]:
        text = f'{{"event": "failed", "host": "{host}", "exit_code": 1, "message": "", "failed_at": {failed_at}}}'
        lines = [
            "Traceback (most recent call last):",
            '  File "train.py", line 1, in <module>',
            f"{error}: text",
        ]
        return [
            LogLine(host, line, estimated, is_estimated=True)
            for line in (f"CLOUDTRAIN {text}", *lines)
        ]

    lines = [
        *failure("algo-1", "KeyError", 20.0, 1.0),
        *failure("algo-2", "ValueError", 10.0, 30.0),
    ]
    found: Explanation = explain_run(Status(RUN, "local", State.FAILED), lines)
    assert found.message == "ValueError: text"
