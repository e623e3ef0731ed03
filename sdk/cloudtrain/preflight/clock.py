"""Check of this machine's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

from cloudtrain.aws.clock import aws_time
from cloudtrain.preflight.base import Account, Check, failed, passed, unknown
from cloudtrain.support.units import format_duration

_MAX_SKEW_SECONDS = 300
"""AWS rejects signatures that are older or newer. Source: IAM user guide, signing API requests, 2026-11."""
_WARN_SECONDS = 60
_FIX = "synchronise the clock: timedatectl set-ntp true, or chronyc makestep"


def check_clock(context: Account) -> Iterator[Check]:
    """Compare this machine's clock with the Date header of a response. With a wrong clock AWS rejects every call."""
    from botocore.exceptions import ClientError

    before = time.time()
    try:
        answer = context.client("sts").get_caller_identity()
    except ClientError as error:  # a rejection is an answer, too: its reason may be the clock
        answer = error.response
    here = (before + time.time()) / 2
    there = aws_time(answer)
    if there is None:
        yield unknown("clock", "the response has no Date header")
        return
    skew = round(abs(here - there))
    if skew <= 1:  # the header has whole seconds
        yield passed("clock", "agrees with AWS's clock")
        return
    detail = f"{format_duration(skew)} {'ahead of' if here > there else 'behind'} AWS's clock"
    if skew > _MAX_SKEW_SECONDS:
        limit = format_duration(_MAX_SKEW_SECONDS)
        yield failed("clock", f"{detail}; AWS rejects requests that are more than {limit} off", _FIX)
    else:
        yield passed("clock", detail, warning=f"the clock is {detail}: {_FIX}" if skew > _WARN_SECONDS else "")
