"""Sweeps whose controllers are killed and meet faults: no trial twice, never more at a time, never over the budget."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.plans import SETTINGS
from support.sizes import seed_blocks

from cloudtrain.catalog.prices import Price, Prices
from cloudtrain.catalog.source import Source
from cloudtrain.errors import CloudtrainError
from cloudtrain.features.sweeps import service
from cloudtrain.features.sweeps.loader import load_sweep
from cloudtrain.features.sweeps.results import SweepState
from cloudtrain.features.sweeps.stored_sweep import known_sweeps
from cloudtrain.features.sweeps.study import Study
from cloudtrain.features.sweeps.trial import TrialState
from cloudtrain.job.job_fields import TRIAL_TAG
from cloudtrain.settings.settings import prices_file
from simulation.network import Faults, Network
from simulation.services import FINAL, Account, Job
from simulation.world import Actor, World

pytest.importorskip("optuna")

HOUR = 3600.0
RUNTIME = 600.0
JOB = """\
name: demo
code: {script: train.py}
cluster: {instance_type: ml.g5.2xlarge}
limits: {runtime: 10m}
"""
SWEEP = """\
job: job.yaml
space: {{code.args.lr: {{log_uniform: [1e-4, 1e-2]}}}}
objective: validation/loss
strategy: random
trials: {trials}
parallel: {parallel}
limits: {{cost: {budget} USD, time: {minutes}m}}
"""
USD_PER_HOUR = 1.515
RESERVED_USD = 0.37
"""What a trial reserves at most."""
CENT = 0.01
LONG = 10_000
"""Minutes after which every sweep has ended."""


pytestmark = pytest.mark.usefixtures("account")


class Sweep:
    """A sweep that a user starts, and starts again after each death and each error, in a world of a seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.world = World(seed, deaths=seed % 4)
        chance = self.world.chance
        self.account = Account(lambda: self.world.now, self._plan_job)
        self.account.buckets["bucket"] = {}
        self.account.metrics = {"validation/loss": 0.5}
        lost, unanswered, refused = (chance.choice([0.0, 0.01, 0.05]) for _ in range(3))
        Network(self.world, self.account, Faults(lost, 2 * unanswered, refused, outage=0.5))
        self.trials, self.parallel = chance.randint(2, 5), chance.randint(1, 3)
        self.minutes = chance.choice([10, 20, 40, LONG])
        self.budget = round(chance.uniform(1.0, 1.2 * self.trials) * RESERVED_USD, 2)
        folder.mkdir()
        (folder / "job.yaml").write_text(JOB)
        (folder / "train.py").write_text("")
        self._file = folder / "sweep.yaml"
        self._file.write_text(
            SWEEP.format(
                trials=self.trials,
                parallel=self.parallel,
                budget=self.budget,
                minutes=self.minutes,
            )
        )
        self.faults: list[str] = []
        self.errors: Counter[str] = Counter()
        self.world.start("user", self._sweep)
        # A colleague stops some sweeps: at any time, or in the moment in which SageMaker accepts a job, whose answer may
        # be lost.
        self._stopped_at = chance.choice([0, 0, *range(1, self.trials + 1)])
        if chance.random() < 0.25:
            self.world.start("colleague", self._stop, after=chance.uniform(0, 4 * RUNTIME))

    def run(self) -> None:
        self.world.run(self._start_again)

    def _start_again(self, _: Actor) -> None:
        if not self._is_ended():  # who sees the end starts no other one
            self.world.start("user", self._sweep, after=self.world.chance.uniform(1, 2 * HOUR))

    def _is_ended(self) -> bool:
        return any(
            service.read_status(service.StoredSweep.read(folder)).state.is_final
            for folder in known_sweeps().values()
        )

    def _sweep(self) -> None:
        """Run the sweep as `cloudtrain sweep run` does, again after each error."""
        settings = replace(SETTINGS, transport="boto3")
        while not self._is_ended():  # a sweep that a colleague has stopped is not run again
            try:
                sweep = load_sweep(self._file)
                stored, _ = service.open_sweep(sweep, backend="sagemaker", settings=settings)
                service.control(stored, settings=settings, report=self.world.note)
            except CloudtrainError as error:
                self.errors[error.message.partition(":")[0]] += 1
                self.world.note(f"error: {error.message}")
                self.world.sleep(self.world.chance.uniform(60, 600))
            else:
                return

    def _stop(self) -> None:
        """Ask the sweep to stop, as `cloudtrain sweep stop` does while it has a controller."""
        for folder in known_sweeps().values():
            service.StoredSweep.read(folder).stop_file.touch()

    def _plan_job(self, name: str) -> list[tuple[float, str, str]]:
        chance = self.world.chance
        if len(self.account.jobs) + 1 == self._stopped_at:
            self._stop()
        active = [job for job in self.account.jobs.values() if not self._has_ended(job)]
        if len(active) >= self.parallel:
            self.faults.append(f"{name}: {len(active)} jobs beside it, parallel is {self.parallel}")
        seconds = chance.uniform(60, RUNTIME)
        end = chance.choices(["Completed", "Failed"], [9, 1])[0]
        if end == "Failed" and chance.random() < 0.5:
            self.account.reasons[name] = (
                "InternalServerError: We encountered an internal error. Try again."
            )
        return [
            (0, "InProgress", "Starting"),
            (100, "InProgress", "Training"),
            (100 + seconds, end, end),
        ]

    def _has_ended(self, job: Job) -> bool:
        moment, status, _ = job.schedule[-1]
        return status in FINAL and moment <= self.world.now

    def check(self) -> None:
        """Check what the account and the sweep's record say after the end."""
        assert not self.faults, self.faults
        (folder,) = known_sweeps().values()
        stored = service.StoredSweep.read(folder)
        with contextlib.closing(Study(stored)) as study:
            trials, end = study.trials(), study.end
        assert end is not None
        state = SweepState(end[0])
        assert all(self._has_ended(job) for job in self.account.jobs.values())
        assert all(trial.state.is_final for trial in trials)
        assert len(trials) <= self.trials
        jobs = Counter(self._trial_of(name) for name in self.account.jobs)
        for trial in trials:
            may_have_run = trial.state is not TrialState.REFUSED
            has_run = may_have_run and trial.state is not TrialState.STOPPED
            repeats = [
                name for name in self.account.reasons if self._trial_of(name) == str(trial.number)
            ]
            most = may_have_run + len(repeats)
            assert has_run <= jobs.pop(str(trial.number), 0) <= most, (trial, jobs)
        assert not jobs, "jobs of no trial"
        billed = sum(self.account.billed_seconds(name) for name in self.account.jobs)
        cost = billed / HOUR * USD_PER_HOUR
        assert cost <= self.budget + CENT, (cost, self.budget)
        settled = sum(trial.settled_usd for trial in trials)
        assert settled == pytest.approx(cost, abs=CENT * (len(self.account.jobs) + 1))
        if state is SweepState.SUCCEEDED and len(trials) < self.trials:
            assert end[1].startswith(("budget", "limits.time")), end

    def _trial_of(self, name: str) -> str:
        tags = {tag["Key"]: tag["Value"] for tag in self.account.jobs[name].request["Tags"]}
        found: str = tags[TRIAL_TAG]
        return found


