"""The memory probe: one process without the other ranks finds what each of the real ranks holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.measured_memory import Measured
from support.parallel_training import TRAIN, losses
from torch import nn

from cloudtrain_runtime.contract import ParallelConfig
from cloudtrain_runtime.process.run_context import read_context
from cloudtrain_runtime.training.memory_probe import measure_activations, measure_state

LAYOUTS = {
    "ddp": ParallelConfig(),
    "hybrid": ParallelConfig(data="fsdp", shard=2),
    "fsdp and tensor": ParallelConfig(data="fsdp", tensor=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_process_finds_the_bytes_of_four_ranks(name: str, tmp_path: Path) -> None:
    train = replace(TRAIN, steps=1, accumulate=1, parallel=LAYOUTS[name])
    trained = losses(train, 4, tmp_path, task=Measured)
    assert trained.reason is None, trained.text
    ranks = [
        json.loads(line.partition(" ")[2])
        for line in trained.text.splitlines()
        if line.startswith("BYTES")
    ]
    found = measure_state(Measured(10), train, read_context({}), 4)
    assert len(ranks) == 4
    assert {"parameters": found.parameters, "optimizer": found.optimizer} == max(
        ranks, key=lambda each: each["optimizer"]
    )
    assert 0 < found.gradients <= found.parameters


class Stack(Measured):
    """Layers whose activations can be counted by hand."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.Sigmoid(), nn.Linear(256, 1))

    def datasets(self) -> dict[str, torch.utils.data.Dataset[object]]:
        return {"train": torch.utils.data.TensorDataset(torch.zeros(8, 64))}

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).sum()


def test_activations_are_those_kept_for_backward() -> None:
    """The input of the first layer (64 numbers) and the output of the sigmoid (256), once each."""
    found = measure_activations(Stack(8), TRAIN)
    assert [(each.samples, each.bytes) for each in found] == [(2, 2 * 4 * 320), (4, 4 * 4 * 320)]
