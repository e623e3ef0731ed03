"""Ended local runs of several attempts, written as their files, for tests of what shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cloudtrain.job.sections.recover import Recover
from cloudtrain.runs.attempt_chain import (
    CHAIN_FILE,
    CHAIN_VERSION,
    CHAINS_FOLDER,
    AttemptState,
    Chain,
    ChainAttempt,
)
from cloudtrain.runs.status import State
from support.recorded_runs import BEGIN, write_run

KILLED = "rank 1 on algo-1 (local rank 1) was killed by SIGKILL"
STEP_SECONDS = 1.0


@dataclass(frozen=True)
class Tried:
    """An attempt: seconds after the first one at which it begins and ends, and its steps.

    Attributes:
        began: When it began.
        ended: When it ended.
        first: Step that it continues from.
        last: Last step that it has done.
        saved: Step of its newest checkpoint, or None.
    """

    began: float
    ended: float
    first: int
    last: int
    saved: int | None = None


def attempt_id(number: int, name: str = "digits") -> str:
    """Return the id of the run of an attempt."""
    moment = BEGIN + timedelta(minutes=number)
    return f"{name}-{moment:%y%m%d-%H%M%S}-{number:06x}"


def write_chain(
    home: Path,
    tried: Sequence[Tried],
    *,
    state: State | None = State.SUCCEEDED,
    reason: str = "",
    name: str = "digits",
    job: Mapping[str, Any] | None = None,
) -> str:
    """Write the files of a chain and of its local runs; return its id.

    Args:
        home: The folder of local runs.
        tried: Its attempts, all of which have ended; all but the last one were killed.
        state: The final state, or None for a chain that has not decided yet.
        reason: Why it has ended.
        name: Name of the job.
        job: Content of the job file.
    """
    begin = BEGIN.timestamp()
    attempts = []
    for number, each in enumerate(tried, 1):
        run = attempt_id(number, name)
        has_succeeded = state is State.SUCCEEDED and number == len(tried)
        folder = write_run(
            home,
            run,
            _events(each, begin, home / "runs" / run, has_succeeded=has_succeeded),
            state="SUCCEEDED" if has_succeeded else "FAILED",
            reason="" if has_succeeded else KILLED,
            job=job,
            lines=[f"this is attempt {number}"],
        )
        _set_times(folder, begin + each.began, begin + each.ended)
        _set_places(folder, run)
        attempts.append(
            ChainAttempt(
                run,
                AttemptState.ENDED,
                checkpoint=each.saved,
                cause="" if has_succeeded else "infrastructure",
                reason="the run has succeeded" if has_succeeded else KILLED,
                started=begin + each.began,
                ended=begin + each.ended,
            )
        )
    chain = Chain(
        id=attempts[0].run,
        backend="local",
        job=name,
        runtime_seconds=3600,
        created=begin,
        limits=Recover(),
        reservation_usd=0.0,
        usd_per_hour=0.0,
        attempts=tuple(attempts),
        state=state,
        reason=reason,
    )
    folder = home / CHAINS_FOLDER / chain.id
    folder.mkdir(parents=True)
    (folder / CHAIN_FILE).write_text(json.dumps({"version": CHAIN_VERSION, **chain.to_document()}))
    return chain.id


def _events(
    each: Tried, begin: float, folder: Path, *, has_succeeded: bool
) -> list[dict[str, Any]]:
    at = begin + each.began
    events: list[dict[str, Any]] = [
        {"event": "started", "total_steps": 100, "world_size": 2, "step": each.first, "time": at}
    ]
    for step in range(each.first + 1, each.last + 1):
        at += STEP_SECONDS
        events.append({"event": "step", "step": step, "loss": 1 / step, "metrics": {}, "time": at})
        if step == each.saved:
            uri = (folder / "checkpoints" / f"step-{step:08}").as_uri()
            saved = {"uri": uri, "seconds": 0.0, "stall_seconds": 0.0}
            events.append({"event": "checkpoint", "step": step, **saved, "time": at})
    if has_succeeded:
        events.append({"event": "finished", "step": each.last, "time": at})
    return events


def _set_times(folder: Path, began: float, ended: float) -> None:
    file = folder / "state.json"
    content = json.loads(file.read_text())
    content["started"] = datetime.fromtimestamp(began, UTC).isoformat()
    content["ended"] = datetime.fromtimestamp(ended, UTC).isoformat()
    file.write_text(json.dumps(content))


def _set_places(folder: Path, run: str) -> None:
    file = folder / "plan.json"
    place = (folder / "checkpoints").as_uri()
    config = {"checkpoint": {"uri": place, "resume": "auto"}, "script": None}
    content = {**json.loads(file.read_text()), "checkpoint": {"uri": place}, "config": config}
    file.write_text(json.dumps({**content, "run": run}))
