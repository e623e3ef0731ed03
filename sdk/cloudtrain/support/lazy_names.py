"""Names of a package that are imported on first use, so that importing the package is fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def modules_by_name(names: Mapping[str, str]) -> dict[str, str]:
    """Return the module of each name, of a table that has the names of each module in one text."""
    return {name: module for module, found in names.items() for name in found.split()}


def import_lazily(package: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: Name of the package.
        module_of: The module that defines each name, below `cloudtrain`.
    """

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"cloudtrain.{module_of[name]}"), name)
        # The next use finds it without this function.
        setattr(sys.modules[package], name, value)
        return value

    return find
