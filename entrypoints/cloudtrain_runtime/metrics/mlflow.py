"""MLflow: a Task's parameters, metrics, plan and checkpoints, which a thread of rank 0 logs.

Training never waits for the server and never fails because of it. Values are kept while the server does not answer, up
to a limit; the event `tracking` reports the first failure, and at the end how many values were dropped.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import importlib.util
import logging
import math
import os
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain_runtime.contract import RunConfig, check_event
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.metric_values import metric_values
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.contract.strict_json import dump_json, encode_floats, load_json
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.process.event_log import add_listener, emit
from cloudtrain_runtime.s3.objects import S3Objects

_INTERVAL_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_CLOSE_SECONDS = 90.0
"""How long the end of the run waits for the last values, while the server has not failed: a slow import takes 10 s."""

_REQUEST_SECONDS = 10
_MOST_VALUES = 200_000
"""Values that are kept while the server does not answer: about 20 MB. The oldest are dropped first."""

_BATCH = 1000
_BATCH_PARAMETERS = 100
"""Largest batches that MLflow's REST API accepts. Source: its reference of log-batch, 3.17."""

_PARAMETER_CHARACTERS = 6000
_RUNS, _TRAINING = "cloudtrain.runs", "cloudtrain.training"
_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


class MlflowRun:
    """Logs a Task's run to MLflow, from its events.

    A run that continues the same training, after a restart or as another run, continues the same MLflow run: it logs
    the steps after those that are logged.

    Args:
        config: The run's configuration, with `tracking`.

    Raises:
        JobError: a package is not installed.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._uri = config.tracking.mlflow if config.tracking is not None else ""
        _require_packages(self._uri)
        self._values: deque[tuple[str, float, int, int]] = deque()
        # Those of a request that has not succeeded yet.
        self._sending: list[tuple[str, float, int, int]] = []
        self._tags: dict[str, str] = {}
        self._sent_tags: dict[str, str] = {}
        self._started: Mapping[str, Any] | None = None
        self._status = "FAILED"
        self._dropped = 0
        self._has_warned = False
        self._client: Any = None
        self._run = ""
        self._logged: dict[str, int] = {}
        self._is_closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="MLflow", daemon=True)
        add_listener(self._on_event)
        atexit.register(self.close)
        self._thread.start()

    def _on_event(self, written: dict[str, Any]) -> None:
        event = check_event(written)
        if event is None:
            return
        kind, step = event["event"], event.get("step", 0)
        if kind == "started":
            self._started = event
        elif kind == "checkpoint":
            self._tags["cloudtrain.checkpoint"] = event["uri"]
            self._wake.set()  # a run that is killed now continues from here: the values before must not be lost
        self._status = _STATUS.get(kind, self._status)
        for name, value in metric_values(event):
            if len(self._values) >= _MOST_VALUES:
                self._values.popleft()
                self._dropped += 1
            number = math.nan if value is None else float(value)
            self._values.append((_name(name), number, round(event["time"] * 1000), step))

    def close(self) -> None:
        """Log the remaining values, at most for 90 s, and report what was dropped."""
        atexit.unregister(self.close)
        self._is_closing = True
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)
        dropped = self._dropped + len(self._sending) + len(self._values)
        if dropped:
            emit(
                "tracking",
                dropped=dropped,
                detail=f"{dropped} values were not logged to MLflow at {self._uri}",
            )

    def _work(self) -> None:
        pause, is_last = _INTERVAL_SECONDS, False
        while not is_last:
            self._wake.wait(pause)
            self._wake.clear()
            is_last = self._is_closing
            try:
                self._log(is_last=is_last)
                pause = _INTERVAL_SECONDS
            except Exception as error:  # noqa: BLE001 (of the client, the network or the server: training continues)
                self._warn(
                    f"MLflow at {self._uri} does not answer, values are kept: {_describe(error)}"
                )
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _warn(self, detail: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            emit("tracking", detail=detail)

    def _log(self, *, is_last: bool) -> None:
        """Send the values so far, at first with everything that describes the run."""
        if self._started is None:
            return
        if not self._run:
            self._connect(self._started)
        from mlflow.entities import Metric, RunTag

        while self._sending or self._values:
            while self._values and len(self._sending) < _BATCH:
                self._sending.append(self._values.popleft())
            new = [each for each in self._sending if each[3] > self._logged.get(each[0], -1)]
            self._send(self._run, metrics=[Metric(*each) for each in new])
            self._sending = []
        tags = dict(self._tags)
        if tags != self._sent_tags:
            self._send(self._run, tags=[RunTag(*each) for each in tags.items()])
            self._sent_tags = tags
        if is_last:
            self._client.set_terminated(self._run, self._status)

    def _send(self, run: str, **batch: Any) -> None:
        """Send a batch. One that the server rejects is dropped, because it would reject it again."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(run, synchronous=True, **batch)
        except MlflowException as error:
            if error.error_code not in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
                raise
            self._dropped += sum(map(len, batch.values()))
            self._warn(f"MLflow at {self._uri} rejected values: {_describe(error)}")

    def _connect(self, started: Mapping[str, Any]) -> None:
        """Find or create the MLflow run, and log what describes this run."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_REQUEST_SECONDS))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # this thread tries again
        from mlflow import MlflowClient

        # The plugin sagemaker-mlflow (0.5) warns at each request to a server that is not SageMaker's.
        logging.getLogger("mlflow.tracking.request_header").setLevel(logging.ERROR)
        client = MlflowClient(tracking_uri=self._uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", self._config.run)
        found = client.get_experiment_by_name(name)
        experiment = (
            found.experiment_id
            if found
            else client.create_experiment(name, _artifact_root(self._uri))
        )
        training = _digest(self._config.training)
        run = self._find(client, experiment, self._config.run, training)
        run = run or self._find(client, experiment, started.get("continues") or "", training)
        if run is None:  # with the tags by which this is found, also after a lost response
            tags = {_RUNS: self._config.run, _TRAINING: training}
            run = client.create_run(
                experiment, tags=tags, run_name=os.environ.get("MLFLOW_RUN_NAME", self._config.run)
            )
        identifier, runs = run.info.run_id, run.data.tags[_RUNS].split()
        last = {
            each: max(value.step for value in client.get_metric_history(identifier, each))
            for each in run.data.metrics
        }
        client.update_run(identifier, status="RUNNING")
        self._client, self._logged = client, last
        runs += [] if self._config.run in runs else [self._config.run]
        self._tags |= {_RUNS: " ".join(runs), "cloudtrain.code": self._config.code}
        self._describe(identifier, run.data.params)
        self._run = identifier
        emit("tracking", mlflow_run=identifier)

    def _find(self, client: Any, experiment: str, run: str, training: str) -> Any:
        """Return the MLflow run of a run of the same training; None if there is none."""
        found = client.search_runs([experiment], f"tags.`{_RUNS}` LIKE '%{run}%'") if run else []
        of_run = (each for each in found if run in each.data.tags[_RUNS].split())
        return next((each for each in of_run if each.data.tags.get(_TRAINING) == training), None)

    def _describe(self, run: str, logged: Mapping[str, str]) -> None:
        """Log parameters, the plan and what it names. MLflow's parameters cannot change: a new value becomes a tag."""
        from mlflow.entities import Param

        config, tracking = self._config, self._config.tracking
        train = dataclasses.asdict(config.train) if config.train is not None else {}
        parameters = dict(_flatten({"args": config.args, "train": train}))
        self._tags |= {
            f"{name} of {config.run}": text
            for name, text in parameters.items()
            if logged.get(name, text) != text
        }
        new = [Param(name, text) for name, text in parameters.items() if name not in logged]
        for at in range(0, len(new), _BATCH_PARAMETERS):
            self._send(run, params=new[at : at + _BATCH_PARAMETERS])
        try:
            plan = load_json(_read(tracking.plan if tracking is not None else ""))
            source, output = (
                plan.get("source") or {},
                plan["request"]["OutputDataConfig"]["S3OutputPath"],
            )
            names = {"commit": "mlflow.source.git.commit", "branch": "mlflow.source.git.branch"}
            self._tags |= {tag: source[name] for name, tag in names.items() if source.get(name)}
            model = "output/model.tar.gz" if output.startswith("s3:") else "model"
            self._tags["cloudtrain.model"] = f"{output}/{config.run}/{model}"
            self._client.log_dict(run, plan, f"plans/{config.run}.json")
        except Exception as error:  # noqa: BLE001 (of S3 or of MLflow's artifact store: metrics are logged without it)
            self._warn(f"the plan was not logged to MLflow at {self._uri}: {_describe(error)}")


