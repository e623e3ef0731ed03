"""Finished local runs, written as their files, for tests and benchmarks of what shows them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain_runtime.contract import format_event

BEGIN = datetime(2026, 11, 20, 10, 15, tzinfo=UTC)


def step_events(
    count: int, *, loss: float = 2.0, names: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Return the start and the steps of a training whose loss falls; the other metrics are multiples of it."""
    begin = BEGIN.timestamp()
    started = {
        "event": "started",
        "total_steps": count,
        "world_size": 2,
        "step": 0,
        "time": begin,
        "device": "cpu",
    }
    events: list[dict[str, Any]] = [started]
    for step in range(1, count + 1):
        value = loss / (1 + step / (count / 10))
        metrics = {name: value * (2 + at) for at, name in enumerate(names)}
        moment = {"time": round(begin + step * 0.01, 3)}
        events.append(
            {"event": "step", "step": step, "loss": round(value, 6), "metrics": metrics, **moment}
        )
    return events


def write_run(
    home: Path,
    run: str,
    events: Iterable[Mapping[str, Any]],
    *,
    state: str = "SUCCEEDED",
    reason: str = "",
    job: Mapping[str, Any] | None = None,
    lines: Iterable[str] = (),
    diff: str = "",
) -> Path:
    """Write the files of a local run that has ended; return its folder.

    Args:
        home: The folder of local runs.
        run: The run's id.
        events: Events of rank 0, with a name as `event`.
        state: The final state.
        reason: Its reason.
        job: Content of its job file.
        lines: Lines of its log before the events.
        diff: git diff of its code.
    """
    folder = home / "runs" / run
    (folder / "logs").mkdir(parents=True)
    ended = BEGIN.replace(minute=45).isoformat()
    record = {
        "state": state,
        "reason": reason,
        "started": BEGIN.isoformat(),
        "ended": ended,
        "supervisor": None,
    }
    (folder / "state.json").write_text(json.dumps({**record, "artifacts": {}}))
    (folder / "request.json").write_text(json.dumps({"TrainingJobName": run, "Tags": []}))
    content = {"name": run.rsplit("-", 3)[0], **(job or {})}
    source = {"commit": "0" * 40, "branch": "main", "dirty": bool(diff), "diff": diff}
    plan = {
        "run": run,
        "job": content,
        "source": source,
        "bundle": {"digest": "a" * 64, "bytes": 1000, "files": 3},
    }
    (folder / "plan.json").write_text(
        json.dumps({**plan, "request": {}, "command": {"text": "train.py"}})
    )
    formatted = [
        format_event(event["event"], {k: v for k, v in event.items() if k != "event"})
        for event in events
    ]
    (folder / "logs" / "algo-1.log").write_text(
        "".join(f"{line}\n" for line in (*lines, *formatted))
    )
    (folder / "events.jsonl").write_text(
        "".join(f"{line.partition(' ')[2]}\n" for line in formatted)
    )
    return folder
