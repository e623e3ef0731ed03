"""Statements that overwrite the variables by which torchrun says which rank this is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from cloudtrain.job.static_analysis.environment import settings_of
from cloudtrain.job.static_analysis.syntax import Function, Module, last_name, written

_RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
_RANK_CALLS = frozenset({"get_rank", "get_world_size", "get_local_rank", "get_node_local_rank"})
_OTHER_WAY = re.compile(
    r"(?i)slurm|(?<![a-z])mpi|openmpi|ompi_|pmi_|pmix|lsf|lsb_|pbs|jsm_|mv2_|sge_"
    r"|azureml|az_batch|kubernetes|k8s|launcher|notebook|colab|standalone|single|debug"
    r"|(?-i:(?<![A-Za-z])ray_|(?<![A-Z])Ray(?=[A-Z_]|$))"
)
"""Parts of names and texts by which code chooses another way to start ranks than torchrun."""
_REMOTE = re.compile(r"(?:ray\.)?remote\b")


def find_overwritten(module: Module) -> tuple[int, str] | None:
    """Return line and name of one of torchrun's variables that a module overwrites.

    A new value that is computed from the old one does not count, nor one that is set only where torchrun has set none,
    or where something else has started the ranks, such as Slurm.
    """
    return next(_overwritten(module.tree.body, _Ways(module)), None)


class _Ways:
    """Names of a module that depend on torchrun's variables, or on another way to start the ranks."""

    def __init__(self, module: Module) -> None:
        self._of_torchrun: set[str] = set()
        self._of_others: set[str] = set()
        for node in module.nodes:
            if not isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
                continue
            if node.value is None:
                continue
            if _mentions_rank(node.value):
                self._of_torchrun |= _targets(node)
            elif _OTHER_WAY.search(ast.unparse(node.value)):
                self._of_others |= _targets(node)

    def derives(self, value: ast.AST) -> bool:
        """Return whether a value is computed from torchrun's variables."""
        return _mentions_rank(value) or not self._of_torchrun.isdisjoint(_names_below(value))

    def decide(self, node: ast.AST) -> bool:
        """Return whether an expression or statement asks how the ranks were started."""
        if self.derives(node) or _OTHER_WAY.search(ast.unparse(node)):
            return True
        return not self._of_others.isdisjoint(_names_below(node))


def _overwritten(body: list[ast.stmt], ways: _Ways) -> Iterator[tuple[int, str]]:
    """Yield the places that overwrite torchrun's variables in statements that run where torchrun starts the ranks."""
    for node in body:
        yield from _overwritten_in(node, ways)
        if isinstance(node, ast.If) and ways.decide(node.test) and _leaves(node.body):
            # What follows `if "RANK" in os.environ: return` is for another way to start.
            return


def _overwritten_in(node: ast.stmt, ways: _Ways) -> Iterator[tuple[int, str]]:
    if isinstance(node, Function | ast.ClassDef) and (
        _OTHER_WAY.search(node.name) or _is_of_ray(node)
    ):
        return
    if isinstance(node, ast.If) and ways.decide(node.test):
        return
    for setting in settings_of(node):
        if setting.name in _RANK_VARIABLES and not ways.derives(setting.value):
            yield setting.line, setting.name
    for body in _bodies(node, ways):
        yield from _overwritten(body, ways)


def _is_of_ray(node: Function | ast.ClassDef) -> bool:
    """Return whether Ray runs a function or class in a process of its own, which is no rank of torchrun."""
    return any(_REMOTE.match(ast.unparse(each)) for each in node.decorator_list)


def _bodies(node: ast.stmt, ways: _Ways) -> Iterator[list[ast.stmt]]:
    """Yield the parts of a statement, without handlers and cases that are for another way to start."""
    for field in ("body", "orelse", "finalbody"):
        yield getattr(node, field, [])
    if isinstance(node, ast.Try | ast.TryStar) and not any(map(ways.decide, node.body)):
        yield from (each.body for each in node.handlers)
    if isinstance(node, ast.Match) and not ways.decide(node.subject):
        yield from (each.body for each in node.cases if not ways.decide(each.pattern))


def _leaves(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _targets(node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {written(each) for each in targets if not isinstance(each, ast.Subscript)}


def _mentions_rank(node: ast.AST) -> bool:
    return any(
        (isinstance(each, ast.Constant) and each.value in _RANK_VARIABLES)
        or last_name(each) in _RANK_CALLS
        for each in ast.walk(node)
    )


def _names_below(node: ast.AST) -> set[str]:
    return {written(each) for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute)}
