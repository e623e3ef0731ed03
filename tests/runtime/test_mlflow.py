"""MLflow without a server: missing packages."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from cloudtrain_runtime.contract import CheckpointConfig, MlTree, RunConfig, TrackingConfig
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.metrics.tracking.process import start_tracking

ARN = "arn:aws:sagemaker:us-west-2:123456789012:mlflow-app/app-ABC"


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
    uri: str, missing: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        # A folder of this name, without code, is found, too.
        folder = ModuleSpec(name, None)
        return folder if name == missing else ModuleSpec(name, None, origin="here")

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(JobError, match=f"the package {package}, which this environment lacks"):
        start_tracking(MlTree(tmp_path), config(uri), {})
