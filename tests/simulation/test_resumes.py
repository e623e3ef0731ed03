"""Runs that fail and are resumed by two people, through faults and deaths: never two at a time, and no step is lost."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, replace
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
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.contract.manifest import Manifest, StoredFile, checkpoint_folder_name
from simulation.network import Faults, Network
from simulation.services import FINAL, Account, StoredObject
from simulation.world import Actor, World

HOUR = 3600.0
BOTO3 = replace(SETTINGS, transport="boto3")
STEPS = 100
QUEUE_SECONDS = 1_000.0
"""Longer than a client tries one call again."""
JOB = f"""\
name: demo
code: {{task: "mine:Mine"}}
cluster: {{instance_type: ml.g5.2xlarge}}
train: {{steps: {STEPS}, batch_size: 4}}
checkpoint: {{every: 5 steps}}
"""
TASK = """\
from cloudtrain_runtime import Task

class Mine(Task):
    def model(self): ...
    def datasets(self): ...
    def loss(self, model, batch): ...
"""


pytestmark = pytest.mark.usefixtures("account")


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a job: when it is complete, its step and its folder's key."""

    time: float
    step: int
    key: str


class Resumes:
    """A job that fails again and again. Its user, and at first a colleague, resume it, in a world of a seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.world = World(seed, deaths=seed % 4)
        chance = self.world.chance
        self.account = Account(lambda: self.world.now, self._train)
        self.account.buckets["bucket"] = {}
        lost, unanswered, refused = (chance.choice([0.0, 0.02, 0.1]) for _ in range(3))
        Network(self.world, self.account, Faults(lost, unanswered, refused, outage=0.2))
        self._carry = self.world.network
        self.world.network = self._carry_later
        folder.mkdir()
        (folder / "mine.py").write_text(TASK)
        self._job = folder / "job.yaml"
        self._job.write_text(JOB)
        self._coming: list[Saved] = []
        self.newest: dict[str, int] = {}
        """The last step that each run has saved so far."""
        self.faults: list[str] = []
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
        config = self._config_of(name)
        begin, chance = self._first_step(config), self.world.chance
        last = chance.choice([begin + 3, begin + 25, begin + 40, STEPS])
        seconds = chance.choice([10.0, 60.0])
        _, key = split_uri(config.checkpoint.uri)
        for step in range(begin + 5, min(last, STEPS) + 1, 5):
            time = self.world.now + QUEUE_SECONDS + seconds * (step - begin)
            folder = f"{key}/{checkpoint_folder_name(step, _attempt(name))}"
            self._coming.append(Saved(time, step, f"{name}:{folder}"))
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

    def _config_of(self, name: str) -> RunConfig:
        (body,) = (
            found.body
            for key, found in self.account.buckets["bucket"].items()
            if key.endswith(f"{name}/config/run.json")
        )
        return RunConfig.from_json(body.decode())

    def _first_step(self, config: RunConfig) -> int:
        """Return the newest complete step that the job resumes from, and compare it with what has been saved."""
        wanted = config.checkpoint.resume
        place = config.checkpoint.uri if wanted == "auto" else wanted
        _, key = split_uri(place)
        found = [
            int(match[1])
            for name in self.account.buckets["bucket"]
            if name.startswith(key)
            and (match := re.search(r"step-(\d+)[^/]*/manifest.json$", name))
        ]
        step = max(found, default=0)
        newest = max(self.newest.values(), default=0)
        if step != newest:
            self.faults.append(f"{config.run} begins at step {step}, and step {newest} is saved")
        return step

    def _carry_later(self, sent: Any) -> Any:
        """Let the jobs save what is due, and carry a request."""
        for saved in [each for each in self._coming if each.time <= self.world.now]:
            self._coming.remove(saved)
            self._save(saved)
        assert self._carry is not None
        return self._carry(sent)

    def _save(self, saved: Saved) -> None:
        run, _, key = saved.key.partition(":")
        config = self._config_of(run)
        objects, now = self.account.buckets["bucket"], self.world.now
        manifest = Manifest(
            run=run,
            attempt=_attempt(run),
            step=saved.step,
            time=saved.time,
            world_size=1,
            mesh={},
            rng={},
            torch="2.13.0",
            code="",
            request="",
            state={"data": {"epoch": 0}},
            files={"__0_0.distcp": StoredFile(3, (0,))},
            training=dict(config.training),
        )
        objects[f"{key}/__0_0.distcp"] = StoredObject(b"123", now)
        objects[f"{key}/manifest.json"] = StoredObject(manifest.to_json().encode(), now)
        self.newest[run] = saved.step

    def check(self) -> None:
        """Check that no two jobs ran at a time, that each began where one had ended, and that the last has completed."""
        assert not self.faults, self.faults
        assert self.reached in self.account.jobs
        assert self.account.jobs[self.reached].schedule[-1][1] == "Completed"
        assert self.newest[self.reached] == STEPS


def _attempt(run: str) -> str:
    return f"{zlib.crc32(run.encode()):08x}"


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
