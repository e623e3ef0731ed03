"""Interruptions of a run on a Slurm cluster of the tests, of a random kind and at a random moment of its life.

A moment is a state of the run, such as a save in progress, and a random time after it. So the same seed interrupts a
run on a slow machine in the same way as on a fast one, though at other steps.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.state_file import read_state
from cloudtrain.backends.slurm.attempts import Attempts
from cloudtrain.runs.attempt_chain import MOST_WITHOUT_CHECKPOINT
from cloudtrain_runtime.contract.checkpoint_folder import WRITING_PREFIX
from support.jobs import until
from support.slurm_cluster import Cluster
from support.slurm_runs import Trainings

REQUEUE = "scontrol requeue"
NODE_DOWN = "node set down"
NODE_KILLED = "node killed"
SLURMD_KILLED = "slurmd killed"
CONTROLLER = "slurmctld restarted"
PREEMPTION = "preemption"
TIME_LIMIT = "time limit"
KINDS = (REQUEUE, NODE_DOWN, NODE_KILLED, SLURMD_KILLED, CONTROLLER)
"""What can happen to each run. Preemption needs a partition with a lower priority, and a time limit comes by itself."""

QUEUED = "queued again"
STARTING = "starting"
TRAINING = "training"
SAVING = "saving"
DURING = "during another one"
MOMENTS = (QUEUED, STARTING, TRAINING, SAVING, DURING)

_LONGEST_SECONDS = {QUEUED: 2.0, STARTING: 6.0, TRAINING: 5.0, SAVING: 0.05, DURING: 3.0}
"""Longest time from the beginning of a moment to the interruption."""
_POLL_SECONDS = 0.05
_SAVE_POLL_SECONDS = 0.002
_LOOK_SECONDS = 0.3
_HANG_SECONDS = 400.0
_IS_OVER = "the run has ended"


class RunEndedError(Exception):
    """The run ended before it could be interrupted."""


@dataclass(frozen=True)
class Interruption:
    """What has happened to a run, and when."""

    kind: str
    moment: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.moment})"


@dataclass
class Interrupter:
    """Interrupts one run, and keeps its cluster able to continue it.

    Attributes:
        trainings: The trainings of the cluster.
        run: The run's id.
        rng: All randomness.
        kinds: What can happen.
        moments: When it can happen.
        done: What has happened so far.
        limits_reached: Numbers of the attempts that a time limit has ended.
    """

    trainings: Trainings
    run: str
    rng: random.Random
    kinds: tuple[str, ...] = KINDS
    moments: tuple[str, ...] = MOMENTS
    done: list[Interruption] = field(default_factory=list)
    limits_reached: set[int] = field(default_factory=set)

    @property
    def slurm(self) -> Cluster:
        """The cluster."""
        return self.trainings.slurm

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.trainings.folder(self.run)

    def interrupt(self) -> Interruption:
        """Wait for a random moment and interrupt the run.

        Raises:
            RunEndedError: It ended before.
        """
        moments = [each for each in self.moments if each != DURING or self.done]
        moment = self.rng.choice(moments)
        kind = self.rng.choice(self.kinds)
        if self._must_save_first():
            # A run ends after three attempts in a row without a checkpoint, as it should.
            self.wait(lambda: not self._must_save_first())
            moment = TRAINING
        if moment == QUEUED and not self.done:
            moment = STARTING
        if moment == QUEUED and kind not in (CONTROLLER, NODE_DOWN):
            # A job that waits has no nodes and no processes.
            kind = self.rng.choice((CONTROLLER, NODE_DOWN))
        self._wait_for_moment(moment)
        self._pause(self.rng.random() * _LONGEST_SECONDS[moment], moment)
        actions: dict[str, Callable[[], None]] = {
            REQUEUE: self.requeue,
            NODE_DOWN: lambda: self.slurm.set_down(self._random_node()),
            NODE_KILLED: lambda: self.slurm.kill_node(self._random_node()),
            SLURMD_KILLED: lambda: self.slurm.kill_slurmd(self._random_node()),
            CONTROLLER: self._restart_controller,
            PREEMPTION: self._preempt,
        }
        actions[kind]()
        self.done.append(Interruption(kind, moment))
        return self.done[-1]

    def wait_for_end(self) -> None:
        """Let the run continue until it ends."""
        with contextlib.suppress(RunEndedError):
            self.wait(lambda: False)

    # Moments

    def _wait_for_moment(self, moment: str) -> None:
        if moment == DURING:
            return
        if moment == QUEUED:
            if self._state() != "PENDING":
                # Whatever has happened before did not end the attempt.
                self.wait(lambda: self._state() == "RUNNING", pause=_LOOK_SECONDS)
                self.requeue()
            self.wait(lambda: self._state() == "PENDING", continues=False, pause=_LOOK_SECONDS)
            return
        self.wait(lambda: self._state() == "RUNNING", pause=_LOOK_SECONDS)
        if moment == TRAINING:
            self.wait(self._trains)
        elif moment == SAVING:
            cut_off = self._incomplete()
            self.wait(lambda: bool(self._incomplete() - cut_off), pause=_SAVE_POLL_SECONDS)

    def _trains(self) -> bool:
        """Return whether the newest attempt has taken a step."""
        log = JobFolder.newest(self.folder).log("algo-1")
        return log.is_file() and b'"event": "step"' in log.read_bytes()

    def _incomplete(self) -> set[str]:
        """Return the names of checkpoints that are being saved, or whose save was cut off."""
        return {each.name for each in (self.folder / "checkpoints").glob(f"{WRITING_PREFIX}*")}

    def _must_save_first(self) -> bool:
        attempts = Attempts.read(self.folder).all
        newest = attempts[-MOST_WITHOUT_CHECKPOINT + 1 :]
        if len(newest) < MOST_WITHOUT_CHECKPOINT - 1:
            return False
        known = {each.checkpoint or 0 for each in newest}
        return len(known) == 1 and self.newest_step() <= known.pop()

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint; 0 without one."""
        found = (self.folder / "checkpoints").glob("step-*/manifest.json")
        return max((int(each.parent.name.split("-")[1]) for each in found), default=0)

    def _pause(self, seconds: float, moment: str) -> None:
        deadline = time.monotonic() + seconds
        pending = moment in (QUEUED, DURING)
        with contextlib.suppress(TimeoutError):
            self.wait(lambda: time.monotonic() >= deadline, continues=not pending)

    def wait(
        self,
        condition: Callable[[], bool],
        *,
        continues: bool = True,
        pause: float = _POLL_SECONDS,
    ) -> None:
        """Wait for a condition; meanwhile let the queue start the run's next attempt, if it `continues`.

        Raises:
            RunEndedError: The run has ended.
        """
        hangs_at = time.monotonic() + _HANG_SECONDS
        looked_at = 0.0
        while not condition():
            now = time.monotonic()
            if now - looked_at >= _LOOK_SECONDS:
                looked_at = now
                self._look()
                if continues:
                    self._continue()
            assert now < hangs_at, f"{self.run} hangs: {self.slurm.run('scontrol', 'show', 'job')}"
            time.sleep(pause)

    def _look(self) -> None:
        state = read_state(self.folder)
        if state.state.is_final or self._has_ended():
            raise RunEndedError(_IS_OVER)
        if "time limit of the Slurm job" in state.reason and state.attempt is not None:
            self.limits_reached.add(state.attempt)

    def _has_ended(self) -> bool:
        """Return whether Slurm has ended the job in a way that the run has not recorded."""
        if self._ask("%T"):
            return False
        return self.trainings.status(self.run)["exit_code"] is not None

    def _continue(self) -> None:
        """Spare the run the two minutes of a requeued job, and return nodes to service when it needs them."""
        state, _, reason = self._ask("%T %r").partition(" ")
        if state != "PENDING":
            return
        if reason == "BeginTime":
            # It may just have started.
            with contextlib.suppress(AssertionError):
                self.slurm.start_now(self._job())
        elif reason != "None":
            self.repair()

    def repair(self) -> None:
        """Return nodes to service that Slurm knows to be down."""
        for node in self.slurm.nodes:
            if self.slurm.node_state(node).startswith("down"):
                if self.slurm.is_dead(node):
                    self.slurm.start_slurmd(node)
                else:
                    self.slurm.set_up(node)

    # Kinds

    def requeue(self) -> None:
        """Queue the job again, as an administrator does."""
        # A job that has just ended, or waits, cannot be queued again.
        with contextlib.suppress(AssertionError):
            self.slurm.requeue(self._job())

    def _restart_controller(self) -> None:
        self.slurm.stop_controller()
        time.sleep(self.rng.random() * 5.0)
        self.slurm.start_controller()

    def _preempt(self) -> None:
        self.repair()
        count = sum(not self.slurm.is_dead(each) for each in self.slurm.nodes)
        self.slurm.submit("sleep 2", "--partition=main", "--exclusive", f"--nodes={count}")

    def _random_node(self) -> str:
        """Return a node of the run, or any while the run has none."""
        living = [each for each in self.slurm.nodes if not self.slurm.is_dead(each)]
        own = [each for each in self._nodes() if each in living]
        return self.rng.choice(own or living)

    # The job

    def _job(self) -> str:
        return self.trainings.job(self.run)

    def _state(self) -> str:
        return self._ask("%T")

    def _nodes(self) -> list[str]:
        found = self._ask("%N")
        return self.slurm.run("scontrol", "show", "hostnames", found).split() if found else []

    def _ask(self, field_name: str) -> str:
        try:
            return self.slurm.run(
                "squeue", "--noheader", f"--jobs={self._job()}", f"--format={field_name}"
            ).strip()
        except AssertionError:
            # Slurm has forgotten the job.
            return ""


def jobs_of(slurm: Cluster, run: str) -> int:
    """Return how many jobs of a run Slurm remembers."""
    shown = slurm.run("scontrol", "show", "job", "--oneliner")
    return sum(f"JobName={run} " in line for line in shown.splitlines())


def processes_end(trainings: Trainings, run: str) -> bool:
    """Return whether all processes of a run that has ended are gone, within minutes."""
    try:
        until(lambda: not trainings.processes(run), seconds=120)
    except AssertionError:
        return False
    return True
