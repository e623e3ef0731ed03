"""Chains with two controllers: one on a laptop that is closed at times and wakes up later, and the account's function."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sizes import seed_blocks

from cloudtrain.client.client import Client
from cloudtrain.errors import CloudtrainError
from cloudtrain.features.recovery.account import step_chains
from cloudtrain.runs.attempt_chain import CHAIN_FILE
from simulation.test_recovery import BOTO3, Recovery

_SCHEDULE_SECONDS = 300.0

pytestmark = pytest.mark.usefixtures("account")


class AccountRecovery(Recovery):
    """A chain that the function continues, too."""

    def __init__(self, seed: int, folder: Path, home: Path) -> None:
        super().__init__(seed, folder)
        self._home = home
        self.sleeps = 0
        self.steps_by_function = 0
        self.world.start("function", self._call_function, after=self.world.chance.uniform(1, 300))
        self.world.start("lid", self._close_lid, after=self.world.chance.uniform(60, 3600))

    def check(self) -> None:
        """Check the record in S3: what the laptop has may be an older one."""
        (stored,) = self.chains()
        objects = self.account.buckets["bucket"]
        (record,) = [found.body for key, found in objects.items() if key.endswith(CHAIN_FILE)]
        stored.file.write_bytes(record)
        super().check()

    @property
    def _is_over(self) -> bool:
        user = [actor for actor in self.world.actors if actor.name == "user"]
        return all(actor.state == "ended" for actor in user[-1:])

    def _call_function(self) -> None:
        """Call the function on its schedule, each time on a disk of its own."""
        number = 0
        while not self._is_over:
            number += 1
            client = Client(BOTO3, home=self._home / str(number % 2))
            try:
                steps = step_chains(client, report=self._note_step)
                self.world.note(f"function: {vars(steps)}")
            except CloudtrainError as error:
                self.world.note(f"function: error: {error.message}")
            self.world.sleep(_SCHEDULE_SECONDS)

    def _note_step(self, line: str) -> None:
        self.steps_by_function += 1
        self.world.note(f"function: {line}")

    def _close_lid(self) -> None:
        """Suspend all threads of the laptop's processes, and wake them up later."""
        while not self._is_over:
            seconds = self.world.chance.uniform(400, 3 * 3600)
            self.sleeps += 1
            self.world.note(f"the laptop sleeps for {seconds:.0f} s")
            for actor in self.world.actors:
                if actor.process.name == "user" and actor.state == "alive":
                    actor.wakes = max(actor.wakes, self.world.now + seconds)
            self.world.sleep(seconds + self.world.chance.uniform(60, 3600))


@pytest.mark.parametrize("seeds", seed_blocks(10, 5), ids=str)
def test_a_sleeping_laptop_and_the_function_share_chains(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked = 0
    for seed in seeds:
        monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / f"home-{seed}"))
        recovery = AccountRecovery(seed, tmp_path / f"job-{seed}", tmp_path / f"function-{seed}")
        recovery.run()
        trace = "\n".join([f"seed {seed}", *recovery.world.trace[-200:]])
        try:
            for actor in recovery.world.actors:
                assert actor.error is None, actor.error
            recovery.check()
        except AssertionError as error:
            raise AssertionError(f"{trace}\n{error}") from error
        worked += recovery.steps_by_function
    assert worked, "the function has never continued a chain"
