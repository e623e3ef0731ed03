"""Where the time of a step goes: to data, forward, backward, optimizer, checkpoint.

A mark is a clock reading and an addition. On a GPU the host runs ahead of the device, so there the parts come from
events that are recorded around one step in each logging interval, and read when they are complete: nobody waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Final

import torch


class Phase:
    """What the time after a mark belongs to. Plain numbers: an enumeration's members cost more than the mark."""

    DATA: Final = 0
    FORWARD: Final = 1
    BACKWARD: Final = 2
    OPTIMIZER: Final = 3
    CHECKPOINT: Final = 4
    """The end of a step: what ranks agree on, and how long a checkpoint keeps training waiting."""
    LOG: Final = 5
    """Belongs to the run's pace, and to no part of a step."""
    OTHER: Final = 6
    """What is no training, such as an evaluation."""


STEP_PARTS: Final = ("data", "forward", "backward", "optimizer", "checkpoint")
"""Names of the parts of a step, by their numbers in `Phase`."""

_PHASES = 7
_NANOSECONDS = 1e9
_MILLISECONDS = 1e3


@dataclass(frozen=True)
class StepTimes:
    """What a clock has counted since the last reading.

    Attributes:
        steps: Optimizer steps.
        seconds: All of them together, by the wall clock, without what is no training.
        split: Seconds per step by part; empty where none is known yet.
    """

    steps: int
    seconds: float
    split: Mapping[str, float]

    @property
    def data_wait(self) -> float | None:
        """Share of a step that waits for data, or None where that is not known."""
        total = sum(self.split.values())
        return self.split["data"] / total if total > 0 else None


class StepClock:
    """Counts time by phase.

    Args:
        device: Where the steps are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps = 0
        self._nanoseconds = [0] * _PHASES
        self._phase: int = Phase.OTHER
        self._since = perf_counter_ns()
        self._sampler = _Sampler(device) if device.type == "cuda" else None

    def begin(self, *, is_logged: bool = False) -> None:
        """Begin a step: what follows belongs to data. On a GPU the step that will be logged is measured there."""
        self.steps += 1
        if is_logged and self._sampler is not None:
            self._sampler.begin()
        self.mark(Phase.DATA)

    def mark(self, phase: int) -> None:
        """Tell what the time from now on belongs to."""
        now = perf_counter_ns()
        self._nanoseconds[self._phase] += now - self._since
        self._since = now
        self._phase = phase
        if self._sampler is not None:
            self._sampler.mark(phase)

    def read(self) -> StepTimes:
        """Return what was counted since the last reading, and start anew."""
        self.mark(self._phase)
        counted, steps = self._nanoseconds, self.steps
        self._nanoseconds, self.steps = [0] * _PHASES, 0
        seconds = (sum(counted) - counted[Phase.OTHER]) / _NANOSECONDS
        if steps == 0:
            return StepTimes(0, seconds, {})
        split = {name: counted[part] / _NANOSECONDS / steps for part, name in enumerate(STEP_PARTS)}
        if self._sampler is not None:
            sampled = self._sampler.read()
            split = {**sampled, "checkpoint": split["checkpoint"]} if sampled else {}
        return StepTimes(steps, seconds, split)


class _Sampler:
    """Measures single steps on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[tuple[int, torch.cuda.Event]] | None = None
        self._closed: list[tuple[int, torch.cuda.Event]] = []
        self._known: Mapping[str, float] = {}

    def begin(self) -> None:
        self._open = []

    def mark(self, phase: int) -> None:
        if self._open is None:
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._open.append((phase, event))
        if phase in (Phase.CHECKPOINT, Phase.LOG):  # what is no training may lie in the middle of a step
            self._closed, self._open = self._open, None

    def read(self) -> Mapping[str, float]:
        """Return the seconds of the newest step whose events the device has passed."""
        if self._closed and self._closed[-1][1].query():  # type: ignore[no-untyped-call]
            spans = dict.fromkeys(STEP_PARTS[: Phase.CHECKPOINT], 0.0)
            for (phase, began), (_, ended) in zip(self._closed, self._closed[1:], strict=False):
                if phase < Phase.CHECKPOINT:
                    spans[STEP_PARTS[phase]] += began.elapsed_time(ended) / _MILLISECONDS
            self._known, self._closed = spans, []
        return self._known
