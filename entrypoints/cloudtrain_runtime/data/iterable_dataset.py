"""Iterable datasets, divided among ranks sample by sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.data.position import ReaderShare
from cloudtrain_runtime.errors import CheckpointError, TaskError
from cloudtrain_runtime.process.seeds import ContinuedRandomState, random_number


def is_iterable(dataset: Any) -> bool:
    """Return whether a dataset is iterable, but not map-style. An iterator is not: it can be read only once."""
    if isinstance(dataset, IterableDataset):
        return True
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__next__") and not is_map


class IterableSource:
    """The samples of an iterable dataset that one rank reads: every w-th sample of each global batch.

    It has the methods of a FileSource.

    The dataset must be the same on all ranks. Its random states are isolated and seeded by seed and epoch, so it draws
    the same numbers on every rank.

    Args:
        dataset: Dataset with `__iter__`. `set_epoch`, if present, receives the epoch; with `state_dict` and
            `load_state_dict`, a resume does not have to read it from its start.
        global_size: Samples of a global batch.
    """

    # The dataset cannot be divided among several readers.
    most_workers = 1
    note = None

    def __init__(self, dataset: Dataset[Any], share: ReaderShare, global_size: int) -> None:
        self.dataset = dataset
        self.share = share
        self.global_size = global_size
        self.restart()

    def restart(self) -> None:
        self.used = 0
        self.state: tuple[int, Any] | None = None

    def open(self, seed: int, epoch: int, role: int, roles: int) -> _OpenIterable:  # noqa: ARG002 (there is one reader)
        return _OpenIterable(self, seed, epoch)

    def advance(self, marks: tuple[int, Any] | None) -> None:
        self.state = marks

    def own_state(self) -> Any:
        try:
            dump_json(self.state)
        except (TypeError, ValueError) as error:
            kind = type(self.dataset).__name__
            raise TaskError(
                f"{kind}.state_dict() must return JSON values, for the manifest: {error}"
            ) from None
        return self.state

    def global_state(self, states: list[Any]) -> dict[str, Any]:
        if all(state is None or state[1] is None for state in states):
            states = []
        return {"kind": "iterable", "states": states}

    def resume(self, state: Mapping[str, Any], samples: int, size: int) -> list[str]:
        if state.get("kind") != "iterable":
            raise CheckpointError(
                "the checkpoint was saved in the middle of an epoch of a FileStream: the remaining samples are "
                "unknown. Resume with the same data, or start a new run with checkpoint.resume: never"
            )
        self.used = samples
        kept = state["states"]
        if kept and size == self.share.size and hasattr(self.dataset, "load_state_dict"):
            own = kept[self.share.rank]
            self.state = (own[0], own[1]) if own is not None else None
            return []
        why = "without load_state_dict"
        if kept:
            why = "with its own state, which is of another number of ranks"
        return [
            f"the iterable dataset is read from its start, {why}: {samples:,} samples are skipped"
        ]


class _OpenIterable:
    """The samples of one reader.

    `_at` counts the samples of all ranks so far; `_used` is the count at the start or resume.
    """

    # The dataset has random states of its own.
    is_isolated = True

    def __init__(self, source: IterableSource, seed: int, epoch: int) -> None:
        self._dataset: Any = source.dataset
        self._share = source.share
        self._global_size = source.global_size
        self._epoch = epoch
        self._used = source.used
        self._state = source.state
        self._at = self._last = source.used
        place = [] if source.state is None else [source.used]
        self._random = ContinuedRandomState(random_number(seed, epoch, *place) >> 1)
        self._samples: Iterator[Any] | None = None

    def key(self) -> tuple[int, ...]:
        return self._last, self._share.rank

    def take(self, count: int) -> list[Any]:
        with self._random:
            if self._samples is None:
                self._samples = self._own()
            return list(islice(self._samples, count))

    def _own(self) -> Iterator[Any]:
        """Yield this rank's samples from the current position on."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        passed = self._used
        if self._state is not None:
            came_by, own = self._state
            self._dataset.load_state_dict(own)
            passed -= came_by
        rank = self._share.rank
        size = self._share.size
        for sample in islice(iter(self._dataset), passed, None):
            place = (self._at - self._used) % self._global_size % size
            self._at += 1
            if place == rank:
                self._last = self._at
                yield sample

    def marks(self) -> tuple[int, Any] | None:
        """Return the number of samples read, and the dataset's state; None if the dataset has no state."""
        if not hasattr(self._dataset, "state_dict"):
            return None
        return self._last, self._dataset.state_dict()

    def any_sample(self) -> list[Any]:
        return list(islice(iter(self._dataset), 1))
