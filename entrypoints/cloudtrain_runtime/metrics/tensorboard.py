"""TensorBoard scalars: the numbers of step and evaluation events."""

from __future__ import annotations

import atexit
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain_runtime.contract.metric_values import EVALUATION_FIELDS
from cloudtrain_runtime.errors import JobError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_NO_SCALARS = EVALUATION_FIELDS - {"host", "rank"}
"""Fields of events that are not metrics; a Task may have metrics of the other two names."""
_FLUSH_SECONDS = 10
"""Interval of writing: the scalars of this time are lost when the process is killed."""


class TensorBoardWriter:
    """Writes the TensorBoard files of one run.

    Args:
        folder: Folder of the files; the same after a restart.
        first_step: Step that the run starts from; TensorBoard hides what an earlier attempt wrote for later steps.

    Raises:
        JobError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise JobError(
                "tracking.tensorboard: true needs the package tensorboard, which this environment lacks: add "
                "tensorboard to code.requirements (locally: pip install tensorboard), or remove tracking.tensorboard"
            )
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer: SummaryWriter = SummaryWriter(
            str(folder), purge_step=first_step + 1, flush_secs=_FLUSH_SECONDS
        )
        # A worker that fails runs its exit handlers.
        atexit.register(self.close)

    def step(self, step: int, fields: Mapping[str, Any]) -> None:
        """Add the numbers of a step event."""
        own = {name: value for name, value in fields.items() if name not in ("split", "metrics")}
        self._add(step, "train", {**own, **(fields.get("metrics") or {})})
        self._add(step, "split", fields.get("split") or {})

    def evaluation(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Add the mean metrics of a split."""
        self._add(step, split, values)

    def close(self) -> None:
        """Write the remaining scalars, and close the files."""
        self._writer.close()
        atexit.unregister(self.close)

    def _add(self, step: int, group: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name not in _NO_SCALARS and isinstance(value, int | float):
                self._writer.add_scalar(f"{group}/{name}", value, step)
