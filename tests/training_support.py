"""Tasks for runs of several ranks that go wrong or are looked at closely. spread_support starts them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from spread_support import VOCABULARY, Small, Windows
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset


class Broken(Small):
    """The loss of some samples is not a number.

    Args:
        samples: Length of the data set.
        bad: Indices of the samples.
    """

    def __init__(self, samples: int, *, bad: tuple[int, ...], **options: Any) -> None:
        super().__init__(samples, **options)
        self.bad = bad

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        return {split: _Indexed(data) for split, data in super().datasets().items()}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch[0])
        return loss * (float("nan") if torch.isin(batch[1], torch.tensor(self.bad)).any() else 1.0)


class Overflowing(Small):
    """The gradient of the last rank overflows in fp16, in its third micro-batch."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        return loss * 1e30 if model.training and is_last and _count("overflow") == 3 else loss


class Told(Small):
    """Tells the class of each text: its first token."""

    classes = tuple(f"token {number}" for number in range(VOCABULARY))

    def __init__(self, samples: int, *, tests: int = 0, **options: Any) -> None:
        super().__init__(samples, **options)
        self.tests = tests

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        return {**super().datasets(), **({"test": Windows(self.tests, seed=3)} if self.tests else {})}

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        """Draw random numbers, too: training must not notice."""
        torch.rand(3)
        return super().metrics(model, batch)

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[:, :-1])[:, 0].argmax(-1), batch[:, 1]


class Counted(Small):
    """Writes how often gradients were sent in each step to `sent-<rank>` in a folder."""

    def __init__(self, samples: int, *, folder: str, **options: Any) -> None:
        super().__init__(samples, **options)
        self.folder = Path(folder)
        self.sent: list[str] = []
        self._watch()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model)
        optimizer.register_step_pre_hook(lambda *_: self._note())
        return optimizer

    def _note(self) -> None:
        with (self.folder / f"sent-{os.environ['RANK']}").open("a") as log:
            log.write(json.dumps(self.sent) + "\n")
        self.sent.clear()

    def _watch(self) -> None:
        """Note each call of what sends gradients: DDP's buckets, and FSDP's scattered sums."""
        begin = DistributedDataParallel.__init__

        def watched(replica: Any, *args: Any, **options: Any) -> None:
            begin(replica, *args, **options)
            replica.register_comm_hook(None, lambda _, bucket: self._send(bucket))  # DDP reads annotations

        DistributedDataParallel.__init__ = watched  # type: ignore[method-assign]
        name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
        scatter = getattr(dist, name)

        def scattered(*args: Any, **options: Any) -> Any:
            self.sent.append("reduce-scatter")
            return scatter(*args, **options)

        setattr(dist, name, scattered)

    def _send(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self.sent.append("all-reduce")
        tensor: torch.Tensor = bucket.buffer().div_(dist.get_world_size())
        work: Any = dist.all_reduce(tensor, async_op=True)
        averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
        return averaged


class _Indexed(Dataset[tuple[torch.Tensor, int]]):
    """Samples with their index."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data: Any = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.data[index], index


_counts: dict[str, int] = {}


def _count(name: str) -> int:
    _counts[name] = _counts.get(name, 0) + 1
    return _counts[name]
