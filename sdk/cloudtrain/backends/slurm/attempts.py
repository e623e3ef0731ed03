"""`attempts.json`: when each attempt of a run began, from which checkpoint, and which nodes it has lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain.runs.attempt_chain import MOST_WITHOUT_CHECKPOINT
from cloudtrain.runs.status import RunAttempt
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.regular_files import read_regular
from cloudtrain_runtime.contract.json_checks import (
    MismatchError,
    ObjectSchema,
    array,
    count,
    nullable,
    text,
    timestamp,
)
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

ATTEMPTS_FILE = "attempts.json"

_BAD_LOSSES = 2


@dataclass(frozen=True)
class Attempt:
    """An attempt of a run.

    Attributes:
        number: Its number, from 1.
        started: When it began, in seconds since the epoch.
        ended: When it ended, or the last sign of it, in seconds since the epoch.
        checkpoint: Step of the newest checkpoint at its start, or None.
        lost: Nodes that were lost while it ran.
    """

    number: int
    started: float
    ended: float
    checkpoint: int | None
    lost: tuple[str, ...] = ()


_ATTEMPT = ObjectSchema(
    {"number": count, "started": timestamp, "ended": timestamp, "checkpoint": nullable(count)},
    {"lost": array(text)},
)


@dataclass(frozen=True)
class Attempts:
    """The attempts of a run, oldest first."""

    all: tuple[Attempt, ...] = ()

    @classmethod
    def read(cls, root: Path) -> Attempts:
        """Return the attempts that a run has recorded; none where the file is missing or damaged."""
        try:
            found = array(_ATTEMPT)(load_json(read_regular(root / ATTEMPTS_FILE)))
        except (OSError, ValueError, MismatchError):
            return cls()
        return cls(tuple(_attempt(each) for each in found))

    def write(self, root: Path) -> None:
        """Record the attempts."""
        content = [asdict(each) for each in self.all]
        write_atomically(root / ATTEMPTS_FILE, dump_json(content, indent=1) + "\n")

    def begin(self, number: int, now: float, checkpoint: int | None) -> Attempts:
        """Return the attempts with a new one."""
        earlier = tuple(each for each in self.all if each.number < number)
        return Attempts((*earlier, Attempt(number, now, now, checkpoint)))

    def reach(self, now: float) -> Attempts:
        """Return the attempts with a later end of the last one."""
        *earlier, last = self.all
        return Attempts((*earlier, replace(last, ended=now)))

    def lose(self, number: int, nodes: Iterable[str]) -> Attempts:
        """Return the attempts with the nodes that one of them has lost."""
        lost = tuple(nodes)
        return Attempts(
            tuple(
                replace(each, lost=lost) if each.number == number and lost else each
                for each in self.all
            )
        )

    @property
    def bad_nodes(self) -> Mapping[str, tuple[int, ...]]:
        """The nodes that were lost in two attempts or more, with the numbers of these attempts."""
        losses: dict[str, tuple[int, ...]] = {}
        for each in self.all:
            for node in each.lost:
                losses[node] = (*losses.get(node, ()), each.number)
        return {node: found for node, found in losses.items() if len(found) >= _BAD_LOSSES}

    def describe_bad_nodes(self) -> str:
        """Return the nodes that were lost again and again, with their attempts; empty without one."""
        return "; ".join(
            f"{node} was lost in attempts {' and '.join(map(str, numbers))}"
            for node, numbers in self.bad_nodes.items()
        )

    @property
    def seconds(self) -> float:
        """Time of all attempts together."""
        return sum(each.ended - each.started for each in self.all)

    def phases(self, *, continues: bool) -> tuple[RunAttempt, ...]:
        """Return the attempts as a status has them; with `continues` the last one has no end."""
        # What one has saved is what the next one has found.
        saved = [*(each.checkpoint for each in self.all[1:]), None]
        found = [
            RunAttempt(
                f"attempt {each.number}",
                _moment(each.started),
                _moment(each.ended),
                f"lost {', '.join(each.lost)}" if each.lost else "",
                checkpoint=checkpoint,
            )
            for each, checkpoint in zip(self.all, saved, strict=True)
        ]
        if found and continues:
            found[-1] = replace(found[-1], ended=None)
        return tuple(found)

    @property
    def is_stuck(self) -> bool:
        """Whether the last attempt begins from the same checkpoint as the three before it."""
        newest = self.all[-(MOST_WITHOUT_CHECKPOINT + 1) :]
        return (
            len(newest) > MOST_WITHOUT_CHECKPOINT and len({each.checkpoint for each in newest}) == 1
        )


def _attempt(fields: Mapping[str, Any]) -> Attempt:
    return Attempt(
        fields["number"],
        fields["started"],
        fields["ended"],
        fields["checkpoint"],
        tuple(fields.get("lost", ())),
    )


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
