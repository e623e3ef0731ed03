"""Helpers of tests that stop and resume the training loops of other libraries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.jobs import Cli, processes_of, until

RANKS = 2

RECORDER = '''
import json, os, signal, time
from cloudtrain_runtime import context
from cloudtrain_runtime.process.environment import ml_tree

class Recorder:
    """Records the loss of each step on this rank.

    At step STOP_AT it waits for the stop notice. At step KILL_AT rank 1 kills itself, once.
    """

    def __init__(self):
        self.place, self.stop_at = context(), int(os.environ["STOP_AT"])
        self.kill_at = int(os.environ.get("KILL_AT", "-1"))
        self.file = open(f"{os.environ['RECORDS']}/{self.place.run}-{self.place.rank}", "a", buffering=1)

    def record(self, step, loss):
        self.file.write(json.dumps([step, float(loss)]) + "\\n")
        if step == self.kill_at and self.place.rank == 1 and not os.path.exists(f"{os.environ['RECORDS']}/killed"):
            open(f"{os.environ['RECORDS']}/killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.stop_at:
            open(f"{os.environ['RECORDS']}/waits-{self.place.rank}", "w").close()
            while not ml_tree(os.environ).stop_notice.exists():
                time.sleep(0.01)
        if self.stop_at >= 0:
            time.sleep(0.1)  # with slow steps, ranks exchange the stop notice at each step
'''
"""A module of a job's code."""


@dataclass(frozen=True)
class Runs:
    """An uninterrupted run, and one that was stopped and resumed.

    Attributes:
        losses: Losses of all ranks by step, of the uninterrupted run.
        before: The same until the stop.
        after: The same since the resume.
        stopped_at: Step of the stop.
        done: Status of the uninterrupted run.
        running: Status of the other run while it waited.
        stopped: Its status after the stop.
        resumed: Status of the resumed run.
    """

    losses: dict[int, list[float]]
    before: dict[int, list[float]]
    after: dict[int, list[float]]
    stopped_at: int
    done: dict[str, Any]
    running: dict[str, Any]
    stopped: dict[str, Any]
    resumed: dict[str, Any]


def interrupt_and_compare(
    cli: Cli,
    job: Path,
    records: Path,
    *,
    stop_at: int,
    reported: int | None = None,
    settings: tuple[str, ...] = (),
) -> Runs:
    """Run a job without interruption, and once more with a stop in the middle and a resume; check equal losses.

    `reported` is the step that the status shows before the stop; by default the one before it.
    """
    shown = stop_at - 1 if reported is None else reported
    records.mkdir()
    shape = (
        "--local",
        "--json",
        "--instances",
        "1",
        f"--set=cluster.processes_per_instance={RANKS}",
        *settings,
    )
    shape = (*shape, f"--set=code.env.RECORDS={records}")
    done = cli("submit", job, "--follow", *shape, "--set=code.env.STOP_AT=-1")
    assert done.code == 0, done.err
    run = cli("submit", job, *shape, f"--set=code.env.STOP_AT={stop_at}").json["run"]
    until(
        lambda: (
            len(list(records.glob("waits-*"))) == RANKS
            or cli("status", run, "--json").json["exit_code"]
        )
    )
    running = until(lambda: _if_reported(cli("status", run, "--json").json, shown))
    stopped = cli("stop", run, "--json").json
    assert (stopped["state"], stopped["exit_code"]) == ("STOPPED", 5), cli("logs", run).out
    assert processes_of(run) == []
    resumed = cli("resume", run, "--follow", "--json", "--set=code.env.STOP_AT=-1")
    assert resumed.code == 0, resumed.err
    losses, before = _losses(records, done.json["run"]), _losses(records, run)
    after = _losses(records, resumed.json["run"])
    stopped_at = stopped["last_checkpoint"]["step"]
    assert stop_at <= stopped_at < max(losses), (stop_at, stopped_at)
    assert list(after) == [step for step in losses if step > max(before)]
    assert {**before, **after} == losses, "bit by bit"
    return Runs(losses, before, after, stopped_at, done.json, running, stopped, resumed.json)


def kill_and_compare(
    cli: Cli,
    job: Path,
    records: Path,
    expected: Runs,
    *,
    kill_at: int,
    start: int,
    settings: tuple[str, ...] = (),
) -> None:
    """Run a job on two instances, kill a rank, and check that it restarts at a step and repeats the expected losses."""
    shape = (
        "--local",
        "--json",
        "--follow",
        "--instances",
        "2",
        "--set=cluster.processes_per_instance=1",
        *settings,
    )
    changes = (
        "limits.retries=1",
        f"code.env.KILL_AT={kill_at}",
        "code.env.STOP_AT=-1",
        f"code.env.RECORDS={records}",
    )
    done = cli("submit", job, *shape, *(f"--set={change}" for change in changes))
    assert done.code == 0, done.err
    assert (records / "killed").exists()
    run = done.json["run"]
    assert _losses(records, run) == expected.losses
    for rank in range(RANKS):
        steps = [
            json.loads(line)[0] for line in (records / f"{run}-{rank}").read_text().splitlines()
        ]
        assert steps.count(start) == 2  # of the first attempt, and of the second
        assert steps.count(start - 1) == 1


def _if_reported(status: dict[str, Any], step: int) -> dict[str, Any] | None:
    """Return a status that shows this step."""
    return status if status["exit_code"] or (status["last_step"] or 0) >= step else None


def _losses(records: Path, run: str) -> dict[int, list[float]]:
    ranks = [
        dict(map(json.loads, (records / f"{run}-{rank}").read_text().splitlines()))
        for rank in range(RANKS)
    ]
    return {step: [rank[step] for rank in ranks] for step in ranks[0]}
