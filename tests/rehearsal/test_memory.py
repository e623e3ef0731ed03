"""The check `memory`: real Tasks, measured by the probe, against the catalog's instance types."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import EXAMPLES
from support.rehearsals import context_of

from cloudtrain import catalog
from cloudtrain.features.rehearsal.memory import check_memory, explain_out_of_memory
from cloudtrain.features.rehearsal.rank_memory import (
    GIB,
    GPU_RESERVED_BYTES,
    RankMemory,
    rank_capacity,
)
from cloudtrain.support.checks import Result

WIDE = """\
name: wide
code: {directory: ., task: "wide:Wide"}
cluster: {instance_type: ml.g4dn.xlarge, instances: 2}
train: {steps: 4, batch_size: 64}
"""
TASK = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task, context

class Wide(Task):
    """One layer whose output is large: 10 MB for each sample."""

    def model(self):
        return nn.Linear(1, 2_500_000, bias=False)

    def datasets(self):
        assert (context().channels["train"] / "one").read_text() == "1"
        return {"train": TensorDataset(torch.zeros(8, 1))}

    def loss(self, model, batch):
        return model(batch[0]).square().mean()
'''


def test_an_example_that_fits_is_proven(tmp_path: Path) -> None:
    (found,) = check_memory(context_of(EXAMPLES / "gpt-stdlib" / "job.yaml", tmp_path / "context"))
    assert (found.name, found.result) == ("memory", Result.PASS), found.detail
    assert "activations of 16 samples" in found.detail
    assert "(an estimate)" in found.detail


def test_a_batch_that_is_too_large_names_one_that_fits(
    job: Callable[..., Path], tmp_path: Path
) -> None:
    """2,560 samples of 10 MB need more than the 16 GiB of a T4, and 1,280 fit."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one").write_text("1")
    path = job(WIDE + "data: {train: s3://bucket/data/}\n", wide_py=TASK)
    context = context_of(
        path, tmp_path / "context", "train.batch_size=2560", channels={"train": tmp_path / "data"}
    )
    (found,) = check_memory(context)
    assert found.result is Result.FAIL, found.detail
    assert (
        "train.batch_size=1280 and train.accumulate=2 (the global batch stays the same)"
        in found.detail
    )


def test_a_small_gpu_here_gets_advice(job: Callable[..., Path], tmp_path: Path) -> None:
    """The log is PyTorch's on a GPU of 4 GiB; the figures are measured on the CPU."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one").write_text("1")
    path = job(WIDE + "data: {train: s3://bucket/data/}\n", wide_py=TASK)
    context = context_of(
        path, tmp_path / "context", "train.batch_size=512", channels={"train": tmp_path / "data"}
    )
    log = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 4.00 GiB of which"
    found = explain_out_of_memory(context, f"[rank0]: {log}\n", ranks=2)
    assert found is not None
    assert (found.name, found.result) == ("trains", Result.UNKNOWN)
    assert "a GPU here of 4.3 GB is too small" in found.detail
    assert "train.batch_size=128 and train.accumulate=4" in found.detail
    assert explain_out_of_memory(context, "ValueError: of the job", ranks=2) is None


def test_a_script_has_no_estimate(tmp_path: Path) -> None:
    (found,) = check_memory(context_of(EXAMPLES / "script-ddp" / "job.yaml", tmp_path / "context"))
    assert found.result is Result.UNKNOWN


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    instance = catalog.find_instance("ml.g4dn.12xlarge")  # 4 GPUs of 16 GiB
    assert instance is not None
    assert rank_capacity(instance, 4) == 16 * GIB - GPU_RESERVED_BYTES
    assert rank_capacity(instance, 8) == 8 * GIB - GPU_RESERVED_BYTES


@pytest.mark.parametrize(
    "line", ["", "{}", '{"state": {"parameters": "many"}, "activations": []}', "[1]"]
)
def test_other_output_of_the_probe_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not an answer of the probe"):
        RankMemory.from_probe(line)


def test_one_batch_size_is_no_line() -> None:
    state = {"parameters": 1, "gradients": 1, "optimizer": 1, "gathered": 0}
    answer = json.dumps({"state": state, "activations": [{"samples": 2, "bytes": 10}]})
    with pytest.raises(ValueError, match="too few samples"):
        RankMemory.from_probe(answer)
