"""Plan, rehearse and submit multi-instance PyTorch training jobs to SageMaker.

    import cloudtrain

    run = cloudtrain.submit(cloudtrain.JobSpec.from_yaml("job.yaml"), local=True)
    run.wait()
    run.state, run.metrics

The verbs are here. The types of a feature are in `cloudtrain.sweeps`, `serving`, `rehearsal`, `evaluation` and `setup`,
and errors in `cloudtrain.errors`. A public name is imported on first use, so that `import cloudtrain` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; the same names as in `_NAMES`
    from cloudtrain.client.client import Client as Client
    from cloudtrain.client.observer import Observer as Observer
    from cloudtrain.client.shortcuts import check as check
    from cloudtrain.client.shortcuts import checkpoint_folder as checkpoint_folder
    from cloudtrain.client.shortcuts import compare as compare
    from cloudtrain.client.shortcuts import download as download
    from cloudtrain.client.shortcuts import explain as explain
    from cloudtrain.client.shortcuts import files as files
    from cloudtrain.client.shortcuts import get_run as get_run
    from cloudtrain.client.shortcuts import list_runs as list_runs
    from cloudtrain.client.shortcuts import logs as logs
    from cloudtrain.client.shortcuts import plan as plan
    from cloudtrain.client.shortcuts import recover as recover
    from cloudtrain.client.shortcuts import resume as resume
    from cloudtrain.client.shortcuts import status as status
    from cloudtrain.client.shortcuts import stop as stop
    from cloudtrain.client.shortcuts import submit as submit
    from cloudtrain.client.shortcuts import validate as validate
    from cloudtrain.errors import CloudError as CloudError
    from cloudtrain.errors import CloudtrainError as CloudtrainError
    from cloudtrain.errors import RunNotFoundError as RunNotFoundError
    from cloudtrain.errors import SettingsError as SettingsError
    from cloudtrain.errors import SpecError as SpecError
    from cloudtrain.errors import UserError as UserError
    from cloudtrain.features import evaluation as evaluation
    from cloudtrain.features import rehearsal as rehearsal
    from cloudtrain.features import serving as serving
    from cloudtrain.features import setup as setup
    from cloudtrain.features import sweeps as sweeps
    from cloudtrain.features.costs.reading import costs as costs
    from cloudtrain.features.dashboard.model_cards import model_card as model_card
    from cloudtrain.features.evaluation.evaluating import evaluate as evaluate
    from cloudtrain.features.functions.job_of import job_of as job_of
    from cloudtrain.features.functions.remote import remote as remote
    from cloudtrain.features.functions.remote import returned_value as returned_value
    from cloudtrain.features.rehearsal.rehearse import rehearse as rehearse
    from cloudtrain.features.serving.deployment import deploy as deploy
    from cloudtrain.features.serving.deployment import undeploy as undeploy
    from cloudtrain.features.serving.endpoints import list_endpoints as list_endpoints
    from cloudtrain.features.serving.served_run import serve as serve
    from cloudtrain.features.sweeps.handle import get_sweep as get_sweep
    from cloudtrain.features.sweeps.handle import sweep as sweep
    from cloudtrain.job.spec import JobSpec as JobSpec
    from cloudtrain.planning.plan import Plan as Plan
    from cloudtrain.runs.log_lines import LogFilter as LogFilter
    from cloudtrain.runs.run import Run as Run
    from cloudtrain.runs.run_filter import RunFilter as RunFilter
    from cloudtrain.runs.status import State as State
    from cloudtrain.runs.status import Status as Status
    from cloudtrain.settings.settings import Settings as Settings
    from cloudtrain.support.checks import Check as Check
    from cloudtrain.support.checks import Result as Result

__version__ = "0.1.0"

_NAMES = {
    "client.client": "Client",
    "client.observer": "Observer",
    "client.shortcuts": (
        "check checkpoint_folder compare download explain files get_run list_runs logs plan "
        "recover resume status stop submit validate"
    ),
    "errors": "CloudError CloudtrainError RunNotFoundError SettingsError SpecError UserError",
    "features.costs.reading": "costs",
    "features.dashboard.model_cards": "model_card",
    "features.evaluation.evaluating": "evaluate",
    "features.functions.job_of": "job_of",
    "features.functions.remote": "remote returned_value",
    "features.rehearsal.rehearse": "rehearse",
    "features.serving.deployment": "deploy undeploy",
    "features.serving.endpoints": "list_endpoints",
    "features.serving.served_run": "serve",
    "features.sweeps.handle": "get_sweep sweep",
    "job.spec": "JobSpec",
    "planning.plan": "Plan",
    "runs.log_lines": "LogFilter",
    "runs.run": "Run",
    "runs.run_filter": "RunFilter",
    "runs.status": "State Status",
    "settings.settings": "Settings",
    "support.checks": "Check Result",
}
"""The public names by the module that defines them."""

_FEATURES = ("evaluation", "rehearsal", "serving", "setup", "sweeps")
"""The features with public types: `cloudtrain.sweeps` is the package `cloudtrain.features.sweeps`."""

_MOVED = {
    "errors": (
        "BundleError DamagedCheckpointError DriftError MissingExtraError NoCapacityError Problem "
        "UntrustedHomeError UntrustedSettingsError"
    ),
    "features.evaluation": "EvaluatedSplit Evaluation Measurement Ranking rank_evaluations",
    "failure_rules": "Explanation FailureClass",
    "features.costs.sums": "Costs",
    "planning.warm_pool": "WarmPool",
    "features.rehearsal": "Receipt Rehearsal",
    "runs.checkpoints": "CheckpointFolder SavedCheckpoint",
    "runs.comparison": "Comparison",
    "runs.downloads": "Download",
    "runs.log_lines": "LogLine",
    "runs.progress": "Progress",
    "features.serving": "Deployment Endpoint EndpointOptions Server ServingOptions",
    "features.setup": (
        "Candidate Candidates Origin ProfileChange configure find_candidates find_settings "
        "list_profiles read_terraform remove_profile trace_settings"
    ),
    "features.sweeps": "Sweep SweepState SweepStatus Trial TrialState",
}
"""Names that were here in the previews of 0.1.0, by the module that has them now. They warn, and go with 0.2."""

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_NEW_PLACE_OF = {
    **{name: (module, name) for module, names in _MOVED.items() for name in names.split()},
    "EvaluationChoice": ("features.evaluation", "EvaluationOptions"),
    "RehearsalOptions": ("features.rehearsal.rehearse", "RehearsalOptions"),
}

__all__ = sorted({*_MODULE_OF, *_FEATURES})  # noqa: PLE0605 (a list of strings, but no literal)


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULE_OF:
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
        value = globals()[name] = getattr(module, name)
        return value
    if name in _FEATURES:
        return importlib.import_module(f"{__name__}.features.{name}")
    if name == "errors":
        return importlib.import_module(f"{__name__}.errors")
    if name not in _NEW_PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import warnings

    module_name, new_name = _NEW_PLACE_OF[name]
    warnings.warn(
        f"{__name__}.{name} has moved: from {__name__}.{module_name} import {new_name}",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(importlib.import_module(f"{__name__}.{module_name}"), new_name)


def __dir__() -> list[str]:
    return sorted(__all__)
