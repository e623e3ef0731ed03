"""What a stream's feeder asks of the thing that it reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReaderShare:
    """A rank's place among those that read the same."""

    rank: int
    size: int


class StreamReader(ABC):
    """The samples of the rest of an epoch that fall to one reader, one process."""

    @abstractmethod
    def key(self) -> tuple[int, ...]:
        """Return what tells the next batch from every other of the epoch."""

    @abstractmethod
    def take(self, count: int) -> list[Any]:
        """Return so many samples, fewer at the end."""

    @abstractmethod
    def marks(self) -> Any:
        """Return what the position after the last samples is told by."""

    @abstractmethod
    def any_sample(self) -> list[Any]:
        """Return one sample of anybody's, or none when there is none at all."""


class StreamSource(ABC):
    """What one rank reads, and where it stands. Loader workers have copies, made when an epoch is entered.

    Attributes:
        global_size: Samples of a global batch.
    """

    global_size: int

    @property
    @abstractmethod
    def most_workers(self) -> int:
        """How many processes may read for a rank."""

    @property
    def note(self) -> str | None:
        """What is to be said about it."""
        return None

    @abstractmethod
    def restart(self) -> None:
        """Stand at the start of an epoch."""

    @abstractmethod
    def open(self, seed: int, epoch: int, role: int, roles: int) -> StreamReader:
        """Return the samples of the rest of an epoch that fall to one of this rank's readers."""

    @abstractmethod
    def advance(self, marks: Any) -> None:
        """Note the position after a batch that has been used."""

    @abstractmethod
    def own_state(self) -> Any:
        """Return what this rank knows of the position."""

    @abstractmethod
    def whole_state(self, states: list[Any]) -> dict[str, Any]:
        """Return the position that all ranks know together, as JSON values; `states` by data rank."""

    @abstractmethod
    def resume(self, state: Any, samples: int, size: int) -> list[str]:
        """Stand where a saved run stood in the middle of an epoch; return what is to be said about it.

        Args:
            state: What `whole_state` has returned.
            samples: How many had been used, of all ranks together.
            size: Number of shares then.

        Raises:
            CheckpointError: it read other data.
        """
