"""Logs that are followed to the end of a run: each line once, through outages, late lines and several hosts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import boto3
import pytest
from support.plans import SETTINGS
from support.sizes import seed_blocks

from cloudtrain.backends.sagemaker.backend import SageMakerBackend
from cloudtrain.errors import CloudError
from simulation.network import Faults, Network
from simulation.services import Account
from simulation.world import World

RUN = "demo-260528-101500-1a2b3c"


class Following:
    """A job with several hosts that print, and a client that follows its log, in a world of a seed."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        chance = self.world.chance
        self._seconds = chance.choice([30.0, 600.0, 3_000.0])
        self.account = Account(lambda: self.world.now, self._schedule)
        faults = (chance.choice([0.0, 0.02, 0.1]) for _ in range(3))
        begin = self.world.now + chance.uniform(0, self._seconds)
        outages = [(begin, begin + chance.choice([0, 60, 1800]))]
        late = chance.choice([0.0, 0.05, 0.3])
        Network(self.world, self.account, Faults(*faults, late=late), outages)
        self.account.page_events = chance.choice([40, 10_000])
        expires = chance.choice([0.0, 0.03])
        self.account.refuses_token = lambda: chance.random() < expires
        self.account.create_job({"TrainingJobName": RUN, "Tags": []})
        self.printed: dict[str, list[str]] = {}
        for number in range(chance.randint(1, 4)):
            self._print(f"algo-{number + 1}")
        self.client = self.world.start("client", self._follow, after=chance.uniform(0, 200))

    def _schedule(self, _name: str) -> list[tuple[float, str, str]]:
        status = self.world.chance.choice(["Completed", "Failed", "Stopped"])
        return [
            (0, "InProgress", "Starting"),
            (20, "InProgress", "Training"),
            (20 + self._seconds, "InProgress", "Uploading"),
            (60 + self._seconds, status, status),
        ]

    def _print(self, host: str) -> None:
        """Let a host print lines; each can be read after some seconds, in order."""
        chance, made, seen = self.world.chance, self.world.now + 20, 0.0
        pause = chance.choice([0.1, 8.0])
        lines = []
        for number in range(chance.choice([1, 30, 400])):
            made += chance.uniform(0, 2 * self._seconds / 400) if number else 0.0
            made = min(made, self.world.now + 20 + self._seconds)  # nobody prints after the end
            seen = max(seen + chance.uniform(0.1, pause), made + chance.uniform(0.1, 8))
            lines.append((seen, made, f"{host} line {number}"))
        self.account.logs[f"{RUN}/{host}-1780000000"] = lines
        self.printed[host] = [text for _, _, text in lines]

    def _follow(self) -> dict[str, list[str]]:
        """Return the lines of each host, as they came."""
        session = boto3.Session("key", "secret", region_name="us-west-2")
        backend = SageMakerBackend(replace(SETTINGS, transport="boto3"), session=session)
        while True:
            found: dict[str, list[str]] = defaultdict(list)
            try:
                for line in backend.logs(RUN, follow=True, on_trouble=self.world.note):
                    found[line.host].append(line.text)
            except CloudError as error:
                # A service that has never answered: the user starts again.
                self.world.note(f"error: {error.message}")
                assert not found, "an outage of minutes has ended a log that was followed"
                self.world.sleep(30)
            else:
                return dict(found)


@pytest.mark.parametrize("seeds", seed_blocks(20, 10), ids=str)
def test_each_line_is_followed_once(seeds: range) -> None:
    for seed in seeds:
        done = Following(seed)
        done.world.run()
        trace = "\n".join([f"seed {seed}", *done.world.trace[-200:]])
        assert done.client.error is None, (trace, done.client.error)
        assert done.client.result == done.printed, trace
