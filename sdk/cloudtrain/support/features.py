"""The features as the core uses them: by name only, where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_PACKAGE = "cloudtrain.features"


def has_feature(name: str) -> bool:
    """Return whether a feature is installed."""
    return importlib.util.find_spec(f"{_PACKAGE}.{name}") is not None


def call_feature(module: str, function: str, *arguments: Any, **given: Any) -> Any:
    """Call a function of a feature.

    Args:
        module: The module below `cloudtrain.features`, such as `sweeps.schema`.
        function: Name of the function.
        arguments: Its arguments.
        given: Its named arguments.
    """
    found = importlib.import_module(f"{_PACKAGE}.{module}")
    return getattr(found, function)(*arguments, **given)
