"""The GPU tests themselves: skipped loudly without a GPU, and runnable without any other configuration or package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.jobs import REPOSITORY

GPU_TESTS = REPOSITORY / "tests" / "gpu"


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the GPU tests without a GPU."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CLOUDTRAIN_", "PYTEST_"))
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(GPU_TESTS / "pytest.ini"), *arguments],
        env={**kept, "CUDA_VISIBLE_DEVICES": "", **environ},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_gpu_all_are_skipped_loudly(tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    figures.mkdir()
    done = run(str(GPU_TESTS), "--figures", str(figures))
    assert done.returncode == 0, done.stdout
    assert "NO GPU: nothing has been tested on a GPU" in done.stdout
    assert " passed" not in done.stdout
    assert "PyTorch sees no CUDA GPU on this machine" in done.stdout
    assert list(figures.iterdir()) == []


@pytest.mark.skipif(
    torch.__version__ < "2.6", reason="the test on trial shards weights, from torch 2.6 on"
)
def test_a_trial_on_the_cpu_runs_a_test_and_says_so() -> None:
    test = f"{GPU_TESTS / 'test_layouts.py'}::test_shards_of_one_rank[True]"
    done = run(test, CLOUDTRAIN_GPU_TRIAL="cpu")
    assert done.returncode == 0, done.stdout
    assert "TRIAL ON THE CPU: 1 tests passed, and none of them on a GPU" in done.stdout
