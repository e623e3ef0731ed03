"""Runs of a training on a Slurm cluster of the tests: submit, wait, interrupt, and compare what they trained."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cloudtrain_runtime.contract.attempts import read_attempt
from cloudtrain_runtime.contract.constants import REHEARSAL_HOLD_VARIABLE
from support.jobs import EXAMPLES, Cli, processes_of, until
from support.slurm_cluster import Cluster

_HOLD_STEP = 800
HOLDS = ("--set", f"code.env.{REHEARSAL_HOLD_VARIABLE}={_HOLD_STEP}")
"""Options of a training that waits at this step until it is asked to stop, for two minutes at most."""
_REPORTED_STEPS = 10
"""Steps from one report of a training to the next."""
_SETTLE_SECONDS = 2.0
"""Slurm starts no job in the second in which it was requeued: its credential is revoked for that long."""


@dataclass
class Trainings:
    """Trainings of examples/digits on two nodes with one rank each.

    Attributes:
        cli: Runs a command of cloudtrain.
        slurm: The cluster.
        site: The shared folder of the site.
    """

    cli: Cli
    slurm: Cluster
    site: Path

    def submit(self, *options: str) -> str:
        """Submit a training of its own; return the run id."""
        done = self.cli(
            "submit", EXAMPLES / "digits" / "job.yaml", "--backend", "slurm", "--json", "--new",
            "--instances", "2", "--set", "cluster.processes_per_instance=1", "--set", "train.epochs=40",
            "--set", "code.env.OMP_NUM_THREADS=1", *options,
        )  # fmt: skip
        assert done.code == 0, done.err
        return str(done.json["run"])

    def submit_and_hold(self, *options: str) -> str:
        """Submit a training that waits at step 800, in its first attempt, until it is asked to stop; return the run id."""
        run = self.submit(*HOLDS, *options)
        self.wait_for_step(run, _HOLD_STEP - _REPORTED_STEPS)
        return run

    def status(self, run: str) -> dict[str, Any]:
        """Return what `status --json` prints."""
        done = self.cli("status", f"slurm:{run}", "--json")
        assert done.out, done.err
        return dict(done.json)

    def job(self, run: str) -> str:
        """Return Slurm's id of the run's job."""
        return (self.folder(run) / "job").read_text().strip()

    def folder(self, run: str) -> Path:
        """Return the folder of a run."""
        return self.site / "runs" / run

    def wait_for_step(self, run: str, step: int) -> None:
        """Wait until a run has reported a step."""

        def reached() -> bool:
            status = self.status(run)
            assert status["exit_code"] is None, status
            return (status["last_step"] or 0) >= step

        until(reached, seconds=120)

    def wait_for_end(self, run: str) -> dict[str, Any]:
        """Wait until a run has ended; a requeued job waits seconds instead of minutes. Return its status."""
        queued_at: float | None = None
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            status = self.status(run)
            if status["exit_code"] is not None:
                return status
            if status["state"] != "QUEUED":
                queued_at = None
            elif queued_at is None:
                queued_at = time.monotonic()
            elif time.monotonic() - queued_at > _SETTLE_SECONDS and self._waits(run):
                self.slurm.start_now(self.job(run))
            time.sleep(0.3)
        raise AssertionError(f"{run} has not ended: {status}")

    def _waits(self, run: str) -> bool:
        return self.slurm.field(self.job(run), "Reason") == "BeginTime"

    def start_again(self, run: str) -> None:
        """Wait until a run that is queued again trains, without the minutes that its job waits."""
        until(lambda: self._waits(run))
        number = self.attempts(run) + 1
        self.slurm.start_now(self.job(run))
        until(lambda: self.attempts(run) == number and self.status(run)["state"] == "RUNNING")

    def recorded(self, run: str) -> list[dict[str, Any]]:
        """Return the attempts that a run has recorded."""
        return list(json.loads((self.folder(run) / "attempts.json").read_text()))

    def nodes(self, run: str) -> list[str]:
        """Return the nodes of the newest attempt."""
        plan = self.folder(run) / f"attempts/{self.attempts(run)}" / "slurm" / "nodes.json"
        return sorted(json.loads(plan.read_text())["hosts"])

    def attempts(self, run: str) -> int:
        """Return the number of attempts of a run."""
        return read_attempt(self.folder(run) / "attempt")

    def processes(self, run: str) -> list[psutil.Process]:
        """Return the living processes of a run: of its job, and in its containers."""
        return [*self.slurm.processes(self.job(run)), *processes_of(run)]

    def weights(self, run: str) -> str:
        """Return a digest of the weights that a run has trained."""
        import torch

        saved = torch.load(self.folder(run) / "model" / "model.pt", weights_only=True)
        digest = hashlib.sha256()
        for name in sorted(saved):
            digest.update(name.encode())
            digest.update(saved[name].numpy().tobytes())
        return digest.hexdigest()

    def checkpoints(self, run: str) -> list[dict[str, Any]]:
        """Return the manifests of a run's checkpoints, oldest first."""
        found = (self.folder(run) / "checkpoints").glob("step-*/manifest.json")
        return sorted(
            (json.loads(path.read_text()) for path in found), key=lambda each: each["time"]
        )
