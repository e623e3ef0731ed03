"""The check `memory`: real Tasks, measured by the probe, against the catalog's instance types."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import EXAMPLES
from support.rehearsals import scene_of

from cloudtrain import catalog
from cloudtrain.features.rehearsal.memory import explain_out_of_memory, smaller_batch
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
    found = scene_of(EXAMPLES / "gpt-stdlib" / "job.yaml", tmp_path / "scene").check_memory()
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
    scene = scene_of(
        path, tmp_path / "scene", "train.batch_size=2560", channels={"train": tmp_path / "data"}
    )
    found = scene.check_memory()
    assert found.result is Result.FAIL, found.detail
    assert (
        "train.batch_size=1280 and train.accumulate=2 (the global batch stays the same)"
        in found.detail
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (
            (
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of "
                "22.06 GiB of which 1.12 GiB is free. Process 7 has 20.94 GiB memory in use."
            ),
            "2.50 GiB",
        ),
        (
            (
                "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 6.00 GiB total capacity; "
                "4.54 GiB already allocated; 14.94 MiB free; 4.64 GiB reserved in total by PyTorch)"
            ),
            "20.00 MiB",
        ),
        ("CUDA out of memory. Tried to allocate 512 bytes", "512 bytes"),
    ],
)
def test_a_small_gpu_here_is_no_failure_of_the_job(text: str, size: str) -> None:
    found = explain_out_of_memory(f"step 3\n[rank0]: {text}\nmore\n")
    assert found is not None
    assert (found.name, found.result) == ("trains", Result.UNKNOWN)
    assert found.detail == f"a GPU here is too small for the job: an allocation of {size} failed"


def test_another_error_is_not_of_a_small_gpu() -> None:
    assert explain_out_of_memory("RuntimeError: CUDA error: device-side assert triggered") is None


def test_a_script_has_no_estimate(tmp_path: Path) -> None:
    found = scene_of(EXAMPLES / "script-ddp" / "job.yaml", tmp_path / "scene").check_memory()
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


MEMORY = RankMemory(100, 100, 200, 0, 40, 10)
"""400 bytes of state; activations of 40 bytes and 10 per sample."""


def test_the_batch_shrinks_to_a_divisor_that_fits() -> None:
    """Of 1,000 bytes 900 count: 460 for samples, so 46 would fit, and 32 is the largest divisor of 64 below it."""
    assert smaller_batch(MEMORY, 64, 1_000) == 32
    assert smaller_batch(MEMORY, 92, 1_000) == 46
    assert smaller_batch(MEMORY, 94, 1_000) == 2


def test_no_batch_fits_where_the_state_does_not() -> None:
    assert smaller_batch(MEMORY, 64, 440) is None


def test_the_update_counts_where_it_needs_more_than_activations() -> None:
    assert MEMORY.peak_bytes(1) == 400 + 100
    assert MEMORY.peak_bytes(10) == 400 + 140
