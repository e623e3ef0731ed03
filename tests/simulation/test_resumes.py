"""Runs that fail and are resumed by two people, through faults and deaths: never two at a time, and no step is lost."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.plans import SETTINGS
from support.sizes import seed_blocks

from cloudtrain.client.client import Client
from cloudtrain.errors import CloudError, RunNotFoundError, UserError
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State
from simulation.network import Faults, Network
from simulation.services import FINAL, Account
from simulation.trainings import JOB, STEPS, TASK, Trainings
from simulation.world import Actor, World

HOUR = 3600.0
BOTO3 = replace(SETTINGS, transport="boto3")
QUEUE_SECONDS = 1_000.0
"""Longer than a client tries one call again."""


pytestmark = pytest.mark.usefixtures("account")


class Resumes:
    """A job that fails again and again. Its user, and at first a colleague, resume it, in a world of a seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.world = World(seed, deaths=seed % 4)
        chance = self.world.chance
        self.account = Account(lambda: self.world.now, self._train)
        self.account.buckets["bucket"] = {}
        lost, unanswered, refused = (chance.choice([0.0, 0.02, 0.1]) for _ in range(3))
        Network(self.world, self.account, Faults(lost, unanswered, refused, outage=0.2))
        self.trainings = Trainings(self.world, self.account)
        folder.mkdir()
        (folder / "mine.py").write_text(TASK)
        self._job = folder / "job.yaml"
        self._job.write_text(JOB)
        self.newest = self.trainings.newest
        self.faults = self.trainings.faults
        self.reached = ""
        """The last run that the user knows: a shell's history keeps it when the process is killed."""
        self.world.start("user", self._use)

    def run(self) -> Resumes:
        self.world.run(self._begin_again)
        return self

    def _begin_again(self, killed: Actor) -> None:
        if killed.name == "user":
            self.world.start("user", self._use, after=self.world.chance.uniform(1, 600))

    # What people do

    def _use(self) -> None:
        """Submit the job and resume it until it has succeeded."""
        run = self.reached or self._until_sent(self._submit)
        while True:
            self.reached = run
            state = self._ended(run)
            if state is State.SUCCEEDED:
                return
            if self.world.chance.random() < 0.5:
                self.world.start(
                    "colleague", partial(self._help, run), after=self.world.chance.uniform(0, 30)
                )
            run = self._until_sent(partial(self._resume, run))

    def _help(self, run: str) -> None:
        """Resume a run at the same time as its user, who may be offline."""
        while self.reached == run:
            try:
                self._resume(run)
            except CloudError as error:
                self.world.note(f"error: {error.message}")
                self.world.sleep(self.world.chance.uniform(5, 600))
            else:
                return

    def _client(self) -> Client:
        return Client(BOTO3)

    def _submit(self) -> Run:
        return self._client().submit(self._job)

    def _resume(self, run: str) -> Run:
        """Resume a run. If it has saved nothing, follow the hint, and without one submit the job again."""
        try:
            return self._client().resume(f"sagemaker:{run}")
        except UserError as error:
            self.world.note(f"error: {error.message}")
            if self.newest.get(run):
                raise
            change = re.search(r"--set (checkpoint\.resume=\S+)", error.hint or "")
            return (
                self._client().resume(f"sagemaker:{run}", [change[1]]) if change else self._submit()
            )

    def _until_sent(self, send: Any) -> str:
        while True:
            try:
                return str(send().id)
            except CloudError as error:
                self.world.note(f"error: {error.message}")
                self.world.sleep(self.world.chance.uniform(5, 600))

    def _ended(self, run: str) -> State:
        found = self._client().get_run(f"sagemaker:{run}")
        while True:
            try:
                state = found.status().state
            except (CloudError, RunNotFoundError) as error:
                self.world.note(f"error: {error.message}")
            else:
                if state.is_final:
                    return state
            self.world.sleep(self.world.chance.uniform(10, 300))

    # What the container does

    def _train(self, name: str) -> list[tuple[float, str, str]]:
        """Begin at the step that the container would find, save checkpoints, and fail or complete."""
        self._note_two_at_a_time(name)
        begin, chance = self.trainings.first_step(name), self.world.chance
        last = chance.choice([begin + 3, begin + 25, begin + 40, STEPS])
        seconds = chance.choice([10.0, 60.0])
        self.trainings.save_every_fifth(name, begin, last, seconds, QUEUE_SECONDS)
        end = "Completed" if last >= STEPS else "Failed"
        return [
            (0, "InProgress", "Starting"),
            (QUEUE_SECONDS, "InProgress", "Training"),
            (QUEUE_SECONDS + 10 + seconds * (last - begin), end, end),
        ]

    def _note_two_at_a_time(self, name: str) -> None:
        for other, job in self.account.jobs.items():
            moment, status, _ = job.schedule[-1]
            if status not in FINAL or moment > self.world.now:
                self.faults.append(f"{name} beside {other}")

    def check(self) -> None:
        """Check that no two jobs ran at a time, that each began where one had ended, and that the last has completed."""
        assert not self.faults, self.faults
        assert self.reached in self.account.jobs
        assert self.account.jobs[self.reached].schedule[-1][1] == "Completed"
        assert self.newest[self.reached] == STEPS


@pytest.mark.parametrize("seeds", seed_blocks(10, 5), ids=str)
def test_a_resumed_run_loses_no_step_and_never_runs_twice(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / f"home-{seed}"))
        done = Resumes(seed, tmp_path / f"job-{seed}")
        done.run()
        trace = "\n".join([f"seed {seed}", *done.world.trace[-200:]])
        for actor in done.world.actors:
            assert actor.error is None, (trace, actor.error)
        try:
            done.check()
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"{trace}\n{error}") from error
