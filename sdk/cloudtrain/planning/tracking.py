"""Trackers in a plan: MLflow's server, the run of Weights & Biases, the variables that name them, and checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import decision, error, warning
from cloudtrain.planning.placement import Machine
from cloudtrain.planning.plan import CodeInfo
from cloudtrain.planning.storage_layout import ResumeSource
from cloudtrain.support.installation import install_command
from cloudtrain.support.proxies import is_loopback
from cloudtrain_runtime.contract import RunConfig, TrackingConfig
from cloudtrain_runtime.contract.ml_tree import CONTAINER_TREE
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.contract.training_identity import is_same_training

MLFLOW_URI_VARIABLE = "MLFLOW_TRACKING_URI"
WANDB_MODE_VARIABLE = "WANDB_MODE"
WANDB_URL_VARIABLE = "WANDB_BASE_URL"
WANDB_URL = "https://api.wandb.ai"
_MLFLOW_NAME_VARIABLE = "MLFLOW_RUN_NAME"
_WANDB_ID_VARIABLE = "WANDB_RUN_ID"
RUN_VARIABLES: Final = (_MLFLOW_NAME_VARIABLE, _WANDB_ID_VARIABLE)
"""Variables with the id of the first run of a training, by which later runs continue its run in a service."""

_SQLITE = "sqlite:///"
_WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_SECRET_WAY = "code.env: {WANDB_API_KEY: {secret: NAME}}"  # noqa: S105 (how to name one)
_OFFLINE_WAY = "tracking.wandb.mode: offline"
_OFFLINE_FOLDER = "wandb"
_MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline"}
"""Modes in which something is logged, with the former names of Weights & Biases."""


def mlflow_uri(spec: JobSpec) -> str:
    """Return MLflow's tracking uri, with the absolute path of a database; an empty string without MLflow."""
    server = spec.tracking.mlflow or ""
    if not server or server.startswith(("arn:", "http:", "https:")):
        return server
    return f"{_SQLITE}{(spec.base / server.removeprefix(_SQLITE)).resolve()}"


def wandb_mode(spec: JobSpec) -> str:
    """Return `online` or `offline`; an empty string if nothing is logged to Weights & Biases."""
    wandb = spec.tracking.wandb
    if wandb is None:
        return ""
    return _MODES.get(spec.code.variables.get(WANDB_MODE_VARIABLE, wandb.mode), "")


def without_tracking(spec: JobSpec) -> dict[str, Any]:
    """Return the sections of a run that is no training of its user, such as a rehearsal, and is in no tracker.

    The variable is for code that logs by itself.
    """
    env = {**spec.code.env, WANDB_MODE_VARIABLE: "disabled"}
    return {
        "code": spec.code.model_copy(update={"env": env}),
        "tracking": type(spec.tracking)(),
    }


def decide_tracking(spec: JobSpec, code: CodeInfo) -> TrackingConfig | None:
    """Return where cloudtrain logs a run, without the places of its files; None if it logs it nowhere.

    It logs Tasks, and scripts whose metrics it finds, unless their code has a sign of the package and so logs by itself.
    """
    mlflow, wandb = mlflow_uri(spec), wandb_mode(spec)
    if spec.train is None:
        mlflow = mlflow if _logs_script(spec, code, "mlflow") else ""
        wandb = wandb if _logs_script(spec, code, "wandb") else ""
    if not mlflow and not wandb:
        return None
    return TrackingConfig(mlflow=mlflow, wandb=wandb)


def _logs_script(spec: JobSpec, code: CodeInfo, package: str) -> bool:
    # Two that log to one run would each refuse the other's steps. What a command starts is not known.
    logs_itself = package in code.conventions.trackers or package in dump_json(spec.code.args)
    return bool(spec.metrics) and spec.code.command is None and not logs_itself


def offline_folder(
    spec: JobSpec,
    config: RunConfig,
    run_folder: str,
    resumed: ResumeSource | None,
    *,
    is_local: bool,
) -> str:
    """Return the folder of a run's offline files, which is that of the first run of its training."""
    if spec.cluster.network.isolation and not is_local:
        # SageMaker syncs this folder, and nothing else of an isolated container before its end.
        return (CONTAINER_TREE.checkpoints / _OFFLINE_FOLDER).as_uri()
    if resumed is not None and is_same_training(resumed.training, config.training):
        return resumed.offline_files or f"{run_folder}/{_OFFLINE_FOLDER}"
    return f"{run_folder}/{_OFFLINE_FOLDER}"


