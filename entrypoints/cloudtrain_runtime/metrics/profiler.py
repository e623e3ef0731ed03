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
_MICROSECONDS_PER_MILLISECOND = 1e3


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
            for line in operator_lines(running, on_device=context.device.type == "cuda"):
                log_line(line)
            emit(
                "profile",
                uri=machine_path(folder.absolute(), os.environ).as_uri(),
                first_step=self._first,
                last_step=running.step_num,
            )


def operator_lines(running: profile, *, on_device: bool) -> list[str]:
    """Return a table of the operators with the most time of their own, `on_device` or on the CPU, as lines of text."""
    averages = [each for each in running.key_averages() if not each.key.startswith("ProfilerStep")]
    times = [
        (each.self_device_time_total if on_device else each.self_cpu_time_total, each)
        for each in averages
    ]
    total = sum(time for time, _ in times) or 1.0
    times.sort(key=lambda pair: -pair[0])
    lines = [
        f"{'ms':>10} {'share':>6} {'calls':>8}  operator, by its own time on the {'GPU' if on_device else 'CPU'}"
    ]
    for time, each in times[:_ROWS]:
        milliseconds = time / _MICROSECONDS_PER_MILLISECOND
        lines.append(
            f"{milliseconds:>10.2f} {time / total:>6.1%} {each.count:>8}  {each.key[:_NAME_COLUMNS]}"
        )
    return lines
