"""The GPU tests themselves: skipped loudly without a GPU, and runnable without any other configuration or package."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gpu_figures
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


def run_day(out: Path, *arguments: str, trial: str = "cpu") -> subprocess.CompletedProcess[str]:
    """Run the command for a machine with a GPU, without one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CLOUDTRAIN_")}
    environ = {**kept, "CUDA_VISIBLE_DEVICES": "", "CLOUDTRAIN_GPU_TRIAL": trial}
    command = [sys.executable, str(GPU_TESTS / "gpu_day.py"), "--out", str(out), *arguments]
    return subprocess.run(
        command, env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


def results_of(out: Path) -> dict[str, Any]:
    path = out / "gpu-none-cpu.json"
    gpu_figures.load(path)  # refuses what is no results file
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def test_gpu_day_without_a_gpu_exits_with_one_line(tmp_path: Path) -> None:
    done = run_day(tmp_path / "out", trial="")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "PyTorch sees none" in done.stderr
    assert not (tmp_path / "out").exists()


def test_gpu_day_names_what_time_did_not_suffice_for(tmp_path: Path) -> None:
    done = run_day(tmp_path, "--minutes", "0", "--parts", "tests,trials")
    assert done.returncode == 0, done.stderr
    left_out = results_of(tmp_path)["machine"]["left_out"]
    assert "GPU tests: no time left" in left_out
    assert "trial digits: no time left" in left_out
    assert "trial out_of_memory: needs a GPU" in left_out


def test_gpu_day_writes_the_outcome_of_each_trial(tmp_path: Path) -> None:
    done = run_day(tmp_path, "--parts", "trials", "--trials", "list,first-contact")
    assert done.returncode == 0, done.stdout + done.stderr
    results = results_of(tmp_path)
    assert {each["name"]: each["outcome"] for each in results["tests"]} == {
        "trial::list": "passed",
        "trial::first-contact": "passed",
    }
    assert results["machine"]["left_out"] == "nothing"
    assert "SUCCEEDED" in (tmp_path / "logs" / "first-contact.log").read_text()


def product_trials() -> ModuleType:
    spec = importlib.util.spec_from_file_location("product_trials", GPU_TESTS / "product_trials.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        ({"code": 3}, "exit code 0 instead of 3"),
        ({"shows": ("SUCCEEDED",)}, "no 'SUCCEEDED' in the output"),
        ({"explained": "memory"}, "explain does not mention 'memory'"),
        ({"explained": "Halve", "never_advised": "train.batch_size"}, "explain advises"),
    ],
)
def test_a_trial_with_another_result_fails(
    tmp_path: Path, expected: dict[str, Any], problem: str
) -> None:
    program = tmp_path / "cloudtrain.py"
    program.write_text("print('Halve train.batch_size')")
    trials = product_trials()
    trial = trials.Trial("any", ("submit",), **expected)
    result = trials.run_trial(trial, [sys.executable, str(program)], dict(os.environ), tmp_path)
    assert result.outcome == "failed"
    assert problem in (tmp_path / "any.log").read_text()


def test_jobs_of_the_trials_exist() -> None:
    trials = product_trials()
    jobs = {
        Path(each) for trial in trials.TRIALS for each in trial.command if each.endswith(".yaml")
    }
    assert [job for job in jobs if not job.is_file()] == []
    assert {job.parent for job in (GPU_TESTS / "trials").glob("*/job.yaml")} <= {
        job.parent for job in jobs
    }
