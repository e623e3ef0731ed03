"""Metrics of one process: step timer, FLOPs, memory and TensorBoard."""

import random
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.metrics.flops import count_flops, meta_copy, peak_flops
from cloudtrain_runtime.metrics.meter import Meter, peak_memory_bytes
from cloudtrain_runtime.metrics.step_timer import (
    STEP_PARTS,
    Phase,
    StepClock,
)
from cloudtrain_runtime.metrics.tracking.tensorboard import TensorBoardWriter
from cloudtrain_runtime.process.run_context import read_context
from cloudtrain_runtime.task import Task

CPU = torch.device("cpu")


class Perceptron(Task):
    """Two layers, dropout and batch norm. With `reads_values` the loss depends on a comparison of its value."""

    tokens_per_sample = 16

    def __init__(self, *, reads_values: bool = False) -> None:
        self.reads_values = reads_values

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 4)
        )

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"train": TensorDataset(torch.randn(8, 8), torch.zeros(8, dtype=torch.long))}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        random.random()  # noqa: S311 (an augmentation)
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * 2 if self.reads_values and loss > 1 else loss


class ManualTime:
    """Replaces the step timer's time with `now`, in nanoseconds, which a test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000
        monkeypatch.setattr(
            "cloudtrain_runtime.metrics.step_timer.perf_counter_ns", lambda: self.now
        )


def test_the_parts_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    time = ManualTime(monkeypatch)
    clock = StepClock(CPU)
    for _ in range(4):
        clock.begin()
        time.now += 30_000_000
        for micro_step in range(2):
            if micro_step:
                clock.mark(Phase.DATA)
                time.now += 10_000_000
            clock.mark(Phase.FORWARD)
            time.now += 20_000_000
            clock.mark(Phase.BACKWARD)
            time.now += 40_000_000
        clock.mark(Phase.OPTIMIZER)
        time.now += 10_000_000
        clock.mark(Phase.LOG)
        time.now += 1_000_000
        clock.mark(Phase.CHECKPOINT)
        time.now += 30_000_000
        clock.mark(Phase.OTHER)
        time.now += 5_000_000_000
    reading = clock.read()
    assert reading.steps == 4
    assert reading.split == pytest.approx(
        {"data": 0.04, "forward": 0.04, "backward": 0.08, "optimizer": 0.01, "checkpoint": 0.03}
    )
    assert list(reading.split) == list(STEP_PARTS)
    assert reading.data_wait == pytest.approx(0.2)
    assert reading.seconds == pytest.approx(4 * 0.201), "without evaluations"
    clock.begin()
    time.now += 7_000_000
    assert clock.read().split["data"] == pytest.approx(0.007), "each reading starts from zero"


def test_a_reading_without_steps_has_no_parts() -> None:
    reading = StepClock(CPU).read()
    assert (reading.steps, reading.split, reading.data_wait) == (0, {}, None)


class DeviceEvent:
    """A fake CUDA event, so that the test needs no GPU. It is pending while `is_busy` is set."""

    now_milliseconds = 0.0
    is_busy = True

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:  # noqa: ARG002 (the signature of torch)
        self.at = DeviceEvent.now_milliseconds

    def query(self) -> bool:
        return not DeviceEvent.is_busy

    def elapsed_time(self, other: "DeviceEvent") -> float:
        assert not DeviceEvent.is_busy, "this would block until the device is ready"
        return other.at - self.at


def test_gpu_step_time_is_read_after_the_device_passed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    time = ManualTime(monkeypatch)
    clock = StepClock(torch.device("cuda"))

    def step(milliseconds: float, *, is_logged: bool) -> None:
        clock.begin(is_logged=is_logged)
        for phase in (
            Phase.FORWARD,
            Phase.BACKWARD,
            Phase.DATA,
            Phase.FORWARD,
            Phase.BACKWARD,
            Phase.OPTIMIZER,
        ):
            DeviceEvent.now_milliseconds += milliseconds
            clock.mark(phase)
        DeviceEvent.now_milliseconds += milliseconds
        clock.mark(Phase.LOG)

    step(99.0, is_logged=False)
    step(5.0, is_logged=True)
    time.now += 2_000_000
    clock.mark(Phase.CHECKPOINT)
    time.now += 8_000_000
    assert clock.read().split == {}, "the device has not finished the step"
    DeviceEvent.is_busy = False
    step(99.0, is_logged=False)
    time.now += 3_000_000
    clock.mark(Phase.CHECKPOINT)
    time.now += 4_000_000
    split = clock.read().split
    assert split == pytest.approx(
        {
            "data": 0.010,
            "forward": 0.010,
            "backward": 0.010,
            "optimizer": 0.005,
            "checkpoint": 0.004,
        }
    )


def test_step_time_excludes_the_counting_of_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLOPs are counted in the first step, before its forward pass."""
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(DeviceEvent, "is_busy", False)
    clock = StepClock(torch.device("cuda"))
    clock.begin(is_logged=True)
    for milliseconds, phase in (
        (2.0, Phase.OTHER),
        (500.0, Phase.FORWARD),
        (40.0, Phase.BACKWARD),
        (80.0, Phase.OPTIMIZER),
        (10.0, Phase.LOG),
    ):
        DeviceEvent.now_milliseconds += milliseconds
        clock.mark(phase)
    split = clock.read().split
    assert {
        name: split[name] for name in ("data", "forward", "backward", "optimizer")
    } == pytest.approx({"data": 0.002, "forward": 0.040, "backward": 0.080, "optimizer": 0.010})


