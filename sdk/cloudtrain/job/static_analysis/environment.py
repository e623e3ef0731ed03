"""Environment variables that statements set, and whether that is the address of the first rank."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from cloudtrain.job.static_analysis.syntax import Module, written

_ADDRESS = "MASTER_ADDR"
_THIS_HOST = frozenset({"localhost", "127.0.0.1", "0.0.0.0", "::1"})  # noqa: S104 (nothing listens)


class Setting(NamedTuple):
    """A variable that a statement sets."""

    name: str
    value: ast.expr
    line: int


def settings_of(node: ast.AST) -> Iterator[Setting]:
    """Yield the variables that an assignment to `os.environ`, or a call of its `update`, sets."""
    if isinstance(node, ast.Expr):
        node = node.value
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and written(target.value).endswith("environ"):
                yield from _setting(target.slice, node.value, node.lineno)
    elif isinstance(node, ast.Call) and written(node.func).endswith("environ.update"):
        for each in node.keywords:
            if each.arg:
                yield Setting(each.arg, each.value, node.lineno)
        for mapping in node.args:
            yield from _settings_of_mapping(mapping, node.lineno)


def own_address_lines(node: ast.AST) -> Iterator[int]:
    """Yield the lines of a statement that set MASTER_ADDR to this host, written out."""
    return (each.line for each in _addresses(node) if _is_this_host(each))


def sets_other_address(module: Module) -> bool:
    """Return whether a module sets MASTER_ADDR to another value, or lets the ranks meet by `init_method` or a store."""
    for node in (*module.of(ast.Assign), *module.calls):
        if not all(map(_is_this_host, _addresses(node))):
            return True
    meetings = [each.value for each in module.keywords if each.arg in ("init_method", "store")]
    return not all(map(_is_environment_method, meetings))


def _addresses(node: ast.AST) -> Iterator[Setting]:
    return (each for each in settings_of(node) if each.name == _ADDRESS)


def _is_this_host(setting: Setting) -> bool:
    return isinstance(setting.value, ast.Constant) and setting.value.value in _THIS_HOST


def _is_environment_method(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == "env://"


def _settings_of_mapping(mapping: ast.expr, line: int) -> Iterator[Setting]:
    if isinstance(mapping, ast.Dict):
        for key, value in zip(mapping.keys, mapping.values, strict=True):
            yield from _setting(key, value, line)


def _setting(key: ast.expr | None, value: ast.expr, line: int) -> Iterator[Setting]:
    if isinstance(key, ast.Constant):
        yield Setting(str(key.value), value, line)
