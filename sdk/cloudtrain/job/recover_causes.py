"""The causes of `limits.recover.on`, which commands name without the job's models."""

from __future__ import annotations

from typing import Literal, get_args

RecoverCause = Literal["capacity", "interruption", "time_limit", "infrastructure"]
"""Why an attempt has ended: no instances, taken away or stopped from outside, at `limits.runtime`, a broken host."""
RECOVER_CAUSES: tuple[RecoverCause, ...] = get_args(RecoverCause)