def test_counting_flops_changes_no_state() -> None:
    task = Perceptron()
    model = task.model()
    batch = (torch.randn(8, 8), torch.zeros(8, dtype=torch.long))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    shape = meta_copy(model)
    assert all(tensor.is_meta for tensor in [*shape.parameters(), *shape.buffers()])
    # A forward product costs 2mnk. The backward pass costs the same for weights, and for inputs except the first.
    expected = 2 * 8 * 8 * 32 * 2 + 2 * 8 * 32 * 4 * 3
    assert count_flops(task, shape, batch) == expected
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_flops_of_a_loss_that_reads_values_are_unknown() -> None:
    task = Perceptron(reads_values=True)
    assert (
        count_flops(
            task, meta_copy(task.model()), next(iter([(torch.randn(8, 8), torch.zeros(8).long())]))
        )
        is None
    )


def test_a_meta_copy_keeps_shared_weights_shared() -> None:
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    shape: Any = meta_copy(nn.Sequential(first, last))
    assert shape[0].weight is shape[1].weight


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16", False, 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", True, 156),
        ("NVIDIA A100-SXM4-80GB", "fp32", False, 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", False, 989),
        ("NVIDIA H100 PCIe", "fp16", False, 756),
        ("NVIDIA H200", "bf16", False, 989),
        ("NVIDIA B200", "bf16", False, 2250),
        ("NVIDIA L4", "bf16", False, 121),
        ("NVIDIA L40S", "bf16", False, 362),
        ("NVIDIA A10G", "bf16", False, 70),
        ("Tesla T4", "fp16", False, 65),
        ("Tesla T4", "bf16", False, None),
        ("Tesla V100-SXM2-16GB", "fp32", True, 15.7),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", False, None),
        ("NVIDIA GeForce RTX 4090", "bf16", False, None),
    ],
)
def test_peak_flops_are_dense_values_by_device_name(
    name: str, precision: str, tf32: bool, tera: float | None
) -> None:
    assert peak_flops(name, precision, uses_tf32=tf32) == (None if tera is None else tera * 1e12)


