"""Profile of chosen steps: traces for Perfetto and TensorBoard, and a table of the slowest operators."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cloudtrain_runtime.contract.machine_paths import machine_path
from cloudtrain_runtime.metrics.step_timer import Phase, StepClock
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.run_context import Context

if TYPE_CHECKING:
    from torch.profiler import ProfilerAction, profile

PROFILE_FOLDER = "profile"
_ROWS = 12
_NAME_COLUMNS = 60


class StepProfiler:
    """Profiles some steps on every rank: ranks wait for each other, and only all traces show which one is slow.

    Args:
        context: This rank's context; traces are written below its output folder.
        clock: Clock of the steps; it does not count the time of writing.
        at: First step to record, from 1; None records none.
        steps: Number of steps to record.
    """

    def __init__(self, context: Context, clock: StepClock, at: int | None, steps: int) -> None:
        self._context = context
        self._clock = clock
        self._is_over = at is None
        self._first = at or 0
        self._last = self._first + steps - 1
        self._profile: profile | None = None

    def on_step(self, step: int) -> None:
        """Handle the begin of a step. The step before the first recorded one warms up the profiler."""
        if self._is_over:
            return
        if self._profile is None:
            if self._first - 1 <= step <= self._last:
                self._begin(step)
        elif step > self._last:
            self.close()
        else:
            self._profile.step()

    def close(self) -> None:
        """Stop recording, if it is still running when the run ends."""
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        self._is_over = True
        self._clock.mark(Phase.OTHER)
        with heartbeat.exempt():  # a slow disk is no hang
            running.stop()

    def _begin(self, step: int) -> None:
        from torch.profiler import ProfilerAction, ProfilerActivity, profile

        # A run that resumes within the recorded steps records the remaining ones.
        self._first = first = max(self._first, step)
        activities = [ProfilerActivity.CPU]
        if self._context.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)

        def action(number: int) -> ProfilerAction:  # the profiler is stopped after the last step
            return ProfilerAction.RECORD if number >= first else ProfilerAction.WARMUP

        running = profile(activities=activities, schedule=action, on_trace_ready=self._store)
        running.step_num = first - 1  # the trace shows this number
        running.start()
        if step == first:
            running.step()
        self._profile = running

    def _store(self, running: profile) -> None:
        context = self._context
        folder = context.output_dir / PROFILE_FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard's plugin finds traces by this suffix.
            running.export_chrome_trace(
                str(folder / f"{context.host}-rank-{context.rank}.pt.trace.json.gz")
            )
        except OSError as error:  # training can continue without a profile
            log_line(f"the profile of rank {context.rank} could not be written: {error}")
            return
        if context.is_main:
            order = "self_cpu_time_total"
            if context.device.type == "cuda":
                order = "self_device_time_total"
            averages = running.key_averages()
            log_line(averages.table(order, row_limit=_ROWS, max_name_column_width=_NAME_COLUMNS))
            emit(
                "profile",
                uri=machine_path(folder.absolute(), os.environ).as_uri(),
                first_step=self._first,
                last_step=running.step_num,
            )