def _require_packages(uri: str) -> None:
    wanted = {"mlflow": "mlflow-skinny"}
    if uri.startswith("arn:"):
        wanted["sagemaker_mlflow"] = "sagemaker-mlflow"
    elif uri.startswith("sqlite:"):
        wanted = {"mlflow": "mlflow", "sqlalchemy": "mlflow"}
    for module, package in wanted.items():
        if importlib.util.find_spec(module) is None:
            raise JobError(
                f"tracking.mlflow needs the package {package}, which this environment lacks: add {package} to "
                f"code.requirements (locally: pip install {package}), or remove tracking.mlflow"
            )


def _artifact_root(uri: str) -> str | None:
    """Return where an experiment of a database keeps its artifacts; None lets a server choose."""
    return (
        Path(uri.removeprefix("sqlite:///")).with_name("mlartifacts").as_uri()
        if uri.startswith("sqlite:")
        else None
    )


def _read(uri: str) -> bytes:
    folder, _, name = uri.rpartition("/")
    if uri.startswith("s3://"):
        return S3Objects(folder).read(name) or b""
    return path_of(uri).read_bytes()


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested mappings as text, by dotted name."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flatten(part, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield (
            _name(name),
            redact(value if isinstance(value, str) else repr(value))[:_PARAMETER_CHARACTERS],
        )


def _name(name: str) -> str:
    """Return a name with the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _digest(training: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        dump_json(encode_floats(dict(training)), sort_keys=True).encode()
    ).hexdigest()[:16]


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
