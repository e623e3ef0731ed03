"""Chains through lost answers, dead controllers, no capacity and interruptions: no attempt twice, no money over the limit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.plans import SETTINGS
from support.sizes import seed_blocks

from cloudtrain.client.client import Client
from cloudtrain.controllers.folder import known_folders
from cloudtrain.errors import CloudtrainError
from cloudtrain.features.recovery import service
from cloudtrain.features.recovery.stored_chain import StoredChain
from cloudtrain.job.spec import load_job
from cloudtrain.runs.attempt_chain import CHAIN_FILE, CHAINS_FOLDER
from cloudtrain.runs.status import State
from simulation.network import Faults, Network
from simulation.services import FINAL, Account, Job
from simulation.trainings import JOB, STEPS, TASK, Trainings
from simulation.world import Actor, World

HOUR = 3600.0
BOTO3 = replace(SETTINGS, transport="boto3")
USD_PER_HOUR = 1.515
CENT = 0.01
LIMITS = """\
limits:
  runtime: 1h
  recover: {{attempts: {attempts}, cost: {cost} USD, time: {hours}h}}
"""
ENDS = {
    "capacity": "CapacityError: Unable to provision requested ML compute capacity. Please retry.",
    "service": "InternalServerError: We encountered an internal error. Please try again.",
    "code": "AlgorithmError: ValueError: bad batch, exit code: 1",
    "limit": "",
    "done": "",
}

pytestmark = pytest.mark.usefixtures("account")


class Recovery:
    """A job with limits.recover, whose controller is started again after each death, in a world of a seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.world = World(seed, deaths=seed % 4)
        chance = self.world.chance
        self.account = Account(lambda: self.world.now, self._train)
        self.account.buckets["bucket"] = {}
        lost, unanswered, refused = (chance.choice([0.0, 0.01, 0.05]) for _ in range(3))
        Network(self.world, self.account, Faults(lost, 2 * unanswered, refused, outage=0.5))
        self.attempts = chance.randint(1, 6)
        self.cost = round(chance.uniform(1.0, 4.0) * 1.7, 2)
        self.hours = chance.choice([4, 24, 336])
        folder.mkdir()
        (folder / "mine.py").write_text(TASK)
        self._job = folder / "job.yaml"
        limits = LIMITS.format(attempts=self.attempts, cost=self.cost, hours=self.hours)
        self._job.write_text(JOB + limits)
        self.ends: dict[str, str] = {}
        self.trainings = Trainings(self.world, self.account)
        self.faults = self.trainings.faults
        self._step = 0
        self.world.start("user", self._use)
        if chance.random() < 0.2:
            self.world.start("colleague", self._stop, after=chance.uniform(0, 6 * HOUR))

    def run(self) -> None:
        self.world.run(self._start_again)

    def _start_again(self, killed: Actor) -> None:
        if killed.name == "user":
            self.world.start("user", self._use, after=self.world.chance.uniform(1, 2 * HOUR))

    def chains(self) -> list[StoredChain]:
        return [
            StoredChain(name, folder)
            for name, folder in known_folders(CHAINS_FOLDER, CHAIN_FILE).items()
        ]

    def _use(self) -> None:
        while True:
            try:
                found = self.chains()
                stored = found[0] if found else self._begin()
                if stored.read().state is not None:
                    return
                service.control(stored, settings=BOTO3, report=self.world.note)
            except CloudtrainError as error:
                self.world.note(f"error: {error.message}")
                self.world.sleep(self.world.chance.uniform(60, 600))

    def _begin(self) -> StoredChain:
        return service.begin_with_job(Client(BOTO3), load_job(self._job).valid_spec(), "sagemaker")

    def _stop(self) -> None:
        for stored in self.chains():
            stored.stop_file.touch()

    # What the account does

    def _train(self, name: str) -> list[tuple[float, str, str]]:
        chance = self.world.chance
        active = [job for job in self.account.jobs.values() if not self._has_ended(job)]
        if active:
            self.faults.append(f"{name} beside {len(active)} others")
        end = chance.choices([*ENDS], [3, 3, 1, 2, 1])[0]
        self.ends[name] = end
        if ENDS[end]:
            self.account.reasons[name] = ENDS[end]
        if end == "capacity":
            return [(0, "InProgress", "Starting"), (60, "Failed", "Failed")]
        begin = self.trainings.first_step(name)
        left = STEPS - begin
        limit = self.trainings.limit_of(name)
        seconds = limit if end == "limit" else chance.uniform(60, limit - 1)
        last = STEPS if end == "done" else begin + chance.randint(0, left - 1)
        pace = seconds / max(1, left)
        self.trainings.save_every_fifth(name, begin, last, pace, 100.0)
        final = {"limit": "Stopped", "done": "Completed"}.get(end, "Failed")
        secondary = "MaxRuntimeExceeded" if end == "limit" else final
        return [
            (0, "InProgress", "Starting"),
            (100, "InProgress", "Training"),
            (100 + seconds, final, secondary),
        ]

    def _has_ended(self, job: Job) -> bool:
        moment, status, _ = job.schedule[-1]
        return status in FINAL and moment <= self.world.now

    def _end_of(self, run: str) -> str:
        _, _, last = self.account.jobs[run].schedule[-1]
        return "stopped" if last == "Stopped" else self.ends[run]

    def check(self) -> None:
        assert not self.faults, self.faults
        (stored,) = self.chains()
        chain = stored.read()
        assert chain.state is not None
        assert all(self._has_ended(job) for job in self.account.jobs.values())
        billed = sum(self.account.billed_seconds(name) for name in self.account.jobs)
        cost = billed / HOUR * USD_PER_HOUR
        assert cost <= self.cost + CENT, (cost, self.cost)
        runs = [each.run for each in chain.attempts]
        assert set(self.account.jobs) <= set(runs)
        assert Counter(runs).most_common(1)[0][1] == 1
        ended = [self._end_of(run) for run in runs if run in self.ends]
        assert sum(each != "capacity" for each in ended) <= self.attempts
        assert all(each not in ("done", "code") for each in ended[:-1])
        if chain.state is State.SUCCEEDED:
            assert ended[-1] == "done"
        if ended and ended[-1] == "done":
            assert chain.state is State.SUCCEEDED


@pytest.mark.parametrize("seeds", seed_blocks(10, 5), ids=str)
def test_chains_keep_their_promises(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / f"home-{seed}"))
        recovery = Recovery(seed, tmp_path / f"job-{seed}")
        recovery.run()
        trace = "\n".join([f"seed {seed}", *recovery.world.trace[-200:]])
        try:
            for actor in recovery.world.actors:
                assert actor.error is None, actor.error
            recovery.check()
        except AssertionError as error:
            raise AssertionError(f"{trace}\n{error}") from error
