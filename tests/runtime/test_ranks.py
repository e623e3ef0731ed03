"""Several ranks that are killed and resumed, with the same and with another number: real processes, real Gloo."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.parallel_training import ADAM_SHIFT
from support.ranks import (
    LENGTH,
    TRAIN,
    Trace,
    Trial,
    start,
)

pytestmark = pytest.mark.processes


def same_weights(left: Trace, right: Trace) -> bool:
    assert left.weights is not None
    assert right.weights is not None
    return all(torch.equal(left.weights[name], right.weights[name]) for name in left.weights)


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("noisy", [False, True], ids=["accumulating", "batch norm and dropout"])
def test_killed_and_resumed_runs_are_the_same_to_the_last_bit(ranks: int, noisy: bool, tmp_path: Path) -> None:
    train = TRAIN if noisy else replace(TRAIN, batch_size=TRAIN.batch_size // 3, accumulate=3)
    whole = start(Trial(ranks, tmp_path / "whole", noisy, train=train))
    assert whole.weights is not None, whole.text
    pieces: dict[int, float] = {}
    for killed_at in (3, 10, 11):
        part = start(Trial(ranks, tmp_path / "cut", noisy, killed_at=killed_at, train=train))
        assert part.weights is None
        assert max(part.losses) == killed_at, part.text
        assert {**pieces, **part.losses}.items() >= pieces.items()  # steps made again are made alike
        pieces |= part.losses
    rest = start(Trial(ranks, tmp_path / "cut", noisy, train=train))
    pieces |= rest.losses
    assert len(rest.losses) < len(pieces), "it started from nothing"
    assert pieces == whole.losses
    assert same_weights(rest, whole)


def test_any_number_of_ranks_gives_the_same_steps(tmp_path: Path) -> None:
    """2 -> 4 -> 3 -> 1 ranks, against one process that takes each step by itself; cut in the middle of both epochs."""
    whole = replace(TRAIN, batch_size=2 * TRAIN.batch_size)
    alone = start(Trial(1, tmp_path / "alone", train=whole, dtype=torch.float64))
    losses: dict[int, float] = {}
    samples: dict[int, list[int]] = {}
    said = ""
    for ranks, end in ((2, 4), (4, 12), (3, 18), (1, None)):
        part = start(Trial(ranks, tmp_path / "changing", ends_at=end, dtype=torch.float64))
        assert not losses.keys() & part.losses.keys()
        losses |= part.losses
        samples |= part.samples
        said += part.text
        last = part
    assert losses.keys() == alone.losses.keys()
    assert samples == alone.samples
    epoch = [index for step in range(13) for index in samples[step]]
    assert sorted(epoch) == list(range(LENGTH))
    assert list(losses.values()) == pytest.approx(list(alone.losses.values()), rel=1e-6)  # a rank's share is float32
    assert last.weights is not None
    assert alone.weights is not None
    for name, weight in alone.weights.items():
        torch.testing.assert_close(last.weights[name], weight, rtol=0, atol=len(losses) * ADAM_SHIFT)
    for sentence in (
        "stays at 12 samples with 4 ranks instead of 2",
        "with 1 rank instead of 3; a step takes 2",
    ):
        assert sentence in said
