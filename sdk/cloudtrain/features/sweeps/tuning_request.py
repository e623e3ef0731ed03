"""The CreateHyperParameterTuningJob request of a sweep, rendered offline from the plan of its job. Pure.

Every field equals what `sagemaker.tuner.HyperparameterTuner` 2.257 sends with a PyTorch estimator; a test compares. A
tuning job has no entry command and fewer members than a training job; `check_tuning` refuses what it cannot express.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from cloudtrain import catalog
from cloudtrain.catalog.service_limits import TUNING_JOB, check_request, limit_of, members_of
from cloudtrain.errors import Problem, SpecError
from cloudtrain.features.sweeps.domains import Choice, Range
from cloudtrain.features.sweeps.loader import LoadedSweep
from cloudtrain.features.sweeps.space import Dimension, Space
from cloudtrain.features.sweeps.spec import BAYESIAN, FUNCTION, GRID, HYPERBAND, RANDOM
from cloudtrain.job.arguments import script_argv
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.sections.train import Train
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.placement import LAUNCHER_TOOLKIT
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.request import metric_definition, metric_definitions
from cloudtrain.support.field_path import FieldPath
from cloudtrain_runtime.contract import CODE_CHANNEL, RunConfig, SearchedValue
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.contract.trial import ARGUMENTS, TRAIN

STRATEGIES = {RANDOM: "Random", BAYESIAN: "Bayesian", HYPERBAND: "Hyperband", GRID: "Grid"}
_SEARCHABLE = {
    **dict.fromkeys(("learning_rate", "clip_grad_norm"), "float"),
    **dict.fromkeys(
        ("epochs", "steps", "batch_size", "accumulate", "seed", "workers", "skip_nonfinite"), "int"
    ),
    **dict.fromkeys(
        ("compile", "activation_checkpointing", "deterministic", "drop_last", "export_nonfinite"),
        "bool",
    ),
    **dict.fromkeys(("precision", "schedule", "export"), "text"),
}
"""Kind of the fields of `train` that `run.json` holds under the same name and in the same unit."""
_REFUSED = {
    "cluster.prefer": "a tuning job has one instance type",
    "cluster.queue": "a job queue takes no tuning jobs",
    "cluster.keep_alive": "a tuning job keeps no warm pool",
    "cluster.training_plan": "a tuning job uses no training plan",
    "cluster.remote_debug": "a tuning job has no remote debugging",
    "cluster.health_check": "a tuning job has no health checks",
    "cluster.network.isolation": "isolated trials would share one checkpoint folder",
    "code.command": "AWS's toolkit starts one rank per GPU, not a command per instance",
    "code.outputs": "AWS's toolkit keeps only /opt/ml/model and /opt/ml/output/data",
    "tracking.tensorboard": "a tuning job syncs no TensorBoard files",
    "tracking.wandb": "all trials would have the id of one run",
    "request": "its members are those of training jobs",
}
"""Fields of a job that a tuning job cannot express, and why."""
_USE_OPTUNA = "remove it, or use engine: optuna"
_REQUIREMENTS = "requirements.txt"
_ESTIMATOR = {
    "sagemaker_estimator_class_name": "PyTorch",
    "sagemaker_estimator_module": "sagemaker.pytorch.estimator",
}
"""Hyperparameters that the SDK's tuner adds, so that `HyperparameterTuner.attach` finds the estimator's class."""
_DIGITS = 10


@dataclass(frozen=True)
class TuningPlan:
    """A tuning job that is decided and not created.

    Attributes:
        name: Its name, which is in the place of the run id.
        request: The CreateHyperParameterTuningJob document.
        plan: The plan of the job with this name; its configuration lists what is searched.
    """

    name: str
    request: Mapping[str, Any]
    plan: Plan


def check_tuning(sweep: LoadedSweep) -> list[Problem]:
    """Return what a tuning job cannot express, with its place in the sweep or job file."""
    found = [sweep.problem(each.path, each.message, each.hint) for each in _check_sweep(sweep)]
    for dimension in Space.of(sweep.spec.space).dimensions:
        found += [
            sweep.problem(each.path, each.message, each.hint)
            for each in _check_dimension(sweep, dimension)
        ]
    return [*found, *map(sweep.job.problem_of, _check_job(sweep.job))]


def _check_sweep(sweep: LoadedSweep) -> Iterator[Diagnostic]:
    spec = sweep.spec
    metric = sweep.spec.objective.metric
    if metric.startswith(FUNCTION):
        hint = "name a metric, or use engine: optuna"
        yield Diagnostic("SageMaker cannot call a function of Python", ("objective",), hint)
        return
    if spec.pruning == "asha":
        hint = "use pruning: median, which is SageMaker's own rule, or engine: optuna"
        yield Diagnostic("a tuning job cannot stop trials by this rule", ("pruning",), hint)
    if spec.rungs is not None and "factor" in spec.rungs.model_fields_set:
        yield Diagnostic(
            "SageMaker chooses the ratio of hyperband's rungs itself",
            ("rungs", "factor"),
            _USE_OPTUNA,
        )
    if spec.rungs is not None and sweep.job.train is not None and sweep.job.train.epochs is None:
        message = "SageMaker counts hyperband's resource in epochs, and the job has steps"
        yield Diagnostic(message, ("rungs",), "remove it, or give train.epochs in the job")
    grid = sum(1 for _ in Space.of(spec.space).grid()) if spec.strategy == GRID else None
    if grid is not None and spec.trials not in (None, grid):
        yield Diagnostic(
            f"a tuning job runs all {grid} combinations of its grid", ("trials",), "remove it"
        )
    read = [each["Name"] for each in metric_definitions(sweep.job.metrics)]
    if sweep.job.code.task is None and metric not in read:
        hint = f"add it to metrics of the job, which has {', '.join(read)}"
        yield Diagnostic(
            "SageMaker reads the metric of a script by a regular expression", ("objective",), hint
        )


def _check_dimension(sweep: LoadedSweep, dimension: Dimension) -> Iterator[Diagnostic]:
    at: FieldPath = ("space", dimension.path)
    domain = dimension.domain
    spec = sweep.spec
    if dimension.conditions:
        yield Diagnostic("a tuning job has no conditions", (*at, "when"), _USE_OPTUNA)
    if isinstance(domain, Range) and domain.step is not None and spec.strategy != GRID:
        yield Diagnostic(
            "a range of a tuning job has no steps",
            (*at, "step"),
            "remove it, or write choice: [...]",
        )
    kind = _kind_of(dimension)
    if kind is None:
        fields = ", ".join(f"train.{name}" for name in sorted(_SEARCHABLE))
        hint = f"search {fields} or code.args.NAME; or use engine: optuna"
        yield Diagnostic("a trial of a tuning job cannot change this field", at, hint)
    elif kind == "":
        message = "the values of a tuning job's field must be of one kind: numbers, true and false, or text"
        yield Diagnostic(message, (*at, "choice"), "write them in quotes, or use engine: optuna")
    elif kind == "int" and isinstance(domain, Range) and not domain.is_integer:
        yield Diagnostic("expected integers", at, "use int or log_int")
    elif dimension.path.startswith(ARGUMENTS):
        yield from _check_argument(sweep.job, at, kind)


def _check_argument(job: JobSpec, at: FieldPath, kind: str) -> Iterator[Diagnostic]:
    if not isinstance(job.code.args, Mapping):
        yield Diagnostic(
            "code.args of the job is a list, which has no names", at, "write it as a mapping"
        )
    elif job.code.task is None and kind == "bool":
        yield Diagnostic(
            "a script's argument is text",
            (*at, "choice"),
            'write the values in quotes: ["true", "false"]',
        )


def _kind_of(dimension: Dimension) -> str | None:
    """Return the kind of a field's values; None if it cannot be searched, and empty text for mixed choices."""
    path = dimension.path
    domain = dimension.domain
    if path.startswith(TRAIN):
        return _SEARCHABLE.get(path.removeprefix(TRAIN))
    if not path.startswith(ARGUMENTS) or "." in path.removeprefix(ARGUMENTS):
        return None
    if isinstance(domain, Range):
        return "int" if domain.is_integer else "float"
    kinds = {_kind_of_value(each) for each in domain.labels}
    if kinds == {"int", "float"}:
        return "float"
    return kinds.pop() if len(kinds) == 1 else ""


