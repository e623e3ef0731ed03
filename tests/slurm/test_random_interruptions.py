"""Three interruptions of a random kind at random moments, as benchmarks/slurm_interruptions.py makes many of them."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from support.jobs import Cli
from support.sizes import tries
from support.slurm_chains import RECORDS_SAMPLES, Chain, differences, epochs_of, read_chain
from support.slurm_cluster import Cluster
from support.slurm_interruptions import (
    DURING,
    QUEUED,
    STARTING,
    TRAINING,
    Interrupter,
    RunEndedError,
    jobs_of,
    processes_end,
)
from support.slurm_runs import Trainings

from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain_runtime.contract.constants import REHEARSAL_HOLD_VARIABLE

pytestmark = pytest.mark.processes

INTERRUPTIONS = tries(3)
SEED = 0
"""benchmarks/slurm_interruptions.py takes others."""
STEPS, STEPS_PER_EPOCH = 1600, 40
HOLD_STEP = 1500
"""Where a run waits for an interruption, so that a fast machine does not end it before."""
MOMENTS = (QUEUED, STARTING, TRAINING, DURING)
"""A run that waits saves only when it is interrupted."""


def submit(trainings: Trainings, *options: str) -> str:
    return trainings.submit("--site", "test", *RECORDS_SAMPLES, *options)


def end(interrupter: Interrupter) -> None:
    """Let a run end that may wait at the step where it holds."""
    trainings, run = interrupter.trainings, interrupter.run

    def waits() -> bool:
        tree = JobFolder.newest(trainings.folder(run)).tree("algo-1")
        return (tree.rehearsal / "held-0").exists()

    with contextlib.suppress(RunEndedError):
        interrupter.wait(waits)
        interrupter.requeue()
    interrupter.wait_for_end()


def faults(trainings: Trainings, run: str, expected: Chain, weights: str) -> list[str]:
    status = trainings.status(run)
    assert status["state"] == "SUCCEEDED", status
    found = list(differences(read_chain(trainings.folder(run)), expected))
    if trainings.weights(run) != weights:
        found.append("its weights differ")
    if jobs_of(trainings.slurm, run) != 1:
        found.append("it has several jobs")
    if not processes_end(trainings, run):
        found.append("processes of it live on")
    return found


def test_random_interruptions_lose_nothing(cli: Cli, slurm: Cluster, slurm_site: Path) -> None:
    trainings = Trainings(cli, slurm, slurm_site)
    uninterrupted = submit(trainings)
    trainings.wait_for_end(uninterrupted)
    expected = read_chain(trainings.folder(uninterrupted))
    assert sorted(expected.samples) == list(range(1, STEPS + 1))
    first, *others = epochs_of(expected.samples, STEPS_PER_EPOCH)
    assert all(each == first for each in others)
    weights = trainings.weights(uninterrupted)

    rng = random.Random(SEED)  # noqa: S311 (a test that can be repeated)
    count = 0
    while count < INTERRUPTIONS:
        run = submit(trainings, "--set", f"code.env.{REHEARSAL_HOLD_VARIABLE}={HOLD_STEP}")
        interrupter = Interrupter(trainings, run, rng, moments=MOMENTS)
        with contextlib.suppress(RunEndedError):
            while len(interrupter.done) < INTERRUPTIONS - count:
                interrupter.interrupt()
        end(interrupter)
        count += len(interrupter.done)
        what = ", ".join(map(str, interrupter.done))
        assert faults(trainings, run, expected, weights) == [], what
        assert interrupter.done, f"{run} was not interrupted"
        slurm.restore()