def tracking_variables(
    spec: JobSpec, config: RunConfig, run: str, resumed: ResumeSource | None
) -> dict[str, str]:
    """Return the environment variables by which code reaches the trackers; without one nothing.

    A run that continues the training of another one has the name and id of that one's run in a service.
    """
    named: Mapping[str, str] = {}
    if resumed is not None and is_same_training(resumed.training, config.training):
        # Empty where the earlier run was not tracked.
        named = resumed.tracked
    defaults: dict[str, str] = {}
    if mlflow_uri(spec):
        defaults |= {
            "MLFLOW_EXPERIMENT_NAME": spec.name,
            _MLFLOW_NAME_VARIABLE: named.get(_MLFLOW_NAME_VARIABLE) or run,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "true",
        }
    wandb = spec.tracking.wandb
    if wandb is not None:
        identifier = named.get(_WANDB_ID_VARIABLE) or run
        defaults |= {
            WANDB_MODE_VARIABLE: wandb.mode,
            "WANDB_PROJECT": wandb.project or spec.name,
            _WANDB_ID_VARIABLE: identifier,
            "WANDB_NAME": identifier,
            "WANDB_RESUME": "allow",
            "WANDB_ERROR_REPORTING": "false",
        }
        if wandb.entity is not None:
            defaults["WANDB_ENTITY"] = wandb.entity
    own = {name: value for name, value in spec.code.variables.items() if name in defaults}
    found = {name: value for name, value in defaults.items() if name not in spec.code.secrets}
    found |= own
    if uri := mlflow_uri(spec):
        found[MLFLOW_URI_VARIABLE] = uri
    return found


def describe_tracking(spec: JobSpec, config: RunConfig) -> Iterator[Diagnostic]:
    """Say where offline files are, and who logs a script."""
    mode = wandb_mode(spec)
    tracking = config.tracking or TrackingConfig()
    if tracking.wandb == "offline":
        place = "the folder wandb of the run"
        if spec.cluster.network.isolation:
            place = "the folder wandb of the checkpoints"
        yield decision(
            f"tracking.wandb: the offline files are kept in {place}, which status names; to upload a copy of them: "
            "wandb sync FOLDER/offline-run-*"
        )
    if mode and spec.train is None and not tracking.wandb:
        yield decision(
            "tracking.wandb: the script logs by itself: wandb.init() finds project, id and mode in its environment. "
            "cloudtrain logs the metrics of a script or module that has `metrics` and does not name wandb"
        )


def _lacks_wandb_key(spec: JobSpec) -> bool:
    given = {*spec.code.secrets, *spec.code.variables}
    return wandb_mode(spec) == "online" and given.isdisjoint(_WANDB_KEYS)


def _no_key(*ways: str) -> Diagnostic:
    message = "no key of Weights & Biases: the run could not log in"
    return error(("tracking", "wandb"), message, ", or ".join((*ways, _OFFLINE_WAY)))


def check_local_tracking(
    spec: JobSpec, machine: Machine, *, installs: bool
) -> Iterator[Diagnostic]:
    """Check that this machine has the trackers' packages and a login.

    Args:
        spec: The job.
        machine: This machine.
        installs: Whether the run uses an environment with its requirements.
    """
    yield from _check_packages(spec, machine, installs=installs)
    if not _lacks_wandb_key(spec):
        return
    if machine.has_wandb_login:
        yield decision(
            "tracking.wandb: without WANDB_API_KEY a local run uses the login of this machine (wandb login)"
        )
    else:
        yield _no_key("wandb login", _SECRET_WAY)


def check_node_tracking(spec: JobSpec, machine: Machine) -> Iterator[Diagnostic]:
    """Check that the nodes of a cluster have the trackers' packages, and say how they log in.

    Args:
        spec: The job.
        machine: A node.
    """
    yield from _check_packages(spec, machine, installs=False)
    if _lacks_wandb_key(spec):
        yield decision(
            "tracking.wandb: without WANDB_API_KEY in code.env the nodes use the login in your home folder (wandb login)"
        )
    if is_loopback(uri := mlflow_uri(spec)):
        yield warning(f"tracking.mlflow: on a node {uri} is the node itself, not this machine")


def _check_packages(spec: JobSpec, machine: Machine, *, installs: bool) -> Iterator[Diagnostic]:
    is_logged = spec.train is not None or bool(spec.metrics)
    needed = {
        "tensorboard": spec.tracking.tensorboard and spec.train is not None,
        "mlflow": is_logged and bool(mlflow_uri(spec)),
        "wandb": is_logged and bool(wandb_mode(spec)),
    }
    for name, is_needed in needed.items():
        if is_needed and name in machine.missing and not (installs and spec.code.requirements):
            nothing = "false" if name == "tensorboard" else "null"
            hint = f"{install_command(name)}, or leave it out here: --set tracking.{name}={nothing}"
            yield error(("tracking", name), f"this machine lacks the package {name}", hint)


def check_cluster_tracking(spec: JobSpec) -> Iterator[Diagnostic]:
    """Check that a container of a cluster can reach the trackers, and log in."""
    if _lacks_wandb_key(spec):
        yield _no_key(_SECRET_WAY)
    uri = mlflow_uri(spec)
    is_isolated = spec.cluster.network.isolation
    if uri.startswith(_SQLITE):
        message = "a cluster cannot write a database on this machine"
        yield error(("tracking", "mlflow"), message, "name a server: its ARN, or https://host")
    elif is_loopback(uri):
        yield warning(
            f"tracking.mlflow: on SageMaker {uri} is the container itself; it is this machine in a sandbox"
        )
    if uri and is_isolated:
        yield warning(
            "tracking.mlflow: an isolated container reaches no MLflow server, so its run is not tracked"
        )
    if wandb_mode(spec) == "online" and is_isolated:
        yield warning(
            "tracking.wandb: an isolated container does not reach Weights & Biases, so its run is not tracked; with "
            "mode: offline its files are kept with the checkpoints"
        )
