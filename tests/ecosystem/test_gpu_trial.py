"""A part of the GPU tests on the CPU; `make test-gpu-trial` runs all of them."""

import os
import re
import subprocess
import sys

import pytest
from support.jobs import REPOSITORY

PARTS = tuple(f"tests/gpu/test_{part}.py" for part in ("options", "precision"))


@pytest.mark.timeout(1800)
def test_gpu_tests_pass_on_the_cpu() -> None:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CLOUDTRAIN_", "PYTEST_"))
    }
    configuration = str(REPOSITORY / "tests" / "gpu" / "pytest.ini")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", configuration, *PARTS, "--numprocesses", "3"],
        env={**kept, "CLOUDTRAIN_GPU_TRIAL": "cpu"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 8
