"""Timer of the phases of a step: data, forward, backward, optimizer, checkpoint.

A mark costs a clock reading and an addition. On a GPU the host runs ahead of the device, so there the phases are timed
by events around one step in each logging interval, which are read when they are complete, without waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Final

import torch

from cloudtrain_runtime.contract.metric_values import STEP_PARTS


class Phase:
    """Phase that begins at a mark; the first ones are the indices of `STEP_PARTS`.

    Plain numbers, because members of an Enum cost more than the mark.
    """

    DATA: Final = 0
    FORWARD: Final = 1
    BACKWARD: Final = 2
    OPTIMIZER: Final = 3
    CHECKPOINT: Final = 4
    """The end of a step: agreement of the ranks, and the time that a checkpoint blocks training."""
    LOG: Final = 5
    """Counts in the throughput, but belongs to no part of a step."""
    OTHER: Final = 6
    """Work besides training, such as an evaluation."""


_PHASES = 7
_NANOSECONDS = 1e9
_MILLISECONDS = 1e3


@dataclass(frozen=True)
class StepTimes:
    """Times since the last reading of a clock."""

    steps: int  # number of optimizer steps
    seconds: float  # wall-clock time of all steps, without other work such as evaluations
    split: Mapping[str, float]  # seconds per step by part; empty if not known yet

    @property
    def data_wait(self) -> float | None:
        """Share of a step that waits for data, or None if it is unknown."""
        total = sum(self.split.values())
        return self.split["data"] / total if total > 0 else None


class StepClock:
    """Measures time by phase."""

    def __init__(self, device: torch.device) -> None:
        self.steps = 0
        self._nanoseconds = [0] * _PHASES
        self._phase: int = Phase.OTHER
        self._since = perf_counter_ns()
        self._sampler = _Sampler(device) if device.type == "cuda" else None

    def begin(self, *, is_logged: bool = False) -> None:
        """Begin a step with the data phase. On a GPU, a logged step is also timed on the device."""
        self.steps += 1
        if is_logged and self._sampler is not None:
            self._sampler.begin()
        self.mark(Phase.DATA)

    def mark(self, phase: int) -> None:
        """Begin a phase."""
        now = perf_counter_ns()
        self._nanoseconds[self._phase] += now - self._since
        self._since = now
        self._phase = phase
        if self._sampler is not None:
            self._sampler.mark(phase)

    def read(self) -> StepTimes:
        """Return the times since the last reading, and reset them."""
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
        if phase in (Phase.CHECKPOINT, Phase.LOG):  # other work may interrupt a step
            self._closed, self._open = self._open, None

    def read(self) -> Mapping[str, float]:
        """Return the seconds by part of the newest step that the device has completed."""
        if self._closed and self._closed[-1][1].query():  # type: ignore[no-untyped-call]
            spans = dict.fromkeys(STEP_PARTS[: Phase.CHECKPOINT], 0.0)
            for (phase, began), (_, ended) in zip(self._closed, self._closed[1:], strict=False):
                if phase < Phase.CHECKPOINT:
                    spans[STEP_PARTS[phase]] += began.elapsed_time(ended) / _MILLISECONDS
            self._known, self._closed = spans, []
        return self._known
