"""The metrics of logged steps: throughput, memory, utilisation and slow ranks.

None of this waits for the device or for another rank during a step.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from cloudtrain_runtime.metrics.flops import count_flops, device_peak_flops
from cloudtrain_runtime.metrics.step_timer import Phase, StepClock
from cloudtrain_runtime.metrics.stragglers import (
    CPU_DELAY_SECONDS,
    GPU_DELAY_SECONDS,
    StragglerMonitor,
)
from cloudtrain_runtime.process.event_log import emit
from cloudtrain_runtime.process.run_context import Context
from cloudtrain_runtime.task import Task

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of ru_maxrss. Source: getrusage(2) of macOS and of Linux."""


class Meter:
    """Computes the metrics of logged steps.

    Attributes:
        clock: Clock on which the training loop marks the phases of a step.
        samples: Samples of all ranks since the last logged step; the training loop adds to it.
        wants_batch: Whether `count_batch_flops` should be called with the next micro-batch.

    Args:
        shape: The unsharded model on the meta device, see `meta_copy`; None means that FLOPs are not counted.
        stage: This rank's pipeline stage.
    """

    def __init__(
        self, task: Task, shape: nn.Module | None, precision: str, context: Context, stage: int = 0
    ) -> None:
        self.clock = StepClock(context.device)
        self._task = task
        self._context = context
        self._peak_flops = device_peak_flops(context.device, precision)
        self._sample_flops = task.flops_per_sample
        self._shape = shape
        # Counting calls the Task's loss once more, which is useless without a known peak.
        self.wants_batch = (
            self._peak_flops is not None and self._sample_flops is None and shape is not None
        )
        on_cpu = context.device.type == "cpu"
        least = CPU_DELAY_SECONDS if on_cpu else GPU_DELAY_SECONDS
        self._stragglers = StragglerMonitor(context, stage, least)
        self.samples = 0

    def count_batch_flops(self, batch: Any, samples: int) -> None:
        """Count the FLOPs of a micro-batch, outside of the measured time."""
        if self._shape is not None:
            self.clock.mark(Phase.OTHER)
            flops = count_flops(self._task, self._shape, batch)
            self._sample_flops = None if flops is None else flops / samples
        self._shape, self.wants_batch = None, False

    def read(self) -> tuple[dict[str, Any], tuple[float, ...]]:
        """Return the fields of a step event since the last one, and this rank's numbers for the other ranks."""
        reading = self.clock.read()
        rate = self.samples / max(reading.seconds, 1e-9)
        self.samples = 0
        mfu = None
        if self._sample_flops is not None and self._peak_flops is not None:
            mfu = rate * self._sample_flops / (self._peak_flops * self._context.world_size)
        tokens = self._task.tokens_per_sample
        fields: Mapping[str, Any] = {
            "samples_per_second": rate,
            "tokens_per_second": None if tokens is None else rate * tokens,
            "data_wait": reading.data_wait,
            "split": dict(reading.split) or None,
            "mfu": mfu,
            "memory_bytes": peak_memory_bytes(self._context.device),
        }
        known = {name: value for name, value in fields.items() if value is not None}
        return known, self._stragglers.numbers(reading)

    def compare(self, rows: Sequence[Sequence[float]]) -> None:
        """Report slow ranks from the numbers that `read` returned on each rank. All ranks call this."""
        for straggler in self._stragglers.compare(rows):
            if self._context.is_main:
                emit("straggler", step=self._context.step, **asdict(straggler))


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: of its GPU, or of the host if it has none.

    For a GPU this is the memory that PyTorch's allocator has reserved, because that is the memory that runs out.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
