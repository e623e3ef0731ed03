"""Callbacks of a submit or a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudtrain.bundle import ProgressCallback
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.run import Run

if TYPE_CHECKING:
    from cloudtrain.preflight import Check


def _ignore(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Callbacks:
    """What a submit or a resume reports while it works. Each callback is optional.

    Attributes:
        on_plan: Called with the plan before anything is packed, checked or sent, so that its warnings can be shown.
        on_checks: Called with the checks of the account when none of them has failed; some may be unknown.
        on_wait: Called with the reason and the seconds before each pause of `wait_for_capacity`.
        on_sent: Called with each run that `wait_for_capacity` submits, before it waits for the run's instances.
        progress: Called with the bytes of the code that have been read or packed, and their total.
        upload_progress: Called with the bytes that have been uploaded, and their total.
    """

    on_plan: Callable[[Plan], None] = _ignore
    on_checks: Callable[[tuple[Check, ...]], None] = _ignore
    on_wait: Callable[[str, float], None] = _ignore
    on_sent: Callable[[Run], None] = _ignore
    progress: ProgressCallback | None = None
    upload_progress: ProgressCallback | None = None


NO_CALLBACKS = Callbacks()
