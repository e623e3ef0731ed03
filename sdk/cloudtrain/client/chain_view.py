"""A chain as one run: each operation of a run, over the attempts of the chain."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cloudtrain.backends.container.state_file import is_held
from cloudtrain.backends.registry import backend_package
from cloudtrain.errors import CloudError, CloudtrainError, RunNotFoundError
from cloudtrain.runs.attempt_chain import (
    CHAIN_FILE,
    CHAINS_FOLDER,
    AttemptState,
    Chain,
    ChainAttempt,
    find_chain,
    find_waiting_chain,
    read_chain,
)
from cloudtrain.runs.billing import Billing
from cloudtrain.runs.early_end import STOPPED_BY_REQUEST
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.runs.progress import join_progress
from cloudtrain.runs.run import parse_reference
from cloudtrain.runs.status import RunAttempt, State, Status
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.controller_files import LOCK_FILE, PAUSE_FILE, STOP_FILE
from cloudtrain.support.regular_files import read_regular

if TYPE_CHECKING:
    from cloudtrain.backends.base import Backend
    from cloudtrain.backends.context import BackendContext
    from cloudtrain.client.account_chains import AccountChains
    from cloudtrain.runs.downloads import RunStorage


def as_chain(backend: Backend, run: str, homes: Iterable[Path]) -> Backend:
    """Return the backend under which a run is its whole chain; the same one for a run without a chain."""
    homes = tuple(homes)
    folder = find_chain(run, homes)
    if folder is not None:
        return cast("Backend", ChainView(backend, folder))
    # Another machine may have begun it.
    view = ChainView(backend, homes[0] / CHAINS_FOLDER / run)
    return cast("Backend", view) if view.is_in_account else backend


def find_waiting(text: str, context: BackendContext) -> tuple[Backend, str] | None:
    """Return the backend and the id of a chain that has no run yet, by its name; None if there is none.

    Raises:
        RunNotFoundError: The text is no name of a run.
    """
    named, name = parse_reference(text)
    chain = find_waiting_chain(name, context.homes)
    if chain is None or named not in (None, chain.backend):
        return None
    for backend in backend_package(chain.backend).find_backends(context):
        return as_chain(backend, chain.id, context.homes), chain.id
    return None


class ChainView:
    """A backend whose run of one id is a chain. What is not here is the backend's own.

    Args:
        backend: The backend of the attempts.
        folder: The folder of the chain.
    """

    def __init__(self, backend: Backend, folder: Path) -> None:
        self._backend = backend
        self._folder = folder
        self._ended: dict[str, Status] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def status(self, run: str) -> Status:
        """Return the status of the newest attempt, with the times, the cost and the progress of all."""
        if run != self._id:
            return self._backend.status(run)
        chain = self._read()
        found = [(each, self._status_of(each)) for each in _with_runs(chain)]
        existing = [(attempt, status) for attempt, status in found if status is not None]
        if not existing:
            return self._without_run(chain)
        newest, shown = existing[-1]
        progress = functools.reduce(join_progress, (status.progress for _, status in existing))
        state, reason = self._state_of(chain, newest, shown)
        return dataclasses.replace(
            shown,
            run=chain.id,
            state=state,
            reason=reason,
            created=_moment(chain.attempts[0].started),
            started=next((status.started for _, status in existing if status.started), None),
            ended=shown.ended if state.is_final else None,
            billable_seconds=sum(status.billable_seconds for _, status in existing),
            cost_usd=_sum_costs(found),
            progress=progress,
            attempts=tuple(_attempts(existing)),
            is_abandoned=not (state.is_final or self._may_be_controlled()),
        )

    def summary(self) -> Status:
        """Return the status without the progress of earlier attempts, for a list: only the newest one is read."""
        chain = self._read()
        newest = self._shown_attempt(chain)
        shown = self._status_of(newest)
        if shown is None:
            return self._without_run(chain)
        state, reason = self._state_of(chain, newest, shown)
        settled = sum(each.settled_usd for each in chain.attempts if each is not newest)
        began = chain.attempts[0].started
        return dataclasses.replace(
            shown,
            run=chain.id,
            state=state,
            reason=reason,
            created=_moment(began),
            started=shown.started if newest is chain.attempts[0] else _moment(began),
            ended=shown.ended if state.is_final else None,
            cost_usd=None if shown.cost_usd is None else shown.cost_usd + settled,
            attempts=tuple(_recorded_attempts(chain)),
        )

    def _status_of(self, attempt: ChainAttempt) -> Status | None:
        """Return the status of an attempt's run; None if it does not exist. One that has ended is read once."""
        known = self._ended.get(attempt.run)
        if known is not None:
            return known
        try:
            found = self._backend.status(attempt.run)
        except RunNotFoundError:
            return None
        if found.state.is_final:
            self._ended[attempt.run] = found
        return found

    def _without_run(self, chain: Chain) -> Status:
        """Return the status of a chain whose first submit waits.

        Raises:
            RunNotFoundError: Its runs do not exist any more.
        """
        if _with_runs(chain):
            raise RunNotFoundError(
                f"the runs of {chain.id} do not exist any more", "see: cloudtrain list"
            )
        state, reason = self._waiting_state(self._pause() or "attempt 1 is about to start")
        return Status(
            chain.id,
            chain.backend,
            chain.state or state,
            chain.reason or reason,
            created=_moment(chain.attempts[0].started),
        )

    def _state_of(self, chain: Chain, newest: ChainAttempt, shown: Status) -> tuple[State, str]:
        if State.SUCCEEDED in (chain.state, shown.state):
            return State.SUCCEEDED, shown.reason
        if chain.state is not None:
            return chain.state, chain.reason
        number = len(chain.attempts)
        if newest is not chain.newest:
            waits = self._pause() or f"attempt {number} is about to start"
            return self._waiting_state(waits, newest.reason)
        if not shown.state.is_final:
            place = f"attempt {number} of at most {chain.limits.attempts}"
            return shown.state, _join(shown.reason, place)
        ended = f"attempt {number} has ended, and its controller has not looked at it yet"
        return self._waiting_state(ended, _first_line(shown.reason))

    def _waiting_state(self, *reasons: str) -> tuple[State, str]:
        """Return the state of a chain none of whose runs is active, and how to continue it where nothing does so."""
        is_stopped = (self._folder / STOP_FILE).exists()
        if self._is_controlled():
            if is_stopped:
                return State.STOPPING, STOPPED_BY_REQUEST
            return State.QUEUED, _join(*reasons)
        # The controller may have ended between the reads.
        chain = self._read()
        if chain.state is not None:
            return chain.state, chain.reason
        if is_stopped:
            return State.STOPPED, STOPPED_BY_REQUEST
        return State.QUEUED, _join(_no_controller(chain.id), *reasons)

    def _may_be_controlled(self) -> bool:
        """Whether something may continue the chain: of one in an account, that may be elsewhere."""
        return not facts_of(self._backend.name).is_local or self._is_controlled()

    def _is_controlled(self) -> bool:
        """Return whether a controller of this machine continues the chain, or this cannot be read."""
        try:
            return is_held(self._folder / LOCK_FILE)
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def _pause(self) -> str:
        try:
            return read_regular(self._folder / PAUSE_FILE).decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def logs(
        self,
        run: str,
        *,
        follow: bool = False,
        only: LogFilter = ALL_LINES,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Iterator[LogLine]:
        """Yield the log lines of all attempts, the oldest first; with `follow` until the chain has ended."""
        if run != self._id:
            yield from self._backend.logs(run, follow=follow, only=only, on_trouble=on_trouble)
            return
        backoff = self._backend.poll_backoff()
        done: set[str] = set()
        while True:
            chain = self._read()
            for attempt in _with_runs(chain):
                if attempt.run in done:
                    continue
                is_newest = attempt is chain.newest
                yield from self._backend.logs(
                    attempt.run, follow=follow, only=only, on_trouble=on_trouble
                )
                if follow or not is_newest:
                    done.add(attempt.run)
            if not follow or chain.state is not None:
                return
            time.sleep(backoff.next_seconds())

    def facts(self, run: str) -> Mapping[str, str]:
        """Return the known values of the job."""
        return self._backend.facts(self._kept_run(run))

    def plan_of(self, run: str) -> Mapping[str, Any]:
        """Return the plan.json of the attempt that has saved last: its results are those of the chain."""
        return self._backend.plan_of(self._kept_run(run))

    def storage_of(self, run: str) -> RunStorage:
        """Return where the results of the attempt that has saved last are."""
        return self._backend.storage_of(self._kept_run(run))

    def billing(self, run: str) -> Billing:
        """Return what is billed for all attempts together."""
        if run != self._id:
            return self._backend.billing(run)
        each = [self._backend.billing(one.run) for one in _with_runs(self._read())]
        if not each:
            return Billing()
        return dataclasses.replace(
            each[-1],
            usd_per_hour=_mean_price(each),
            billable_seconds=sum(one.billable_seconds for one in each),
            training_seconds=sum(one.training_seconds for one in each),
            warm_pool_seconds=sum(one.warm_pool_seconds for one in each),
            restarts=sum(one.restarts for one in each) + len(each) - 1,
        )

    def stop(self, run: str) -> None:
        """Ask the chain to stop: no other attempt begins, and the newest one saves and ends."""
        if run != self._id:
            self._backend.stop(run)
            return
        chain = self._read()
        if chain.state is not None:
            return
        if self._folder.exists():
            (self._folder / STOP_FILE).touch()
        if self._account is not None:
            self._account.request_stop(chain.id)
        if chain.newest.state is AttemptState.RUNNING:
            self._backend.stop(chain.newest.run)

    @property
    def _id(self) -> str:
        return self._folder.name

    def _read(self) -> Chain:
        """Return the record; that of the account, where the controller may be on another machine."""
        if not (self._folder / CHAIN_FILE).exists():
            copy = self._read_copy()
            if copy is None:
                raise RunNotFoundError(f"the chain {self._id} was deleted")
            return copy
        here = read_chain(self._folder)
        copy = None
        # What is here is shown where the account cannot be reached.
        with contextlib.suppress(CloudError):
            copy = self._read_copy()
        # The end of a chain may be recorded here only: see `Pauses.copy_end`.
        if copy is not None and (here.state is None or copy.state is not None):
            return copy
        return here

    def _read_copy(self) -> Chain | None:
        return None if self._account is None else self._account.read(self._id)

    @functools.cached_property
    def _account(self) -> AccountChains | None:
        if not facts_of(self._backend.name).uses_account:
            return None
        from cloudtrain.client.account_chains import AccountChains

        return AccountChains.of(self._backend)

    @property
    def is_in_account(self) -> bool:
        """Whether the account has a record of the chain; no if it cannot be reached, or is damaged."""
        try:
            return self._read_copy() is not None
        except CloudtrainError:
            return False

    def _shown_attempt(self, chain: Chain) -> ChainAttempt:
        """Return the newest attempt that has a run; the first one where none has."""
        found = _with_runs(chain)
        return found[-1] if found else chain.newest

    def _kept_run(self, run: str) -> str:
        """Return the newest attempt that has saved a checkpoint or has succeeded; without any, the newest one."""
        if run != self._id:
            return run
        chain = self._read()
        shown = self._shown_attempt(chain)
        for each in reversed(_with_runs(chain)):
            if each.checkpoint is not None:
                return each.run
            found = self._status_of(each) if each is shown else None
            if found is not None and _has_results(found):
                return each.run
        return shown.run


def _with_runs(chain: Chain) -> tuple[ChainAttempt, ...]:
    """Return the attempts whose runs exist."""
    return tuple(each for each in chain.attempts if each.state is not AttemptState.PLANNED)


def _no_controller(chain: str) -> str:
    return f"no controller of this machine continues it: cloudtrain recover {chain}"


def _has_results(status: Status) -> bool:
    return status.state is State.SUCCEEDED or status.progress.checkpoint is not None


def _mean_price(each: Sequence[Billing]) -> float | None:
    """Return the price per hour at which the billed seconds of all attempts cost what they cost together."""
    costs = [one.cost_usd for one in each]
    seconds = sum(one.billable_seconds + one.warm_pool_seconds for one in each)
    if None in costs:
        return None
    if not seconds:
        return each[-1].usd_per_hour
    return sum(filter(None, costs)) * 3600 / seconds


def _join(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _recorded_attempts(chain: Chain) -> Iterator[RunAttempt]:
    """Yield the attempts that have a run as the chain has recorded them."""
    for number, each in enumerate(_with_runs(chain), 1):
        has_succeeded = chain.state is State.SUCCEEDED and each is chain.newest
        yield RunAttempt(
            name=f"attempt {number}",
            started=_moment(each.started),
            ended=None if each.ended is None else _moment(each.ended),
            detail="" if has_succeeded else each.reason,
            run=each.run,
            checkpoint=each.checkpoint,
            cost_usd=None if each.is_active else each.settled_usd,
        )


def _attempts(existing: Iterable[tuple[ChainAttempt, Status]]) -> Iterator[RunAttempt]:
    """Yield the attempts that have had their machines, or wait for them, each from the status of its run."""
    for number, (attempt, status) in enumerate(existing, 1):
        began = status.started or status.created
        if began is None or (status.started is None and not status.phases):
            continue
        checkpoint = status.progress.checkpoint
        is_over = status.state.is_final
        yield RunAttempt(
            name=f"attempt {number}",
            started=began,
            ended=status.ended if is_over else None,
            detail=status.reason if is_over else "",
            run=attempt.run,
            checkpoint=attempt.checkpoint if checkpoint is None else checkpoint.step,
            cost_usd=status.cost_usd,
            phases=status.phases,
        )


def _sum_costs(found: Iterable[tuple[ChainAttempt, Status | None]]) -> float | None:
    """Return the cost of all attempts; of one whose run was deleted, the recorded one."""
    total = 0.0
    for attempt, status in found:
        cost = attempt.settled_usd if status is None else status.cost_usd
        if cost is None:
            return None
        total += cost
    return total


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
