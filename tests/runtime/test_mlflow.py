"""MLflow without a server: missing packages, and the limit of values that are kept."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from cloudtrain_runtime.contract import CheckpointConfig, RunConfig, TrackingConfig, parse_event
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.metrics.mlflow import MlflowRun

ARN = "arn:aws:sagemaker:us-west-2:123456789012:mlflow-app/app-ABC"
KEPT = """
import importlib.util, sys
find_spec = importlib.util.find_spec
# As if MLflow were installed. It is not imported without a start.
importlib.util.find_spec = lambda name, *package: sys if name == "mlflow" else find_spec(name, *package)
from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.metrics import mlflow
from cloudtrain_runtime.process.event_log import emit
mlflow._MOST_VALUES = 3
mlflow.MlflowRun(RunConfig.from_json(sys.argv[1]))
for step in range(5):
    emit("step", step=step, loss=0.5)
    emit("best", step=step, metric="validation/loss", value=0.5)
"""


def config(uri: str) -> RunConfig:
    return RunConfig(
        run="demo", task="mine:Mine", script=None, args={}, requirements=None, processes_per_instance=1,
        distribution="torch_distributed", max_restarts=0, train=None,
        checkpoint=CheckpointConfig("", None, None, 1, "auto"), tracking=TrackingConfig(uri),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("uri", "missing", "package"),
    [
        ("https://a.b", "mlflow", "mlflow-skinny"),
        (ARN, "sagemaker_mlflow", "sagemaker-mlflow"),
        ("sqlite:////a/b.db", "sqlalchemy", "mlflow"),
    ],
)
def test_a_missing_package_is_named(
    uri: str, missing: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else sys)
    with pytest.raises(JobError, match=f"the package {package}, which this environment lacks"):
        MlflowRun(config(uri))


def test_values_beyond_the_limit_are_counted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KEPT, config("https://a.b").to_json()],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    last = parse_event(done.stdout.splitlines()[-1])
    assert last is not None
    assert (last["event"], last["dropped"]) == ("tracking", 5)
