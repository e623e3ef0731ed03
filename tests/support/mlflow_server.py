"""A real MLflow server on loopback, and what it has logged."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloudtrain.backends.container.machine import free_port
from support.jobs import until

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes that no test needs
}


@contextlib.contextmanager
def serve_mlflow(folder: Path, port: int | None = None) -> Iterator[str]:
    """Serve MLflow with a database in a folder; yield its address."""
    port = port or free_port()
    folder.mkdir(exist_ok=True)
    store = (
        f"--backend-store-uri=sqlite:///{folder}/mlflow.db",
        f"--artifacts-destination={folder}/artifacts",
    )
    options = ("--host=127.0.0.1", f"--port={port}", "--workers=1", *store)
    with (folder / "server.log").open("a") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *options],
            cwd=folder, stdout=log, stderr=log, env={**os.environ, **QUIET},
        )  # fmt: skip
    try:
        until(
            lambda: _answers(f"http://127.0.0.1:{port}/health", server, folder / "server.log"),
            seconds=300,
        )
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(300)


def _answers(url: str, server: subprocess.Popen[bytes], log: Path) -> bool:
    assert server.poll() is None, log.read_text()[-3000:]
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310 (loopback)
            return True
    except OSError:
        return False


def tracked_runs(uri: str, experiment: str) -> list[Any]:
    """Return the MLflow runs of an experiment, oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return list(client.search_runs([found.experiment_id], order_by=["start_time ASC"]))


def logged_values(uri: str, run_id: str, metric: str) -> list[tuple[int, float]]:
    """Return steps and values of a metric in the order of its steps, with every value that was logged twice."""
    from mlflow import MlflowClient

    found = MlflowClient(tracking_uri=uri).get_metric_history(run_id, metric)
    return sorted((each.step, each.value) for each in found)


def logged_artifact(uri: str, run_id: str, path: str, folder: Path) -> Any:
    """Return a JSON artifact of a run, which is downloaded to a folder."""
    from mlflow import MlflowClient

    found = MlflowClient(tracking_uri=uri).download_artifacts(run_id, path, str(folder))
    return json.loads(Path(found).read_text())
