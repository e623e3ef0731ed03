"""The GPU benchmark: its trial on a CPU, and what it does without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoints
import gpu
import gpu_figures
import jsonschema
import pytest
from measure import Peer
from support.jobs import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environ, timeout=500
    )


def test_without_a_gpu_it_exits_with_one_line() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "torch finds no CUDA device" in done.stderr


@pytest.mark.processes
def test_cpu_trial_measures_every_part(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    sizes = ["--gigabytes", "1.5", "--rounds", "2"]
    done = run("--cpu-trial", "--peers", "hand,cloudtrain,torchtitan", *sizes, "--write", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    jsonschema.validate(json.loads(path.read_text()), gpu_figures.SCHEMA)
    results = gpu_figures.load(path)
    found = {(each.name, each.peer): each.value for each in results.figures}
    names = {name for name, _ in found}
    assert {name.partition(": ")[2] for name in names if name.startswith("GPT: ")} == {
        "throughput",
        "peak memory",
        "start to the end of the first step",
        "share of a step that waits for data",
    }
    assert {peer for name, peer in found if name == "GPT: throughput"} == {
        "cloudtrain",
        "plain PyTorch loop",
    }
    assert {"data pipeline at full speed", "checkpoint of 1.5 GB: stall of training"} < names
    assert found["checkpoint of 1.5 GB: throughput to complete", "cloudtrain"] > 0
    assert results.machine["gpu"] == "none (CPU)"
    assert "torchtitan is not installed" in str(results.machine["left_out"])
    assert "MFU: the peak FLOP/s of none (CPU) is unknown" in str(results.machine["left_out"])
    assert results.versions["torchtitan"] == "not installed"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "Traceback (most recent call last):\n  File x\nKeyError: 'a'\n====\nroot cause: rank 0\n=====",
            "KeyError: 'a'",
        ),
        (
            "[rank0]: torch.OutOfMemoryError: CUDA out of memory\n========",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        ("stall failed or took too long:\n-----\n", "stall failed or took too long:"),
        ("=====", "no reason was given"),
        ("lightning is not installed", "lightning is not installed"),
    ],
)
def test_reason_of_a_gap_is_readable(output: str, reason: str) -> None:
    assert gpu.short_reason(output) == reason


def test_a_peer_that_fails_costs_its_own_figure_only() -> None:
    def fail() -> float:
        raise KeyError("stager")

    peers = [Peer("own", lambda: 1.0), Peer("broken", fail), Peer("other", lambda: 2.0)]
    found, failed = checkpoints.alternate_working(peers, 3, always=("own",))
    assert {each.name: each.values() for each in found} == {"own": [1.0] * 3, "other": [2.0] * 3}
    assert [(each.name, each.reason) for each in failed] == [("broken", "KeyError: 'stager'")]
    with pytest.raises(KeyError):
        checkpoints.alternate_working(peers, 3, always=("broken",))


def test_two_programs_with_turns_come_before_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.time, "monotonic", lambda: 0.0)
    assert gpu.why_not("hand", 60, started=0, longest_start=0.0) == ""
    assert gpu.why_not("cloudtrain", 60, started=1, longest_start=40.0) == ""
    assert "3 turns of every program" in gpu.why_not("hand", 60, started=2, longest_start=40.0)
    assert gpu.why_not("hand", 300, started=2, longest_start=40.0) == ""
    assert (
        gpu.why_not("cloudtrain", 0, started=1, longest_start=40.0) == "no time left in the budget"
    )
