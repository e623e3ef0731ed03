"""MLflow in a plan: the server's uri, the environment variables that name it, and checks."""

from __future__ import annotations

from collections.abc import Iterator

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import error, warning
from cloudtrain.planning.storage_layout import ResumeSource
from cloudtrain.support.proxies import is_loopback
from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.contract.training_identity import is_same_training

MLFLOW_URI_VARIABLE = "MLFLOW_TRACKING_URI"
MLFLOW_NAME_VARIABLE = "MLFLOW_RUN_NAME"
_SQLITE = "sqlite:///"


def mlflow_uri(spec: JobSpec) -> str:
    """Return MLflow's tracking uri, with the absolute path of a database; an empty string without MLflow."""
    server = spec.tracking.mlflow or ""
    if not server or server.startswith(("arn:", "http:", "https:")):
        return server
    return f"{_SQLITE}{(spec.base / server.removeprefix(_SQLITE)).resolve()}"


def mlflow_variables(
    spec: JobSpec, config: RunConfig, run: str, resumed: ResumeSource | None
) -> dict[str, str]:
    """Return the environment variables of a job that is tracked with MLflow; without one nothing.

    A run that continues the training of another one has the name of that one's MLflow run.
    """
    uri = mlflow_uri(spec)
    if not uri:
        return {}
    mlflow_run = run
    if resumed is not None and is_same_training(resumed.training, config.training):
        # Empty where the earlier run was not tracked.
        mlflow_run = resumed.mlflow_run or run
    defaults = {
        "MLFLOW_EXPERIMENT_NAME": spec.name,
        MLFLOW_NAME_VARIABLE: mlflow_run,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
    own = {name: value for name, value in spec.code.variables.items() if name in defaults}
    return {**defaults, **own, MLFLOW_URI_VARIABLE: uri}


def check_cluster_tracking(spec: JobSpec) -> Iterator[Diagnostic]:
    """Check that a container of a cluster can reach the MLflow server."""
    uri = mlflow_uri(spec)
    if uri.startswith(_SQLITE):
        message = "a cluster cannot write a database on this machine"
        yield error(("tracking", "mlflow"), message, "name a server: its ARN, or https://host")
    elif is_loopback(uri):
        yield warning(
            f"tracking.mlflow: on SageMaker {uri} is the container itself; it is this machine in a sandbox"
        )
    if uri and spec.cluster.network.isolation:
        yield warning(
            "tracking.mlflow: an isolated container reaches no MLflow server, so its run is not tracked"
        )
