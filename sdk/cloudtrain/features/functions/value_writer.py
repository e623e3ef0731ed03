"""The writer of values as Python source: literals, containers, and names of functions and classes."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final

_DEEPEST: Final = 50
_MOST_BITS: Final = 10_000


class NoExpressionError(Exception):
    """A value has no expression."""


@dataclass
class Writer:
    """Writes one value.

    Attributes:
        names: Names of the notebook.
        is_local: Whether a module lies outside of installed packages.
        write_other: Writes objects of all other types.
        imports: Statements that the expression needs.
        used: Names of the notebook that it needs.
        modules: Modules that it imports.
    """

    names: Mapping[str, Any]
    is_local: Callable[[str], bool]
    write_other: Callable[[Any, Writer], str]
    imports: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    _depth: int = 0

    def write(self, value: Any) -> str:
        """Return the expression of a value.

        Raises:
            NoExpressionError: It has none.
        """
        if self._depth > _DEEPEST:
            # It may contain itself.
            raise NoExpressionError
        self._depth += 1
        try:
            return self._write(value)
        finally:
            self._depth -= 1

    def _write(self, value: Any) -> str:
        kind = type(value)
        if kind is int and value.bit_length() > _MOST_BITS:
            # Python refuses to print it in decimal digits.
            return hex(value)
        if kind in (type(None), bool, int, str, bytes, type(...)):
            return repr(value)
        if kind is float:
            return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
        if kind in (list, tuple, set, frozenset):
            return self._write_sequence(value)
        if kind is dict:
            return "{" + ", ".join(f"{key}: {part}" for key, part in self.pairs(value)) + "}"
        return self._write_object(value)

    def pairs(self, value: Mapping[Any, Any]) -> list[tuple[str, str]]:
        """Return keys and values as expressions."""
        return [(self.write(key), self.write(part)) for key, part in value.items()]

    def _write_sequence(self, value: Any) -> str:
        parts = [self.write(part) for part in value]
        if isinstance(value, frozenset | set):
            parts.sort()
            return f"{type(value).__name__}([{', '.join(parts)}])"
        if isinstance(value, list):
            return f"[{', '.join(parts)}]"
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"

    def _write_object(self, value: Any) -> str:
        kind = type(value)
        if isinstance(value, PurePath):
            known = "Path" if isinstance(value, Path) else kind.__name__
            return f"{self.module('pathlib')}.{known}({str(value)!r})"
        if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
            return f"{self.module('torch')}.{repr(value).removeprefix('torch.')}"
        if kind.__module__ == "numpy" and isinstance(value, sys.modules["numpy"].generic):
            return self._write_number(value)
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
            return self.named(value)
        if isinstance(value, types.MethodDescriptorType):
            return f"{self.named(value.__objclass__)}.{value.__name__}"
        return self.write_other(value, self)

    def _write_number(self, value: Any) -> str:
        plain = value.item()
        if type(plain) not in (bool, int, float, complex, str):
            raise NoExpressionError
        return f"{self.module('numpy')}.{type(value).__name__}({self.write(plain)})"

    def module(self, name: str) -> str:
        """Import a module; return the expression of it."""
        root = name.partition(".")[0]
        self.modules.add(name)
        if self.names.get(root, sys.modules.get(root)) is sys.modules.get(root):
            self.imports.add(f"import {name}")
            return name
        # The notebook has the name for something else.
        alias = f"_{name.replace('.', '_')}"
        self.imports.add(f"import {name} as {alias}")
        return alias

    def named(self, value: Any) -> str:
        """Return the name of a function or class of the notebook or of a module.

        Raises:
            NoExpressionError: It has none.
        """
        name, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", None)
        if module == "__main__" and self.names.get(name) is value:
            self.used.add(name)
            return str(name)
        if module in (None, "__main__") or "." in name:
            raise NoExpressionError
        if getattr(sys.modules.get(module), name, None) is not value:
            raise NoExpressionError
        if module == "builtins" and self.names.get(name, value) is value:
            return str(name)
        return f"{self.module(module)}.{name}"
