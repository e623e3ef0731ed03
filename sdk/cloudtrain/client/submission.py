"""One submit: find an active run, check, pack and send; and retry while there is no capacity."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cloudtrain.aws.retry import Backoff
from cloudtrain.backends.base import Backend
from cloudtrain.client.observer import Observer
from cloudtrain.errors import CloudError, NoCapacityError
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State, Status
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.run_id import make_run_id
from cloudtrain.support.units import format_duration

if TYPE_CHECKING:
    from cloudtrain.bundle.archive import Bundle
    from cloudtrain.support.checks import Check

_LONGEST_PAUSE_SECONDS = 900.0
_NO_CAPACITY = re.compile(
    r"CapacityError|InsufficientCapacity|insufficient capacity|ResourceLimitExceeded", re.IGNORECASE
)


@dataclass(frozen=True)
class Submission:
    """How plans are sent.

    Attributes:
        backend: The backend.
        pack: Packs the code, or returns None when an earlier run has stored it.
        observer: Receives what is reported.
        skip_check: Do not check the account.
        is_new: Start another run beside one of the same request and code.
    """

    backend: Backend
    pack: Callable[[], Bundle | None]
    observer: Observer
    skip_check: bool = False
    is_new: bool = False

    def start(self, plan: Plan, wait_for_capacity: float | None = None) -> Run:
        """Send a plan, once or, with a number of seconds, until there is capacity: see the methods below."""
        if wait_for_capacity is None:
            return self.send(plan)
        return self.send_until_capacity(plan, wait_for_capacity)

    def send(self, plan: Plan) -> Run:
        """Return the active run of this request, or start one. Its warnings are those of the plan and the checks."""
        if not self.is_new and (active := self.backend.find_active_run(plan)) is not None:
            return active.with_warnings(plan.warnings)
        wait_for_checks = self.backend.start_checks(plan, skip=self.skip_check)
        bundle = self.pack()
        if facts_of(self.backend.name).uses_account and not self.skip_check:
            self.observer.on_detail("checking the account")
        raise_failed(checks := wait_for_checks())
        if checks:
            self.observer.on_checks(checks)
            plan = add_warnings(
                replace(plan, checks=tuple(check.to_json() for check in checks)), checks
            )
        plan = replace(plan, submitter=find_user())
        run = self.backend.submit(
            plan, bundle, is_new=self.is_new, progress=self.observer.on_upload
        )
        return run.with_warnings(plan.warnings)

    def send_until_capacity(self, plan: Plan, seconds: float) -> Run:
        """Send again, with growing pauses, while there is no capacity or the quota is used up.

        Args:
            plan: The plan. Each retry gets a new run id.
            seconds: Maximum sum of the pauses.

        Returns:
            The run, which has its instances.

        Raises:
            NoCapacityError: There was no capacity in that time.
        """
        backoff = Backoff(self.backend.capacity_pause_seconds, _LONGEST_PAUSE_SECONDS)
        left_seconds = seconds
        while True:
            try:
                run = self.send(plan)
                self.observer.on_sent(run)
                status = run.wait(until=State.RUNNING)
                if not lacks_capacity(status):
                    return run
                reason = status.reason
            except NoCapacityError as error:
                reason = error.message
            if left_seconds <= 0:
                hint = "wait longer, or allow other instance types: cluster.prefer"
                raise NoCapacityError(
                    f"no capacity in {format_duration(round(seconds))}: {reason}", hint
                )
            pause = min(backoff.next_seconds(), left_seconds)
            left_seconds -= pause
            self.observer.on_wait(reason, pause)
            time.sleep(pause)
            plan = plan.rename(make_run_id(plan.job, datetime.now(UTC), plan.identity[:6]))


def find_user() -> str:
    """Return the name of this machine's user; empty where it has none, as in some containers."""
    import getpass

    with contextlib.suppress(OSError, KeyError):
        return getpass.getuser()
    return ""


def lacks_capacity(status: Status) -> bool:
    """Return whether a run has failed because AWS had no instances for it. Such a run costs nothing.

    FailureReason is the service's: `CapacityError: Unable to provision requested ML compute capacity.` (API reference
    of DescribeTrainingJob; a failure of the user's code begins with AlgorithmError or ClientError).
    """
    return (
        status.state is State.FAILED
        and status.started is None
        and _NO_CAPACITY.search(status.reason) is not None
    )


def add_warnings(decided: Plan, checks: tuple[Check, ...]) -> Plan:
    """Return the plan with the warnings of the checks after its own."""
    return replace(
        decided, warnings=(*decided.warnings, *(check.warning for check in checks if check.warning))
    )


def raise_failed(
    checks: tuple[Check, ...],
    hint: str = "see all of them: cloudtrain check JOB; to submit anyway: --skip-check",
) -> None:
    """Raise one error that lists the failed checks; do nothing when none has failed.

    Raises:
        CloudError: A check has failed.
        NoCapacityError: Only the quota check has failed.
    """
    failed = [check for check in checks if check.result == "fail"]
    if failed:
        lines = "\n  ".join(
            f"{check.name}: {check.detail}\n    fix: {check.fix}" for check in failed
        )
        count = "a check" if len(failed) == 1 else f"{len(failed)} checks"
        # Only a used-up quota can become free without a change by the user.
        is_quota = all(check.name == "quota" for check in failed)
        kind = NoCapacityError if is_quota else CloudError
        raise kind(f"{count} failed, so nothing was uploaded or started:\n  {lines}", hint)