@pytest.mark.parametrize("seeds", seed_blocks(10, 5), ids=str)
def test_sweeps_keep_their_promises(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / f"home-{seed}"))
        sweep = Sweep(seed, tmp_path / f"job-{seed}")
        sweep.run()
        trace = "\n".join([f"seed {seed}", *sweep.world.trace[-300:]])
        try:
            for actor in sweep.world.actors:
                assert actor.error is None, actor.error
            sweep.check()
        except AssertionError as error:
            raise AssertionError(f"{trace}\n{error}") from error


def test_a_seed_gives_the_same_sweep_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    for turn in ("first", "again"):
        monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / turn))
        sweep = Sweep(3, tmp_path / f"job-{turn}")
        sweep.run()
        traces.append(sweep.world.trace)
    assert traces[0] == traces[1]
    assert any("is killed" in line for line in traces[0])


class SweepWithoutPrice(Sweep):
    """A sweep whose type has a price while it is planned, and none while it runs."""

    def _sweep(self) -> None:
        settings = replace(SETTINGS, transport="boto3")
        sweep = load_sweep(self._file)
        stored, _ = service.open_sweep(sweep, backend="sagemaker", settings=settings)
        prices_file(os.environ).unlink()
        service.control(stored, settings=settings, report=self.world.note)


def test_a_budget_starts_no_trial_without_a_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    source = Source("a refresh", "https://example.com", "2026-11-20")
    priced = Prices({"us-west-2": {"ml.p6-b200.48xlarge": Price(0.01, source)}})
    prices_file(os.environ).parent.mkdir(parents=True)
    prices_file(os.environ).write_text(json.dumps(priced.to_json()))
    sweep = SweepWithoutPrice(0, tmp_path / "job")
    (tmp_path / "job" / "job.yaml").write_text(JOB.replace("ml.g5.2xlarge", "ml.p6-b200.48xlarge"))
    sweep.run()
    assert [actor.error for actor in sweep.world.actors] == [None] * len(sweep.world.actors)
    (folder,) = known_sweeps().values()
    with contextlib.closing(Study(service.StoredSweep.read(folder))) as study:
        trials = study.trials()
    assert {trial.state for trial in trials} == {TrialState.REFUSED}
    assert "no price is known" in trials[0].reason
    assert not sweep.account.jobs
