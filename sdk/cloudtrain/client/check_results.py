"""What follows from the checks of the account: warnings in the plan, or an error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cloudtrain.errors import CloudError, NoCapacityError
from cloudtrain.planning.plan import Plan

if TYPE_CHECKING:
    from cloudtrain.preflight import Check


def add_warnings(decided: Plan, checks: tuple[Check, ...]) -> Plan:
    """Return the plan with the warnings of the checks after its own."""
    return replace(decided, warnings=(*decided.warnings, *(check.warning for check in checks if check.warning)))


def raise_failed(
    checks: tuple[Check, ...],
    hint: str = "see all of them: cloudtrain check JOB; to submit anyway: --skip-check",
) -> None:
    """Raise one error that lists the failed checks; do nothing when none has failed.

    Args:
        checks: Results of the checks.
        hint: What else the user can do.

    Raises:
        CloudError: A check has failed.
        NoCapacityError: Only the quota check has failed.
    """
    failed = [check for check in checks if check.result == "fail"]
    if failed:
        lines = "\n  ".join(f"{check.name}: {check.detail}\n    fix: {check.fix}" for check in failed)
        count = "a check" if len(failed) == 1 else f"{len(failed)} checks"
        # Only a used-up quota can become free without a change by the user.
        kind = NoCapacityError if all(check.name == "quota" for check in failed) else CloudError
        raise kind(f"{count} failed, so nothing was uploaded or started:\n  {lines}", hint)
