"""A rehearsal from start to end: the order of its checks, and its receipt."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cloudtrain.bundle.unpacking import unpack
from cloudtrain.features.rehearsal.comparing import compare
from cloudtrain.features.rehearsal.memory import NAME as MEMORY
from cloudtrain.features.rehearsal.memory import check_memory, explain_out_of_memory
from cloudtrain.features.rehearsal.resuming import (
    ELASTIC,
    LEAST_STEPS,
    RESUMES,
    STOPS,
    Interruptions,
)
from cloudtrain.features.rehearsal.runs import (
    STARTS,
    TRAINS,
    UNSEEN_GROUP,
    Ended,
    NotShownError,
    RehearsalRunner,
    RunDriver,
    find_training_fault,
    has_succeeded,
    not_started,
    why,
)
from cloudtrain.features.rehearsal.saving import check_saves
from cloudtrain.features.rehearsal.scripts import ScriptRehearsal
from cloudtrain.features.rehearsal.shape import Shape, other_sizes
from cloudtrain.features.rehearsal.shared_imports import with_shared_imports
from cloudtrain.features.rehearsal.starting import check_requirements
from cloudtrain.features.rehearsal.workspace import Workspace
from cloudtrain.job.diagnostics import Severity
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import texts_of
from cloudtrain.planning.job_checks import keeps_checkpoints
from cloudtrain.planning.package_checks import warn_about_packages
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.tracking import without_tracking
from cloudtrain.support.checks import Check, failed, passed, unknown
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.steps import Steps
from cloudtrain.support.units import Cadence

STEPS = 12
"""Optimizer steps of a Task."""
SCRIPT_STEPS = 36
"""Optimizer steps of a script: its ranks agree on a stop up to 17 steps late where steps are fast."""
_SAVES = 3
"""Checkpoints of a training of that many steps."""
_CANNOT = "NCCL between hosts, EFA's bandwidth and a real cluster are not on this machine"
_HANG_SECONDS = 300
"""Ranks that wait to be interrupted do not hang."""


@dataclass(frozen=True)
class RehearsedJob:
    """What is rehearsed.

    Attributes:
        spec: The job as it would be sent.
        plan: Its plan for the cluster.
        here: The job with data that is on this machine.
        archive: Its bundle.
        shape: Hosts and ranks here.
        channels: Folder of each channel whose data is on this machine.
    """

    spec: JobSpec
    plan: Plan
    here: JobSpec
    archive: Path
    shape: Shape
    channels: Mapping[str, Path]


class Engine:
    """Makes the checks of a rehearsal in a workspace.

    Args:
        workspace: Its folder and processes.
        job: What is rehearsed.
        runner: Starts runs.
        seconds: Its time, which begins with the first step of its first run.
        seed: Seed of the steps at which runs are interrupted.
        steps: Receives what is done.
        imports: Socket of the process that imports once for all runs.
    """

    def __init__(
        self,
        workspace: Workspace,
        job: RehearsedJob,
        runner: RehearsalRunner,
        seconds: float,
        seed: int,
        steps: Steps,
        imports: Path,
    ) -> None:
        self.workspace = workspace
        self.job = job
        self.runner = runner
        self.seed = seed
        self.on_progress = steps.on_progress
        last_step = steps_of_rehearsal(job.spec)
        spec = rehearsed_spec(job.here, job.shape, last_step)
        ranks = job.shape.world_size
        self.driver = RunDriver(
            runner=runner,
            spec=spec,
            home=workspace.home,
            seconds=seconds,
            last_step=last_step,
            ranks=ranks,
            on_detail=steps.on_detail,
            imports=imports,
        )

    def checks(self) -> Iterator[Check]:
        """Make the checks, and yield each when it is known."""
        code = self.workspace.folder / "code"
        unpack(self.job.archive, code)
        run = partial(self.workspace.run, cwd=code, env=os.environ)
        self.on_progress("installing requirements")
        seconds = self.driver.seconds_left
        requirements = check_requirements(self.job.plan, code, self.workspace.folder, run, seconds)
        if requirements is not None:
            yield requirements
        plan = self.job.plan
        found = warn_about_packages(self.job.spec, plan.bundle, plan.image)
        for text in texts_of(Severity.WARNING, found):
            yield unknown(STARTS, f"the packages of this machine were used: {text}")
        if self.job.shape.problem:
            yield unknown(TRAINS, self.job.shape.problem)
            return
        yield from self._runs()
        yield self._memory()
        if plan.cluster.backend != "gloo":
            yield unknown("network", _CANNOT)

    def _runs(self) -> Iterator[Check]:
        """Yield the checks that need runs."""
        driver = self.driver
        task = self.job.spec.code.task
        conventions = self.job.plan.bundle.conventions
        if task is None and not conventions.saves_by_runtime:
            keeps = keeps_checkpoints(self.job.spec, conventions)
            scripts = ScriptRehearsal(
                driver, self.seed, starts_ranks=conventions.starts_ranks, keeps=keeps
            )
            yield from scripts.checks(self.on_progress)
            return
        steps = count(driver.last_step, "step")
        self.on_progress(f"training {steps} on {self._ranks()}")
        try:
            run = driver.start()
            driver.wait_for_first_step(run)
            reference = driver.wait(run)
        except NotShownError as error:
            yield from not_started(driver, error)
            return
        if not has_succeeded(reference):
            # A GPU here may be smaller than that of the job.
            small = explain_out_of_memory(reference.status.reason)
            yield from judge_reference(reference, driver) if small is None else [small]
            return
        yield from judge_reference(reference, driver)
        self.on_progress("verifying the checkpoint")
        yield from check_saves(driver, reference, self.job.plan)
        saved = reference.status.progress.checkpoint
        if saved is None or saved.step < LEAST_STEPS:
            text = f"the training has fewer than {LEAST_STEPS} steps: too few to interrupt it"
            yield from (unknown(name, text) for name in (STOPS, RESUMES))
            return
        driver.shorten(saved.step, max(1, saved.step // _SAVES))
        interruptions = Interruptions(
            driver=driver,
            reference=reference,
            compare=partial(compare, self.workspace, driver),
            seed=self.seed,
        )
        yield from interruptions.checks(self.on_progress)
        sizes = other_sizes(self.job.shape, self.job.spec)
        if sizes:
            yield from interruptions.elastic(sizes, self.on_progress)
        else:
            text = "the parallel layout fits on no other number of ranks that this machine carries"
            yield unknown(ELASTIC, text)

    def _ranks(self) -> str:
        shape = self.job.shape
        if shape.hosts == 1:
            return count(shape.ranks, "rank")
        return f"{shape.hosts} x {count(shape.ranks, 'rank')}"

    def _memory(self) -> Check:
        self.on_progress("estimating the memory of a rank")

        def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
            code = self.workspace.folder / "code"
            seconds = self.driver.seconds_left
            forked = with_shared_imports(command, self.driver.imports)
            return self.workspace.run(forked, cwd=code, env=os.environ, timeout=seconds)

        job = self.job
        try:
            return check_memory(job.spec, job.plan, job.channels, self.workspace.folder, run)
        except OSError as error:
            return unknown(MEMORY, f"it could not be checked: {error}")


def judge_reference(reference: Ended, driver: RunDriver) -> Iterator[Check]:
    """Yield `starts` and `trains` from the uninterrupted run."""
    losses = reference.losses
    ranks = driver.ranks
    began = reference.of_kind("started") or losses or reference.status.progress.last_step
    if not began and not has_succeeded(reference):
        yield failed(STARTS, f"no step was taken: {why(reference)}")
        return
    text = "the bundle unpacked as it would travel, and its code was imported by all ranks"
    yield passed(STARTS, text)
    if not has_succeeded(reference):
        yield failed(TRAINS, why(reference))
        return
    world = reference.status.progress.world_size or ranks
    # Only a script reports them.
    reports = reference.of_kind("ranks")
    joined = sum(int(each.get("joined") or 0) for each in reports)
    alone = sum(int(each.get("alone") or 0) for each in reports)
    fault = find_training_fault(reference, alone or ranks - world, ranks)
    if driver.spec.code.task is not None and not reference.of_kind("finished"):
        fault = fault or (
            f"the ranks ended with exit code 0 after step {reference.last_step or 0}, before training was finished"
        )
    if fault:
        yield failed(TRAINS, fault)
        return
    shown = ", no loss was reported"
    if losses:
        first = losses[min(losses)]
        last = losses[max(losses)]
        shown = f", loss {first:.4g} to {last:.4g}"
    saved = reference.status.progress.checkpoint
    saved_step = saved.step if saved is not None else 0
    steps = max(losses, default=saved_step)
    if driver.spec.code.task is None and ranks > 1 and not joined:
        text = f"{count(steps, 'step')} on {count(ranks, 'rank')}{shown}; {UNSEEN_GROUP}"
        yield unknown(TRAINS, text)
        return
    text = f"{count(steps, 'step')} on {count(ranks, 'rank')}, all in the process group{shown}"
    yield passed(TRAINS, text)


def steps_of_rehearsal(spec: JobSpec) -> int:
    """Return the number of steps that a rehearsed training takes: fewer if the job has fewer."""
    if spec.train is None:
        return SCRIPT_STEPS
    steps = spec.train.steps
    return STEPS if steps is None else min(STEPS, steps)


def rehearsed_spec(spec: JobSpec, shape: Shape, steps: int) -> JobSpec:
    """Return a job for this machine: fewer hosts and ranks, checkpoints every few steps, no notifications.

    Model, data, batch size, schedule and code are unchanged.
    """
    cluster = {
        "instance_type": spec.cluster.choices[0].instance_type,
        "prefer": (),
        "instances": shape.hosts,
        "processes_per_instance": shape.ranks,
        "training_plan": None,
        "queue": None,
        "keep_alive": None,
        "max_pending": None,
        "spot": None,
    }
    checkpoint = {
        "every": Cadence(steps=max(1, steps // _SAVES)),
        "uri": None,
        "resume": "auto",
        "keep": 4,
    }
    return spec.model_copy(
        update={
            "cluster": spec.cluster.model_copy(update=cluster),
            "checkpoint": spec.checkpoint.model_copy(update=checkpoint),
            "limits": spec.limits.model_copy(update={"hang": _HANG_SECONDS}),
            **without_tracking(spec),
            "output": type(spec.output)(),
            "notify": None,
            "report": False,
        }
    )
