"""Filters of log lines, and waiting through outages."""

import os
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cloudtrain.aws.retry import Backoff
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.errors import UnreachableError
from cloudtrain.runs.log_lines import (
    LogFilter,
    LogLine,
    find_rank,
    parse_since,
)
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State, Status
from cloudtrain_runtime.contract import format_event

RUN = "digits-261120-101500-1a2b3c"


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("[rank3]: Traceback (most recent call last):", 3),
        ("[rank12]:[W1121 07:58:18 ProcessGroup.cpp] warning", 12),
        ("[1,3]<stdout>:hello", 3),
        ("[1,mpirank:11,algo-2]<stderr>:hello", 11),
        ("[default0]:hello", None),  # a local rank
        ("hello [rank3]: there", None),
        ("[ranking]: x", None),
        (format_event("step", {"step": 1}), 0),
        (format_event("failed", {"rank": 5}), 5),
        (format_event("failed", {"host": "algo-2", "rank": None}), None),
        ("unfinished" + format_event("step", {"step": 1}), 0),
    ],
)
def test_the_rank_of_a_line(text: str, rank: int | None) -> None:
    assert find_rank(text) == rank
    assert LogFilter(rank=3).wants(LogLine("algo-1", text)) is (rank == 3)


def test_a_line_must_match_every_filter() -> None:
    only = LogFilter(host="algo-1", grep=re.compile("lo+ss"), rank=1)
    assert only.wants(LogLine("algo-1", "[rank1]: loss 2"))
    for line in (
        LogLine("algo-2", "[rank1]: loss"),
        LogLine("algo-1", "[rank1]: x"),
        LogLine("algo-1", "loss"),
    ):
        assert not only.wants(line)


def test_since() -> None:
    assert parse_since("10m") == timedelta(minutes=10)
    assert parse_since("2026-11-20T10:00") == datetime(2026, 11, 20, 10, tzinfo=UTC)
    assert LogFilter(since=parse_since("1h")).begins(10_000) == 6400
    moment = LogFilter(since=parse_since("2026-11-20T10:00+02:00")).begins(0)
    assert moment == datetime(2026, 11, 20, 8, tzinfo=UTC).timestamp()
    assert LogFilter(since=datetime(2026, 11, 20, 10)).begins(0) == moment + 7200  # noqa: DTZ001 (without a zone: UTC)
    assert LogFilter().begins(5) is None
    assert LogFilter(since=parse_since("999999d")).from_now().begins(0) == 0
    for text in ("", "10", "yesterday", "2026-13-01", "999999999d999999999d"):
        with pytest.raises(ValueError, match="expected a duration such as 10m or a time"):
            parse_since(text)


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    """Create a finished run of two hosts, of which the first printed events."""
    logs = tmp_path / "runs" / RUN / "logs"
    logs.mkdir(parents=True)
    (logs.parent / "state.json").write_text('{"state": "SUCCEEDED", "reason": ""}')
    lines = [
        "start",
        format_event("step", {"step": 1, "time": 100.0}),
        "between",
        format_event("step", {"step": 2, "time": 200.0}),
        "end",
    ]
    (logs / "algo-1.log").write_text("\n".join(lines))
    (logs / "algo-2.log").write_text("no times here\n")
    return LocalBackend(tmp_path)


def test_since_uses_the_times_of_events_in_local_logs(backend: LocalBackend) -> None:
    def texts(since: float) -> list[str]:
        only = LogFilter(since=datetime.fromtimestamp(since, UTC))
        return [line.text.split()[0] for line in backend.logs(RUN, only=only)]

    assert texts(50) == ["start", "CLOUDTRAIN", "between", "CLOUDTRAIN", "end", "no"]
    assert texts(150) == ["between", "CLOUDTRAIN", "end", "no"]
    assert texts(250) == ["end", "no"]
    for path in (backend.runs / RUN / "logs").iterdir():
        os.utime(path, (300, 300))
    assert texts(250) == ["end", "no"]
    assert texts(350) == []


class Flaky:
    """A backend with scripted results: a state to return, or an error to raise."""

    name = "sagemaker"

    def __init__(self, *results: State | Exception) -> None:
        self.results = list(results)

    def poll_backoff(self) -> Backoff:
        return Backoff(0.001)

    def status(self, run: str) -> Status:
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return Status(run, self.name, result)

    def logs(self, run: str, **_: object) -> Iterator[LogLine]:  # noqa: ARG002 (the protocol's signature)
        return iter(())

    def facts(self, run: str) -> dict[str, str]:  # noqa: ARG002
        return {}

    def stop(self, run: str) -> None:  # noqa: ARG002
        return


def test_a_wait_survives_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.aws.retry.random.uniform", lambda *_: 0.001)
    outage = UnreachableError("could not describe the training job: no response")
    messages: list[str] = []
    run = Run(RUN, Flaky(State.QUEUED, outage, outage, State.RUNNING, outage, State.SUCCEEDED))
    assert run.wait(on_trouble=messages.append).state is State.SUCCEEDED
    assert messages[::2] == [f"{outage.message} (retrying; the run continues)"] * 2
    assert [text.rpartition(" ")[0] for text in messages[1::2]] == ["recovered after"] * 2
    with pytest.raises(UnreachableError):
        Run(RUN, Flaky(outage)).wait()
    with pytest.raises(TimeoutError, match="it continues"):
        Run(RUN, Flaky(State.RUNNING, outage, outage, outage, outage)).wait(timeout_seconds=0.0)


def test_hosts_are_coloured_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from cloudtrain.console.runs import host_prefixes

    assert host_prefixes()("algo-1") == "algo-1"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    prefix = host_prefixes()
    first, second = prefix("algo-1"), prefix("algo-2")
    assert first.startswith("\x1b[")
    assert "algo-1" in first
    assert first.replace("algo-1", "") != second.replace("algo-2", "")
    assert prefix("algo-1") == first
    monkeypatch.setenv("NO_COLOR", "1")
    assert host_prefixes()("algo-1") == "algo-1"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert host_prefixes()("algo-1") == "algo-1"
