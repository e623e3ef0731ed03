"""Submits of the same request at the same time, with lost requests, lost responses, refusals and killed clients."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.plans import CODE, SETTINGS
from support.sizes import seed_blocks

from cloudtrain import Observer
from cloudtrain.backends.sagemaker.backend import SageMakerBackend
from cloudtrain.bundle.archive import Bundle
from cloudtrain.client.submission import Submission
from cloudtrain.errors import CloudError
from cloudtrain.planning.plan import Plan
from cloudtrain.support.run_id import make_run_id
from simulation.network import Faults, Network
from simulation.services import FINAL, Account
from simulation.world import Actor, World

HOUR = 3600.0
BOTO3 = replace(SETTINGS, transport="boto3")


@pytest.fixture
def plan(plan_of: Any) -> Plan:
    return plan_of(settings=BOTO3)


@pytest.fixture
def bundle(tmp_path: Path, plan: Plan) -> Bundle:
    path = tmp_path / "code.tar.gz"
    path.write_bytes(b"the code")
    return Bundle(path, CODE)


class Submits:
    """Clients that submit one request, in a world of a seed."""

    def __init__(self, seed: int, plan: Plan, bundle: Bundle) -> None:
        self.world = World(seed, deaths=seed % 4)
        chance = self.world.chance
        self.account = Account(lambda: self.world.now, self._job)
        self.account.buckets["bucket"] = {}
        Network(
            self.world,
            self.account,
            Faults(*(chance.choice([0.0, 0.02, 0.1]) for _ in range(3))),
        )
        self._seconds = chance.choice([200.0, 100 * HOUR])
        self._plan, self._bundle = plan, bundle
        self.twice: list[str] = []
        for number in range(chance.randint(2, 4)):
            self.world.start(f"client {number}", self._submit, after=chance.uniform(0, 60))
        later = chance.uniform(
            0, 2 * HOUR
        )  # often after the first job's end, whose lock is old then
        for number in range(2):
            after = later + chance.uniform(0, 2)
            self.world.start(f"later client {number}", self._submit, after=after)

    def run(self) -> Submits:
        self.world.run(self._submit_again)
        return self

    def _submit_again(self, killed: Actor) -> None:
        after = self.world.chance.uniform(1, 2 * HOUR)
        self.world.start(f"{killed.name} again", self._submit, after)

    def _job(self, name: str) -> list[tuple[float, str, str]]:
        """Note a second job beside an active one, which a user would pay for twice."""
        active = [other for other in self.account.jobs if not self._has_ended(other)]
        self.twice += [f"{name} beside {other}" for other in active]
        return [
            (0, "InProgress", "Starting"),
            (60, "InProgress", "Training"),
            (self._seconds, "Completed", "Completed"),
        ]

    def _has_ended(self, name: str) -> bool:
        moment, status, _ = self.account.jobs[name].schedule[-1]
        return status in FINAL and moment <= self.world.now

    def _submit(self) -> str:
        """Submit as a user does: again after an error of AWS."""
        session = boto3.Session("key", "secret", region_name="us-west-2")
        backend = SageMakerBackend(BOTO3, session=session)
        sending = Submission(backend, lambda: self._bundle, Observer(), skip_check=True)
        ended_before = {name for name in self.account.jobs if self._has_ended(name)}
        while True:
            now = datetime.fromtimestamp(self.world.now, UTC)
            plan = self._plan.rename(make_run_id(self._plan.job, now, self._plan.identity[:6]))
            try:
                found = sending.send(plan).id
            except CloudError as error:
                self.world.note(f"error: {error.message}")
                self.world.sleep(self.world.chance.uniform(5, 600))
            else:
                assert found not in ended_before, f"{found} had ended before its submit began"
                return found


@pytest.mark.parametrize("seeds", seed_blocks(100, 25), ids=str)
def test_no_request_is_paid_for_twice(seeds: range, plan: Plan, bundle: Bundle) -> None:
    for seed in seeds:
        done = Submits(seed, plan, bundle).run()
        trace = "\n".join([f"seed {seed}", *done.world.trace])
        assert not done.twice, trace
        assert done.account.jobs, trace
        for actor in done.world.actors:
            assert actor.error is None, (trace, actor.error)
            if actor.state == "ended":
                assert actor.result in done.account.jobs, trace


def test_a_seed_gives_the_same_world_again(plan: Plan, bundle: Bundle) -> None:
    first, again = (Submits(7, plan, bundle).run().world.trace for _ in range(2))
    assert first == again
    assert len(first) > 5
