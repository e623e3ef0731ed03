"""Check a Task's source for common mistakes without importing it, for the plan.

The worker checks in the class itself what the source leaves open: several bases, bases outside of the code folder,
decorators, metaclasses, and names that are bound twice, inside of an `if`, by a star import or by `setattr`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, Final, NamedTuple

from cloudtrain_runtime.contract import task_methods
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.python_source import find_module, parse_text, read_text
from cloudtrain_runtime.contract.task_methods import TaskDiagnostic

_TASK: Final = "Task"
_UNBOUND: Final = "?"
_MOST_STEPS: Final = 20
_KINDS: Final = [each.kind for each in signature(lambda a, /, b, *c, d, **e: 0).parameters.values()]  # noqa: ARG005
_HIDDEN_BINDING: Final = lazy_pattern(
    r"(?m)(?<!\.)\b(exec|eval|globals|locals|vars|setattr|delattr)\s*\(|import\s*\*|^\s*global\s"
    r"|__(dict|setattr|getattr|getattribute|new|init_subclass)__"
)

_Bound = Mapping[str, ast.stmt | None]
"""By name, the definition or import that alone binds it; None for any other name that may be bound."""


class _Class(NamedTuple):
    file: str
    node: ast.ClassDef
    bound: _Bound


class _StopError(Exception):
    """The source cannot be checked: for the mistake in `args`, or because it leaves something open."""


def check_task(
    directory: Path, reference: str, arguments: Mapping[str, Any]
) -> list[TaskDiagnostic]:
    """Return the mistakes in a code folder's Task `module:Class`, and in its arguments, in source order."""
    name = reference.partition(":")[2]
    try:
        classes, above = _read_classes(directory, reference)
    except _StopError as error:
        return list(error.args)
    owners = {each: owner for owner in reversed(classes) for each in owner.bound}
    methods = {each: _signature(owner.bound[each]) for each, owner in owners.items()}
    found: list[TaskDiagnostic] = []
    init = methods.get("__init__", Signature() if above == _TASK else None)
    if init is not None:
        own = Signature([*init.parameters.values()][1:])
        found += task_methods.check_arguments(name, own, arguments)
    wrong: Iterable[tuple[str, TaskDiagnostic]] = ()
    if above == _TASK:
        wrong = task_methods.check_methods(name, methods, directory)
    elif not above:
        wrong = [("", task_methods.not_a_task(name))]
    for method, each in wrong:
        owner = owners.get(method, classes[0])
        node = owner.bound.get(method) or owner.node
        found.append(replace(each, file=owner.file, line=node.lineno, column=node.col_offset + 1))
    return sorted(found, key=lambda each: (each.file, each.line or 0))


def has_method(directory: Path, reference: str, method: str) -> bool | None:
    """Return whether a Task defines an optional method; None where its source leaves that open."""
    try:
        classes, above = _read_classes(directory, reference)
    except _StopError:
        return None
    bound = [each.bound[method] for each in classes if method in each.bound]
    if above != _TASK:
        return None
    if bound and not any(bound):
        # The name is bound to something that only Python itself can evaluate.
        return None
    return bool(bound)


def parse(path: Path, name: str) -> ast.Module | TaskDiagnostic | None:
    """Return a file's syntax tree, or its error with this name of the file; None if only Python itself can read it."""
    try:
        tree = parse_text(read_text(path))
        _compile(tree)
    except (OSError, RecursionError, MemoryError):
        return None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        column = getattr(error, "offset", None)
        why = error.msg if isinstance(error, SyntaxError) else error
        return TaskDiagnostic(
            message=f"is not valid Python: {why}",
            hint="fix it, or run with the Python version that it needs",
            file=name,
            line=line,
            column=max(column or 1, 1) if line else None,
        )
    return tree


