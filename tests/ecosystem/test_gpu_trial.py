"""All GPU tests on the CPU, but for those that measure a GPU."""

import os
import re
import subprocess
import sys

import pytest
from support.jobs import REPOSITORY


@pytest.mark.timeout(1800)
def test_gpu_tests_pass_on_the_cpu() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CLOUDTRAIN_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(REPOSITORY / "tests" / "gpu" / "pytest.ini"), "tests/gpu"],
        env={**kept, "CLOUDTRAIN_GPU_TRIAL": "cpu"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 20
