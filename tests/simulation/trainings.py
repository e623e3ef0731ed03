"""What containers do in a world: begin at the step that they find in S3, save checkpoints, and report them."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from typing import Any

from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.contract.manifest import Manifest, StoredFile, checkpoint_folder_name
from simulation.services import Account, StoredObject
from simulation.world import World

JOB = """\
name: demo
code: {task: "mine:Mine"}
cluster: {instance_type: ml.g5.2xlarge}
train: {steps: 100, batch_size: 4}
checkpoint: {every: 5 steps}
"""
STEPS = 100
TASK = """\
from cloudtrain_runtime import Task

class Mine(Task):
    def model(self): ...
    def datasets(self): ...
    def loss(self, model, batch): ...
"""


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a job: when it is complete, its step and its folder's key."""

    time: float
    step: int
    run: str
    key: str


class Trainings:
    """The trainings of one job in an account.

    Attributes:
        newest: The last step that each run has saved so far.
        faults: What must not happen, a sentence each.
    """

    def __init__(self, world: World, account: Account) -> None:
        self._world = world
        self._account = account
        self._coming: list[Saved] = []
        self.newest: dict[str, int] = {}
        self.faults: list[str] = []
        self._carry = world.network
        world.network = self._carry_later

    def first_step(self, run: str) -> int:
        """Return the newest complete step that a run resumes from, and compare it with what has been saved."""
        config = self._config_of(run)
        wanted = config.checkpoint.resume
        place = config.checkpoint.uri if wanted == "auto" else wanted
        _, key = split_uri(place)
        found = [
            int(match[1])
            for name in self._account.buckets["bucket"]
            if name.startswith(key)
            and (match := re.search(r"step-(\d+)[^/]*/manifest.json$", name))
        ]
        step = max(found, default=0)
        newest = max(self.newest.values(), default=0)
        if step != newest:
            self.faults.append(f"{run} begins at step {step}, and step {newest} is saved")
        return step

    def save_every_fifth(
        self, run: str, begin: int, last: int, seconds: float, after: float
    ) -> None:
        """Let a run save each fifth step.

        Args:
            run: The run.
            begin: Step at which it begins.
            last: Step at which it ends.
            seconds: Seconds of a step.
            after: Seconds from now until it begins.
        """
        _, key = split_uri(self._config_of(run).checkpoint.uri)
        for step in range(begin + 5, min(last, STEPS) + 1, 5):
            time = self._world.now + after + seconds * (step - begin)
            folder = f"{key}/{checkpoint_folder_name(step, _attempt(run))}"
            self._coming.append(Saved(time, step, run, folder))

    def limit_of(self, run: str) -> float:
        """Return the time limit of a run in seconds."""
        plan = json.loads(self._object(f"{run}/plan.json"))
        return float(plan["request"]["StoppingCondition"]["MaxRuntimeInSeconds"])

    def _config_of(self, run: str) -> RunConfig:
        return RunConfig.from_json(self._object(f"{run}/config/run.json").decode())

    def _object(self, end: str) -> bytes:
        objects = self._account.buckets["bucket"]
        (body,) = (found.body for key, found in objects.items() if key.endswith(end))
        return body

    def _carry_later(self, sent: Any) -> Any:
        """Let the jobs save what is due, and carry a request."""
        for saved in [each for each in self._coming if each.time <= self._world.now]:
            self._coming.remove(saved)
            self._save(saved)
        assert self._carry is not None
        return self._carry(sent)

    def _save(self, saved: Saved) -> None:
        config = self._config_of(saved.run)
        objects, now = self._account.buckets["bucket"], self._world.now
        manifest = Manifest(
            run=saved.run,
            attempt=_attempt(saved.run),
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
        objects[f"{saved.key}/__0_0.distcp"] = StoredObject(b"123", now)
        objects[f"{saved.key}/manifest.json"] = StoredObject(manifest.to_json().encode(), now)
        self.newest[saved.run] = saved.step
        event = {"event": "checkpoint", "uri": saved.key, "step": saved.step, "time": saved.time}
        lines = self._account.logs.setdefault(f"{saved.run}/algo-1-1", [])
        lines.append((now, now, f"CLOUDTRAIN {json.dumps(event)}"))


def _attempt(run: str) -> str:
    return f"{zlib.crc32(run.encode()):08x}"
