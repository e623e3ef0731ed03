"""The checks of a script that saves by itself: what can be seen from outside.

Its ranks join the group, files appear in /opt/ml/checkpoints, and the steps that it reports continue after a resume.
A script has no step at which its ranks could wait, so it is interrupted soon after it has written a file.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from cloudtrain.features.rehearsal.resuming import ELASTIC, RESUMES, SAMPLES, STOPS
from cloudtrain.features.rehearsal.runs import (
    IMPORTED,
    KILLS,
    RANK,
    STARTS,
    TRAINS,
    UNSEEN_GROUP,
    Ended,
    NotShownError,
    RunDriver,
    find_training_fault,
    has_succeeded,
    not_started,
    why,
)
from cloudtrain.features.rehearsal.saving import NAME as SAVES
from cloudtrain.features.rehearsal.script_files import (
    SavedFile,
    damaged_archive,
    partial_state,
    saved_files,
)
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State
from cloudtrain.support.checks import Check, Result, failed, passed, unknown
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.units import format_size
from cloudtrain_runtime.contract import STOP_GRACE_SECONDS

_POLL_SECONDS = 0.05
_REPORTS = 2
"""Steps that a script must have reported before the file from which it resumes, so that its first step is passed."""
_MORE_REPORTS = 3
_MOST_SECONDS_OF_STEPS = 3.0
"""Steps that a script should report after its first file, before it is interrupted, and the longest wait for them."""
_SHARE_OF_TIME = 0.2
"""Share of the remaining time that one run of a script may take to write a file."""
_MOST_STEPS_AFTER_SIGTERM = 20
"""A script that takes more steps after SIGTERM has hardly acted on it."""
_TORCHRUN_SECONDS = 30.0
"""Time after which torchrun ends ranks with SIGKILL that have not acted on SIGTERM."""
_FIRST_SHARE_OF_TIME = 0.4
"""That of the first run: without its file nothing else can be shown."""
_MOST_DELAY_SECONDS = 0.5
_LEAST_RUNS = 2
_LOSS_TOLERANCE = 0.1
"""Relative difference of a loss after a resume, where runs without one are equal: as much as other dropout makes."""
_NO_STEP_YET = "it had reported no step when it was interrupted"
_NO_STEPS = (
    "the script reports no step, so it is not visible where it continues: call cloudtrain_runtime.report, or name "
    "a pattern in metrics.step"
)


@dataclass
class Interrupted:
    """A run of a script that was interrupted after it had saved.

    Attributes:
        what: What interrupted it.
        ended: The run.
        files: What it had saved.
        is_by_itself: Whether it ended before it could be interrupted.
        step: Last step that it had reported before it was interrupted.
    """

    what: str
    ended: Ended
    files: list[SavedFile]
    is_by_itself: bool
    step: int = 0

    @property
    def step_before_save(self) -> int:
        """Last step that it had reported before its newest large file was written; 0 if there is none.

        A file of less than half of the largest one's size, such as a list of results, is no checkpoint.
        """
        least = max((file.size for file in self.files), default=0) / 2
        saved = max((file.modified for file in self.files if file.size >= least), default=0.0)
        steps = self.ended.of_kind("step")
        before = (event["step"] for event in steps if event.get("time", saved) < saved)
        return max(before, default=0)


class ScriptRehearsal:
    """Rehearses a script that saves by itself.

    Args:
        driver: The runs.
        seed: Seed of the moments at which it is interrupted.
        starts_ranks: Whether the script starts its ranks itself.
        keeps: Whether the script or its job names a place for checkpoints.
    """

    def __init__(self, driver: RunDriver, seed: int, *, starts_ranks: bool, keeps: bool) -> None:
        self.driver = driver
        driver.ends_at_last_step = False
        self.seed = seed
        self.starts_ranks = starts_ranks
        self.keeps = keeps
        self._random = random.Random(seed)  # noqa: S311 (no secret)

    @property
    def _no_steps(self) -> str:
        if "step" in self.driver.spec.metrics:
            return f"{_NO_STEP_YET}: {self.driver.more_time}"
        return _NO_STEPS

    def checks(self, on_progress: Callable[[str], None]) -> Iterator[Check]:
        """Yield the checks."""
        on_progress("running the script until it has saved, then SIGTERM")
        try:
            first = self._interrupt("SIGTERM", self.driver.stop, _FIRST_SHARE_OF_TIME)
        except NotShownError as error:
            yield from not_started(self.driver, error)
            return
        yield from self._judge_start(first)
        if first.ended.status.state is State.FAILED:
            return
        saves = self._judge_files(first)
        yield saves
        yield self._judge_stop(first)
        if not first.files:
            yield Check(RESUMES, saves.result, "there is no file from which it could resume")
            return
        yield from self._resumes(first, on_progress)
        text = "the samples of a script are not visible to cloudtrain"
        yield unknown(SAMPLES, text)
        text = "a script's own files are loaded by its own code: not tried"
        yield unknown(ELASTIC, text)

    def _resumes(self, first: Interrupted, on_progress: Callable[[str], None]) -> Iterator[Check]:
        shown = []
        repeated = []
        fresh = [first.ended]
        resumed = []
        for what in ("SIGTERM", *KILLS):
            try:
                if what == "SIGTERM":
                    interrupted = first
                else:
                    on_progress(f"running the script until it has saved, then {KILLS[what]}")
                    interrupted = self._interrupt(KILLS[what], partial(self._kill, what=what))
                    fresh.append(interrupted.ended)
                on_progress(f"resuming after {interrupted.what}")
                continued = self._resume(interrupted)
                shown.append(_phrase(interrupted, continued))
                resumed.append((interrupted.what, continued))
                if (continued.first_step or 0) <= interrupted.step_before_save:
                    repeated.append(continued.first_step)
            except NotShownError as error:
                yield Check(RESUMES, error.result, f"after {KILLS.get(what, what)}: {error}")
                if error.result is Result.FAIL:
                    return
        if problem := _other_losses(fresh, resumed):
            yield failed(RESUMES, problem)
        elif repeated and len(repeated) == len(shown):
            # One alone may have been interrupted during a save.
            text = f"step {repeated[0]} was taken again, though it was reported before the newest file was written"
            text += ": is its number saved in place of that of the next step?"
            yield unknown(RESUMES, text)
        elif shown:
            yield passed(RESUMES, f"the step counter continued: {'; '.join(shown)}")

    def _interrupt(
        self, what: str, interrupt: Callable[[Run], Ended], share_of_time: float = _SHARE_OF_TIME
    ) -> Interrupted:
        """Start the script, and interrupt it soon after it has saved.

        Raises:
            NotShownError: It did not start, or has saved nothing in its share of the time.
        """
        run = self.driver.start()
        self.driver.wait_for_first_step(run, self._has_saved)
        deadline = time.monotonic() + max(10.0, self.driver.seconds_left * share_of_time)
        reported_at: float | None = None
        while True:
            status = run.status()
            self.driver.show_step(status)
            files = saved_files(self.driver.host_roots(run), reported_at or 0.0)
            if status.state.is_final:
                everything = saved_files(self.driver.host_roots(run))
                return Interrupted(what, self.driver.wait(run), everything, is_by_itself=True)
            steps = _reported_steps(self.driver, run)
            reports = len(steps)
            if reported_at is None and reports >= _REPORTS:
                reported_at = time.time()
                files = []
            # A script that reports no step can be interrupted after its first file.
            is_silent = not reports and "step" not in self.driver.spec.metrics
            has_saved = bool(files) and (reported_at is not None or is_silent)
            if has_saved or time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        self._wait_for_steps(run, len(steps) + _MORE_REPORTS)
        time.sleep(self._random.uniform(0, _MOST_DELAY_SECONDS))
        step = max(_reported_steps(self.driver, run), default=0)
        ended = interrupt(run)
        files = saved_files(self.driver.host_roots(run))
        return Interrupted(what, ended, files, is_by_itself=has_succeeded(ended), step=step)

    def _has_saved(self, run: Run) -> bool:
        return bool(saved_files(self.driver.host_roots(run)))

    def _wait_for_steps(self, run: Run, reports: int) -> None:
        """Wait, for some seconds at most, until a run has reported this many steps.

        A resumed run then repeats steps that other runs have reported, so that their losses can be compared.
        """
        deadline = time.monotonic() + _MOST_SECONDS_OF_STEPS
        while time.monotonic() < deadline and not run.status().state.is_final:
            reported = len(_reported_steps(self.driver, run))
            if not reported or reported >= reports:
                return
            time.sleep(_POLL_SECONDS)

    def _kill(self, run: Run, what: str) -> Ended:
        if what != RANK:
            return self.driver.kill(run, what, {})
        held = self.driver.rank_processes(run)
        if not held:
            raise NotShownError("the processes of its ranks were not found", is_failure=False)
        return self.driver.kill(run, what, held)

    def _judge_start(self, first: Interrupted) -> Iterator[Check]:
        ended = first.ended
        ranks = self.driver.ranks
        if ended.status.state is State.FAILED:
            if ended.last_step is None:
                yield failed(STARTS, why(ended))
                return
            yield passed(STARTS, IMPORTED)
            yield failed(TRAINS, why(ended))
            return
        yield passed(STARTS, IMPORTED)
        reports = ended.of_kind("ranks")
        joined = sum(int(each.get("joined") or 0) for each in reports)
        alone = sum(int(each.get("alone") or 0) for each in reports)
        # Ranks that the script starts itself may not be visible.
        has_group = joined > 0 or ranks == 1 or self.starts_ranks
        if reports and not has_group:
            alone = alone or ranks
        if fault := find_training_fault(ended, alone, ranks):
            yield failed(TRAINS, fault)
            return
        losses = ended.losses
        group = "1 rank"
        if ranks > 1:
            group = f"{joined} of {ranks} ranks in the process group"
        if ended.last_step is None:
            yield unknown(TRAINS, f"{group}; {self._no_steps}")
            return
        loss = ", no loss was reported"
        if losses:
            loss = f", loss {list(losses.values())[-1]:.4g}"
        if ranks > 1 and not joined:
            text = f"step {ended.last_step} was reached{loss}; {UNSEEN_GROUP}"
            yield unknown(TRAINS, text)
            return
        yield passed(TRAINS, f"{group}, up to step {ended.last_step}{loss}")

    def _judge_files(self, first: Interrupted) -> Check:
        files = first.files
        if not files and self.keeps and not first.is_by_itself:
            text = f"no file has appeared up to step {first.ended.last_step or 0}: let it save more often, or "
            text += self.driver.more_time
            return unknown(SAVES, text)
        if not files:
            lost = [
                str(path["path"])
                for event in first.ended.of_kind("outputs")
                for path in event.get("unkept", ())
            ]
            text = "no file has appeared in /opt/ml/checkpoints"
            if lost:
                text += f"; it has written {lost[0]}, which is not kept"
            return failed(SAVES, text)
        if broken := damaged_archive(files):
            text = f"{broken} is damaged: write to another name, and rename the file"
            return failed(SAVES, text)
        if problem := partial_state(files, self.driver.ranks):
            return failed(SAVES, problem)
        hosts = sorted({file.host for file in files})
        size = sum(file.size for file in files)
        text = f"{count(len(files), 'file')}, {format_size(size)}, on {', '.join(hosts)}"
        text += "; their content is the script's own and was not verified"
        return passed(SAVES, text)

    def _judge_stop(self, first: Interrupted) -> Check:
        ended = first.ended
        if first.is_by_itself:
            text = "the script ended before it could be stopped: give it more to train"
            return unknown(STOPS, text)
        if ended.stop_seconds > STOP_GRACE_SECONDS:
            text = f"the end took {ended.stop_seconds:.0f} s, longer than the notice of {STOP_GRACE_SECONDS} s"
            return failed(STOPS, text)
        if not first.files:
            # Where the script or its job names a place for checkpoints, none may have been due yet.
            result = Result.UNKNOWN if self.keeps else Result.FAIL
            return Check(STOPS, result, "SIGTERM left no checkpoint")
        if ended.stop_seconds >= _TORCHRUN_SECONDS and not self.starts_ranks:
            text = f"the ranks did not end after SIGTERM, and torchrun killed them {_TORCHRUN_SECONDS:.0f} s later: "
            text += "what a script does after SIGTERM must take less"
            return failed(STOPS, text)
        more = (ended.last_step or 0) - first.step
        if first.step and more > _MOST_STEPS_AFTER_SIGTERM:
            text = f"the script took {more} more steps after SIGTERM at step {first.step}: does it ignore the signal?"
            return unknown(STOPS, text)
        stopped = time.time()
        if ended.status.ended is not None:
            stopped = ended.status.ended.timestamp()
        age = max(0.0, stopped - max(file.modified for file in first.files))
        text = f"SIGTERM (seed {self.seed}): all processes ended after {ended.stop_seconds:.1f} s"
        return passed(STOPS, f"{text}; the newest file was {age:.1f} s old at the end")

    def _resume(self, interrupted: Interrupted) -> Ended:
        """Resume a run; return the run that has continued it.

        Raises:
            NotShownError: It failed, began again, or its steps are not visible.
        """
        if interrupted.is_by_itself:
            raise NotShownError("the script ended before it could be interrupted", is_failure=False)
        if not interrupted.files:
            raise NotShownError("it had saved no file yet", is_failure=False)
        before = interrupted.ended
        run = self.driver.begin_resume(before)
        resumed = self._observe(run, reports_steps=before.first_step is not None)
        if resumed.status.state is State.FAILED:
            raise NotShownError(f"the resumed run failed: {why(resumed)}")
        if before.first_step is None:
            raise NotShownError(self._no_steps, is_failure=False)
        if resumed.first_step is None:
            raise NotShownError(
                "the resumed run had reported no step in its share of the time", is_failure=False
            )
        if resumed.first_step <= before.first_step:
            text = f"it began again at step {resumed.first_step}, after it had reached step {before.last_step}"
            raise NotShownError(f"{text}: load the newest file in /opt/ml/checkpoints at the start")
        return resumed

    def _observe(self, run: Run, *, reports_steps: bool) -> Ended:
        """Return a resumed run after its first step, or its end; a run that continues is stopped.

        Raises:
            NotShownError: There was no time.
        """
        if reports_steps:
            self.driver.wait_for_first_step(run)
        deadline = time.monotonic() + max(10.0, self.driver.seconds_left * _SHARE_OF_TIME)
        while True:
            status = run.status()
            if status.state.is_final:
                return self.driver.wait(run)
            if len(_reported_steps(self.driver, run)) >= _REPORTS or time.monotonic() > deadline:
                return self.driver.stop(run)
            time.sleep(_POLL_SECONDS)


def _phrase(interrupted: Interrupted, resumed: Ended) -> str:
    return (
        f"step {resumed.first_step} after {interrupted.what} at step {interrupted.ended.last_step}"
    )


def _other_losses(fresh: list[Ended], resumed: list[tuple[str, Ended]]) -> str:
    """Return a sentence about a resumed run whose loss differs from that of runs without interruption, or nothing.

    Only steps count that two such runs have reported, so that it is known how much they differ.
    """
    expected: dict[int, list[float]] = {}
    for each in fresh:
        for step, loss in each.losses.items():
            if loss is not None:
                expected.setdefault(step, []).append(loss)
    for what, run in resumed:
        for step, loss in sorted(run.losses.items()):
            known = expected.get(step, [])
            if loss is None or len(known) < _LEAST_RUNS:
                continue
            allowed = max(2 * (max(known) - min(known)), _LOSS_TOLERANCE * abs(known[0]))
            if min(abs(loss - each) for each in known) > allowed:
                text = f"after {what} the loss of step {step} is {loss:.4g}, and {known[0]:.4g} without an interruption"
                return f"{text}, in {len(known)} runs: state is not restored on every rank, or other samples are used"
    return ""


def _reported_steps(driver: RunDriver, run: Run) -> set[int]:
    """Return the steps that a run has reported."""
    return {event["step"] for event in driver.events(run) if event["event"] == "step"}
