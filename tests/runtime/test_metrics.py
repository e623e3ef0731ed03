"""Metrics of a run: step timer, FLOPs, memory, bandwidth, stragglers, TensorBoard and profiles."""

import gzip
import json
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
from support import measurements
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from cloudtrain_runtime.contract import parse_event
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.metrics import Meter
from cloudtrain_runtime.metrics.bandwidth import bandwidth_warning, bus_factor
from cloudtrain_runtime.metrics.flops import count_flops, meta_copy, peak_flops
from cloudtrain_runtime.metrics.memory import peak_memory_bytes
from cloudtrain_runtime.metrics.profiler import StepProfiler, operator_lines
from cloudtrain_runtime.metrics.step_timer import (
    STEP_PARTS,
    Phase,
    StepClock,
    StepTimes,
)
from cloudtrain_runtime.metrics.stragglers import (
    NUMBERS_PER_RANK,
    OWN_PARTS,
    Straggler,
    StragglerDetector,
    StragglerMonitor,
)
from cloudtrain_runtime.metrics.tensorboard import TensorBoardWriter
from cloudtrain_runtime.process.run_context import read_context
from cloudtrain_runtime.task import Task

CPU = torch.device("cpu")


class Perceptron(Task):
    """Two layers, dropout, batch norm; `looks` has its loss look at values, as some do."""

    tokens_per_sample = 16

    def __init__(self, *, looks: bool = False) -> None:
        self.looks = looks

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 4))

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"train": TensorDataset(torch.randn(8, 8), torch.zeros(8, dtype=torch.long))}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        random.random()  # noqa: S311 (an augmentation)
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * 2 if self.looks and loss > 1 else loss


