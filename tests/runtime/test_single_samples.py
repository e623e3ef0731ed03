"""A warning at the first step about batch norm that a later step would give one sample."""

import pytest
import torch
from torch import nn

from cloudtrain_runtime.data import GlobalOrderSampler
from cloudtrain_runtime.training.single_samples import warn_of_single_samples


@pytest.mark.parametrize(
    ("model", "shape", "smallest", "is_warned"),
    [
        (nn.Sequential(nn.BatchNorm1d(4)), (3, 4), 1, True),
        (nn.Sequential(nn.BatchNorm2d(4)), (3, 4, 1, 1), 1, True),
        (nn.Sequential(nn.BatchNorm1d(4), nn.Flatten(), nn.BatchNorm1d(8)), (3, 4, 2), 1, True),
        (nn.Sequential(nn.BatchNorm1d(4)), (3, 4), 2, False),
        (nn.Sequential(nn.BatchNorm1d(4)), (3, 4), None, False),
        (nn.Sequential(nn.BatchNorm2d(4)), (3, 4, 2, 2), 1, False),
        (nn.Sequential(nn.BatchNorm1d(4)).eval(), (3, 4), 1, False),
        (nn.Sequential(nn.LayerNorm(4)), (3, 4), 1, False),
    ],
)
def test_the_first_step_warns_of_a_single_sample(
    model: nn.Module,
    shape: tuple[int, ...],
    smallest: int | None,
    is_warned: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    warn_of_single_samples(model, smallest)
    model(torch.randn(shape))
    model(torch.randn(shape))
    assert "".join(capfd.readouterr()).count("gives a rank one sample") == int(is_warned)


@pytest.mark.parametrize(
    ("length", "batch", "accumulate", "ranks", "drop_last"),
    [(9, 4, 1, 1, False), (9, 4, 1, 1, True), (17, 4, 2, 2, False), (30, 3, 2, 3, False)],
)
def test_the_smallest_batch_is_that_of_all_ranks(
    length: int, batch: int, accumulate: int, ranks: int, drop_last: bool
) -> None:
    samplers = [
        GlobalOrderSampler(
            length,
            batch_size=batch,
            accumulate=accumulate,
            seed=0,
            drop_last=drop_last,
            rank=rank,
            world_size=ranks,
        )
        for rank in range(ranks)
    ]
    sizes = [len(indices) for sampler in samplers for indices in sampler]
    assert {sampler.smallest_batch for sampler in samplers} == {min(sizes)}
