"""A chain: the attempts of a run that cloudtrain continues by itself, as its file records them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cloudtrain.errors import SpecError, UserError
from cloudtrain.runs.status import State
from cloudtrain.support.regular_files import read_regular
from cloudtrain.support.run_id import is_run_id
from cloudtrain_runtime.contract.format_version import NewerFormatError, check_not_newer
from cloudtrain_runtime.contract.json_checks import (
    ObjectSchema,
    array,
    count,
    json_object,
    nullable,
    number,
    text,
    timestamp,
)
from cloudtrain_runtime.contract.strict_json import load_json

if TYPE_CHECKING:
    from cloudtrain.job.sections.recover import Recover

CHAINS_FOLDER = "chains"
CHAIN_FILE = "chain.json"
CHAIN_VERSION = 1
MOST_WITHOUT_CHECKPOINT = 3
"""Attempts in a row without a new checkpoint after which a chain ends."""


class AttemptState(StrEnum):
    """State of an attempt."""

    PLANNED = "PLANNED"
    """Its reservation and the id of its run are recorded; the run may have been submitted or not."""
    RUNNING = "RUNNING"
    ENDED = "ENDED"


@dataclass(frozen=True)
class ChainAttempt:
    """An attempt of a chain, which is a run.

    Attributes:
        run: Id of its run.
        state: Its state.
        reservation_usd: Part of the budget that it holds while it is active.
        runtime_seconds: Its time limit, or None for that of the job.
        settled_usd: Its cost after its end.
        overrun_usd: What it cost beyond its reservation.
        checkpoint: Step of the newest checkpoint at its end; None before, or without one.
        cause: Why it has ended, of `limits.recover.on`; empty if another attempt cannot help, or before its end.
        reason: The reason of its end, in a sentence.
        started: When it was planned, in seconds since the epoch.
        ended: When its end was seen, in seconds since the epoch, or None.
    """

    run: str
    state: AttemptState = AttemptState.PLANNED
    reservation_usd: float = 0.0
    runtime_seconds: int | None = None
    settled_usd: float = 0.0
    overrun_usd: float = 0.0
    checkpoint: int | None = None
    cause: str = ""
    reason: str = ""
    started: float = 0.0
    ended: float | None = None

    @property
    def is_active(self) -> bool:
        """Whether it holds its reservation."""
        return self.state is not AttemptState.ENDED

    @property
    def has_trained(self) -> bool:
        """Whether it counts as an attempt: it has had its instances."""
        return self.cause != "capacity"

    def but(self, **changes: Any) -> Self:
        """Return the attempt with other values."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Chain:
    """A chain.

    Attributes:
        id: Its id, which is that of its first run.
        backend: Where its runs run.
        job: Name of its job.
        runtime_seconds: Time limit of an attempt.
        created: When it began, in seconds since the epoch.
        limits: How it continues.
        reservation_usd: What an attempt with the job's time limit reserves.
        usd_per_hour: Price of the cluster, or 0 where nothing is billed.
        attempts: Its attempts, the oldest first.
        identity: Identity of the plan of its first attempt; empty in records without one.
        state: Its final state, or None before its end.
        reason: Why it has ended; may be empty.
    """

    id: str
    backend: str
    job: str
    runtime_seconds: int
    created: float
    limits: Recover
    reservation_usd: float
    usd_per_hour: float
    attempts: tuple[ChainAttempt, ...]
    identity: str = ""
    state: State | None = None
    reason: str = ""

    @property
    def newest(self) -> ChainAttempt:
        """The newest attempt."""
        return self.attempts[-1]

    @property
    def trained(self) -> tuple[ChainAttempt, ...]:
        """The attempts that have ended and had their instances, the oldest first."""
        return tuple(each for each in self.attempts if not each.is_active and each.has_trained)

    @property
    def is_stuck(self) -> bool:
        """Whether the last attempts have brought no new checkpoint."""
        steps = [-1 if each.checkpoint is None else each.checkpoint for each in self.trained]
        last = steps[-MOST_WITHOUT_CHECKPOINT:]
        before = max(steps[:-MOST_WITHOUT_CHECKPOINT], default=-1)
        return len(last) == MOST_WITHOUT_CHECKPOINT and max(last) <= before

    def with_newest(self, attempt: ChainAttempt) -> Chain:
        """Return the chain with another state of its newest attempt."""
        return dataclasses.replace(self, attempts=(*self.attempts[:-1], attempt))

    def with_next(self, attempt: ChainAttempt) -> Chain:
        """Return the chain with another attempt."""
        return dataclasses.replace(self, attempts=(*self.attempts, attempt))

    def ended(self, state: State, reason: str) -> Chain:
        """Return the chain after its end."""
        return dataclasses.replace(self, state=state, reason=reason)

    def to_document(self) -> dict[str, Any]:
        """Return the content of its file."""
        return {
            **dataclasses.asdict(self),
            "limits": self.limits.model_dump(mode="json"),
        }

    @classmethod
    def from_document(cls, content: Any) -> Chain:
        """Return the chain of a file's content.

        Raises:
            ValueError: It is damaged.
        """
        # It imports pydantic, which a run without a chain does not need.
        from cloudtrain.job.sections.recover import Recover

        fields = _CHAIN(content)
        attempts = tuple(
            ChainAttempt(**{**_named(_ATTEMPT, each), "state": AttemptState(each["state"])})
            for each in fields["attempts"]
        )
        runs = [fields["id"], *(each.run for each in attempts)]
        if not attempts or not all(map(is_run_id, runs)):
            raise ValueError("it has no attempts, or one whose run has no valid id")
        state = fields["state"]
        return cls(
            **{
                **_named(_CHAIN, fields),
                "limits": Recover(**fields["limits"]),
                "attempts": attempts,
                "state": None if state is None else State(state),
            }
        )


