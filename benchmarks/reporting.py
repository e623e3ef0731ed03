"""Measure what `cloudtrain_runtime.report` costs in a loop of steps of one millisecond.

    .venv/bin/python benchmarks/reporting.py [--steps 2000] [--rounds 7] [--write FILE]

A process computes steps that take one millisecond of processor time, once without reports and once with a report of
step, total and three metrics after each step. Both loops run in turn in one process of a run whose rank is 0, so the
reports are printed. The processor time of all threads is counted, of the one that prints as well.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from measure import Benchmark, Peer, Session, alternate, table

from cloudtrain_runtime import report
from cloudtrain_runtime.contract import CheckpointConfig, MlTree, RunConfig

PLAIN, REPORTED = "the steps alone", "with a report after each"
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="the same steps without reports",
    goal="at most 1.01 times the processor time of the steps",
    mechanism="the reports of a round were printed, the last step among them",
    options={"steps": (2_000, "steps of each loop")},
)


def measure(session: Session) -> list[str]:
    """Return the table of processor time."""
    steps = session.options.steps
    with tempfile.TemporaryDirectory() as folder:
        _become_rank_zero(Path(folder))
        printed = Path(folder) / "printed"
        output = os.dup(1)
        lines = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        offset = [0]

        def with_reports() -> float:
            os.dup2(lines, 1)
            began = time.process_time()
            for step in range(offset[0] + 1, offset[0] + steps + 1):
                _compute()
                report(step, total=10**9, loss=1 / step, accuracy=0.5, rate=1e-3)
            seconds = time.process_time() - began
            time.sleep(1.5)  # the thread prints the last values within a second
            os.dup2(output, 1)
            offset[0] += steps
            session.require(
                f'"step": {offset[0]},' in printed.read_text(), "the last report was not printed"
            )
            return seconds

        def plain() -> float:
            began = time.process_time()
            for _ in range(steps):
                _compute()
            return time.process_time() - began

        found = alternate(
            [Peer(PLAIN, plain), Peer(REPORTED, with_reports, goal="1.01")], session.rounds
        )
    return table(f"{steps:,} steps of 1 ms", found, base=PLAIN, digits=3)


def _become_rank_zero(folder: Path) -> None:
    """Give this process the environment of rank 0 of a script's run."""
    tree = MlTree(folder)
    tree.run_config.parent.mkdir(parents=True)
    saving = CheckpointConfig("", 600, None, 3, "auto")
    config = RunConfig("demo", None, "train.py", [], None, 1, "torch_distributed", 0, None, saving)
    tree.run_config.write_text(config.to_json())
    os.environ.update(CLOUDTRAIN_ML_ROOT=str(folder), RANK="0", WORLD_SIZE="1")


def _compute() -> None:
    """Use one millisecond of this thread's processor time."""
    end = time.thread_time() + 1e-3
    while time.thread_time() < end:
        pass


if __name__ == "__main__":
    sys.stdout.flush()
    BENCHMARK.main(measure)
