"""What all trackers have: a queue with a limit, steps that are logged once, and services that fail or hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cloudtrain_runtime.contract import format_event, parse_event
from cloudtrain_runtime.metrics.tracking import background
from cloudtrain_runtime.metrics.tracking.background import BackgroundLogger
from cloudtrain_runtime.metrics.tracking.service import EventReader
from cloudtrain_runtime.metrics.tracking.tracker import Connection, Ending, Value


class Service:
    """A tracker that keeps what it gets, has steps already, fails some calls, or hangs."""

    name = "service"
    place = "a service"

    def __init__(self, logged: Mapping[str, int] | None = None, *, failures: int = 0) -> None:
        self.logged = logged or {}
        self.failures = failures
        self.values: list[Value] = []
        self.saved: list[str] = []
        self.ending: Ending | None = None
        self.hangs = threading.Event()
        self.hangs.set()

    def require_packages(self) -> None:
        """Need none."""

    def connect(self, started: Mapping[str, Any]) -> Connection:  # noqa: ARG002 (the protocol)
        self.hangs.wait()
        return Connection(self.logged, {"url": "https://service.example/run"})

    def log(self, values: Sequence[Value]) -> int:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the service is away")
        self.values += values
        return 0

    def save(self, checkpoint: str) -> None:
        self.saved.append(checkpoint)

    def end(self, ending: Ending) -> None:
        self.ending = ending


def events(captured: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found = map(parse_event, captured.readouterr().out.splitlines())
    return [event for event in found if event is not None]


def step(number: int, loss: float = 0.5) -> dict[str, Any]:
    return {"event": "step", "time": 1.0, "step": number, "loss": loss}


def log(service: Service, *written: dict[str, Any], seconds: float = 60) -> None:
    logger = BackgroundLogger(service)
    for event in ({"event": "started", "time": 0.0}, *written):
        logger.on_event(event)
    logger.close()
    logger.join(time.monotonic() + seconds)


def test_a_repeated_step_keeps_its_first_value(capfd: pytest.CaptureFixture[str]) -> None:
    service = Service({"train/loss": 3})
    log(service, *(step(each, 0.5) for each in (3, 4, 5)), *(step(each, 0.1) for each in (4, 5, 6)))
    assert [(each.step, each.value) for each in service.values] == [(4, 0.5), (5, 0.5), (6, 0.1)]
    assert [event.get("url") for event in events(capfd)] == ["https://service.example/run"]


def test_a_checkpoint_is_saved_after_its_values() -> None:
    service = Service()
    saved = {"event": "checkpoint", "time": 1.0, "uri": "file:///c/step-1", "step": 1}
    finished = {"event": "finished", "time": 2.0, "step": 1}
    log(service, step(1), saved, finished)
    assert (len(service.values), service.saved) == (1, ["file:///c/step-1"])
    assert service.ending is Ending.FINISHED


def test_values_beyond_the_limit_are_counted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_MOST_VALUES", 3)
    service = Service()
    service.hangs.clear()
    log(service, *map(step, range(5)), seconds=0.1)
    last = events(capfd)[-1]
    assert (last["event"], last["dropped"]) == ("tracking", 5)
    assert last["detail"] == "5 values were not logged to a service"
    service.hangs.set()


def test_a_failed_last_request_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_INTERVAL_SECONDS", 0.01)
    service = Service(failures=2)
    finished = {"event": "finished", "time": 2.0, "step": 1}
    log(service, step(1), finished)
    assert ([each.step for each in service.values], service.ending) == ([1], Ending.FINISHED)
    away = Service(failures=10**6)
    log(away, step(1))
    assert away.failures == 10**6 - 3, "a service that is away holds no run"


def test_a_failure_after_the_end_wins() -> None:
    service = Service()
    logger = BackgroundLogger(service)
    logger.on_event({"event": "started", "time": 0.0})
    logger.on_event({"event": "finished", "time": 1.0, "step": 1})
    logger.close(Ending.FAILED)
    logger.join(time.monotonic() + 60)
    assert service.ending is Ending.FAILED


def test_a_long_line_does_not_end_the_reading(tmp_path: Path) -> None:
    service = Service()
    logger = BackgroundLogger(service)
    lines = [format_event("started", {"time": 0.0}), "x" * (3 << 20)]
    lines.append(format_event("step", {"time": 1.0, "step": 1, "loss": 0.5}))
    file = tmp_path / "events"
    file.write_text("\n".join(lines) + "\n")
    EventReader(file, [logger]).read()
    logger.close()
    logger.join(time.monotonic() + 60)
    assert [each.step for each in service.values] == [1]


def test_a_failed_request_is_sent_again(capfd: pytest.CaptureFixture[str]) -> None:
    service = Service(failures=1)
    logger = BackgroundLogger(service)
    for event in ({"event": "started", "time": 0.0}, step(1)):
        logger.on_event(event)
    while service.failures:
        time.sleep(0.01)
    logger.on_event(step(2))
    logger.close()
    logger.join(time.monotonic() + 60)
    assert [each.step for each in service.values] == [1, 2]
    (warning,) = [event for event in events(capfd) if "detail" in event]
    assert "takes no values, they are kept: ConnectionError" in warning["detail"]