_ATTEMPT = ObjectSchema(
    {
        "run": text,
        "state": text,
        "reservation_usd": number,
        "runtime_seconds": nullable(count),
        "settled_usd": number,
        "overrun_usd": number,
        "checkpoint": nullable(count),
        "cause": text,
        "reason": text,
        "started": timestamp,
        "ended": nullable(timestamp),
    }
)
_CHAIN = ObjectSchema(
    {
        "id": text,
        "backend": text,
        "job": text,
        "runtime_seconds": count,
        "created": timestamp,
        "limits": json_object,
        "reservation_usd": number,
        "usd_per_hour": number,
        "attempts": array(_ATTEMPT),
        "identity": text,
        "state": nullable(text),
        "reason": text,
    }
)


def _named(schema: ObjectSchema, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a schema names."""
    return {name: fields[name] for name in schema.required}


def find_chain(run: str, homes: Iterable[Path]) -> Path | None:
    """Return the folder of the chain that begins with a run, or None."""
    folders = (home / CHAINS_FOLDER / run for home in homes)
    return next((each for each in folders if (each / CHAIN_FILE).is_file()), None)


def read_chains(homes: Iterable[Path]) -> Iterator[tuple[Path, Chain]]:
    """Yield the chains in folders of local runs, each with its folder; damaged records are skipped."""
    for home in homes:
        for file in sorted((home / CHAINS_FOLDER).glob(f"*/{CHAIN_FILE}")):
            with contextlib.suppress(UserError):
                yield file.parent, read_chain(file.parent)


def read_chain(folder: Path) -> Chain:
    """Return the chain that a folder has recorded.

    Raises:
        UserError: The record cannot be read, or another program wrote it.
    """
    file = folder / CHAIN_FILE
    try:
        body = read_regular(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    return parse_chain(body, str(file))


def parse_chain(body: bytes, place: str) -> Chain:
    """Return the chain of a record.

    Args:
        body: The content of its file.
        place: Where it is, for messages.

    Raises:
        UserError: It is damaged, or another program wrote it.
    """
    try:
        content = load_json(body)
        check_not_newer(place, content, CHAIN_VERSION)
        return Chain.from_document(content)
    except NewerFormatError as error:
        raise UserError(str(error)) from None
    except (ValueError, SpecError) as error:
        raise UserError(f"{place}: this is not the file of a chain: {error}") from None


def find_live_chain(identity: str, backend: str, homes: Iterable[Path]) -> Path | None:
    """Return the folder of the chain that continues a request, whichever of its attempts is the newest; or None.

    Args:
        identity: Identity of the plan of its first attempt.
        backend: Where it runs.
        homes: Folders of local runs.
    """
    for folder, chain in read_chains(homes):
        is_of_request = (chain.backend, chain.identity) == (backend, identity)
        if is_of_request and chain.state is None:
            return folder
    return None


def find_chain_of_attempt(run: str, homes: Iterable[Path]) -> Chain | None:
    """Return the chain that has a run as one of its later attempts, or None."""
    for _, chain in read_chains(homes):
        if run in [each.run for each in chain.attempts] and run != chain.id:
            return chain
    return None


def find_waiting_chain(name: str, homes: Iterable[Path]) -> Chain | None:
    """Return the newest chain of a name that has no run yet, or None.

    Args:
        name: Its id, the beginning or end of it, or the name of its job.
        homes: Folders of local runs.
    """
    found = None
    for _, chain in read_chains(homes):
        is_named = chain.job == name or chain.id.startswith(name) or chain.id.endswith(name)
        is_waiting = len(chain.attempts) == 1 and chain.newest.state is AttemptState.PLANNED
        if is_named and is_waiting and (found is None or chain.created > found.created):
            found = chain
    return found
