"""`limits.recover` of job.yaml: when a run that has ended is continued by itself, and how often."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from cloudtrain.job.fields import Dollars, Duration, Integer, Section, parse_switch
from cloudtrain.job.recover_causes import RECOVER_CAUSES, RecoverCause


class Recover(Section):
    """How a run is continued by itself, from its newest checkpoint, after it has ended for an outside cause."""

    attempts: Integer = Field(default=5, ge=1, le=100)
    """How many attempts may train, the first one included; those that got no instances do not count."""
    cost: Annotated[Dollars, Field(gt=0)] | None = None
    """Most that all attempts together may cost; the last one gets less time if the rest demands it."""
    time: Annotated[Duration, Field(gt=0)] = 14 * 86400
    """Time from the submit after which no other attempt begins."""
    on: Annotated[tuple[RecoverCause, ...], Field(min_length=1)] = RECOVER_CAUSES
    """The causes after which another attempt begins."""


def _from_switch(value: object) -> Any:
    switched = parse_switch(value)
    if switched is True:
        return {}
    return None if switched is False else value


RecoverField = Annotated[Recover | None, BeforeValidator(_from_switch)]
