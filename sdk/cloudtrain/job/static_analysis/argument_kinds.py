"""The kinds of a script's options and of a Task's arguments, read from the source: bool, int, float or str."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from cloudtrain.job.static_analysis.syntax import Module

_KINDS = ("bool", "int", "float", "str")
_FLAGS = ("store_true", "store_false", "store_const", "count")

ArgumentKinds = tuple[tuple[str, str], ...]
"""Pairs of a name and one of `bool`, `int`, `float`, `str` and, for an option without a value, `flag`."""


def option_kinds(modules: Iterable[Module]) -> ArgumentKinds:
    """Return the kinds of the options that a script defines by argparse, as far as its source shows them."""
    found: dict[str, str] = {}
    for module in modules:
        for call in module.calls:
            if getattr(call.func, "attr", "") != "add_argument":
                continue
            kind = _option_kind(call)
            for name in _option_names(call):
                # Two programs of a file may define an option in two ways.
                found[name] = kind if found.get(name, kind) == kind else ""
    return tuple((name, kind) for name, kind in found.items() if kind)


def task_argument_kinds(module: Module, task: str) -> ArgumentKinds:
    """Return the kinds of the arguments of a Task's `__init__`, by annotation or default."""
    init = next(_inits(module.tree, task), None)
    if init is None:
        return ()
    positional = [*init.args.posonlyargs, *init.args.args]
    defaults = [None] * (len(positional) - len(init.args.defaults)) + list(init.args.defaults)
    pairs = [
        *zip(positional, defaults, strict=True),
        *zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True),
    ]
    kinds = ((argument.arg, _kind_of(argument, default)) for argument, default in pairs)
    return tuple((name, kind) for name, kind in kinds if kind)


def _inits(tree: ast.Module, task: str) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == task:
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    yield each


def _kind_of(argument: ast.arg, default: ast.expr | None) -> str:
    if argument.annotation is not None:
        name = getattr(argument.annotation, "id", "")
        return name if name in _KINDS else ""
    if isinstance(default, ast.Constant):
        name = type(default.value).__name__
        return name if name in _KINDS else ""
    return ""


def _option_names(call: ast.Call) -> Iterator[str]:
    for each in call.args:
        if isinstance(each, ast.Constant) and str(each.value).startswith("--"):
            yield str(each.value).removeprefix("--")


def _option_kind(call: ast.Call) -> str:
    given = {each.arg: each.value for each in call.keywords}
    if isinstance(action := given.get("action"), ast.Constant) and action.value in _FLAGS:
        return "flag"
    if "action" in given:
        return ""
    name = getattr(given.get("type"), "id", "")
    return name if name in _KINDS else ""
