"""The controller of a chain: watches the run of its newest attempt, and starts the next one.

What it does next depends only on the record and on the state of the newest run. An attempt is recorded with its
reservation and the id of its run before it is submitted, and the end of one together with the next one. So a controller
that was killed at any moment can be started again: a recorded run that exists is watched, and one that does not exist is
submitted, under the same id.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

from cloudtrain.aws.retry import Backoff
from cloudtrain.backends.container.process_tree import processes_of_run
from cloudtrain.client.next_step import explain_with_next_step
from cloudtrain.controllers.budget import Budget, overrun_of
from cloudtrain.controllers.outside_causes import cause_of_error
from cloudtrain.controllers.pauses import Pauses
from cloudtrain.controllers.reserved_runs import ReservedRuns
from cloudtrain.errors import (
    CloudtrainError,
    CredentialsError,
    NoCapacityError,
    NoCheckpointError,
    RunNotFoundError,
    UnreachableError,
)
from cloudtrain.features.recovery.causes import find_cause
from cloudtrain.features.recovery.stored_chain import StoredChain, has_time
from cloudtrain.runs.attempt_chain import (
    MOST_WITHOUT_CHECKPOINT,
    AttemptState,
    Chain,
    ChainAttempt,
)
from cloudtrain.runs.early_end import STOPPED_BY_REQUEST
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State, Status
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.units import format_duration, format_usd

_IDLE_SECONDS = 0.2
_PAUSED_SECONDS = 2.0
"""Time between two looks for a request to stop."""
_LEAST_RUNTIME_SECONDS = 600
"""A shorter attempt would be spent on its own start."""
_SAVE_SECONDS = 30.0


class Controller:
    """The controller of one chain. One process at a time may have one: see `StoredChain.lock`.

    Args:
        stored: The folder of the chain.
        reserved: Its runs.
        begin: Submits the run of the first attempt, under its id.
        report: Called with one line about each change.
        on_save: Called after each change of the record.
    """

    def __init__(
        self,
        stored: StoredChain,
        reserved: ReservedRuns,
        *,
        begin: Callable[[str], Run],
        report: Callable[[str], None],
        on_save: Callable[[], None],
    ) -> None:
        self._stored = stored
        self._reserved = reserved
        self._begin = begin
        self._report = report
        self._on_save = on_save
        self._pauses = Pauses(stored, report)
        self._is_free = not facts_of(reserved.backend).uses_account
        self._chain = stored.read()
        self._backoff: Backoff | None = None
        self._watched: Run | None = None
        self._has_asked_to_stop = False
        self._is_first_look = True
        self._lacks = 0

    def run(self) -> None:
        """Continue the chain until it has ended. The state is recorded, so that nothing is returned."""
        self._pauses.end()
        while self._chain.state is None:
            self._step()
            if self._chain.state is None:
                time.sleep(self._pause())
        self._pauses.copy_end(self._on_save)

    def advance(self) -> None:
        """Do all that can be done now, without a wait: for a process that is started again later."""
        before = None
        while self._chain.state is None and self._chain is not before:
            before = self._chain
            self._step()
        if self._chain.state is not None:
            self._on_save()

    def _step(self) -> None:
        attempt = self._chain.newest
        if attempt.state is AttemptState.RUNNING:
            self._watch(attempt)
        elif not (self._is_first_look and self._look_for(attempt)):
            self._start(attempt)
        self._is_first_look = False

    def _start(self, attempt: ChainAttempt) -> None:
        """Submit a planned attempt, unless the chain is to end or pauses."""
        if reason := self._reason_to_end():
            self._stop_planned(attempt, reason)
        elif self._pauses.may_start():
            self._submit(attempt)

    def _pause(self) -> float:
        if self._chain.newest.state is AttemptState.PLANNED:
            return _IDLE_SECONDS if self._pauses.is_over else _PAUSED_SECONDS
        if self._backoff is None:
            return _IDLE_SECONDS
        return self._backoff.next_seconds()

    def _reason_to_end(self) -> str:
        if self._stored.stop_file.exists():
            return STOPPED_BY_REQUEST
        if not has_time(self._chain):
            return f"limits.recover.time of {format_duration(self._chain.limits.time)} is over"
        return ""

    # Submits

    def _submit(self, attempt: ChainAttempt) -> None:
        try:
            run = self._send(attempt)
        except (CloudtrainError, OSError) as error:
            self._not_submitted(attempt, error)
            return
        self._backoff = run.poll_backoff()
        self._save(self._chain.with_newest(attempt.but(state=AttemptState.RUNNING, run=run.id)))

    def _send(self, attempt: ChainAttempt) -> Run:
        if len(self._chain.attempts) == 1:
            return self._begin(attempt.run)
        client = self._reserved.client(attempt.run)
        changes = []
        if attempt.runtime_seconds is not None:
            changes.append(f"limits.runtime={attempt.runtime_seconds}s")
        self._end_processes(self._chain.attempts[-2].run)
        for earlier in reversed(self._chain.trained):
            # One whose submit has failed may have no run.
            with contextlib.suppress(NoCheckpointError, RunNotFoundError):
                return client.resume(
                    self._reserved.reference(earlier.run), changes, skip_check=True
                )
        # Nothing was saved: the same run again.
        first = self._reserved.reference(self._chain.attempts[0].run)
        resumed = client.get_run(first).plan_document()["job"].get("checkpoint", {}).get("resume")
        changes.append(f"checkpoint.resume={resumed or 'auto'}")
        return client.resume(first, changes, skip_check=True)

    def _end_processes(self, run: str) -> None:
        """Wait until the ranks of an attempt on this machine have ended, whose supervisor was killed; they save."""
        if not self._is_free:
            return
        deadline = time.monotonic() + _SAVE_SECONDS
        while processes_of_run(run) and time.monotonic() < deadline:
            time.sleep(_IDLE_SECONDS)
        # Without a supervisor, this kills what is left.
        with contextlib.suppress(RunNotFoundError):
            self._reserved.get(run).stop()

    def _not_submitted(self, attempt: ChainAttempt, error: CloudtrainError | OSError) -> None:
        """Record that a submit has failed. For an outside cause the attempt stays planned."""
        cause = cause_of_error(error, self._stored.home)
        lacks_capacity = isinstance(error, NoCapacityError)
        if cause and not (lacks_capacity and "capacity" not in self._chain.limits.on):
            self._wait_for_capacity(cause)
            if self._is_free:
                # As above.
                self._save(self._chain.with_newest(attempt.but(run=self._new_id())))
            return
        message = error.message if isinstance(error, CloudtrainError) else str(error)
        if self._is_free and (isinstance(error, OSError) or type(error) is CloudtrainError):
            # A process of this machine did not start, or was killed at its start.
            ended = _ended(attempt, message.partition("\n")[0].rstrip(":"), "infrastructure")
            self._proceed(self._chain.with_newest(ended), State.FAILED)
            return
        self._end(attempt, State.FAILED, message)

    def _look_for(self, attempt: ChainAttempt) -> bool:
        """Record how far the submit of a controller that was killed has come; return whether that changes the record."""
        if self._finds(attempt):
            self._save(self._chain.with_newest(attempt.but(state=AttemptState.RUNNING)))
            return True
        if self._is_free:
            # The folder of a run that was not completely created keeps its name.
            self._save(self._chain.with_newest(attempt.but(run=self._new_id())))
        return self._is_free

    def _finds(self, attempt: ChainAttempt) -> bool:
        """Return whether the run of a planned attempt exists."""
        return self._reserved.find_status(attempt.run, was_submitted=False) is not None

    def _stop_planned(self, attempt: ChainAttempt, reason: str) -> None:
        """End a chain whose newest attempt is not known to have a run; a submit may have created one."""
        try:
            is_found = self._finds(attempt)
        except (UnreachableError, CredentialsError):
            # The next step looks again.
            return
        if is_found:
            # The next step stops it.
            self._save(self._chain.with_newest(attempt.but(state=AttemptState.RUNNING)))
            return
        state = State.STOPPED if reason == STOPPED_BY_REQUEST else State.FAILED
        self._end(attempt, state, reason)

    # What a run reports

    def _watch(self, attempt: ChainAttempt) -> None:
        try:
            run = self._run_of(attempt)
            status = run.status()
            self._backoff = self._backoff or run.poll_backoff()
            if status.state.is_final:
                self._close(attempt, run, status)
            elif self._stored.stop_file.exists() and not self._has_asked_to_stop:
                run.stop()
                self._has_asked_to_stop = True
        except (UnreachableError, CredentialsError) as error:
            # Other credentials may come with another client.
            self._watched = None
            self._pauses.begin(error.message)
        except RunNotFoundError:
            self._end(attempt, State.FAILED, f"its run {attempt.run} was deleted")
        else:
            if self._pauses.cause and self._pauses.is_over:
                self._pauses.end()

    def _run_of(self, attempt: ChainAttempt) -> Run:
        """Return the run of an attempt: one object for all looks, which knows its plan and has its connections."""
        if self._watched is None or self._watched.id != attempt.run:
            self._watched = self._reserved.get(attempt.run)
        return self._watched

    def _close(self, attempt: ChainAttempt, run: Run, status: Status) -> None:
        """Record the end of an attempt, with the next one or the end of the chain."""
        explained = explain_with_next_step(run, status)
        cause = find_cause(status, explained)
        cost = 0.0 if self._is_free else status.cost_usd
        checkpoint = status.progress.checkpoint
        settled = attempt.reservation_usd if cost is None else cost
        words = status.reason.strip().partition("\n")[0]
        ended = attempt.but(
            state=AttemptState.ENDED,
            settled_usd=settled,
            overrun_usd=overrun_of(attempt.reservation_usd, settled),
            reservation_usd=0.0,
            checkpoint=None if checkpoint is None else checkpoint.step,
            cause=cause or "",
            reason=words or explained.message,
            ended=time.time(),
        )
        self._proceed(self._chain.with_newest(ended), status.state)

    def _proceed(self, chain: Chain, state: State) -> None:
        """Record what follows the end of the newest attempt: the next one, or the end of the chain.

        Args:
            chain: The chain, with the attempt as it has ended.
            state: The state in which it has ended.
        """
        cause = chain.newest.cause
        reason = chain.newest.reason
        if state is State.SUCCEEDED:
            self._save(chain.ended(State.SUCCEEDED, ""))
        elif self._stored.stop_file.exists():
            self._save(chain.ended(State.STOPPED, STOPPED_BY_REQUEST))
        elif cause not in chain.limits.on:
            self._save(chain.ended(state, reason))
        elif why := _reason_against(chain):
            self._save(chain.ended(state, f"{reason}; {why}"))
        else:
            self._continue(chain, state, reason)

    def _continue(self, chain: Chain, state: State, reason: str) -> None:
        """Record the next attempt, or the end where the budget has no place for it."""
        planned = self._planned(chain)
        if planned is None:
            budget = Budget.of(chain.limits.cost, chain.attempts)
            why = f"{format_usd(max(0.0, budget.left_usd))} are left of limits.recover.cost"
            if budget.is_overrun:
                why = f"a run cost {format_usd(budget.overrun_usd)} more than its reservation"
            self._save(chain.ended(state, f"{reason}; {why}"))
            return
        if chain.newest.cause == "capacity":
            self._wait_for_capacity(reason)
        else:
            self._lacks = 0
        self._save(chain.with_next(planned))

    def _wait_for_capacity(self, cause: str) -> None:
        """Pause before the next submit, longer each time in a row."""
        seconds = self._reserved.capacity_pause_seconds()
        self._pauses.begin(cause, self._lacks, shortest_seconds=seconds)
        self._lacks += 1

    def _planned(self, chain: Chain) -> ChainAttempt | None:
        """Return the next attempt; None if the budget has no place for it."""
        budget = Budget.of(chain.limits.cost, chain.attempts)
        if budget.is_overrun:
            return None
        reservation = chain.reservation_usd
        runtime = None
        if not budget.allows(reservation):
            # What is left pays for a shorter one.
            lacking = (reservation - budget.left_usd) / chain.usd_per_hour * 3600
            runtime = math.floor(chain.runtime_seconds - lacking)
            if runtime < _LEAST_RUNTIME_SECONDS:
                return None
            reservation = budget.left_usd
        return ChainAttempt(
            self._new_id(len(chain.attempts)),
            reservation_usd=reservation,
            runtime_seconds=runtime,
            started=time.time(),
        )

    def _new_id(self, number: int | None = None) -> str:
        part = f"{len(self._chain.attempts) if number is None else number}/{time.time()}"
        return self._reserved.new_id(self._chain.job, part)

    # The record

    def _end(self, attempt: ChainAttempt, state: State, reason: str) -> None:
        """Record the end of a chain whose newest attempt has no run."""
        self._save(self._chain.with_newest(_ended(attempt, reason)).ended(state, reason))

    def _save(self, chain: Chain) -> None:
        self._chain = chain
        self._pauses.write(lambda: self._stored.write(chain))
        if chain.state is None:
            self._pauses.copy(self._on_save)
        self._report(_describe(chain))


def _ended(attempt: ChainAttempt, reason: str, cause: str = "") -> ChainAttempt:
    """Return an attempt without a run after its end."""
    return attempt.but(
        state=AttemptState.ENDED,
        reservation_usd=0.0,
        cause=cause,
        reason=reason,
        ended=time.time(),
    )


def _reason_against(chain: Chain) -> str:
    """Return why no other attempt may begin; empty if one may."""
    limits = chain.limits
    trained = sum(each.has_trained for each in chain.attempts)
    if trained >= limits.attempts:
        return f"{trained} attempts have been made (limits.recover.attempts)"
    if chain.is_stuck:
        return f"{MOST_WITHOUT_CHECKPOINT} attempts in a row ended without a new checkpoint"
    if not has_time(chain):
        return f"limits.recover.time of {format_duration(limits.time)} is over"
    return ""


def _describe(chain: Chain) -> str:
    if chain.state is not None:
        return f"{chain.state}{f': {chain.reason}' if chain.reason else ''}"
    number = len(chain.attempts)
    attempt = chain.newest
    if number > 1 and attempt.state is AttemptState.PLANNED:
        before = chain.attempts[-2]
        return f"attempt {number - 1} ended ({before.reason}); attempt {number} is {attempt.run}"
    return f"attempt {number} ({attempt.run}): {attempt.state}"
