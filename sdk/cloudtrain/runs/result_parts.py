"""The parts of a run's results."""

from __future__ import annotations

from typing import Final

MODEL: Final = "model"
OUTPUTS: Final = "outputs"
CHECKPOINTS: Final = "checkpoints"
PARTS: Final = (MODEL, OUTPUTS, CHECKPOINTS)