def _kind_of_value(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    kinds = {int: "int", float: "float", str: "text"}
    return next((kind for plain, kind in kinds.items() if isinstance(value, plain)), "")


def _check_job(spec: JobSpec) -> Iterator[Diagnostic]:
    cluster = spec.cluster
    code = spec.code
    refused = {path: message for path, message in _REFUSED.items() if attrgetter(path)(spec)}
    if cluster.image is not None and cluster.image.private_registry is not None:
        refused["cluster.image"] = "a tuning job needs an image of ECR"
    if (spec.tracking.mlflow or "").startswith("arn:"):
        refused["tracking.mlflow"] = "a tuning job has no SageMaker MLflow server"
    for path, message in refused.items():
        yield Diagnostic(f"engine: sagemaker: {message}", tuple(path.split(".")), _USE_OPTUNA)
    if code.requirements not in (None, _REQUIREMENTS):
        hint = f"name the file {_REQUIREMENTS}, in the code folder itself; or use engine: optuna"
        message = f"engine: sagemaker: AWS's toolkit installs {_REQUIREMENTS} only"
        yield Diagnostic(message, ("code", "requirements"), hint)
    processes = cluster.processes_per_instance
    expected = toolkit_processes(spec)
    if processes not in ("auto", expected):
        message = f"engine: sagemaker: AWS's toolkit starts {expected} rank{'' if expected == 1 else 's'} per instance"
        yield Diagnostic(message, ("cluster", "processes_per_instance"), _USE_OPTUNA)


def toolkit_processes(spec: JobSpec) -> int | None:
    """Return the ranks per instance that AWS's toolkit starts: one per GPU, or one; None for an unknown type.

    Source: github.com/aws/sagemaker-training-toolkit 5.1.4, runner.py.
    """
    instance = catalog.find_instance(spec.cluster.types[0])
    return None if instance is None or instance.gpus is None else instance.gpus or 1


def render_tuning(sweep: LoadedSweep, plan: Plan, *, attempt: int = 1) -> TuningPlan:
    """Return the tuning job of a sweep.

    Args:
        sweep: The sweep, which `check_tuning` accepts.
        plan: The plan of its job for SageMaker.
        attempt: Number in the name, for another tuning job of an equal sweep.

    Raises:
        SpecError: AWS's model refuses the request. The error lists every problem.
    """
    space = Space.of(sweep.spec.space)
    name = tuning_name(sweep, plan, attempt)
    named = plan.rename(name)
    named = _with_toolkit_ranks(
        replace(named, config=_shared_config(sweep, named.config)), sweep.job
    )
    request = {
        "HyperParameterTuningJobName": name,
        "HyperParameterTuningJobConfig": _tuning_config(sweep, space),
        "TrainingJobDefinition": _definition(named.request, sweep),
        "Tags": named.request["Tags"],
    }
    problems = [
        sweep.problem(
            _place_of(each.path, request),
            f"{'.'.join(map(str, each.path))}: {each.message}",
            each.hint,
        )
        for each in check_request(request, TUNING_JOB)
    ]
    if problems:
        raise SpecError(problems)
    return TuningPlan(name, request, named)


def tuning_name(sweep: LoadedSweep, plan: Plan, attempt: int = 1) -> str:
    """Return the name of a sweep's tuning job: equal for equal sweeps and code, on any machine."""
    identity = dump_json([sweep.identity_document(), plan.identity], sort_keys=True, default=str)
    suffix = hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS] + (
        f"-{attempt}" if attempt > 1 else ""
    )
    most = limit_of("HyperParameterTuningJobName", of=TUNING_JOB)["max"]
    return f"{sweep.name[: most - len(suffix) - 1].rstrip('-')}-{suffix}"


