"""Tasks with several optimizers: a tiny GAN, and mistakes in a training step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import Dataset

from support.parallel_training import Small

REAL, NOISE = 3, 4


class Points(Dataset[torch.Tensor]):
    """Real points, each with the noise for a generated one."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.values = torch.randn(samples, REAL + NOISE, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index].to(torch.get_default_dtype())


class Pair(nn.Module):
    """A generator and a discriminator, whose spectral norm has buffers that change in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 8), nn.Tanh(), nn.Linear(8, REAL))
        self.discriminator = nn.Sequential(
            spectral_norm(nn.Linear(REAL, 8)), nn.LeakyReLU(0.2), nn.Linear(8, 1)
        )


class Gan(Small):
    """Learns to generate points."""

    def model(self) -> nn.Module:
        return Pair()

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        validation = {"validation": Points(self.validates, seed=2)} if self.validates else {}
        return {"train": Points(self.samples, seed=1), **validation}

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        return generator_loss(model, model.generator(batch[:, REAL:]))

    def metrics(self, model: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        return {"score": model.discriminator(batch[:, :REAL])[:, 0]}

    def optimizer(self, model: Any) -> Any:
        return {
            "discriminator": torch.optim.AdamW(
                model.discriminator.parameters(), lr=2 * self.learning_rate
            ),
            "generator": torch.optim.AdamW(model.generator.parameters(), lr=self.learning_rate),
        }

    def training_step(
        self, model: Any, batch: torch.Tensor, update: Callable[[str, torch.Tensor], None]
    ) -> None:
        fake = model.generator(batch[:, REAL:])
        update("discriminator", discriminator_loss(model, batch[:, :REAL], fake.detach()))
        update("generator", generator_loss(model, fake))


def discriminator_loss(model: Any, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Return the loss of the scores of real and generated points."""
    return (
        F.softplus(-model.discriminator(real)).mean() + F.softplus(model.discriminator(fake)).mean()
    )


def generator_loss(model: Any, fake: torch.Tensor) -> torch.Tensor:
    """Return the loss of generated points that the discriminator recognizes."""
    return F.softplus(-model.discriminator(fake)).mean()


class Noisy(Gan):
    """Draws its noise in the step, and updates the discriminator twice."""

    def training_step(
        self, model: Any, batch: torch.Tensor, update: Callable[[str, torch.Tensor], None]
    ) -> None:
        for _ in range(2):
            fake = model.generator(torch.randn(len(batch), NOISE))
            update("discriminator", discriminator_loss(model, batch[:, :REAL], fake.detach()))
        update("generator", generator_loss(model, fake))


class Partial(Gan):
    """Has a layer that only the second rank uses, and one that none does."""

    def model(self) -> nn.Module:
        model = Pair()
        extra, unused = nn.Linear(REAL, REAL), nn.Linear(1, 1)
        nn.init.zeros_(extra.bias)
        nn.init.ones_(unused.weight)
        model.generator.extend([extra, unused])
        return model

    def training_step(
        self, model: Any, batch: torch.Tensor, update: Callable[[str, torch.Tensor], None]
    ) -> None:
        used = 4 if os.environ["RANK"] == "1" else 3
        fake = model.generator[:used](batch[:, REAL:])
        update("discriminator", discriminator_loss(model, batch[:, :REAL], fake.detach()))
        update("generator", generator_loss(model, fake))


class Mistaken(Gan):
    """Makes a mistake.

    Args:
        samples: Length of the data set.
        mistake: Which.
    """

    def __init__(self, samples: int, *, mistake: str) -> None:
        super().__init__(samples)
        self.mistake = mistake

    def optimizer(self, model: Any) -> Any:
        found = super().optimizer(model)
        other = torch.optim.SGD(model.generator.parameters(), 0.1)
        wrong = {
            "single": other,
            "shared": {**found, "other": other},
            "none": {},
            "listed": {"a": [other]},
        }
        return wrong.get(self.mistake, found)

    def training_step(
        self, model: Any, batch: torch.Tensor, update: Callable[[str, torch.Tensor], None]
    ) -> None:
        fake = model.generator(batch[:, REAL:])
        if self.mistake == "name":
            update("discriminater", discriminator_loss(model, batch[:, :REAL], fake))
        elif self.mistake == "shape":
            update("generator", model.discriminator(fake))
        elif self.mistake == "detached":
            update("generator", generator_loss(model, fake).detach())
        elif self.mistake == "other parameters":
            update("generator", generator_loss(model, fake.detach()))
        elif self.mistake == "early":
            later = generator_loss(model, fake)
            update("discriminator", discriminator_loss(model, batch[:, :REAL], fake.detach()))
            update("generator", later)


class Unstepped(Gan):
    """Returns several optimizers without a training step."""

    training_step = Small.training_step
