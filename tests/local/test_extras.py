"""Without an optional package, a command exits 2 with the command that installs it, before anything starts."""

import os
import subprocess
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import REPOSITORY, Cli

TASK = """\
from torch import nn
from cloudtrain_runtime import Task

class Tiny(Task):
    def model(self): return nn.Linear(1, 1)
    def datasets(self): return {"train": [(0.0, 0.0)]}
    def loss(self, model, batch): return model(batch[0]).mean()
"""
JOB = """\
name: tiny
code: {task: "tiny:Tiny"}
cluster: {instance_type: ml.m5.xlarge, processes_per_instance: 1}
train: {steps: 1, batch_size: 1}
tracking: {tensorboard: true}
"""
ACCOUNT = {
    "CLOUDTRAIN_ROLE": "arn:aws:iam::123456789012:role/training",
    "CLOUDTRAIN_BUCKET": "bucket",
    "CLOUDTRAIN_REGION": "us-west-2",
    "CLOUDTRAIN_TRANSPORT": "estimator",  # without it, boto3 sends where the SDK is missing
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
}


def python_without(module: str, folder: Path) -> Path:
    """Return the interpreter of an environment that has every installed package but one."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name.partition("-")[0].partition(".")[0] != module:
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("torch", ["submit", "--local"], "local"),
        ("psutil", ["submit", "--local"], "local"),
        ("numpy", ["submit", "--local"], "local"),
        ("tensorboard", ["submit", "--local"], "tensorboard"),
        ("moto", ["submit", "--sandbox"], "sandbox"),
        ("flask", ["sandbox"], "sandbox"),
        ("numpy", ["submit", "--sandbox"], "sandbox"),
        ("sagemaker", ["submit", "--skip-check"], "sagemaker"),
    ],
)
def test_a_missing_extra_is_named(
    module: str, arguments: list[str], extra: str, job: Callable[..., Path], tmp_path: Path
) -> None:
    path = job(JOB, tiny_py=TASK)
    python = python_without(module, tmp_path / "environment")
    done = subprocess.run(
        [python, "-m", "cloudtrain", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=path.parent,
        env={**os.environ, **ACCOUNT},
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    assert f" -m pip install '{REPOSITORY}[{extra}]'" in done.stderr
    assert module in done.stderr.lower()
    assert "Traceback" not in done.stderr
    assert not (path.parent / ".cloudtrain" / "runs").exists()


def test_the_place_of_a_missing_tensorboard_is_named(
    job: Callable[..., Path], cli: Cli, tmp_path: Path
) -> None:
    path = job(JOB, tiny_py=TASK)
    python = python_without("tensorboard", tmp_path / "environment")
    done = subprocess.run(
        [python, "-m", "cloudtrain", "validate", path, "--local"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        f"{path}:5:25  tracking.tensorboard: this machine lacks the package tensorboard"
        in done.stdout + done.stderr
    )
    assert cli("validate", path, "--local").code == 0
