"""The services that a run can be logged to."""

from __future__ import annotations

from pathlib import Path

from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.metrics.tracking.mlflow import MlflowTracker
from cloudtrain_runtime.metrics.tracking.tracker import Tracker
from cloudtrain_runtime.metrics.tracking.wandb import WandbTracker


def trackers_of(config: RunConfig, folder: Path) -> list[Tracker]:
    """Return the services that a run is logged to.

    Args:
        config: The run's configuration.
        folder: Folder for their own files on this host.
    """
    found: list[Tracker] = []
    tracking = config.tracking
    if tracking is None:
        return found
    if tracking.mlflow:
        found.append(MlflowTracker(config))
    if tracking.wandb:
        found.append(WandbTracker(config, folder))
    return found