@functools.lru_cache(maxsize=32)
def _compile(tree: ast.Module) -> None:
    """Find errors that parsing leaves open, such as two parameters of one name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(tree, "<source>", "exec", dont_inherit=True)


def _read_classes(directory: Path, reference: str) -> tuple[list[_Class], str]:
    """Return a class and its bases in the code folder, and what is above them: `_TASK`, `_UNBOUND`, or nothing."""
    module, _, name = reference.partition(":")
    path = find_module(directory, module)
    if path is None:
        raise _StopError(task_methods.missing_module(directory, module))
    classes: list[_Class] = []
    file, bound, attributes = _read_module(directory, path)
    if name not in bound:
        known = [each for each, node in bound.items() if isinstance(node, ast.ClassDef)]
        raise _StopError(task_methods.missing_class(file, name, known))
    for _ in range(_MOST_STEPS):
        statement = bound.get(name)
        if isinstance(statement, ast.ClassDef) and not (
            statement.decorator_list or statement.keywords
        ):
            classes.append(_Class(file, statement, {**_bound(statement.body), **attributes}))
            bases = [each.id if isinstance(each, ast.Name) else "" for each in statement.bases]
            if not bases:
                return classes, ""
            name = bases[0] if len(bases) == 1 else ""
        elif isinstance(statement, ast.ImportFrom) and statement.level <= 1:
            name = next(each.name for each in statement.names if (each.asname or each.name) == name)
            source = statement.module or ""
            top = source.partition(".")[0]
            if top == "cloudtrain_runtime" and name == "Task" and classes:
                return classes, _TASK
            folder = path.parent if statement.level else directory
            path = find_module(folder, source)
            if path is None or top in sys.stdlib_module_names:
                break
            file, bound, attributes = _read_module(directory, path)
        elif classes and name and name not in bound and not hasattr(builtins, name):
            return classes, _UNBOUND
        else:
            break
    raise _StopError


def _read_module(directory: Path, path: Path) -> tuple[str, _Bound, _Bound]:
    """Return a module's path in the code folder, what it binds, and the attributes that it sets on any object."""
    file = path.relative_to(directory).as_posix()
    tree = parse(path, file)
    if not isinstance(tree, ast.Module):
        raise _StopError(*([tree] if tree else []))
    if _HIDDEN_BINDING.search(read_text(path)):
        raise _StopError
    return file, *_bindings(tree)


@functools.lru_cache(maxsize=32)
def _bindings(tree: ast.Module) -> tuple[_Bound, _Bound]:
    attributes = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute)]
    set_on_objects = {each.attr: None for each in attributes if not isinstance(each.ctx, ast.Load)}
    return _bound(tree.body), set_on_objects


def _bound(body: Sequence[ast.stmt]) -> _Bound:
    found: dict[str, ast.stmt | None] = {}
    for statement in body:
        is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        is_clear = is_definition or isinstance(statement, ast.ImportFrom)
        for node in [statement] if is_definition else ast.walk(statement):
            name = (
                getattr(node, "asname", None)
                or getattr(node, "name", None)
                or getattr(node, "id", None)
            )
            if isinstance(name, str) and not isinstance(getattr(node, "ctx", None), ast.Load):
                # `import a.b` binds `a`.
                name = name.partition(".")[0]
                found[name] = statement if is_clear and name not in found else None
    return found


def _signature(node: ast.stmt | None) -> Signature | None:
    """Return the signature of an ordinary function; None for anything else."""
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return None
    args = node.args
    groups: list[Sequence[ast.arg | None]] = [
        args.posonlyargs,
        args.args,
        [args.vararg],
        args.kwonlyargs,
        [args.kwarg],
    ]
    pairs = [
        (each, kind)
        for kind, group in zip(_KINDS, groups, strict=True)
        for each in group
        if each is not None
    ]
    positional = [*args.posonlyargs, *args.args]
    optional = positional[len(positional) - len(args.defaults) :]
    optional += [
        each
        for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        if default is not None
    ]
    empty = Parameter.empty
    return Signature(
        [
            Parameter(each.arg, kind, default=... if each in optional else empty)
            for each, kind in pairs
        ]
    )
