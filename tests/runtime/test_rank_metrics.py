"""Metrics of several ranks: bandwidth, stragglers and profiles."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import measurements

from cloudtrain_runtime.contract import parse_event
from cloudtrain_runtime.metrics.bandwidth import bandwidth_warning, bus_bandwidth
from cloudtrain_runtime.metrics.profiler import StepProfiler
from cloudtrain_runtime.metrics.step_timer import (
    STEP_PARTS,
    StepClock,
    StepTimes,
)
from cloudtrain_runtime.metrics.stragglers import (
    CPU_DELAY_SECONDS,
    NUMBERS_PER_RANK,
    OWN_PARTS,
    Straggler,
    StragglerMonitor,
)
from cloudtrain_runtime.process.run_context import read_context

CPU = torch.device("cpu")


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_measure_one_bandwidth(world_size: int, tmp_path: Path) -> None:
    results, text = measurements.start(measurements.bandwidth, world_size, tmp_path)
    assert len({tuple(result) for result in results}) == 1, "all ranks have the same result"
    size, seconds, gbps = results[0]
    assert gbps == pytest.approx(2 * (world_size - 1) / world_size * size / seconds * 8 / 1e9)
    events = [event for line in text.splitlines() if (event := parse_event(line)) is not None]
    assert [event["event"] for event in events] == ["bandwidth", "bandwidth"]
    for event in events:
        expected = 2 * (world_size - 1) / world_size * event["bytes"] / event["seconds"] * 8 / 1e9
        assert event["gbps"] == pytest.approx(expected, rel=1e-4)
    assert events[1]["hosts"] == world_size // 2
    assert events[1]["rated_gbps"] == (None if world_size == 2 else 1e9)
    assert events[1]["warning"] is None, "there is no warning for Gloo"


def test_a_network_far_below_its_rating_gives_a_warning() -> None:
    assert bus_bandwidth(10**9, 1.0, 2) == pytest.approx(8.0)
    assert bus_bandwidth(10**9, 1.0, 8) == pytest.approx(14.0)
    assert bandwidth_warning(330.0, 400.0, "nccl") is None
    assert bandwidth_warning(30.0, None, "nccl") is None
    warning = bandwidth_warning(30.0, 400.0, "nccl")
    assert warning is not None
    assert "30 Gbit/s" in warning
    assert "EFA is not active?" in warning


def test_a_slow_rank_is_reported_once_and_at_its_end() -> None:
    hosts = ("algo-1", "algo-2")
    own = replace(read_context({}), world_size=4, local_world_size=2, hosts=hosts)
    ranks = [StragglerMonitor(replace(own, rank=rank)) for rank in range(4)]
    reported: list[tuple[int, Straggler]] = []
    for reading in range(16):
        # Rank 2 has slow data from the 3rd to the 8th reading, and all ranks wait for it in the backward pass.
        data = [0.05 if rank == 2 and 3 <= reading <= 8 else 0.002 for rank in range(4)]
        others = {"forward": 0.01, "backward": 0.06, "optimizer": 0.001}
        splits = [{"data": seconds, **others} if reading else {} for seconds in data]
        rows = [
            rank.numbers(StepTimes(1, 0.2, split))
            for rank, split in zip(ranks, splits, strict=True)
        ]
        assert all(len(row) == NUMBERS_PER_RANK for row in rows)
        changes = [rank.compare(rows) for rank in ranks]
        assert all(change == changes[0] for change in changes), "all ranks have the same result"
        reported += [(reading, change) for change in changes[0]]
    (first, slow), (last, over) = reported
    assert first == 5, "after three slow readings in a row"
    assert (slow.rank, slow.host, slow.part, slow.is_over) == (2, "algo-2", "data", False)
    assert slow.ratio == pytest.approx(61 / 13)
    assert last == 11
    assert (over.rank, over.is_over) == (2, True)


@pytest.mark.processes
def test_a_run_reports_times_stragglers_and_a_profile(tmp_path: Path) -> None:
    """One of 3 ranks loads its data slowly. Two of the 12 steps are profiled."""
    _, text = measurements.start(measurements.uneven_run, 3, tmp_path)
    events = [event for line in text.splitlines() if (event := parse_event(line)) is not None]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 13))
    for step in steps:
        assert set(step["split"]) == set(STEP_PARTS)
        assert step["tokens_per_second"] == pytest.approx(4 * step["samples_per_second"], rel=1e-4)
        assert step["data_wait"] == pytest.approx(
            step["split"]["data"] / sum(step["split"].values()), rel=1e-3
        )
        assert step["memory_bytes"] > 2**20
    # Rank 0 waits for the slow rank 2 in its backward pass.
    assert sum(step["split"]["backward"] for step in steps) > 12 * 0.05
    stragglers = [event for event in events if event["event"] == "straggler"]
    assert [(event["rank"], event["host"], event["part"]) for event in stragglers] == [
        (2, "algo-2", "data")
    ]
    (profile,) = [event for event in events if event["event"] == "profile"]
    assert (profile["first_step"], profile["last_step"]) == (5, 6)
    traces = sorted((tmp_path / "data" / "profile").iterdir())
    assert len(traces) == 3
    for trace in traces:
        assert steps_in(trace_of(trace)) == ["ProfilerStep#5", "ProfilerStep#6"]


def test_readings_at_short_intervals_are_skipped() -> None:
    ranks = [
        StragglerMonitor(replace(read_context({}), rank=rank, world_size=2)) for rank in range(2)
    ]
    reported = []
    for number in range(1, 101):
        # The ranks measure different times, and must still skip the same readings.
        splits = [dict.fromkeys(OWN_PARTS, 0.0001 + 0.01 * rank) for rank in range(2)]
        readings = [StepTimes(10, 0.004 + 0.001 * rank, split) for rank, split in enumerate(splits)]
        rows = [rank.numbers(reading) for rank, reading in zip(ranks, readings, strict=True)]
        found = [rank.compare(rows) for rank in ranks]
        assert found[0] == found[1]
        reported += [number] if found[0] else []
    assert reported == [60], "three comparisons, one per 100 ms of the slower rank's time"


def rows(*seconds: float, stages: tuple[int, ...] | None = None) -> list[list[float]]:
    return [
        [0.0, own, 0.0, 1.0, float(stages[rank] if stages else 0)]
        for rank, own in enumerate(seconds)
    ]


def test_a_straggler_is_slow_in_consecutive_readings() -> None:
    def changes(
        readings: list[list[list[float]]], ranks: int
    ) -> list[tuple[int, float, str, bool]]:
        monitor = StragglerMonitor(replace(read_context({}), world_size=ranks))
        found = [change for reading in readings for change in monitor.compare(reading)]
        return [(change.rank, change.ratio, change.part, change.is_over) for change in found]

    slow = rows(0.010, 0.010, 0.013)
    assert changes([slow] * 2, 3) == []
    assert changes([slow] * 9, 3) == [(2, pytest.approx(1.3), "forward", False)]
    assert changes([slow, slow, rows(0.01, 0.01, 0.01), slow, slow], 3) == [], "not in a row"
    assert changes([rows(0.010, 0.010, 0.0115)] * 9, 3) == [], "less than 20 %"
    assert changes([rows(0.0010, 0.0010, 0.0015)] * 9, 3) == [], "less than a millisecond"
    assert changes([rows(0.010, 0.016)] * 3, 2) == [(1, pytest.approx(1.6), "forward", False)]
    assert changes([rows(0.010, 0.020, 0.010, 0.020, stages=(0, 1, 0, 1))] * 9, 4) == [], (
        "stages are not compared"
    )
    assert changes([rows(0.010, 0.0, 0.010)] * 9, 3) == [], "one rank has no reading yet"


def test_ranks_that_share_cores_are_no_stragglers() -> None:
    monitor = StragglerMonitor(replace(read_context({}), world_size=2), 0, CPU_DELAY_SECONDS)
    assert [monitor.compare(rows(0.010, 0.050)) for _ in range(9)] == [[]] * 9
    found = [change for _ in range(9) for change in monitor.compare(rows(0.010, 0.070))]
    assert [(change.rank, change.part) for change in found] == [(1, "forward")]


def trace_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def steps_in(events: list[dict[str, Any]]) -> list[str]:
    return sorted(
        {event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep")}
    )


@pytest.mark.processes
def test_every_rank_writes_a_trace_of_the_profiled_steps(tmp_path: Path) -> None:
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
    assert "Self CPU" in text


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (range(1, 9), [1, 2]),
        (range(2, 9), [2]),  # resumed within the profile: its remaining steps
        (range(1, 2), [1]),  # ended within the profile
        (range(3, 9), []),  # resumed after the profile
    ],
)
def test_a_profile_of_an_interrupted_run_has_its_steps(
    steps: range, expected: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    context = replace(read_context({}), output_dir=tmp_path)
    profiler = StepProfiler(context, StepClock(CPU), at=1, steps=2)
    for step in steps:
        profiler.on_step(step)
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    profiler.close()
    traces = list(tmp_path.glob("profile/*"))
    assert len(traces) == bool(expected)
    for trace in traces:
        assert steps_in(trace_of(trace)) == [f"ProfilerStep#{step}" for step in expected]
        lines = capfd.readouterr().out.splitlines()
        (event,) = [event for line in lines if (event := parse_event(line)) is not None]
        assert (event["first_step"], event["last_step"]) == (expected[0], expected[-1])
        assert any("aten::mm" in line for line in lines), "the operators with their own times"
