"""Ranks that are killed and resumed, with the same or another number of ranks: real processes, real Gloo."""

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
def test_resume_after_a_kill_is_bit_exact(ranks: int, noisy: bool, tmp_path: Path) -> None:
    train = TRAIN if noisy else replace(TRAIN, batch_size=TRAIN.batch_size // 3, accumulate=3)
    uninterrupted = start(Trial(ranks, tmp_path / "uninterrupted", noisy, train=train))
    assert uninterrupted.weights is not None, uninterrupted.text
    losses: dict[int, float] = {}
    for killed_at in (3, 10, 11):
        part = start(Trial(ranks, tmp_path / "killed", noisy, killed_at=killed_at, train=train))
        assert part.weights is None
        assert max(part.losses) == killed_at, part.text
        assert {
            **losses,
            **part.losses,
        }.items() >= losses.items()  # repeated steps have the same losses
        losses |= part.losses
    rest = start(Trial(ranks, tmp_path / "killed", noisy, train=train))
    losses |= rest.losses
    assert len(rest.losses) < len(losses), "the last start did not resume"
    assert losses == uninterrupted.losses
    assert same_weights(rest, uninterrupted)


@pytest.mark.promise
def test_any_number_of_ranks_gives_the_same_steps(tmp_path: Path) -> None:
    """Compare 2, then 4, 3 and 1 ranks, interrupted within both epochs, with a single process of the same steps."""
    train = replace(TRAIN, batch_size=2 * TRAIN.batch_size)
    single = start(Trial(1, tmp_path / "single", train=train, dtype=torch.float64))
    losses: dict[int, float] = {}
    samples: dict[int, list[int]] = {}
    text = ""
    for ranks, end in ((2, 4), (4, 12), (3, 18), (1, None)):
        part = start(Trial(ranks, tmp_path / "changing", ends_at=end, dtype=torch.float64))
        assert not losses.keys() & part.losses.keys()
        losses |= part.losses
        samples |= part.samples
        text += part.text
        last = part
    assert losses.keys() == single.losses.keys()
    assert samples == single.samples
    epoch = [index for step in range(13) for index in samples[step]]
    assert sorted(epoch) == list(range(LENGTH))
    assert list(losses.values()) == pytest.approx(
        list(single.losses.values()), rel=1e-6
    )  # a rank's share is float32
    assert last.weights is not None
    assert single.weights is not None
    for name, weight in single.weights.items():
        torch.testing.assert_close(
            last.weights[name], weight, rtol=0, atol=len(losses) * ADAM_SHIFT
        )
    for sentence in (
        "stays at 12 samples with 4 ranks instead of 2",
        "with 1 rank instead of 3; a step takes 2",
    ):
        assert sentence in text
