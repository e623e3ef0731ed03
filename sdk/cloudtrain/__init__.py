"""cloudtrain: what is planned is what is rehearsed is what is sent.

    import cloudtrain

    run = cloudtrain.submit(cloudtrain.JobSpec.from_yaml("job.yaml"), local=True)
    run.wait()
    run.state, run.metrics

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudtrain.api import (
        check,
        checkpoint_folder,
        configure,
        explain,
        files,
        find_candidates,
        find_settings,
        get_run,
        list_profiles,
        list_runs,
        logs,
        plan,
        read_terraform,
        remove_profile,
        resume,
        status,
        stop,
        submit,
        trace_settings,
        validate,
    )
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
    from cloudtrain.explain import Explanation, FailureClass
    from cloudtrain.plan import Plan
    from cloudtrain.preflight import Candidate, Candidates, Check
    from cloudtrain.profiles import ProfileChange
    from cloudtrain.run import LogFilter, LogLine, Progress, Run, RunFilter, State, Status, WarmPool
    from cloudtrain.saved import CheckpointFolder, SavedCheckpoint
    from cloudtrain.sending import Callbacks
    from cloudtrain.settings import Origin, Settings
    from cloudtrain.spec import JobSpec

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

_HOMES = {
    "api": (
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
    ),
    "errors": (
        *("BundleError", "CloudError", "CloudtrainError", "DamagedCheckpointError", "DriftError", "MissingExtraError"),
        *("NoCapacityError", "Problem", "RunNotFoundError", "SettingsError", "SpecError"),
        *("UntrustedSettingsError", "UserError"),
    ),
    "explain": ("Explanation", "FailureClass"),
    "plan": ("Plan",),
    "preflight": ("Candidate", "Candidates", "Check"),
    "profiles": ("ProfileChange",),
    "run": ("LogFilter", "LogLine", "Progress", "Run", "RunFilter", "State", "Status", "WarmPool"),
    "saved": ("CheckpointFolder", "SavedCheckpoint"),
    "sending": ("Callbacks",),
    "settings": ("Origin", "Settings"),
    "spec": ("JobSpec",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


class _Package(ModuleType):
    """`cloudtrain.plan` is the verb, though a module of that name exists, too (`from cloudtrain.plan import Plan`)."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME_OF and isinstance(value, ModuleType):
            return  # the import system binding a submodule over a public name
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


sys.modules[__name__].__class__ = _Package
