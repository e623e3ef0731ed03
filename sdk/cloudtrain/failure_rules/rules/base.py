"""The form of a rule: a pattern, its failure class and what to advise, by the kind of job and where it ran."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from cloudtrain.failure_rules.classes import FailureClass


class Source(enum.Flag):
    """Where a text comes from."""

    REASON = enum.auto()
    """SageMaker's FailureReason. A match decides without reading the log."""
    MESSAGE = enum.auto()
    """The message of a secondary status, while the job waits."""
    EXCEPTION = enum.auto()
    """`Type: message` at the end of a traceback."""
    LINE = enum.auto()
    """A log line outside of a traceback."""


class Causality(enum.IntEnum):
    """How close a text is to the cause. The smallest value wins, whatever was printed first."""

    CAUSE = 0
    SYMPTOM = 1
    """Sometimes the only trace of the cause, sometimes the effect of a cause that another rank reports."""
    CONSEQUENCE = 2
    """What a healthy rank prints after another one has failed."""


class Jobs(enum.Flag):
    """The kinds of jobs, by the field of `code` that starts them."""

    TASK = enum.auto()
    SCRIPT = enum.auto()
    MODULE = enum.auto()
    COMMAND = enum.auto()
    PROGRAM = SCRIPT | MODULE | COMMAND
    """What has a training loop of its own, so that `train` has no fields for it."""
    ALL = TASK | PROGRAM


class Places(enum.Flag):
    """Where a run takes place."""

    HERE = enum.auto()
    SIMULATION = enum.auto()
    CLOUD = enum.auto()
    MACHINE = HERE | SIMULATION
    """Its processes, disk, GPUs and network are those of this machine, whatever `cluster` asks for."""
    ACCOUNT = SIMULATION | CLOUD
    """It has a role, and `cloudtrain check` can look at the account."""
    ALL = HERE | ACCOUNT


class Part(NamedTuple):
    """A part of an advice.

    Attributes:
        text: A sentence, or a part of one, with placeholders.
        jobs: The kinds of jobs that it is for.
        places: The places that it is for.
    """

    text: str
    jobs: Jobs = Jobs.ALL
    places: Places = Places.ALL


def for_task(text: str) -> Part:
    """Return a part for Tasks."""
    return Part(text, Jobs.TASK)


def for_program(text: str) -> Part:
    """Return a part for what has a training loop of its own."""
    return Part(text, Jobs.PROGRAM)


def here(text: str) -> Part:
    """Return a part for local runs."""
    return Part(text, places=Places.HERE)


def on_machine(text: str) -> Part:
    """Return a part for local runs and those of the sandbox."""
    return Part(text, places=Places.MACHINE)


def in_account(text: str) -> Part:
    """Return a part for SageMaker and the sandbox."""
    return Part(text, places=Places.ACCOUNT)


def in_cloud(text: str) -> Part:
    """Return a part for SageMaker."""
    return Part(text, places=Places.CLOUD)


Advice = str | tuple[str | Part, ...]
"""A text for every run, or the parts from which each kind of job and place takes its own. A part that is a text is for
all of them."""


def advice_for(advice: Advice, job: Jobs, place: Places) -> str:
    """Return the text of an advice for one kind of job in one place; its parts are joined by spaces."""
    if isinstance(advice, str):
        return advice
    parts = (Part(each) if isinstance(each, str) else each for each in advice)
    return " ".join(part.text for part in parts if job in part.jobs and place in part.places)


class Rule:
    """A pattern for one failure.

    Args:
        failure_class: The class of the failure.
        pattern: Regular expression of what the text contains.
        action: What to do, with placeholders. It names only what the job and the place have.
        causality: How close the text is to the cause.
        sources: Where the text can come from, besides log lines, which every rule with needles matches.
        raised_in: Regular expression of the file whose code must have raised the exception.
        in_import: Whether a library must have raised the exception while the job's code imported a package, which is
            then {imported}.
        needles: Substrings, at least one of which every matching line contains. They are searched first, which is a
            hundred times faster than the pattern.
    """

    def __init__(
        self,
        failure_class: FailureClass,
        pattern: str,
        action: Advice,
        causality: Causality = Causality.CAUSE,
        *,
        sources: Source = Source.EXCEPTION,
        raised_in: str = "",
        in_import: bool = False,
        needles: tuple[str, ...] = (),
    ) -> None:
        self.failure_class = failure_class
        self.pattern = re.compile(pattern)
        self.action = action
        self.causality = causality
        self.sources = sources | Source.LINE if needles else sources
        self.needles = needles
        self.is_general = not pattern
        self._raised_in = re.compile(raised_in)
        self._in_import = in_import

    def match(self, text: str, file: str = "", imported: str = "") -> dict[str, str] | None:
        """Return the named groups that a text has; None if it does not match.

        `file` is the one whose code has raised an exception, where a traceback names it, and `imported` the package
        whose import by the job's code it has ended.
        """
        is_there = self._raised_in.search(file) and (imported or not self._in_import)
        match = self.pattern.search(text) if is_there else None
        if match is None:
            return None
        found = {"imported": imported, **match.groupdict()}
        return {name: value for name, value in found.items() if value}
