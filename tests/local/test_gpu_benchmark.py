"""The GPU benchmark: its trial on a CPU, and what it does without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_figures
import jsonschema
import pytest
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
