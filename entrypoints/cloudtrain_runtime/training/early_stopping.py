"""State of early stopping: how many evaluations have passed without an improvement."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cloudtrain_runtime.contract import EarlyStopping


@dataclass
class EarlyStoppingState:
    """Best value so far, and the evaluations since. Checkpoints store the fields by name.

    Attributes:
        best: Best value of the metric; None before the first finite one.
        waited: Evaluations in a row that did not improve on it.
    """

    best: float | None = None
    waited: int = 0

    def should_stop(self, rule: EarlyStopping, value: float) -> bool:
        """Record an evaluation; return whether training should stop."""
        sign = 1.0 if rule.mode == "min" else -1.0
        # A value that is not finite is never an improvement: no later value could be better than it.
        if math.isfinite(value) and (self.best is None or sign * (self.best - value) > rule.min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= rule.patience