def _with_toolkit_ranks(plan: Plan, spec: JobSpec) -> Plan:
    """Return a plan with the ranks that AWS's toolkit starts, which are fewer on a type without GPUs."""
    processes = toolkit_processes(spec)
    if processes is None or not plan.cluster.world_size:
        return plan
    ranks = processes * plan.cluster.instances
    cluster = replace(
        plan.cluster, processes_per_instance=processes, world_size=ranks, launcher=LAUNCHER_TOOLKIT
    )
    batch = plan.batch
    if batch is not None:
        batch = replace(batch, global_=batch.global_ * ranks // plan.cluster.world_size)
    return replace(
        plan,
        cluster=cluster,
        batch=batch,
        config=replace(plan.config, processes_per_instance=processes),
    )


def searched_values(sweep: LoadedSweep) -> dict[str, SearchedValue]:
    """Return what each trial receives as hyperparameters, by path in the job."""
    searched = {}
    for dimension in Space.of(sweep.spec.space).dimensions:
        field = Train.model_fields.get(dimension.path.removeprefix(TRAIN))
        default = None if field is None or not dimension.path.startswith(TRAIN) else field.default
        searched[dimension.path] = SearchedValue(_kind_of(dimension) or "text", default)
    return searched


def _shared_config(sweep: LoadedSweep, config: RunConfig) -> RunConfig:
    """Return the configuration that all trials share: it lists what each receives as hyperparameters."""
    searched = searched_values(sweep)
    given = sweep.job.code.args
    args = config.args
    if isinstance(args, list) and isinstance(given, Mapping):
        args = script_argv(
            {name: value for name, value in given.items() if f"{ARGUMENTS}{name}" not in searched}
        )
    return replace(config, args=args, searched=searched)


def _tuning_config(sweep: LoadedSweep, space: Space) -> dict[str, Any]:
    spec = sweep.spec
    is_grid = spec.strategy == GRID
    limits: dict[str, Any] = {
        "MaxNumberOfTrainingJobs": sum(1 for _ in space.grid()) if is_grid else spec.trials,
        "MaxParallelTrainingJobs": spec.parallel,
    }
    if spec.limits.time is not None:
        limits["MaxRuntimeInSeconds"] = spec.limits.time
    epochs = None if sweep.job.train is None else sweep.job.train.epochs
    hyperband = None
    if spec.rungs is not None and epochs is not None:
        hyperband = {"MinResource": spec.rungs.first or max(1, epochs // 9), "MaxResource": epochs}
    return {
        "Strategy": STRATEGIES[spec.strategy],
        **({"StrategyConfig": {"HyperbandStrategyConfig": hyperband}} if hyperband else {}),
        "HyperParameterTuningJobObjective": {
            "Type": "Maximize" if spec.objective.is_maximized else "Minimize",
            "MetricName": spec.objective.metric,
        },
        "ResourceLimits": limits,
        "ParameterRanges": _ranges(space, is_grid=is_grid),
        "TrainingJobEarlyStoppingType": "Off" if spec.pruning == "none" else "Auto",
        "RandomSeed": spec.seed,
    }


def _ranges(space: Space, *, is_grid: bool) -> dict[str, list[dict[str, Any]]]:
    ranges: dict[str, list[dict[str, Any]]] = {
        f"{kind}ParameterRanges": [] for kind in ("Continuous", "Categorical", "Integer")
    }
    for dimension in space.dimensions:
        domain = dimension.domain
        if is_grid or isinstance(domain, Choice):
            values = domain.grid() if isinstance(domain, Range) else domain.labels
            # The SDK sends choices as JSON strings, and numbers as text.
            texts = [dump_json(str(value)) for value in values]
            ranges["CategoricalParameterRanges"].append({"Name": dimension.path, "Values": texts})
            continue
        kind = "Integer" if domain.is_integer else "Continuous"
        low, high = map(int if domain.is_integer else float, domain.bounds)
        scaling = "Logarithmic" if domain.is_log else "Linear"
        bounds = {"MinValue": str(low), "MaxValue": str(high), "ScalingType": scaling}
        ranges[f"{kind}ParameterRanges"].append({"Name": dimension.path, **bounds})
    return ranges


def _definition(request: Mapping[str, Any], sweep: LoadedSweep) -> dict[str, Any]:
    """Return the TrainingJobDefinition of a CreateTrainingJob request.

    All trials would share the folder of CheckpointConfig, so it is left out: the runtime saves to S3 itself.
    """
    algorithm = request["AlgorithmSpecification"]
    metrics = list(algorithm["MetricDefinitions"])
    if sweep.spec.objective.metric not in {each["Name"] for each in metrics}:
        metrics.append(metric_definition(sweep.spec.objective.metric))
    channels = [each for each in request["InputDataConfig"] if each["ChannelName"] != CODE_CHANNEL]
    known = set(members_of("TrainingJobDefinition", of=TUNING_JOB)) - {
        "CheckpointConfig",
        "ResourceConfig",
    }
    return {
        **{name: value for name, value in request.items() if name in known},
        "StaticHyperParameters": {
            **request["HyperParameters"],
            **{name: dump_json(value) for name, value in _ESTIMATOR.items()},
        },
        "InputDataConfig": channels,
        "AlgorithmSpecification": {
            "TrainingImage": algorithm["TrainingImage"],
            "TrainingInputMode": algorithm["TrainingInputMode"],
            "MetricDefinitions": metrics,
        },
        "HyperParameterTuningResourceConfig": request["ResourceConfig"],
    }


def _place_of(path: FieldPath, request: Mapping[str, Any]) -> FieldPath:
    """Return the field of the sweep file that a value of the request comes from."""
    if "ParameterRanges" in path:
        at = path.index("ParameterRanges")
        if len(path) > at + 2:
            item = request["HyperParameterTuningJobConfig"]["ParameterRanges"][path[at + 1]][
                path[at + 2]
            ]
            return ("space", item["Name"])
        return ("space",)
    fields: dict[str, FieldPath] = {
        "MaxNumberOfTrainingJobs": ("trials",),
        "MaxParallelTrainingJobs": ("parallel",),
        "MaxRuntimeInSeconds": ("limits", "time"),
        "MetricName": ("objective",),
        "RandomSeed": ("seed",),
    }
    is_own = path[:1] == ("HyperParameterTuningJobConfig",)
    return fields.get(str(path[-1]), ("job",)) if is_own else ("job",)
