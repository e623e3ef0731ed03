"""A short series of killed and resumed runs, with the benchmark script that runs long series."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.sizes import tries

KILLS = tries(3)
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"


@pytest.mark.processes
@pytest.mark.parametrize(("store", "strategy", "seed"), [("folder", "fsdp", 3), ("s3", "ddp", 4)])
def test_runs_that_are_killed_repeatedly_lose_nothing(store: str, strategy: str, seed: int) -> None:
    if strategy == "fsdp" and torch.__version__ < "2.6":
        pytest.skip("torch.distributed.fsdp has fully_shard from torch 2.6 on")
    command = [
        sys.executable,
        str(SCRIPT),
        "--kills",
        str(KILLS),
        "--store",
        store,
        "--strategy",
        strategy,
        "--seed",
        str(seed),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"{KILLS} kills" in done.stdout
