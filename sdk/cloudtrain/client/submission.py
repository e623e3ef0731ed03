"""One submit to SageMaker: look, check, pack, claim, send; and again while there is no capacity."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cloudtrain.aws.retry import Backoff
from cloudtrain.bundle import ProgressCallback
from cloudtrain.client.capacity import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, lacks_capacity
from cloudtrain.errors import CloudError, NoCapacityError
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State
from cloudtrain.support.run_id import make_run_id
from cloudtrain.support.units import format_duration

if TYPE_CHECKING:
    from cloudtrain.backends.sagemaker import SageMakerBackend
    from cloudtrain.bundle.archive import Bundle
    from cloudtrain.preflight import Check


def _ignore(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Callbacks:
    """What a submit or a resume reports while it works. Each callback is optional.

    Attributes:
        on_plan: Called with the plan before anything is packed, asked or sent; its warnings are there to be shown.
        on_checks: Called with the checks of the account when none of them has failed; some may be unknown.
        on_wait: Called with the reason and the seconds before each pause of `wait_for_capacity`.
        on_sent: Called with each run that `wait_for_capacity` submits, before its instances are waited for.
        progress: Called with the bytes of the code that have been read or packed, and how many there are.
        upload_progress: Called with the bytes that have been uploaded, and how many there are.
    """

    on_plan: Callable[[Plan], None] = _ignore
    on_checks: Callable[[tuple[Check, ...]], None] = _ignore
    on_wait: Callable[[str, float], None] = _ignore
    on_sent: Callable[[Run], None] = _ignore
    progress: ProgressCallback | None = None
    upload_progress: ProgressCallback | None = None


NO_CALLBACKS = Callbacks()


class Sending:
    """One submit to SageMaker, from the look for a run that goes on to the training job; may be done several times."""

    def __init__(
        self,
        cloud: SageMakerBackend,
        pack: Callable[[], Bundle] | None,
        *,
        skip_check: bool,
        new: bool,
        callbacks: Callbacks,
    ) -> None:
        self._callbacks = callbacks
        self._cloud = cloud
        self._pack = pack
        self._skip_check = skip_check
        self._new = new

    def send(self, decided: Plan) -> Run:
        """Return the run of this request that has not ended, or start one; with the warnings of plan and checks."""
        if not self._new and (live := self._cloud.find_live(decided)) is not None:
            return live.with_warnings(decided.warnings)
        self._cloud.start_loading()
        pending = None if self._skip_check else self._cloud.start_checks(decided)
        bundle = None if self._pack is None else self._pack()
        if pending is not None:
            refuse_failed(checks := pending.wait())
            self._callbacks.on_checks(checks)
            decided = replace(decided, checks=tuple(check.to_json() for check in checks))
            decided = add_warnings(decided, checks)
        return self._start(decided, bundle).with_warnings(decided.warnings)

    def _start(self, decided: Plan, bundle: Bundle | None) -> Run:
        if self._new:
            return self._send_beside(decided, bundle)
        reserved = self._cloud.reserve(decided)
        return reserved if isinstance(reserved, Run) else self._submit(reserved, bundle)

    def _send_beside(self, decided: Plan, bundle: Bundle | None) -> Run:
        """Start a run under a name of its own: one of time and request is the same for all who ask in one second."""
        own = decided.rename(make_run_id(decided.job, datetime.now(UTC), secrets.token_hex(3)))
        run = self._submit(own, bundle)
        self._cloud.hand_over(own)
        return run

    def _submit(self, decided: Plan, bundle: Bundle | None) -> Run:
        return self._cloud.submit(decided, bundle, progress=self._callbacks.upload_progress)

    def send_when_there_is_room(
        self,
        decided: Plan,
        seconds: float,
        *,
        first_pause: float = FIRST_PAUSE_SECONDS,
    ) -> Run:
        """Send again and again, with growing pauses, while there is no capacity or the quota is used up.

        Args:
            decided: What to send; a further try gets a run id of its own time.
            seconds: How long the pauses may be in all.
            first_pause: Seconds.

        Returns:
            The run, which has its instances.

        Raises:
            NoCapacityError: there was no room in that time.
        """
        backoff, left_seconds = Backoff(first_pause, LONGEST_PAUSE_SECONDS), seconds
        while True:
            try:
                run = self.send(decided)
                self._callbacks.on_sent(run)
                status = run.wait(until=State.RUNNING)
                if not lacks_capacity(status):
                    return run
                reason = status.reason
            except NoCapacityError as error:
                reason = error.message
            if left_seconds <= 0:
                hint = "wait longer, or let the job take other types: cluster.prefer"
                raise NoCapacityError(f"no capacity in {format_duration(round(seconds))}: {reason}", hint)
            pause = min(backoff.next_seconds(), left_seconds)
            left_seconds -= pause
            self._callbacks.on_wait(reason, pause)
            time.sleep(pause)
            decided = decided.rename(make_run_id(decided.job, datetime.now(UTC), decided.identity[:6]))


def add_warnings(decided: Plan, checks: tuple[Check, ...]) -> Plan:
    """Return the plan with the warnings of checks of the account after its own."""
    return replace(decided, warnings=(*decided.warnings, *(check.warning for check in checks if check.warning)))


def refuse_failed(
    checks: tuple[Check, ...],
    hint: str = "see all of them: cloudtrain check JOB; to submit all the same: --skip-check",
) -> None:
    """Raise what has failed; the hint tells what else can be done about it.

    Raises:
        CloudError: a check has failed.
        NoCapacityError: only the quota has.
    """
    failed = [check for check in checks if check.result == "fail"]
    if failed:
        lines = "\n  ".join(f"{check.name}: {check.detail}\n    fix: {check.fix}" for check in failed)
        count = "a check" if len(failed) == 1 else f"{len(failed)} checks"
        # A quota is the one thing that may mend itself.
        kind = NoCapacityError if all(check.name == "quota" for check in failed) else CloudError
        raise kind(
            f"{count} failed, so nothing was uploaded or started:\n  {lines}",
            hint,
        )
