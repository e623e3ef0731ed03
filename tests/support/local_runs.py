"""Helpers of tests that run jobs on this machine."""

from __future__ import annotations

from cloudtrain_runtime.contract import parse_event
from support.jobs import Cli

LOG_EVERY_STEP = ("--set", "code.env.CLOUDTRAIN_LOG_EVERY_STEPS=1")
"""Options that make a run log the loss of every step."""


def losses_by_step(cli: Cli, run: str) -> dict[int, float]:
    """Return the losses in the log of a run, by step."""
    events = (parse_event(line["text"]) for line in cli("logs", run, "--json").json["lines"])
    return {event["step"]: event["loss"] for event in events if event and event["event"] == "step"}
