"""Plan, rehearse and submit multi-instance PyTorch training jobs to SageMaker.

    import cloudtrain

    run = cloudtrain.submit(cloudtrain.JobSpec.from_yaml("job.yaml"), local=True)
    run.wait()
    run.state, run.metrics

A public name is imported on first use, so that `import cloudtrain` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; the same names as in `_NAMES`
    from cloudtrain.client.account import find_settings as find_settings
    from cloudtrain.client.account import trace_settings as trace_settings
    from cloudtrain.client.client import Client as Client
    from cloudtrain.client.observer import Observer as Observer
    from cloudtrain.client.receipts import Receipt as Receipt
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
    from cloudtrain.client.shortcuts import resume as resume
    from cloudtrain.client.shortcuts import status as status
    from cloudtrain.client.shortcuts import stop as stop
    from cloudtrain.client.shortcuts import submit as submit
    from cloudtrain.client.shortcuts import validate as validate
    from cloudtrain.errors import BundleError as BundleError
    from cloudtrain.errors import CloudError as CloudError
    from cloudtrain.errors import CloudtrainError as CloudtrainError
    from cloudtrain.errors import DamagedCheckpointError as DamagedCheckpointError
    from cloudtrain.errors import DriftError as DriftError
    from cloudtrain.errors import MissingExtraError as MissingExtraError
    from cloudtrain.errors import NoCapacityError as NoCapacityError
    from cloudtrain.errors import Problem as Problem
    from cloudtrain.errors import RunNotFoundError as RunNotFoundError
    from cloudtrain.errors import SettingsError as SettingsError
    from cloudtrain.errors import SpecError as SpecError
    from cloudtrain.errors import UntrustedHomeError as UntrustedHomeError
    from cloudtrain.errors import UntrustedSettingsError as UntrustedSettingsError
    from cloudtrain.errors import UserError as UserError
    from cloudtrain.failure_rules import Explanation as Explanation
    from cloudtrain.failure_rules import FailureClass as FailureClass
    from cloudtrain.features.costs.reading import costs as costs
    from cloudtrain.features.costs.sums import Costs as Costs
    from cloudtrain.features.dashboard.model_cards import model_card as model_card
    from cloudtrain.features.evaluation.evaluating import EvaluationChoice as EvaluationChoice
    from cloudtrain.features.evaluation.evaluating import evaluate as evaluate
    from cloudtrain.features.rehearsal.rehearse import RehearsalOptions as RehearsalOptions
    from cloudtrain.features.rehearsal.rehearse import rehearse as rehearse
    from cloudtrain.features.rehearsal.report import Rehearsal as Rehearsal
    from cloudtrain.features.serving.deployment import Deployment as Deployment
    from cloudtrain.features.serving.deployment import deploy as deploy
    from cloudtrain.features.serving.deployment import undeploy as undeploy
    from cloudtrain.features.serving.endpoint_request import EndpointOptions as EndpointOptions
    from cloudtrain.features.serving.endpoints import Endpoint as Endpoint
    from cloudtrain.features.serving.endpoints import list_endpoints as list_endpoints
    from cloudtrain.features.serving.package import ServingOptions as ServingOptions
    from cloudtrain.features.serving.served_run import Server as Server
    from cloudtrain.features.serving.served_run import serve as serve
    from cloudtrain.features.setup.account_settings import configure as configure
    from cloudtrain.features.setup.account_settings import find_candidates as find_candidates
    from cloudtrain.features.setup.account_settings import list_profiles as list_profiles
    from cloudtrain.features.setup.account_settings import read_terraform as read_terraform
    from cloudtrain.features.setup.account_settings import remove_profile as remove_profile
    from cloudtrain.features.sweeps.handle import Sweep as Sweep
    from cloudtrain.features.sweeps.handle import get_sweep as get_sweep
    from cloudtrain.features.sweeps.handle import sweep as sweep
    from cloudtrain.features.sweeps.results import SweepState as SweepState
    from cloudtrain.features.sweeps.results import SweepStatus as SweepStatus
    from cloudtrain.features.sweeps.trial import Trial as Trial
    from cloudtrain.features.sweeps.trial import TrialState as TrialState
    from cloudtrain.job.spec import JobSpec as JobSpec
    from cloudtrain.planning.plan import Plan as Plan
    from cloudtrain.planning.warm_pool import WarmPool as WarmPool
    from cloudtrain.preflight import Candidate as Candidate
    from cloudtrain.preflight import Candidates as Candidates
    from cloudtrain.runs.checkpoints import CheckpointFolder as CheckpointFolder
    from cloudtrain.runs.checkpoints import SavedCheckpoint as SavedCheckpoint
    from cloudtrain.runs.comparison import Comparison as Comparison
    from cloudtrain.runs.downloads import Download as Download
    from cloudtrain.runs.evaluations import EvaluatedSplit as EvaluatedSplit
    from cloudtrain.runs.evaluations import Evaluation as Evaluation
    from cloudtrain.runs.evaluations import Measurement as Measurement
    from cloudtrain.runs.evaluations import Ranking as Ranking
    from cloudtrain.runs.evaluations import rank_evaluations as rank_evaluations
    from cloudtrain.runs.log_lines import LogFilter as LogFilter
    from cloudtrain.runs.log_lines import LogLine as LogLine
    from cloudtrain.runs.progress import Progress as Progress
    from cloudtrain.runs.run import Run as Run
    from cloudtrain.runs.run_filter import RunFilter as RunFilter
    from cloudtrain.runs.status import State as State
    from cloudtrain.runs.status import Status as Status
    from cloudtrain.settings.profiles import ProfileChange as ProfileChange
    from cloudtrain.settings.settings import Origin as Origin
    from cloudtrain.settings.settings import Settings as Settings
    from cloudtrain.support.checks import Check as Check
    from cloudtrain.support.checks import Result as Result

__version__ = "0.1.0"

_NAMES = {
    "client.account": "find_settings trace_settings",
    "client.client": "Client",
    "client.observer": "Observer",
    "client.receipts": "Receipt",
    "client.shortcuts": (
        "check checkpoint_folder compare download explain files get_run list_runs logs plan "
        "resume status stop submit validate"
    ),
    "errors": (
        "BundleError CloudError CloudtrainError DamagedCheckpointError DriftError MissingExtraError "
        "NoCapacityError Problem RunNotFoundError SettingsError SpecError UntrustedHomeError "
        "UntrustedSettingsError UserError"
    ),
    "failure_rules": "Explanation FailureClass",
    "features.serving.deployment": "Deployment deploy undeploy",
    "features.serving.endpoint_request": "EndpointOptions",
    "features.serving.endpoints": "Endpoint list_endpoints",
    "features.serving.package": "ServingOptions",
    "features.serving.served_run": "Server serve",
    "features.setup.account_settings": (
        "configure find_candidates list_profiles read_terraform remove_profile"
    ),
    "features.costs.reading": "costs",
    "features.costs.sums": "Costs",
    "features.dashboard.model_cards": "model_card",
    "features.evaluation.evaluating": "EvaluationChoice evaluate",
    "features.rehearsal.rehearse": "RehearsalOptions rehearse",
    "features.rehearsal.report": "Rehearsal",
    "features.sweeps.handle": "Sweep get_sweep sweep",
    "features.sweeps.results": "SweepState SweepStatus",
    "features.sweeps.trial": "Trial TrialState",
    "job.spec": "JobSpec",
    "planning.plan": "Plan",
    "planning.warm_pool": "WarmPool",
    "preflight": "Candidate Candidates",
    "runs.checkpoints": "CheckpointFolder SavedCheckpoint",
    "runs.comparison": "Comparison",
    "runs.downloads": "Download",
    "runs.evaluations": "EvaluatedSplit Evaluation Measurement Ranking rank_evaluations",
    "runs.log_lines": "LogFilter LogLine",
    "runs.progress": "Progress",
    "runs.run": "Run",
    "runs.run_filter": "RunFilter",
    "runs.status": "State Status",
    "settings.profiles": "ProfileChange",
    "settings.settings": "Origin Settings",
    "support.checks": "Check Result",
}
"""The public names by the module that defines them."""

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 (a list of strings, but no literal)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(
        importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name
    )
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
