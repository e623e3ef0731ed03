"""Warnings about Tasks that fail where ranks have different numbers of samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.job.spec import JobSpec

JOB = """
name: demo
code: {task: "mine:Mine"}
cluster: {instance_type: ml.m5.large, instances: 2}
train: {epochs: 1, batch_size: 4}
"""
TASK = """
import functools
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed import all_gather as collect
from cloudtrain_runtime import Task
from helpers import Gathers, gathered as shared


class Mine(Task):
    def model(self):
        return nn.Linear(4, 4)

    def datasets(self): ...

    def loss(self, model, batch):
        LOSS

    def metrics(self, model, batch):
        dist.all_gather([], model(batch))

    def after_step(self, model):
        shared([])


class Other(Task):
    def loss(self, model, batch):
        dist.all_gather([], batch)


def unused(batch):
    dist.all_gather([], batch)


if __name__ == "__main__":
    dist.all_gather([], [])
"""
HELPERS = """
import torch.distributed as dist


def gathered(values):
    parts = [values.clone() for _ in range(dist.get_world_size())]
    HELPER(parts, values)
    return parts


class Gathers:
    def forward(self, values):
        dist.all_gather([], values)
"""


@pytest.fixture
def warnings(job: Callable[..., Path]) -> Callable[..., list[str]]:
    """Return a function that plans a Task and returns the warnings about its code."""

    def plan(
        *overrides: str,
        loss: str = "...",
        helper: str = "dist.broadcast",
    ) -> list[str]:
        task = TASK.replace("LOSS", loss)
        path = job(JOB, mine_py=task, helpers_py=HELPERS.replace("HELPER", helper))
        found = cloudtrain.plan(JobSpec.from_yaml(path, list(overrides)), local=True).warnings
        return [each for each in found if " calls " in each]

    return plan


def test_a_gathering_loss_needs_full_batches(warnings: Callable[..., list[str]]) -> None:
    (text,) = warnings(loss="dist.all_gather_into_tensor(batch, batch)")
    assert text.startswith("mine.py:18:9 calls all_gather_into_tensor, which needs equal shapes")
    assert "set train.drop_last: true" in text
    (text,) = warnings(helper="dist.nn.functional.all_gather")
    assert text.startswith("helpers.py:7:5 calls all_gather,")
    (text,) = warnings(loss="collect([], batch)")
    assert text.startswith("mine.py:18:9 calls all_gather,")


@pytest.mark.parametrize(
    "loss",
    [
        "functools.partial(dist.all_gather, [])(batch)",
        "self.layer.forward = Gathers().forward",
        "collectives.all_gather_tensor(batch, 0, None)",
    ],
)
def test_a_gather_that_is_passed_on_counts(warnings: Callable[..., list[str]], loss: str) -> None:
    assert len(warnings(loss=loss, helper="dist.all_reduce")) == 1


def test_a_loss_that_gathers_nothing_has_no_warning(warnings: Callable[..., list[str]]) -> None:
    assert warnings() == []  # metrics() alone gathers
    assert warnings(loss="dist.all_reduce(batch.sum()); batch.gather(0, batch)") == []
    assert warnings(loss="self.cluster.all_gather(batch); all_gather(batch)") == []
    gathers = {"loss": "dist.all_gather([], batch)"}
    assert warnings("train.drop_last=true", **gathers) == []
    assert warnings("cluster.instances=1", "cluster.processes_per_instance=1", **gathers) == []
