"""A warning at the first step about batch norm that a later step would give one sample."""

import copy
import io

import pytest
import torch
from torch import nn

from cloudtrain_runtime.data import GlobalOrderSampler
from cloudtrain_runtime.training.single_samples import warning_of_single_samples


class Views(nn.Module):
    """Batch norm over two views of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.cat([values, -values]))


@pytest.mark.parametrize(
    ("model", "shape", "is_warned"),
    [
        (nn.Sequential(nn.BatchNorm1d(4)), (3, 4), True),
        (nn.Sequential(nn.BatchNorm2d(4)), (3, 4, 1, 1), True),
        (nn.Sequential(nn.BatchNorm1d(4), nn.Flatten(), nn.BatchNorm1d(8)), (3, 4, 2), True),
        (Views(), (3, 4), False),
        (nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(4)), (3, 5, 4), False),
        (nn.Sequential(nn.BatchNorm2d(4)), (3, 4, 2, 2), False),
        (nn.Sequential(nn.BatchNorm1d(4)).eval(), (3, 4), False),
        (nn.Sequential(nn.LayerNorm(4)), (3, 4), False),
    ],
)
def test_the_first_step_warns_of_a_single_sample(
    model: nn.Module,
    shape: tuple[int, ...],
    is_warned: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with warning_of_single_samples(model, 3):
        model(torch.randn(shape))
        model(torch.randn(shape))
    assert "".join(capfd.readouterr()).count("gives a rank one sample") == int(is_warned)


def test_copies_of_a_watched_model_are_plain(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    with warning_of_single_samples(model, 3):
        teacher = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
        model(torch.randn(3, 4))
        teacher(torch.randn(3, 4))
    teacher(torch.randn(3, 4))
    assert "".join(capfd.readouterr()).count("gives a rank one sample") == 1


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
