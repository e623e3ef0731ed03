"""cloudtrain: what is planned is what is rehearsed is what is sent.

    import cloudtrain

    run = cloudtrain.submit(cloudtrain.JobSpec.from_yaml("job.yaml"), local=True)
    run.wait()
    run.state, run.metrics

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudtrain.client.account import (
        configure,
        find_candidates,
        find_settings,
        list_profiles,
        read_terraform,
        remove_profile,
        trace_settings,
    )
    from cloudtrain.client.callbacks import Callbacks
    from cloudtrain.client.jobs import check, files, plan, validate
    from cloudtrain.client.runs import checkpoint_folder, explain, get_run, list_runs, logs, status, stop
    from cloudtrain.client.submission import resume, submit
    from cloudtrain.errors import (
        BundleError,
        CloudError,
        CloudtrainError,
        DamagedCheckpointError,
        DriftError,
        MissingExtraError,
        NoCapacityError,
        Problem,
        RunNotFoundError,
        SettingsError,
        SpecError,
        UntrustedSettingsError,
        UserError,
    )
    from cloudtrain.failure_rules import Explanation, FailureClass
    from cloudtrain.job.spec import JobSpec
    from cloudtrain.planning.plan import Plan
    from cloudtrain.planning.warm_pool import WarmPool
    from cloudtrain.preflight import Candidate, Candidates, Check
    from cloudtrain.runs.checkpoints import CheckpointFolder, SavedCheckpoint
    from cloudtrain.runs.log_lines import LogFilter, LogLine
    from cloudtrain.runs.progress import Progress
    from cloudtrain.runs.run import Run
    from cloudtrain.runs.run_filter import RunFilter
    from cloudtrain.runs.status import State, Status
    from cloudtrain.settings.profiles import ProfileChange
    from cloudtrain.settings.settings import Origin, Settings

__version__ = "0.1.0"

__all__ = [
    "BundleError",
    "Callbacks",
    "Candidate",
    "Candidates",
    "Check",
    "CheckpointFolder",
    "CloudError",
    "CloudtrainError",
    "DamagedCheckpointError",
    "DriftError",
    "Explanation",
    "FailureClass",
    "JobSpec",
    "LogFilter",
    "LogLine",
    "MissingExtraError",
    "NoCapacityError",
    "Origin",
    "Plan",
    "Problem",
    "ProfileChange",
    "Progress",
    "Run",
    "RunFilter",
    "RunNotFoundError",
    "SavedCheckpoint",
    "Settings",
    "SettingsError",
    "SpecError",
    "State",
    "Status",
    "UntrustedSettingsError",
    "UserError",
    "WarmPool",
    "check",
    "checkpoint_folder",
    "configure",
    "explain",
    "files",
    "find_candidates",
    "find_settings",
    "get_run",
    "list_profiles",
    "list_runs",
    "logs",
    "plan",
    "read_terraform",
    "remove_profile",
    "resume",
    "status",
    "stop",
    "submit",
    "trace_settings",
    "validate",
]

_MODULE_OF = {
    "BundleError": "errors",
    "Callbacks": "client.callbacks",
    "Candidate": "preflight",
    "Candidates": "preflight",
    "Check": "preflight",
    "CheckpointFolder": "runs.checkpoints",
    "CloudError": "errors",
    "CloudtrainError": "errors",
    "DamagedCheckpointError": "errors",
    "DriftError": "errors",
    "Explanation": "failure_rules",
    "FailureClass": "failure_rules",
    "JobSpec": "job.spec",
    "LogFilter": "runs.log_lines",
    "LogLine": "runs.log_lines",
    "MissingExtraError": "errors",
    "NoCapacityError": "errors",
    "Origin": "settings.settings",
    "Plan": "planning.plan",
    "Problem": "errors",
    "ProfileChange": "settings.profiles",
    "Progress": "runs.progress",
    "Run": "runs.run",
    "RunFilter": "runs.run_filter",
    "RunNotFoundError": "errors",
    "SavedCheckpoint": "runs.checkpoints",
    "Settings": "settings.settings",
    "SettingsError": "errors",
    "SpecError": "errors",
    "State": "runs.status",
    "Status": "runs.status",
    "UntrustedSettingsError": "errors",
    "UserError": "errors",
    "WarmPool": "planning.warm_pool",
    "check": "client.jobs",
    "checkpoint_folder": "client.runs",
    "configure": "client.account",
    "explain": "client.runs",
    "files": "client.jobs",
    "find_candidates": "client.account",
    "find_settings": "client.account",
    "get_run": "client.runs",
    "list_profiles": "client.account",
    "list_runs": "client.runs",
    "logs": "client.runs",
    "plan": "client.jobs",
    "read_terraform": "client.account",
    "remove_profile": "client.account",
    "resume": "client.submission",
    "status": "client.runs",
    "stop": "client.runs",
    "submit": "client.submission",
    "trace_settings": "client.account",
    "validate": "client.jobs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
