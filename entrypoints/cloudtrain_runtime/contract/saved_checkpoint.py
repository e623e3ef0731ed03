"""What a list of checkpoints says about each of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

COMPLETE: Final = "complete"
UNFINISHED: Final = "unfinished"
DAMAGED: Final = "damaged"
UNREADABLE: Final = "unreadable"
"""Its version is newer; or the bytes are those that were written, but a load cannot parse them."""


def age_order(step: int, completed: float | None) -> tuple[int, float]:
    """Return a sort key by which a newer checkpoint is greater.

    Of several of one step, which different attempts have saved, the one that was completed last is newer.
    """
    return step, completed or 0.0


def size_mismatches(expected: Mapping[str, Collection[int]], sizes: Mapping[str, int]) -> list[str]:
    """Return one phrase for each expected file that is missing or has none of its possible sizes.

    Args:
        expected: The possible sizes in bytes of each file.
        sizes: The sizes of the files that are there.
    """
    found = []
    for name, possible in sorted(expected.items()):
        if sizes.get(name) in possible:
            continue
        if name not in sizes:
            found.append(f"{name} is missing")
            continue
        wanted = next(iter(possible), "a known size")
        found.append(f"{name} has {sizes[name]} bytes instead of {wanted}")
    return found


def oldest_kept(complete: Iterable[int], keep: int) -> int | None:
    """Return the step before which checkpoints are expired: only complete ones count as kept. None if there is none."""
    kept = sorted(set(complete))[-keep:]
    return kept[0] if kept else None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A stored checkpoint.

    Attributes:
        step: Number of optimizer steps.
        name: Name of its folder.
        uri: URI of its folder.
        state: `complete`, `unfinished`, `damaged`, or `unreadable`: a newer cloudtrain has written it, or after a
            verification, the content is intact, but this version of PyTorch cannot load it.
        why: Why it is not complete, or what a verification could not compare; otherwise empty.
        bytes: Size of all its files.
        files: Number of its files.
        run: Run that wrote it, or None if unknown.
        time: When it was completed, in seconds since the epoch.
        world_size: Number of ranks that wrote it.
        torch: Version of PyTorch that wrote it.
        best: Whether it has the best weights of its run so far, for runs with `train.export: best`.
    """

    step: int
    name: str
    uri: str
    state: str
    why: str
    bytes: int
    files: int
    run: str | None = None
    time: float | None = None
    world_size: int | None = None
    torch: str | None = None
    best: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether a run can resume from it, as far as is known."""
        return self.state == COMPLETE

    def age_seconds(self, now: float | None = None) -> float | None:
        """Return the seconds since it was completed; None if it is incomplete."""
        if self.time is None:
            return None
        present = time.time() if now is None else now
        # The clocks of two machines may differ.
        return max(0.0, present - self.time)

    def to_json(self, now: float | None = None) -> dict[str, Any]:
        """Return its entry in `checkpoints --json`."""
        age = self.age_seconds(now)
        return {**asdict(self), "age_seconds": None if age is None else round(age, 1)}
