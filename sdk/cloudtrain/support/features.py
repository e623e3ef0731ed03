"""What features offer to the core and to each other. A feature is a folder that may be missing."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from cloudtrain.errors import UserError

_PACKAGE = "cloudtrain.features"
OFFERS = {
    "best_trials": "sweeps.service.find_best_trials",
    "costs": "costs.reading.costs",
    "endpoint_list": "serving.commands.list_endpoints",
    "evaluate": "evaluation.evaluating.evaluate",
    "job_of": "functions.job_of.job_of",
    "backend_of_notebook": "functions.notebook_file.backend_of_notebook",
    "job_of_notebook": "functions.notebook_file.job_of_notebook",
    "recover": "recovery.service.continue_run",
    "recover_later": "recovery.service.wait_for_capacity",
    "rehearse": "rehearsal.rehearse.rehearse_job",
    "sweep": "sweeps.handle.sweep",
    "sweep_list": "sweeps.page_record.list_sweeps",
    "sweep_page": "sweeps.page_record.sweep_document",
    "sweep_row": "sweeps.page_record.sweep_row",
    "sweep_schema": "sweeps.schema.sweep_schema",
    "write_job": "functions.job_of.write_job",
}
"""The functions of features that others call, by what they give: feature, module and name."""


def find_offer(name: str) -> Callable[..., Any] | None:
    """Return a function of a feature, by its name in `OFFERS`; None where the feature is not installed."""
    module, _, function = OFFERS[name].rpartition(".")
    if importlib.util.find_spec(f"{_PACKAGE}.{module.partition('.')[0]}") is None:
        return None
    found: Callable[..., Any] = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), function)
    return found


def offer(name: str) -> Callable[..., Any]:
    """Return a function of a feature, by its name in `OFFERS`.

    Raises:
        UserError: The feature is not installed.
    """
    found = find_offer(name)
    if found is None:
        feature = OFFERS[name].partition(".")[0]
        raise UserError(f"this installation has no feature {feature!r}", "install cloudtrain again")
    return found
