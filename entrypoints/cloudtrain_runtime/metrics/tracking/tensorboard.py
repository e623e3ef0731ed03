"""TensorBoard scalars: the metrics of a Task, from its events."""

from __future__ import annotations

import atexit
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain_runtime.contract.metric_values import metric_values
from cloudtrain_runtime.metrics.tracking.tracker import require_package
from cloudtrain_runtime.process.event_log import add_listener

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_FLUSH_SECONDS = 10
"""Interval of writing: the scalars of this time are lost when the process is killed."""


class TensorBoardWriter:
    """Writes the TensorBoard files of one run, from its events.

    Args:
        folder: Folder of the files; the same after a restart.
        first_step: Step that the run starts from; TensorBoard hides what an earlier attempt wrote for later steps.

    Raises:
        JobError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        require_package("tensorboard", "tensorboard", "tracking.tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer: SummaryWriter = SummaryWriter(
            str(folder), purge_step=first_step + 1, flush_secs=_FLUSH_SECONDS
        )
        add_listener(self.on_event)
        # A worker that fails runs its exit handlers, too.
        atexit.register(self._writer.close)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Add the metrics of an event; write all of them at the end of the run."""
        for name, value in metric_values(event):
            number = math.nan if value is None else value
            self._writer.add_scalar(name, number, event["step"])
        if event["event"] == "finished":
            self._writer.flush()
