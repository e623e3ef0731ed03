"""The picture of docs/how-to/tracking.md: a run in MLflow's page that was stopped and resumed.

    PYTHONPATH=tests .venv-mlflow/bin/python -m support.mlflow_picture

It trains the example digits on this machine, and needs Chromium.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from support.jobs import EXAMPLES, REPOSITORY, command, until
from support.mlflow_server import QUIET, serve_mlflow, tracked_runs

PICTURE = REPOSITORY / "docs" / "how-to" / "mlflow.png"
_STOP_AT = 200
_WIDTH, _HEIGHT = 1620, 660
_RENDERING_MS = 300_000


def main() -> None:
    """Train, stop, resume, and take the picture."""
    with tempfile.TemporaryDirectory() as name, serve_mlflow(Path(name) / "server") as uri:
        _train(Path(name), uri)
        _take_picture(Path(name), uri)
    print(PICTURE)


def _take_picture(folder: Path, uri: str) -> None:
    (run,) = tracked_runs(uri, "digits")
    shown = {
        "runs": json.dumps([run.info.run_id]),
        "experiments": json.dumps([run.info.experiment_id]),
        "metric": json.dumps("train/loss"),
        "plot_metric_keys": json.dumps(["train/loss", "validation/loss"]),
        "x_axis": "step",
    }
    options = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    )
    page = (f"--virtual-time-budget={_RENDERING_MS}", f"--window-size={_WIDTH},{_HEIGHT}")
    own = (f"--user-data-dir={folder / 'profile'}", f"--screenshot={PICTURE}")
    url = f"{uri}/#/metric?{urlencode(shown)}"
    subprocess.run(["chromium", *options, *page, *own, url], check=True, timeout=300)


def _train(folder: Path, uri: str) -> None:
    environ = {**os.environ, **QUIET, "HOME": str(folder), "CLOUDTRAIN_HOME": str(folder / "runs")}

    def run(*words: object) -> Any:
        line = [str(command()), *map(str, words), "--json"]
        return json.loads(
            subprocess.run(line, env=environ, stdout=subprocess.PIPE, check=True).stdout
        )

    settings = (f"tracking.mlflow={uri}", "train.epochs=40", "train.learning_rate=2e-4")
    first = run(
        "submit",
        EXAMPLES / "digits" / "job.yaml",
        "--local",
        *(f"--set={each}" for each in settings),
    )["run"]
    until(lambda: (run("status", first)["last_step"] or 0) >= _STOP_AT, seconds=600)
    stopped = run("stop", first)
    assert stopped["last_step"] < stopped["total_steps"]
    print(f"stopped at step {stopped['last_step']}")
    run("resume", first, "--follow")


if __name__ == "__main__":
    main()
