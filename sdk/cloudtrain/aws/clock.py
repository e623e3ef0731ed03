"""The time of AWS's clock."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any


def aws_time(answer: Mapping[str, Any]) -> float | None:
    """Return the time of a response, in seconds since the epoch by AWS's clock, or None."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
