"""One submit to SageMaker: find a live run, check, pack, send; and retry while there is no capacity."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cloudtrain.aws.retry import Backoff
from cloudtrain.client.callbacks import Callbacks
from cloudtrain.client.capacity import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, lacks_capacity
from cloudtrain.client.check_results import add_warnings, raise_failed
from cloudtrain.errors import NoCapacityError
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State
from cloudtrain.support.run_id import make_run_id
from cloudtrain.support.units import format_duration

if TYPE_CHECKING:
    from cloudtrain.backends.sagemaker import SageMakerBackend
    from cloudtrain.bundle.archive import Bundle


class SageMakerSubmission:
    """One submit to SageMaker, from the search for a live run to the training job.

    Args:
        cloud: The backend.
        pack: Function that packs the code, or None when the code is in the bucket already.
        skip_check: Do not check the account.
        new: Start another run beside one of the same request and code.
        callbacks: What to call during the submit.
    """

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

    def submit(self, decided: Plan) -> Run:
        """Return the live run of this request, or start one. Its warnings are those of the plan and the checks."""
        if not self._new and (live := self._cloud.find_active_run(decided)) is not None:
            return live.with_warnings(decided.warnings)
        self._cloud.start_sdk_import()
        pending = None if self._skip_check else self._cloud.start_checks(decided)
        bundle = None if self._pack is None else self._pack()
        if pending is not None:
            raise_failed(checks := pending.wait())
            self._callbacks.on_checks(checks)
            decided = replace(decided, checks=tuple(check.to_json() for check in checks))
            decided = add_warnings(decided, checks)
        return self._start(decided, bundle).with_warnings(decided.warnings)

    def submit_until_capacity(
        self,
        decided: Plan,
        seconds: float,
        *,
        first_pause: float = FIRST_PAUSE_SECONDS,
    ) -> Run:
        """Submit again, with growing pauses, while there is no capacity or the quota is used up.

        Args:
            decided: The plan. Each retry gets a new run id.
            seconds: Maximum sum of the pauses.
            first_pause: Seconds before the first retry.

        Returns:
            The run, which has its instances.

        Raises:
            NoCapacityError: There was no capacity in that time.
        """
        backoff, left_seconds = Backoff(first_pause, LONGEST_PAUSE_SECONDS), seconds
        while True:
            try:
                run = self.submit(decided)
                self._callbacks.on_sent(run)
                status = run.wait(until=State.RUNNING)
                if not lacks_capacity(status):
                    return run
                reason = status.reason
            except NoCapacityError as error:
                reason = error.message
            if left_seconds <= 0:
                hint = "wait longer, or allow other instance types: cluster.prefer"
                raise NoCapacityError(f"no capacity in {format_duration(round(seconds))}: {reason}", hint)
            pause = min(backoff.next_seconds(), left_seconds)
            left_seconds -= pause
            self._callbacks.on_wait(reason, pause)
            time.sleep(pause)
            decided = decided.rename(make_run_id(decided.job, datetime.now(UTC), decided.identity[:6]))

    def _start(self, decided: Plan, bundle: Bundle | None) -> Run:
        if self._new:
            return self._start_another(decided, bundle)
        reserved = self._cloud.reserve(decided)
        return reserved if isinstance(reserved, Run) else self._send(reserved, bundle)

    def _start_another(self, decided: Plan, bundle: Bundle | None) -> Run:
        """Start a run with a random id: an id of time and request may belong to a submit of the same second."""
        renamed = decided.rename(make_run_id(decided.job, datetime.now(UTC), secrets.token_hex(3)))
        run = self._send(renamed, bundle)
        self._cloud.take_over_lock(renamed)
        return run

    def _send(self, decided: Plan, bundle: Bundle | None) -> Run:
        return self._cloud.submit(decided, bundle, progress=self._callbacks.upload_progress)