def test_a_meter_reports_throughput_and_data_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    time = ManualTime(monkeypatch)
    context = read_context({})
    task = Perceptron()
    meter = Meter(task, meta_copy(task.model()), "fp32", context)
    assert not meter.wants_batch
    meter.clock.begin()
    time.now += 500_000_000
    meter.clock.mark(Phase.FORWARD)
    time.now += 1_500_000_000
    meter.clock.mark(Phase.OTHER)
    meter.samples += 8
    fields, _ = meter.read()
    assert fields["samples_per_second"] == 4.0
    assert fields["tokens_per_second"] == 64.0
    assert fields["data_wait"] == 0.25
    assert fields["memory_bytes"] > 10 * 2**20
    assert "mfu" not in fields, "the peak FLOPs of a CPU are unknown"


def test_utilisation_is_used_flops_over_available_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cloudtrain_runtime.metrics.meter.device_peak_flops", lambda device, precision: 1e6
    )
    time = ManualTime(monkeypatch)
    task = Perceptron()
    meter = Meter(task, meta_copy(task.model()), "fp32", replace(read_context({}), world_size=2))
    batch = (torch.zeros(8, 8), torch.zeros(8, dtype=torch.long))
    assert meter.wants_batch
    meter.clock.begin()
    meter.count_batch_flops(batch, samples=8)
    assert not meter.wants_batch
    time.now += 77_000_000_000  # the time of counting FLOPs is excluded
    meter.clock.mark(Phase.FORWARD)
    time.now += 1_000_000_000
    meter.samples += 100
    per_sample = (2 * 8 * 8 * 32 * 2 + 2 * 8 * 32 * 4 * 3) / 8
    assert meter.read()[0]["mfu"] == pytest.approx(100 * per_sample / 2e6)
    task.flops_per_sample = 5.0
    stated = Meter(task, meta_copy(task.model()), "fp32", read_context({}))
    stated.clock.begin()
    time.now += 1_000_000_000
    stated.samples += 100
    assert stated.read()[0]["mfu"] == pytest.approx(500 / 1e6)


def test_memory_is_the_peak_and_not_the_present_use() -> None:
    before = peak_memory_bytes(CPU)
    # Exceeds the peak of all earlier tests in this process by 64 MiB.
    size = before - psutil.Process().memory_info().rss + 2**26
    big = torch.ones(size, dtype=torch.uint8)
    del big
    assert peak_memory_bytes(CPU) >= before + 2**25


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(each.step, each.value) for each in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from tensorboard's imports
def test_tensorboard_reads_the_curves_of_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board = TensorBoardWriter(tmp_path / "board", first_step=0)
    for step in (1, 10, 20):
        board.on_event({"event": "step", "step": step, "loss": 1.0 / step, "split": {"data": 0.5}})
    board.on_event({"event": "evaluation", "step": 10, "split": "validation", "loss": 0.25})
    board.on_event({"event": "checkpoint", "step": 10})
    board.on_event({"event": "finished", "step": 20})
    again = TensorBoardWriter(tmp_path / "board", first_step=10)  # killed after 20, resumed from 10
    again.on_event({"event": "step", "step": 20, "loss": 0.125})
    again.on_event({"event": "finished", "step": 20})
    assert curves(tmp_path / "board") == {
        "train/loss": [(1, 1.0), (10, pytest.approx(0.1)), (20, 0.125)],
        "train/data_seconds": [(1, 0.5), (10, 0.5)],
        "validation/loss": [(10, 0.25)],
    }


def test_a_missing_tensorboard_is_an_error_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JobError, match=r"add tensorboard to code\.requirements"):
        TensorBoardWriter(tmp_path, first_step=0)


def test_tensorboard_is_imported_only_on_request() -> None:
    program = """
        import sys
        import cloudtrain_runtime.training.trainer, cloudtrain_runtime.metrics.meter
        import cloudtrain_runtime.metrics.tracking.tensorboard
        import cloudtrain_runtime.metrics.profiler
        print([name for name in sys.modules if name.partition(".")[0] in ("tensorboard", "tensorflow")])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
