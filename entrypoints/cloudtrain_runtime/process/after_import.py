"""Calls of functions after the import of a module. Standard library only."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, call: Callable[[Any], None]) -> None:
        self._name, self._call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, with a loader that calls the function; None for other modules."""
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._call(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def call_after_import(name: str, call: Callable[[Any], None]) -> None:
    """Call a function with a module after its import. It is not imported here: torch reads variables at import."""
    sys.meta_path.insert(0, _Finder(name, call))