class Clockwork:
    """A clock that a test moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000
        monkeypatch.setattr("cloudtrain_runtime.metrics.step_timer.perf_counter_ns", lambda: self.now)


def test_the_parts_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    works = Clockwork(monkeypatch)
    clock = StepClock(CPU)
    for _ in range(4):
        clock.begin()
        works.now += 30_000_000
        for micro_step in range(2):
            if micro_step:
                clock.mark(Phase.DATA)
                works.now += 10_000_000
            clock.mark(Phase.FORWARD)
            works.now += 20_000_000
            clock.mark(Phase.BACKWARD)
            works.now += 40_000_000
        clock.mark(Phase.OPTIMIZER)
        works.now += 10_000_000
        clock.mark(Phase.LOG)
        works.now += 1_000_000
        clock.mark(Phase.CHECKPOINT)
        works.now += 30_000_000
        clock.mark(Phase.OTHER)
        works.now += 5_000_000_000
    reading = clock.read()
    assert reading.steps == 4
    assert reading.split == pytest.approx(
        {"data": 0.04, "forward": 0.04, "backward": 0.08, "optimizer": 0.01, "checkpoint": 0.03}
    )
    assert list(reading.split) == list(STEP_PARTS)
    assert reading.data_wait == pytest.approx(0.2)
    assert reading.seconds == pytest.approx(4 * 0.201), "without evaluations"
    clock.begin()
    works.now += 7_000_000
    assert clock.read().split["data"] == pytest.approx(0.007), "each reading counts anew"


def test_a_clock_without_steps_tells_no_parts() -> None:
    reading = StepClock(CPU).read()
    assert (reading.steps, reading.split, reading.data_wait) == (0, {}, None)


class DeviceEvent:
    """Stands in for an event of a GPU, which this machine need not have: passed when the test says so."""

    now_milliseconds = 0.0
    is_busy = True

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:  # noqa: ARG002 (the signature of torch)
        self.at = DeviceEvent.now_milliseconds

    def query(self) -> bool:
        return not DeviceEvent.is_busy

    def elapsed_time(self, other: "DeviceEvent") -> float:
        assert not DeviceEvent.is_busy, "this would wait"
        return other.at - self.at


def test_gpu_step_time_is_read_after_the_device_passed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    works = Clockwork(monkeypatch)
    clock = StepClock(torch.device("cuda"))

    def step(milliseconds: float, *, is_logged: bool) -> None:
        clock.begin(is_logged=is_logged)
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            DeviceEvent.now_milliseconds += milliseconds
            clock.mark(phase)
        DeviceEvent.now_milliseconds += milliseconds
        clock.mark(Phase.LOG)

    step(99.0, is_logged=False)
    step(5.0, is_logged=True)
    works.now += 2_000_000
    clock.mark(Phase.CHECKPOINT)
    works.now += 8_000_000
    assert clock.read().split == {}, "the device is not there yet"
    DeviceEvent.is_busy = False
    step(99.0, is_logged=False)
    works.now += 3_000_000
    clock.mark(Phase.CHECKPOINT)
    works.now += 4_000_000
    split = clock.read().split
    assert split == pytest.approx(
        {"data": 0.010, "forward": 0.010, "backward": 0.010, "optimizer": 0.005, "checkpoint": 0.004}
    )


def test_step_time_excludes_what_is_not_training(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert {name: split[name] for name in ("data", "forward", "backward", "optimizer")} == pytest.approx(
        {"data": 0.002, "forward": 0.040, "backward": 0.080, "optimizer": 0.010}
    )


def test_flops_are_counted_without_touching_anything() -> None:
    task = Perceptron()
    model = task.model()
    batch = (torch.randn(8, 8), torch.zeros(8, dtype=torch.long))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    shape = meta_copy(model)
    assert all(tensor.is_meta for tensor in [*shape.parameters(), *shape.buffers()])
    # Forward 2mnk a product; backward the same for weights, and for inputs but the first layer's.
    expected = 2 * 8 * 8 * 32 * 2 + 2 * 8 * 32 * 4 * 3
    assert count_flops(task, shape, batch) == expected
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_loss_that_looks_at_values_is_not_counted() -> None:
    task = Perceptron(looks=True)
    assert count_flops(task, meta_copy(task.model()), next(iter([(torch.randn(8, 8), torch.zeros(8).long())]))) is None


def test_shared_weights_stay_shared() -> None:
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
def test_peaks_are_dense_and_by_name(name: str, precision: str, tf32: bool, tera: float | None) -> None:
    assert peak_flops(name, precision, uses_tf32=tf32) == (None if tera is None else tera * 1e12)


def test_a_meter_tells_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    works = Clockwork(monkeypatch)
    context = read_context({})
    task = Perceptron()
    meter = Meter(task, meta_copy(task.model()), "fp32", context)
    assert not meter.wants_batch
    meter.clock.begin()
    works.now += 500_000_000
    meter.clock.mark(Phase.FORWARD)
    works.now += 1_500_000_000
    meter.clock.mark(Phase.OTHER)
    meter.samples += 8
    fields, _ = meter.read()
    assert fields["samples_per_second"] == 4.0
    assert fields["tokens_per_second"] == 64.0
    assert fields["data_wait"] == 0.25
    assert fields["memory_bytes"] > 10 * 2**20
    assert "mfu" not in fields, "nobody knows what a CPU could do"


def test_utilisation_is_used_flops_over_available_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain_runtime.metrics.device_peak_flops", lambda device, precision: 1e6)
    works = Clockwork(monkeypatch)
    task = Perceptron()
    meter = Meter(task, meta_copy(task.model()), "fp32", replace(read_context({}), world_size=2))
    batch = (torch.zeros(8, 8), torch.zeros(8, dtype=torch.long))
    assert meter.wants_batch
    meter.clock.begin()
    meter.count_batch_flops(batch, samples=8)
    assert not meter.wants_batch
    works.now += 77_000_000_000  # counting is no training
    meter.clock.mark(Phase.FORWARD)
    works.now += 1_000_000_000
    meter.samples += 100
    per_sample = (2 * 8 * 8 * 32 * 2 + 2 * 8 * 32 * 4 * 3) / 8
    assert meter.read()[0]["mfu"] == pytest.approx(100 * per_sample / 2e6)
    task.flops_per_sample = 5.0
    told = Meter(task, meta_copy(task.model()), "fp32", read_context({}))
    told.clock.begin()
    works.now += 1_000_000_000
    told.samples += 100
    assert told.read()[0]["mfu"] == pytest.approx(500 / 1e6)


def test_memory_is_what_was_most() -> None:
    before = peak_memory_bytes(CPU)
    # So much that the peak of all earlier tests in this process is exceeded by 64 MiB.
    size = before - psutil.Process().memory_info().rss + 2**26
    big = torch.ones(size, dtype=torch.uint8)
    del big
    assert peak_memory_bytes(CPU) >= before + 2**25


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_measure_one_bandwidth(world_size: int, tmp_path: Path) -> None:
    results, text = measurements.start(measurements.bandwidth, world_size, tmp_path)
    assert len({tuple(result[:3]) for result in results}) == 1, "all ranks know the same"
    size, seconds, gbps, _ = results[0]
    assert gbps == pytest.approx(2 * (world_size - 1) / world_size * size / seconds * 8 / 1e9)
    events = [event for line in text.splitlines() if (event := parse_event(line)) is not None]
    assert [event["event"] for event in events] == ["bandwidth", "bandwidth"]
    assert events[1]["hosts"] == world_size // 2
    assert events[1]["rated_gbps"] == (None if world_size == 2 else 1e9)
    assert events[1]["warning"] is None, "Gloo is not judged"


def test_a_network_far_below_its_rating_is_told() -> None:
    assert bus_factor(2) == 1.0
    assert bus_factor(8) == 1.75
    assert bandwidth_warning(330.0, 400.0, "nccl") is None
    assert bandwidth_warning(30.0, None, "nccl") is None
    warning = bandwidth_warning(30.0, 400.0, "nccl")
    assert warning is not None
    assert "30 Gbit/s" in warning
    assert "EFA is not active?" in warning


def test_a_slow_rank_is_told_once_and_when_it_is_over() -> None:
    hosts = ("algo-1", "algo-2")
    places = [replace(read_context({}), rank=rank, world_size=4, local_world_size=2, hosts=hosts) for rank in range(4)]
    ranks = [StragglerMonitor(context) for context in places]
    told: list[tuple[int, Straggler]] = []
    for at in range(16):
        # Rank 2 has slow data from the 3rd to the 8th reading, and everybody waits for it in the backward pass.
        data = [0.05 if rank == 2 and 3 <= at <= 8 else 0.002 for rank in range(4)]
        splits = [{"data": own, "forward": 0.01, "backward": 0.06, "optimizer": 0.001} if at else {} for own in data]
        rows = [rank.numbers(StepTimes(1, 0.2, split)) for rank, split in zip(ranks, splits, strict=True)]
        assert all(len(row) == NUMBERS_PER_RANK for row in rows)
        changes = [rank.compare(rows) for rank in ranks]
        assert all(change == changes[0] for change in changes), "all ranks know the same"
        told += [(at, change) for change in changes[0]]
    (first, slow), (last, over) = told
    assert first == 5, "three in a row"
    assert (slow.rank, slow.host, slow.part, slow.is_over) == (2, "algo-2", "data", False)
    assert slow.ratio == pytest.approx(61 / 13)
    assert last == 11
    assert (over.rank, over.is_over) == (2, True)


@pytest.mark.processes
def test_a_run_tells_what_it_sees(tmp_path: Path) -> None:
    """3 ranks, of which one loads its data slowly; two of the 12 steps are recorded."""
    _, text = measurements.start(measurements.uneven_run, 3, tmp_path)
    events = [event for line in text.splitlines() if (event := parse_event(line)) is not None]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 13))
    for step in steps:
        assert set(step["split"]) == set(STEP_PARTS)
        assert step["tokens_per_second"] == pytest.approx(4 * step["samples_per_second"], rel=1e-4)
        assert step["data_wait"] == pytest.approx(step["split"]["data"] / sum(step["split"].values()), rel=1e-3)
        assert step["memory_bytes"] > 2**20
    # Rank 0 waits for the slow one in its backward pass, rank 2 for nobody.
    assert sum(step["split"]["backward"] for step in steps) > 12 * 0.05
    told = [event for event in events if event["event"] == "straggler"]
    assert [(event["rank"], event["host"], event["part"]) for event in told] == [(2, "algo-2", "data")]
    (profile,) = [event for event in events if event["event"] == "profile"]
    assert (profile["first_step"], profile["last_step"]) == (5, 6)
    traces = sorted((tmp_path / "data" / "profile").iterdir())
    assert len(traces) == 3
    for trace in traces:
        assert steps_in(trace_of(trace)) == ["ProfilerStep#5", "ProfilerStep#6"]


def test_readings_that_follow_each_other_fast_are_passed_over() -> None:
    ranks = [StragglerMonitor(replace(read_context({}), rank=rank, world_size=2)) for rank in range(2)]
    for _ in range(100):
        # Their own clocks differ, and so would their choices.
        readings = [StepTimes(10, 0.004 + 0.001 * rank, dict.fromkeys(OWN_PARTS, 0.0001)) for rank in range(2)]
        rows = [rank.numbers(reading) for rank, reading in zip(ranks, readings, strict=True)]
        assert ranks[0].compare(rows) == ranks[1].compare(rows)
    assert [rank.compared for rank in ranks] == [5, 5], "one in as long as the slower rank takes for 100 ms"


def rows(*seconds: float, stages: tuple[int, ...] | None = None) -> list[list[float]]:
    return [[0.0, own, 0.0, float(stages[rank] if stages else 0)] for rank, own in enumerate(seconds)]


def test_who_counts_as_slow() -> None:
    def told(readings: list[list[list[float]]], ranks: int) -> list[tuple[int, float, str, bool]]:
        detector = StragglerDetector(ranks)
        return [change for reading in readings for change in detector.changes(reading)]

    slow = rows(0.010, 0.010, 0.013)
    assert told([slow] * 2, 3) == []
    assert told([slow] * 9, 3) == [(2, pytest.approx(1.3), "forward", False)]
    assert told([slow, slow, rows(0.01, 0.01, 0.01), slow, slow], 3) == [], "not in a row"
    assert told([rows(0.010, 0.010, 0.0115)] * 9, 3) == [], "less than 20 %"
    assert told([rows(0.0010, 0.0010, 0.0015)] * 9, 3) == [], "less than a millisecond"
    assert told([rows(0.010, 0.016)] * 3, 2) == [(1, pytest.approx(1.6), "forward", False)]
    assert told([rows(0.010, 0.020, 0.010, 0.020, stages=(0, 1, 0, 1))] * 9, 4) == [], "stages have other layers"
    assert told([rows(0.010, 0.0, 0.010)] * 9, 3) == [], "one has no reading yet"


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own imports
def test_curves_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board = TensorBoardWriter(tmp_path / "board", first_step=0)
    for step in (1, 10, 20):
        board.step(step, {"loss": 1.0 / step, "epoch": 0, "split": {"data": 0.5}, "device": "cpu", "lr": None})
    board.evaluation("validation", 10, {"loss": 0.25})
    board.close()
    again = TensorBoardWriter(tmp_path / "board", first_step=10)  # killed after 20, resumed from 10
    again.step(20, {"loss": 0.125})
    again.close()
    assert curves(tmp_path / "board") == {
        "train/loss": [(1, 1.0), (10, pytest.approx(0.1)), (20, 0.125)],
        "split/data": [(1, 0.5), (10, 0.5)],
        "validation/loss": [(10, 0.25)],
    }


def test_a_missing_tensorboard_is_the_jobs_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JobError, match=r"add tensorboard to code\.requirements"):
        TensorBoardWriter(tmp_path, first_step=0)


def test_nothing_of_it_is_imported_without_being_asked() -> None:
    program = """
        import sys
        import cloudtrain_runtime.training.trainer, cloudtrain_runtime.metrics, cloudtrain_runtime.metrics.tensorboard
        import cloudtrain_runtime.metrics.profiler
        print([name for name in sys.modules if name.partition(".")[0] in ("tensorboard", "tensorflow")])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def trace_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def steps_in(events: list[dict[str, Any]]) -> list[str]:
    return sorted({event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep")})


@pytest.mark.processes
def test_every_rank_leaves_a_trace_of_the_chosen_steps(tmp_path: Path) -> None:
    _, text = measurements.start(measurements.profiled_steps, 4, tmp_path)
    folder = tmp_path / "data" / "profile"
    names = [f"algo-{1 + rank // 2}-rank-{rank}.pt.trace.json.gz" for rank in range(4)]
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        events = trace_of(folder / name)
        assert steps_in(events) == ["ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"]
        assert sum(event.get("name") == "aten::mm" and event["ph"] == "X" for event in events) == 3
        assert any("all_reduce" in str(event.get("name")) for event in events)
    (event,) = [event for line in text.splitlines() if (event := parse_event(line)) is not None]
    assert event["uri"] == folder.as_uri()
    assert (event["first_step"], event["last_step"]) == (4, 6)
    assert "aten::mm" in text
    assert "share" in text


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (range(1, 9), [1, 2]),
        (range(2, 9), [2]),  # resumed in the middle: the rest
        (range(1, 2), [1]),  # ended in the middle
        (range(3, 9), []),  # resumed behind it
    ],
)
def test_a_profile_of_a_run_that_is_cut(
    steps: range, expected: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    context = replace(read_context({}), output_dir=tmp_path)
    profiling = StepProfiler(context, StepClock(CPU), at=1, steps=2)
    for step in steps:
        profiling.on_step(step)
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    profiling.close()
    traces = list(tmp_path.glob("profile/*"))
    assert len(traces) == bool(expected)
    for trace in traces:
        assert steps_in(trace_of(trace)) == [f"ProfilerStep#{step}" for step in expected]
        (event,) = [event for line in capfd.readouterr().out.splitlines() if (event := parse_event(line)) is not None]
        assert (event["first_step"], event["last_step"]) == (expected[0], expected[-1])


def test_operators_are_told_by_their_own_time() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as running:
        for _ in range(3):
            torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    head, first, *_ = operator_lines(running, on_device=False)
    assert head.endswith("on the CPU")
    assert first.split()[2:] == ["3", "aten::mm"] or "aten::fill_" in first
