"""The time of AWS's clock, and how far this machine's is from it."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from cloudtrain.support.units import format_duration

CLOCK_FIX = "synchronise the clock: timedatectl set-ntp true, or chronyc makestep"


def aws_time(answer: Mapping[str, Any]) -> float | None:
    """Return the time of a response, in seconds since the epoch by AWS's clock, or None."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


def describe_skew(here: float, there: float) -> str:
    """Return how far a clock is from AWS's, such as `5m behind AWS's clock`.

    Args:
        here: Time of this machine's clock, in seconds since the epoch.
        there: Time of AWS's clock.
    """
    side = "ahead of" if here > there else "behind"
    return f"{format_duration(round(abs(here - there)))} {side} AWS's clock"
