"""MLflow: parameters, metrics, plan and checkpoints of a run."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.metrics.tracking.tracker import (
    Connection,
    Ending,
    Value,
    describe_error,
    digest,
    flatten,
    read_plan,
    require_package,
)
from cloudtrain_runtime.process.event_log import emit

_REQUEST_SECONDS = 10
_BATCH_PARAMETERS = 100
"""Most parameters in one request that MLflow's REST API accepts. Source: its reference of log-batch, 3.17."""

_PARAMETER_CHARACTERS = 6000
_RUNS, _TRAINING = "cloudtrain.runs", "cloudtrain.training"
_STATUS = {Ending.FINISHED: "FINISHED", Ending.STOPPED: "KILLED", Ending.FAILED: "FAILED"}


class MlflowTracker:
    """Logs a run to MLflow.

    A run that continues the same training, after a restart or as another run, continues the same MLflow run.

    Args:
        config: The run's configuration, with `tracking.mlflow`.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._uri = config.tracking.mlflow if config.tracking is not None else ""
        self._tags: dict[str, str] = {}
        self._client: Any = None
        self._run = ""
        self._has_warned = False

    @property
    def name(self) -> str:
        """The service's name."""
        return "mlflow"

    @property
    def place(self) -> str:
        """The server in words."""
        return f"MLflow at {self._uri}"

    def require_packages(self) -> None:
        """Raise a JobError if this environment cannot reach the server."""
        if self._uri.startswith("sqlite:"):
            require_package("mlflow", "mlflow", "tracking.mlflow")
            require_package("sqlalchemy", "mlflow", "tracking.mlflow")
            return
        require_package("mlflow", "mlflow-skinny", "tracking.mlflow")
        if self._uri.startswith("arn:"):
            require_package("sagemaker_mlflow", "sagemaker-mlflow", "tracking.mlflow")

    def connect(self, started: Mapping[str, Any]) -> Connection:
        """Find or create the MLflow run, and log what describes this run."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_REQUEST_SECONDS))
        # The caller tries again.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient

        # The plugin sagemaker-mlflow (0.5) warns at each request to a server that is not SageMaker's.
        logging.getLogger("mlflow.tracking.request_header").setLevel(logging.ERROR)
        self._client = MlflowClient(tracking_uri=self._uri)
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", self._config.run))
        run = self._find_or_create(experiment, started)
        identifier = run.info.run_id
        logged = {
            each: max(value.step for value in self._client.get_metric_history(identifier, each))
            for each in run.data.metrics
        }
        self._client.update_run(identifier, status="RUNNING")
        runs = run.data.tags[_RUNS].split()
        runs += [] if self._config.run in runs else [self._config.run]
        self._tags = {_RUNS: " ".join(runs), "cloudtrain.code": self._config.code}
        self._describe(identifier, run.data.params)
        self._run = identifier
        self._send_tags(self._tags)
        fields = {"mlflow_run": identifier}
        if self._uri.startswith(("http://", "https://")):
            fields["url"] = f"{self._uri.rstrip('/')}/#/experiments/{experiment}/runs/{identifier}"
        return Connection(logged, fields)

    def log(self, values: Sequence[Value]) -> int:
        """Log values; return how many the server has rejected."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_name(each.name), each.value, round(each.time * 1000), each.step)
            for each in values
        ]
        return self._send(self._run, metrics=metrics)

    def save(self, checkpoint: str) -> None:
        """Log the newest checkpoint as a tag."""
        self._send_tags({"cloudtrain.checkpoint": checkpoint})

    def end(self, ending: Ending) -> None:
        """Log the status of the run."""
        self._client.set_terminated(self._run, _STATUS[ending])

    def _experiment(self, name: str) -> str:
        """Return the id of the experiment of this name, which is created if there is none."""
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(name, _artifact_root(self._uri)))

    def _find_or_create(self, experiment: str, started: Mapping[str, Any]) -> Any:
        """Return the MLflow run of this run or of the one that it continues, or a new one."""
        training = digest(self._config.training)
        name = os.environ.get("MLFLOW_RUN_NAME", self._config.run)
        # The last of these is planned, and has the name of the first run of a training.
        for run in (self._config.run, started.get("continues") or "", name):
            found = self._find(experiment, run, training)
            if found is not None:
                return found
        # With the tags by which this is found, also after a lost response.
        tags = {_RUNS: self._config.run, _TRAINING: training}
        return self._client.create_run(experiment, tags=tags, run_name=name)

    def _find(self, experiment: str, run: str, training: str) -> Any:
        """Return the MLflow run of a run of the same training; None if there is none."""
        if not run or "'" in run:
            return None
        found = self._client.search_runs([experiment], f"tags.`{_RUNS}` LIKE '%{run}%'")
        of_run = (each for each in found if run in each.data.tags[_RUNS].split())
        return next((each for each in of_run if each.data.tags.get(_TRAINING) == training), None)

    def _describe(self, run: str, logged: Mapping[str, str]) -> None:
        """Log parameters, the plan and what it names. MLflow's parameters cannot change: a new value becomes a tag."""
        from mlflow.entities import Param

        config = self._config
        train = dataclasses.asdict(config.train) if config.train is not None else {}
        parameters = {
            _name(name): text[:_PARAMETER_CHARACTERS]
            for name, text in flatten({"args": config.args, "train": train})
        }
        self._tags |= {
            f"{name} of {config.run}": text
            for name, text in parameters.items()
            if logged.get(name, text) != text
        }
        new = [Param(name, text) for name, text in parameters.items() if name not in logged]
        for at in range(0, len(new), _BATCH_PARAMETERS):
            self._send(run, params=new[at : at + _BATCH_PARAMETERS])
        try:
            plan = read_plan(
                config.tracking.plan if config.tracking is not None else "", config.run
            )
            names = {
                "mlflow.source.git.commit": plan.commit,
                "mlflow.source.git.branch": plan.branch,
            }
            self._tags |= {tag: text for tag, text in names.items() if text}
            self._tags["cloudtrain.model"] = plan.model
            self._client.log_dict(run, plan.document, f"plans/{config.run}.json")
        except Exception as error:  # noqa: BLE001 (of S3 or of MLflow's artifact store: metrics are logged without it)
            self._warn(f"the plan was not logged to {self.place}: {describe_error(error)}")

    def _send_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._send(self._run, tags=[RunTag(*each) for each in tags.items()])

    def _send(self, run: str, **batch: Any) -> int:
        """Send a batch. One that the server rejects is dropped, because it would reject it again."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(run, synchronous=True, **batch)
        except MlflowException as error:
            if error.error_code not in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
                raise
            self._warn(f"{self.place} rejected values: {describe_error(error)}")
            return sum(map(len, batch.values()))
        return 0

    def _warn(self, detail: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            emit("tracking", tracker=self.name, detail=detail)


def _artifact_root(uri: str) -> str | None:
    """Return where an experiment of a database keeps its artifacts; None lets a server choose."""
    if not uri.startswith("sqlite:"):
        return None
    return Path(uri.removeprefix("sqlite:///")).with_name("mlartifacts").as_uri()


def _name(name: str) -> str:
    """Return a name with the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. /]", "_", name)
