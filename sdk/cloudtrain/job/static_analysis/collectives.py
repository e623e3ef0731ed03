"""Collectives in a Task's training that need tensors of equal shapes on all ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from cloudtrain.job.static_analysis.syntax import Function, Module, full_name, last_name

_GATHERING = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_gather_tensor",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
    }
)
_EVALUATING = frozenset({"metrics", "after_evaluation", "predict", "analyze", "predict_output"})
"""Methods of a Task that are called in evaluations only."""


def find_gather(modules: list[Module], task: str) -> str | None:
    """Return the place and the name of the first collective in training that needs equal shapes, or None."""
    for module, definition in _used_definitions(modules, task):
        for call in _training_calls(definition):
            # An argument: functools.partial(all_gather, ...)
            for expression in (call.func, *call.args):
                name = _gathering_name(expression, module)
                if name:
                    return f"{module.place(call.lineno)}:{call.col_offset + 1} calls {name}"
    return None


def _gathering_name(expression: ast.expr, module: Module) -> str:
    """Return the name of a collective that an expression refers to; empty for other expressions."""
    if not isinstance(expression, ast.Name | ast.Attribute):
        return ""
    owner, _, name = full_name(expression, module.imported_names).rpartition(".")
    is_collective = f"{owner}.".startswith("torch.distributed.") and name in _GATHERING
    return name if is_collective else ""


def _used_definitions(modules: list[Module], task: str) -> Iterator[tuple[Module, ast.stmt]]:
    """Yield the functions and classes that a Task uses, itself first, by the names that occur in them."""
    definitions: dict[str, list[tuple[Module, ast.stmt]]] = {}
    renamed: dict[str, str] = {}
    for module in modules:
        for statement in module.of(ast.ImportFrom):
            renamed |= {each.asname: each.name for each in statement.names if each.asname}
        for node in module.tree.body:
            if isinstance(node, Function | ast.ClassDef):
                definitions.setdefault(node.name, []).append((module, node))
    seen, waiting = {task}, [task]
    while waiting:
        for module, node in definitions.get(waiting.pop(), ()):
            yield module, node
            named = {renamed.get(name, name) for name in map(last_name, ast.walk(node))} - seen
            seen |= named
            waiting += sorted(named)


def _training_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls below a node that are not in a method for evaluations alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name in _EVALUATING:
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from _training_calls(child)
