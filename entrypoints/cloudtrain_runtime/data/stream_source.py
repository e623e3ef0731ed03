"""Interface between a stream's feeder and the source that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ReaderShare:
    """Index of a rank among the ranks that read the same source."""

    rank: int
    size: int


class StreamReader(Protocol):
    """The remaining samples of an epoch for one reader process."""

    def key(self) -> tuple[int, ...]:
        """Return a key that is unique to the next batch of the epoch."""

    def take(self, count: int) -> list[Any]:
        """Return `count` samples, fewer at the end."""

    def marks(self) -> Any:
        """Return the position after the last samples."""

    def any_sample(self) -> list[Any]:
        """Return a list of any one sample of the source, empty if it has none."""


class StreamSource(Protocol):
    """The data that one rank reads, and its position. Loader workers get copies when an epoch starts.

    Attributes:
        global_size: Samples of a global batch.
    """

    global_size: int = 0

    @property
    def most_workers(self) -> int:
        """Most reader processes of a rank."""

    @property
    def note(self) -> str | None:
        """A note for the user, or None."""
        return None

    def restart(self) -> None:
        """Move to the start of an epoch."""

    def open(self, seed: int, epoch: int, role: int, roles: int) -> StreamReader:
        """Return the remaining samples of an epoch for one of this rank's readers."""

    def advance(self, marks: Any) -> None:
        """Record the position after a batch that has been used."""

    def own_state(self) -> Any:
        """Return this rank's part of the position."""

    def global_state(self, states: list[Any]) -> dict[str, Any]:
        """Return the position of all ranks as JSON values, from the `own_state` of each data rank."""

    def resume(self, state: Any, samples: int, size: int) -> list[str]:
        """Move to a saved position in the middle of an epoch; return notes for the user.

        `state` is the result of `global_state` of a run with `size` shares, after `samples` samples of all ranks.

        Raises:
            CheckpointError: the saved run read other data.
        """
