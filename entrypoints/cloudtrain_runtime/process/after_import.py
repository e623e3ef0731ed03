"""Calls of functions after the import of a module, and changes of functions.

Standard library only, and as few modules of it as possible: each Python process of the ranks imports this module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

TYPE_CHECKING = False  # not from typing, whose import takes longer than this module's own
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class _Finder:
    """A meta path finder. It does not derive from `importlib.abc`, whose import takes longer than all of this."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Callable[[Any], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, with a loader that calls its functions; None for other modules."""
        calls = self.calls.get(fullname)
        if calls is None:
            return None
        spec = self._find_elsewhere(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                for call in calls:
                    call(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Ask all other finders in their order: a job or its tools may hook into the same module."""
        for finder in list(sys.meta_path):
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


_finder = _Finder()


def call_after_import(name: str, call: Callable[[Any], None]) -> None:
    """Call a function with a module after its import. It is not imported here: torch reads variables at import."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.calls.setdefault(name, []).append(call)


def change_arguments(owner: Any, name: str, **changes: Callable[[Any], Any]) -> None:
    """Replace a function by one that changes arguments, whether they are given or not.

    Args:
        owner: Its module or class.
        name: Its name there.
        changes: Function of each argument's value, by name; None for one that is not given. Names that the function
            does not have are ignored.
    """
    import inspect

    plain = getattr(owner, name)
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def changed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for each in changes.keys() & signature.parameters.keys():
            bound.arguments[each] = changes[each](bound.arguments.get(each))
        return plain(*bound.args, **bound.kwargs)

    setattr(owner, name, changed)
