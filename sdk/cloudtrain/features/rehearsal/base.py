"""The interface of a rehearsal's checks: what a check gets, and what it returns.

A check is a function of a `RehearsalContext` that yields one or several `Check`s. It starts processes only through the
context's `run`, so that an interrupt ends them, and writes only below the context's `folder`.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.run import Run
from cloudtrain.support.checks import PROOF_WORDS, Check


def check_to_json(check: Check) -> dict[str, str]:
    """Return the object that `rehearse --json` prints for a check."""
    return {"name": check.name, "result": PROOF_WORDS[check.result], "detail": check.detail}


@dataclass(frozen=True)
class RehearsalContext:
    """What a check gets: the job, its plan, and what the rehearsal has done so far.

    Attributes:
        spec: The job that was rehearsed. `spec.cluster` and `plan` are those of the cluster, not of this machine.
        plan: The plan of the cluster: request, `run.json` (`plan.config`), cluster and cost.
        code: Folder with the unpacked bundle: the job's code, `cloudtrain_runtime` and `cloudtrain_worker.py`.
        folder: Folder for the check's own files; deleted with the rehearsal.
        python: Interpreter of the rehearsed runs.
        channels: Folder of each input channel on this machine, where the job has data that is here.
        reference: The run without an interruption, which has ended; None before it and when it failed.
        environ: Environment for processes of a check.
        deadline: Time on the monotonic clock at which the rehearsal ends.
        seed: Seed of everything that the rehearsal draws at random.
        run_process: Starts a process and waits for it: see `run`.
    """

    spec: JobSpec
    plan: Plan
    code: Path
    folder: Path
    python: str
    channels: Mapping[str, Path]
    reference: Run | None
    environ: Mapping[str, str]
    deadline: float
    seed: int
    run_process: Callable[..., subprocess.CompletedProcess[str]] = field(repr=False)

    @property
    def seconds_left(self) -> float:
        """Seconds until the rehearsal's time is over, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def run(
        self, command: Sequence[str], *, timeout_seconds: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the folder of the code and return its output as text, with standard error in `stderr`.

        The program and all that it starts end with the rehearsal.

        Args:
            command: Program and arguments.
            timeout_seconds: Longest time; by default what is left of the rehearsal.

        Raises:
            TimeoutExpired: It took longer; its processes were killed.
        """
        seconds = self.seconds_left
        if timeout_seconds is not None:
            seconds = min(timeout_seconds, seconds)
        return self.run_process(command, cwd=self.code, env=self.environ, timeout=seconds)


CheckFunction = Callable[[RehearsalContext], Iterable[Check]]
"""A check. An exception in it is a bug of cloudtrain, except OSError and TimeoutExpired, which make it `unknown`."""

JobChange = Callable[[JobSpec, Path, float], tuple[JobSpec, Iterable[Check]]]
"""Changes the job before its code is packed and run: job, folder for its files, and deadline on the monotonic clock to
the job with other data uris, and checks about them. It is for data in S3, of which a sample is fetched."""
