"""The controller of a sweep: proposes trials, submits their runs, reads their metrics, and stops them.

What it does next depends only on the recorded trials and on the states of their runs. It records what it is about to
do before it does it: a trial is recorded with its reservation and the id of its run, and only then submitted. So a
controller that was killed at any moment can be started again: a recorded run that exists is watched, and one that does
not exist is submitted, under the same id.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime

from cloudtrain.aws.retry import Backoff
from cloudtrain.bundle import Contents
from cloudtrain.controllers.budget import Budget
from cloudtrain.controllers.outside_causes import cause_of_end, cause_of_error
from cloudtrain.controllers.pauses import Pauses
from cloudtrain.controllers.reserved_runs import ReservedRuns
from cloudtrain.errors import (
    CloudtrainError,
    CredentialsError,
    RunNotFoundError,
    SpecError,
    UnreachableError,
    nearest,
)
from cloudtrain.features.sweeps.halving import (
    Rule,
    last_promotion,
    length_field,
    lengths_of,
    next_promotion,
)
from cloudtrain.features.sweeps.machine_shares import (
    MachineShare,
    describe_shares,
    limited_to,
    share_machine,
)
from cloudtrain.features.sweeps.planning import job_of
from cloudtrain.features.sweeps.results import SweepState, describe_trial
from cloudtrain.features.sweeps.spec import Rungs
from cloudtrain.features.sweeps.stored_sweep import StoredSweep
from cloudtrain.features.sweeps.study import Study
from cloudtrain.features.sweeps.trial import Trial, TrialState, settle
from cloudtrain.job.job_fields import SWEEP_TAG, TRIAL_TAG
from cloudtrain.job.spec import JobSpec
from cloudtrain.runs.history import read_history
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State, Status
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.units import format_duration, format_usd
from cloudtrain_runtime.contract.strict_json import dump_json

_IDLE_SECONDS = 0.2
_MOST_REPEATS = 5
"""How often a trial is repeated whose runs fail for a cause outside of the sweep."""
_MOST_FIRST_FAILURES = 3
"""A sweep ends if its first trials all fail: the reason is then the job, not the values."""
_END_STATES = {State.FAILED: TrialState.FAILED, State.STOPPED: TrialState.STOPPED}
_PRUNED = "pruned"
_DELETED = "its run was deleted"


class Controller:
    """The controller of one sweep. One process at a time may have one: see `StoredSweep.lock`.

    Args:
        stored: The sweep.
        study: Its trials.
        code: The code of its start, with which all trials run.
        settings: The account; None for the settings of environment and files.
        report: Called with one line about each change.
        score: Returns the objective of a run that has succeeded; by default its metric.
        on_save: Called after each change of the recorded trials.
    """

    def __init__(
        self,
        stored: StoredSweep,
        study: Study,
        code: Contents,
        *,
        settings: Settings | None,
        report: Callable[[str], None],
        score: Callable[[Run], float] | None,
        on_save: Callable[[], None],
    ) -> None:
        self._stored = stored
        self._study = study
        self._reserved = ReservedRuns(stored, stored.backend, code, settings)
        self._pauses = Pauses(stored, report)
        self._report = report
        self._score = score
        self._on_save = on_save
        self._sweep = stored.sweep
        self._spec = stored.sweep.spec
        self._is_local = self._reserved.is_local
        # Their runs are folders, and nothing is billed.
        self._is_free = not facts_of(stored.backend).uses_account
        self._trials = {trial.number: trial for trial in study.trials()}
        self._runs: dict[int, Run] = {}
        self._resubmitted: set[int] = set()
        self._stopped: set[int] = set()
        self._backoff: Backoff | None = None
        self._has_changed = False
        self._failures_in_a_row = 0
        self._is_suspended = False
        self._ending = ""
        self._lengths = lengths_of(self._sweep)
        self._rule = Rule((self._spec.rungs or Rungs()).factor, self._spec.objective.is_maximized)
        self._shares = share_machine(self._spec.parallel) if self._is_local else ()
        self._planner = self._reserved.client().planner(self._sweep.job, backend=stored.backend)

    def run(self) -> None:
        """Run trials until the sweep has ended. The state is recorded, so that nothing is returned."""
        if self._shares:
            self._report(describe_shares(self._shares))
        self._pauses.end()
        self._pauses.write(self._study.repair)
        self._recover()
        while not self._step():
            time.sleep(self._pause())
        if self._is_suspended:
            self._report(f"the sweep is interrupted: {self._pauses.cause}")
            return
        self._finish()

    @property
    def budget(self) -> Budget:
        """The present budget."""
        return Budget.of(self._spec.limits.cost, self._trials.values())

    def _step(self) -> bool:
        """Look at the active trials and start others; return whether the sweep has ended."""
        for trial in self._active():
            if trial.state is TrialState.RUNNING:
                self._watch(trial)
        self._ending = self._ending or self._reason_to_end()
        if self._ending:
            self._stop_active()
        elif self._is_suspended:
            return all(trial.state is TrialState.PLANNED for trial in self._active())
        elif self._pauses.may_start():
            self._submit_planned()
            self._start_more()
        return not self._active() and (bool(self._ending) or self._next() is None)

    def _active(self) -> list[Trial]:
        return [trial for trial in self._trials.values() if trial.state.is_active]

    def _pause(self) -> float:
        """Return the seconds until the next look at the runs. AWS limits calls, so they grow without a change."""
        if not self._runs:
            return _IDLE_SECONDS
        if self._backoff is None:
            self._backoff = next(iter(self._runs.values())).poll_backoff()
        has_changed, self._has_changed = self._has_changed, False
        return self._backoff.next_seconds(changed=has_changed or self._is_local)

    def _reason_to_end(self) -> str:
        """Return why no other trial may start and the active ones are stopped; empty for no reason."""
        limit = self._spec.limits.time
        if self._stored.stop_file.exists():
            return "stopped on request"
        if (
            limit is not None
            and (datetime.now(UTC) - self._stored.created).total_seconds() >= limit
        ):
            return f"limits.time of {format_duration(limit)} is over"
        ended = [trial for trial in self._trials.values() if trial.state.is_final]
        if len(ended) >= _MOST_FIRST_FAILURES and all(
            each.state is TrialState.FAILED for each in ended
        ):
            return f"the first {len(ended)} trials failed: {ended[0].reason}"
        return ""

    # Causes outside of the sweep

    def _repeat(self, trial: Trial, status: Status, cause: str) -> None:
        """Plan the run of a trial again that has failed for a cause outside of the sweep."""
        self._failures_in_a_row += 1
        self._pauses.begin(cause, self._failures_in_a_row - 1)
        settled = settle(trial, self._cost_of(status))
        # This frees its reservation.
        self._trials[trial.number] = settled.but(state=TrialState.FAILED)
        # Other trials end well, so that the cause is this one.
        is_own = trial.repeats >= _MOST_REPEATS and self._failures_in_a_row < _MOST_REPEATS
        why = ""
        if is_own:
            why = f"{trial.repeats + 1} times"
        elif not self.budget.allows(trial.reservation_usd):
            why = "the budget allows no other run of it"
        if why:
            self._close(settled, TrialState.FAILED, f"{cause} ({why})")
            return
        # Every trial fails for it. A person has to look, and the trials stay planned.
        self._is_suspended = self._failures_in_a_row > _MOST_REPEATS
        planned = settled.but(
            state=TrialState.PLANNED,
            reservation_usd=trial.reservation_usd,
            attempt=trial.attempt + 1,
            repeats=trial.repeats + 1,
            objective=None,
            reason="",
        )
        self._save(self._with_run_id(planned))

    # The next trial

    def _next(self) -> Trial | None:
        """Return the trial that starts next, or continues to its next rung; None if there is none for now.

        As long as it is not recorded, each call returns the same one.
        """
        trials = list(self._trials.values())
        promoted = next_promotion(trials, self._lengths, self._rule) if self._lengths else None
        if promoted is None and len(trials) < self._stored.planned_trials:
            if self._ending or self.budget.is_overrun:
                return None
            proposed = self._pauses.write(self._study.propose)
            if proposed is not None:
                return proposed.but(length=self._lengths[0] if self._lengths else None)
        if promoted is None and self._lengths and not self._active():
            promoted = last_promotion(trials, self._lengths, self._rule)
        return None if promoted is None else self._continued(promoted)

    def _continued(self, trial: Trial) -> Trial:
        """Return a trial that continues its last run to the next rung."""
        length = next(length for length in self._lengths if length > (trial.length or 0))
        earlier = (*trial.earlier, trial.run)
        return trial.but(
            state=TrialState.PLANNED,
            length=length,
            earlier=earlier,
            run="",
            attempt=trial.attempt + 1,
        )

    def _start_more(self) -> None:
        """Start trials as far as parallel and the budget allow."""
        while len(self._active()) < self._spec.parallel and self._pauses.is_over:
            trial = self._next()
            if trial is None or not self._admit(trial):
                return

    def _admit(self, trial: Trial) -> bool:
        """Reserve the cost of a trial, record it and submit its run; return False if the budget has no place for it."""
        try:
            plan = self._planner(self._job_of(trial))
        except SpecError as error:
            self._close(trial, TrialState.REFUSED, error.message)
            return True
        if not self._is_free and plan.cost.max_usd is None and self.budget.limit_usd is not None:
            # The plan of the sweep had a price for each type. Without one a trial could cost more than is left.
            reason = "no price is known for its instance type, so the budget could not hold"
            self._close(trial, TrialState.REFUSED, reason)
            return True
        reservation = 0.0 if self._is_free else plan.cost.max_usd or 0.0
        if not self.budget.allows(reservation):
            self._refuse_over_budget(trial, reservation)
            return False
        slots = {each.slot for each in self._active()}
        slot = next(slot for slot in range(self._spec.parallel) if slot not in slots)
        named = trial.but(
            reservation_usd=reservation, slot=slot, started=trial.started or time.time()
        )
        self._submit(self._save(self._with_run_id(named)))
        return True

    def _refuse_over_budget(self, trial: Trial, reservation: float) -> None:
        """End the sweep if no other trial fits into the budget; refuse this trial if only it does not fit."""
        if self.budget.can_ever_allow(reservation) or self._active():
            return
        if not self.budget.can_ever_allow(self._stored.lowest_usd):
            self._ending = self._describe_used_budget()
            return
        message = f"it reserves {format_usd(reservation)}, more than is left of the budget"
        self._close(trial, TrialState.REFUSED, message)

    def _describe_used_budget(self) -> str:
        budget = self.budget
        if budget.is_overrun:
            return f"a run cost {format_usd(budget.overrun_usd)} more than its reservation, so no other trial may start"
        left = (budget.limit_usd or 0.0) - budget.spent_usd
        trials = count(len(self._trials), "trial")
        return f"budget used after {trials}: {format_usd(left)} are left, a trial reserves {self._stored.lowest_usd:.2f}"

    # Runs

    def _job_of(self, trial: Trial) -> JobSpec:
        return job_of(self._sweep, trial, self._tags_of(trial))

    def _tags_of(self, trial: Trial) -> dict[str, str]:
        return {SWEEP_TAG: self._stored.id, TRIAL_TAG: str(trial.number)}

    def _with_run_id(self, trial: Trial) -> Trial:
        """Return a trial with the id of the run that is about to be submitted."""
        part = f"{trial.number}/{trial.attempt}"
        return trial.but(run=self._reserved.new_id(self._sweep.job.name, part))

    def _submit(self, trial: Trial) -> None:
        """Submit the run of a recorded trial. Without capacity or network it stays recorded, and is tried again."""
        try:
            with limited_to(self._share_of(trial)):
                run = self._send(trial)
        except (CloudtrainError, OSError) as error:
            self._not_submitted(trial, error)
        else:
            self._runs[trial.number] = run
            self._save(trial.but(state=TrialState.RUNNING, run=run.id))

    def _not_submitted(self, trial: Trial, error: CloudtrainError | OSError) -> None:
        """Record that a submit has failed. For a cause outside of the sweep the trial stays planned."""
        cause = cause_of_error(error, self._stored.home)
        if cause:
            self._pauses.begin(cause)
            if self._is_free:
                self._find_run(trial)
            return
        message = error.message if isinstance(error, CloudtrainError) else str(error)
        self._close(trial, TrialState.FAILED, message)

    def _send(self, trial: Trial) -> Run:
        client = self._reserved.client(trial.run)
        if trial.earlier:
            changes = [f"{length_field(self._sweep.job)}={trial.length}"]
            changes += [
                f"tags.{name}={dump_json(value)}" for name, value in self._tags_of(trial).items()
            ]
            return client.resume(
                self._reserved.reference(trial.earlier[-1]), changes, skip_check=True
            )
        # After one run has ended, the account needs no other check.
        skips = any(each.settled_usd or each.earlier for each in self._trials.values())
        return client.submit(self._job_of(trial), backend=self._stored.backend, skip_check=skips)

    def _share_of(self, trial: Trial) -> MachineShare | None:
        return self._shares[trial.slot] if len(self._shares) > 1 else None

    def _submit_planned(self) -> None:
        """Submit the recorded trials whose submit has failed, or was interrupted."""
        for trial in self._active():
            if trial.state is TrialState.PLANNED and self._pauses.is_over:
                self._submit(trial)

    def _recover(self) -> None:
        """Find the runs of the active trials. Those that do not exist are submitted by the next step."""
        for trial in self._active():
            self._resubmitted.add(trial.number)
            self._find_run(trial.but(repeats=0))

    def _find_run(self, trial: Trial) -> None:
        """Watch the run of an active trial, if it exists."""
        status = self._find_status(trial)
        if status is not None:
            self._runs[trial.number] = self._reserved.get(trial.run)
            self._save(trial.but(state=TrialState.RUNNING))
        elif trial.state is TrialState.RUNNING:
            self._close(trial, TrialState.FAILED, _DELETED, None)
        elif self._is_free:
            # The folder of a run that was not completely created keeps its name.
            self._save(self._with_run_id(trial.but(attempt=trial.attempt + 1)))

    def _find_status(self, trial: Trial) -> Status | None:
        was_submitted = trial.state is not TrialState.PLANNED
        return self._reserved.find_status(trial.run, was_submitted=was_submitted)

    # What a run reports

    def _watch(self, trial: Trial) -> None:
        """Look at the run of a trial: record its end, its metric, and stop it early if it is to be pruned."""
        try:
            run = self._runs.get(trial.number) or self._reserved.get(trial.run)
            self._runs[trial.number] = run
            status = run.status()
        except (UnreachableError, CredentialsError) as error:
            self._pauses.begin(error.message)
            return
        except RunNotFoundError:
            self._close(trial, TrialState.FAILED, _DELETED, None)
            return
        if status.state.is_final:
            self._end(trial, run, status)
            return
        value = self._metric_of(status)
        if trial.reason:
            # It was to be stopped when the controller was killed.
            self._stop(trial, run)
        elif value is not None and value != trial.objective:
            self._prune(self._save(trial.but(objective=value)), run)

    def _prune(self, trial: Trial, run: Run) -> None:
        """Stop a run whose trial is to be pruned. The reason is recorded first."""
        if self._spec.pruning == "none":
            return
        history = read_history(run).metrics.get(self._spec.objective.metric, ())
        values = [(each.step, each.value) for each in history if each.value is not None]
        if self._study.should_prune(trial, values):
            reason = f"{_PRUNED} at step {values[-1][0]}, with {trial.objective:g}"
            self._stop(self._save(trial.but(reason=reason)), run)

    def _stop(self, trial: Trial, run: Run) -> None:
        """Ask a run to stop, once. The reason is recorded before."""
        if trial.number not in self._stopped:
            run.stop()
            self._stopped.add(trial.number)

    def _end(self, trial: Trial, run: Run, status: Status) -> None:
        """Record the end of a trial's run: its cost takes the place of its reservation."""
        del self._runs[trial.number]
        if trial.number in self._resubmitted and self._reserved.never_began(status):
            self._resubmitted.discard(trial.number)
            planned = trial.but(state=TrialState.PLANNED, attempt=trial.attempt + 1)
            self._submit(self._save(self._with_run_id(planned)))
            return
        if not trial.reason:
            cause = cause_of_end(
                run,
                status,
                self._stored.home,
                # Runs that cost nothing run on this machine.
                shares_disk=not run.is_billed,
            )
            if cause:
                self._repeat(trial, status, cause)
                return
        self._failures_in_a_row = 0
        if status.state is State.SUCCEEDED:
            self._evaluate(trial, run, status)
            return
        state = _END_STATES[status.state]
        if state is TrialState.STOPPED and trial.reason.startswith(_PRUNED):
            state = TrialState.PRUNED
        reason = trial.reason or status.reason.strip().partition("\n")[0]
        self._close(trial, state, reason, self._cost_of(status))

    def _evaluate(self, trial: Trial, run: Run, status: Status) -> None:
        """Record the objective of a trial whose run has succeeded. Without one the trial has failed."""
        objective, missing = self._objective(run, status)
        cost = self._cost_of(status)
        if missing:
            is_unknown = self._spec.objective.metric not in status.progress.metrics
            if is_unknown and all(each.objective is None for each in self._trials.values()):
                # So would all others.
                self._ending = self._ending or f"trial {trial.number}: {missing}"
            self._close(trial.but(objective=None), TrialState.FAILED, missing, cost)
            return
        ended = trial.but(objective=objective)
        state = TrialState.SUCCEEDED
        if trial.length is not None and objective is not None:
            ended = ended.but(rungs={**trial.rungs, str(trial.length): objective})
            if trial.length < self._lengths[-1]:
                state = TrialState.WAITING
        self._close(ended, state, "", cost)

    def _cost_of(self, status: Status) -> float | None:
        return 0.0 if self._is_free else status.cost_usd

    def _metric_of(self, status: Status) -> float | None:
        value = status.progress.metrics.get(self._spec.objective.metric)
        return value if value is not None and math.isfinite(value) else None

    def _objective(self, run: Run, status: Status) -> tuple[float | None, str]:
        """Return the objective of a run that has succeeded, or why it has none."""
        if self._score is not None:
            return float(self._score(run)), ""
        value = self._metric_of(status)
        if value is not None:
            return value, ""
        metric = self._spec.objective.metric
        reported = list(status.progress.metrics)
        if metric in reported:
            return None, f"{metric} is not finite"
        near = nearest(metric, reported)
        hint = f'; did you mean "{near}"?' if near else ""
        return (
            None,
            f"the run reported no {metric}; it reported {', '.join(reported) or 'no metrics'}{hint}",
        )

    # The end

    def _stop_active(self) -> None:
        for trial in self._active():
            if trial.state is TrialState.PLANNED:
                self._stop_planned(trial)
            elif trial.number in self._runs and not trial.reason:
                self._stop(self._save(trial.but(reason=self._ending)), self._runs[trial.number])

    def _stop_planned(self, trial: Trial) -> None:
        """End a trial that is not known to have a run; a submit whose answer was lost may have created one."""
        try:
            status = self._find_status(trial)
        except (UnreachableError, CredentialsError):
            # The next step looks again.
            return
        if status is not None:
            # The next step stops it.
            self._save(trial.but(state=TrialState.RUNNING))
            return
        self._close(trial, TrialState.STOPPED, self._ending)

    def _finish(self) -> None:
        """Record the end of the sweep."""
        for trial in list(self._trials.values()):
            if trial.state is TrialState.WAITING:
                reason = f"{_PRUNED}: others were better after {trial.length} {length_field(self._sweep.job)[6:]}"
                self._save(trial.but(state=TrialState.PRUNED, reason=reason))
        state, reason = self._final_state()
        self._pauses.write(lambda: self._study.set_end(str(state), reason))
        self._pauses.copy_end(self._on_save)
        self._report(f"{state}{f': {reason}' if reason else ''}")

    def _final_state(self) -> tuple[SweepState, str]:
        has_result = any(trial.state is TrialState.SUCCEEDED for trial in self._trials.values())
        if self.budget.is_overrun:
            return SweepState.STOPPED, self._describe_used_budget()
        is_limited = self._ending.startswith(("budget", "limits.time"))
        if self._ending and not (is_limited and has_result):
            is_stopped = is_limited or self._stored.stop_file.exists()
            return SweepState.STOPPED if is_stopped else SweepState.FAILED, self._ending
        if not has_result:
            return SweepState.FAILED, "no trial has succeeded"
        return SweepState.SUCCEEDED, self._ending

    def _close(
        self, trial: Trial, state: TrialState, reason: str, cost_usd: float | None = 0.0
    ) -> None:
        """Record that the run of a trial has ended; without a cost (None) it counts as its reservation."""
        settled = settle(trial, cost_usd)
        self._save(settled.but(state=state, reason=reason, ended=time.time()))

    def _save(self, trial: Trial) -> Trial:
        """Record a trial."""
        self._has_changed = True
        before = self._trials.get(trial.number)
        self._trials[trial.number] = trial
        self._pauses.write(lambda: self._study.save(trial))
        self._pauses.copy(self._on_save)
        if before is None or before.state is not trial.state:
            self._report(describe_trial(trial))
        return trial
