"""Static checks of a Task's source: missing, misspelt and wrongly declared methods. No code is imported.

Standard library only: the plan checks on a laptop without torch, the launcher before it starts a process. Where the
source proves nothing, as with an external base class, no error is reported: the worker checks the class itself.
"""

from __future__ import annotations

import ast
import copy
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cloudtrain_runtime.contract.class_source import (
    RUNTIME,
    ClassSource,
    ExternalClass,
    Function,
    Member,
    ModuleSource,
    ResolutionOrder,
    SourceFolder,
    UnreadableFile,
    dotted_name,
    find_member,
    nodes_in_scope,
)
from cloudtrain_runtime.contract.task_methods import TASK_METHODS, TaskMethod


@dataclass(frozen=True)
class TaskDiagnostic:
    """A mistake in a Task.

    Attributes:
        message: What is wrong and what was expected.
        hint: What to do.
        file: Path from the code folder; empty if the mistake is in `field`.
        line: From 1.
        column: From 1.
        field: Path of the job's field with the mistake, such as `code.args.layers`.
    """

    message: str
    hint: str = ""
    file: str = ""
    line: int | None = None
    column: int | None = None
    field: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return it in one line, as `digits.py:31:5  loss(self, batch): expected loss(self, model, batch)`."""
        at = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        start = f"{at}  " if self.file else f"{'.'.join(self.field)}: "
        return start + self.message + (f"; {self.hint}" if self.hint else "")


def check_task(directory: Path, reference: str, arguments: Mapping[str, Any]) -> list[TaskDiagnostic]:
    """Return the mistakes in a Task, in source order.

    Args:
        directory: The code folder.
        reference: `module:Class`.
        arguments: The job's `code.args`.
    """
    module_name, _, class_name = reference.partition(":")
    sources = SourceFolder(directory)
    module = sources.module(module_name)
    try:
        found = list(_class_findings(sources, module, class_name, arguments) if module else ())
    except RecursionError:  # a thousand nested bases, which no real source has
        return []
    if module is None and not sources.broken:
        found = [_missing_module(directory, module_name)]
    found += [_broken(each) for each in sources.broken]
    return sorted(found, key=lambda each: (each.file, each.line or 0, each.column or 0))


def lacks_method(directory: Path, reference: str, method: str) -> bool:
    """Return whether the source proves that a Task does not define an optional method.

    Args:
        directory: The code folder.
        reference: `module:Class`.
        method: Such as `pipeline`.
    """
    module_name, _, class_name = reference.partition(":")
    sources = SourceFolder(directory)
    module = sources.module(module_name)
    task = sources.resolve(module, class_name) if module is not None and class_name in module.bound else None
    return isinstance(task, ClassSource) and find_member(sources.order(task), method) is ExternalClass.TASK


def _class_findings(
    sources: SourceFolder, module: ModuleSource, class_name: str, arguments: Mapping[str, Any]
) -> Iterator[TaskDiagnostic]:
    if class_name not in module.bound:
        if not module.is_open:
            yield _missing_class(module, class_name)
        return
    task = sources.resolve(module, class_name)
    if not isinstance(task, ClassSource):
        return
    order = sources.order(task)
    yield from _check_arguments(task, find_member(order, "__init__"), order, arguments)
    if ExternalClass.UNKNOWN in order:
        return
    if ExternalClass.TASK not in order:
        yield _no_task(sources, module, task)
        return
    misspelt = dict(_misspelt(sources.directory, order))
    yield from misspelt.values()
    yield from _missing_methods(task, order, misspelt)
    for name, method in TASK_METHODS.items():
        member = find_member(order, name)
        if isinstance(member, Member) and member.node is not None:
            yield from _check_method(member.owner, member.node, method)


def _broken(broken: UnreadableFile) -> TaskDiagnostic:
    hint = "fix it, or run with the Python version that it needs"
    return TaskDiagnostic(broken.message, hint, broken.file, broken.line, broken.column)


def _missing_module(directory: Path, module: str) -> TaskDiagnostic:
    path = directory / (module.replace(".", "/") + ".py")
    siblings = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = _nearest(path.name, siblings, _NEAR)
    hint = f'did you mean "{near}"?' if near else "code.task is module:Class, a module of the code folder"
    return TaskDiagnostic(f"no such file: {path}", hint, field=("code", "task"))


def _missing_class(module: ModuleSource, name: str) -> TaskDiagnostic:
    hint = _did_you_mean(name, module.classes) if module.classes else "the file has no class"
    return TaskDiagnostic(f"{module.file} has no class {name}", hint, field=("code", "task"))


def _no_task(sources: SourceFolder, module: ModuleSource, found: ClassSource) -> TaskDiagnostic:
    others = [name for name in module.classes if _is_task(sources, module, name)]
    hint = f"write class {found.name}(Task), with from {RUNTIME} import Task"
    if others:
        hint = f"code.task can name {', '.join(others)}"
    return _at(found, found.node, f"{found.name} is not a Task", hint)


def _is_task(sources: SourceFolder, module: ModuleSource, name: str) -> bool:
    found = sources.resolve(module, name)
    return isinstance(found, ClassSource) and ExternalClass.TASK in sources.order(found)


def _at(owner: ClassSource, node: ast.ClassDef | Function, message: str, hint: str) -> TaskDiagnostic:
    return TaskDiagnostic(message, hint, owner.module.file, node.lineno, node.col_offset + 1)


def _check_arguments(
    task: ClassSource, init: Member | ExternalClass, order: ResolutionOrder, arguments: Mapping[str, Any]
) -> Iterator[TaskDiagnostic]:
    at = ("code", "args")
    if any(isinstance(each, ClassSource) and "__new__" in each.bound for each in order):
        return
    if isinstance(init, ExternalClass):
        names = arguments if init is ExternalClass.PLAIN and ExternalClass.UNKNOWN not in order else ()
        for name in names:
            hint = "it takes none: remove args"
            yield TaskDiagnostic(f"{task.name} takes no such argument", hint, field=(*at, str(name)))
        return
    if init.node is None or init.node.decorator_list:
        return
    signature = init.node.args
    by_position = [each.arg for each in signature.posonlyargs][1:]
    legal = _legal_keywords(signature)
    for name in arguments:
        if name not in legal and signature.kwarg is None:
            hint = _did_you_mean(str(name), legal) if legal else "it takes none: remove args"
            yield TaskDiagnostic(f"{task.name} takes no such argument", hint, field=(*at, str(name)))
    required = _required(signature)
    for name in required:
        if name in by_position:
            hint = "remove the / behind it: code.args are keyword arguments"
            yield _at(init.owner, init.node, f"__init__ takes {name} by position only", hint)
        elif name not in arguments:
            yield TaskDiagnostic(f"{task.name} needs the argument {name}", f"args: {{{name}: ...}}", field=at)


def _legal_keywords(signature: ast.arguments) -> list[str]:
    """Return the names of arguments that may be given as keywords, without `self`."""
    positional = [each.arg for each in signature.args]
    return [*(positional if signature.posonlyargs else positional[1:]), *(each.arg for each in signature.kwonlyargs)]


def _required(signature: ast.arguments) -> list[str]:
    """Return the names of arguments without a default, without `self`."""
    positional = [each.arg for each in (*signature.posonlyargs, *signature.args)]
    keywords = zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
    return [
        *positional[: len(positional) - len(signature.defaults)][1:],
        *(each.arg for each, default in keywords if default is None),
    ]


_TRANSPARENT: Final = {"override", "final", "abstractmethod", "staticmethod", "classmethod"}
_PROPERTIES: Final = {"property", "cached_property"}


def _missing_methods(task: ClassSource, order: ResolutionOrder, misspelt: Iterable[str]) -> Iterator[TaskDiagnostic]:
    """Yield the required methods that no class defines: without them Python creates no such Task."""
    for name, method in TASK_METHODS.items():
        if method.is_required and name not in misspelt and find_member(order, name) is ExternalClass.TASK:
            hint = f"return {method.returns}"
            yield _at(task, task.node, f"{task.name} has no {_call(name, ('self', *method.parameters))}", hint)
    names = [name for each in order if isinstance(each, ClassSource) for name in each.bound]
    for name in dict.fromkeys(names):
        member = find_member(order, name)
        if isinstance(member, Member) and member.node is not None and "abstractmethod" in _decorators(member.node):
            owner = member.owner
            hint = f"{owner.name} asks for it at {owner.module.file}:{member.node.lineno}"
            yield _at(task, task.node, f"{task.name} has no {_shown(member.node)}", hint)


def _misspelt(directory: Path, order: ResolutionOrder) -> Iterator[tuple[str, TaskDiagnostic]]:
    """Yield misspelt methods by the name of the Task method that was probably meant.

    Only if no class defines the probable method, and no file of the code folder uses the misspelt name.
    """
    undefined = [name for name in TASK_METHODS if find_member(order, name) is ExternalClass.TASK]
    for owner in (each for each in order if isinstance(each, ClassSource)):
        for node in (each for each in owner.bound.values() if isinstance(each, Function)):
            near = _meant(node.name, undefined)
            if near is None or node.decorator_list or _is_used(directory, node.name):
                continue
            message = f"{_shown(node)}: a Task has no such method"
            yield near, _at(owner, node, message, f'did you mean "{near}"?')


def _meant(name: str, undefined: Iterable[str]) -> str | None:
    """Return the method whose name was meant by a misspelt one; None for any other name."""
    near = None if name.startswith("_") or name in TASK_METHODS else _nearest(name, undefined, _VERY_NEAR)
    # `prediction` is near to `predict`, and another word.
    return near if near is not None and abs(len(near) - len(name)) <= _MOST_LETTERS else None


_SKIPPED_FOLDERS: Final = {"__pycache__", "node_modules", "site-packages", RUNTIME}
_MOST_TEXTS: Final = 500


def _is_used(directory: Path, name: str) -> bool:
    """Return whether a text of the code folder uses a name as an attribute or between quotes."""
    pattern = re.compile(rf"\.\s*{name}\b|[\"']{name}\\?[\"']")
    texts = 0
    for folder, folders, files in os.walk(directory):
        folders[:] = [each for each in folders if not each.startswith(".") and each not in _SKIPPED_FOLDERS]
        for file in files:
            if file.endswith((".py", ".ipynb")):
                texts += 1
                if texts > _MOST_TEXTS or pattern.search(_text(Path(folder, file))):
                    return True
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _check_method(owner: ClassSource, node: Function, method: TaskMethod) -> Iterator[TaskDiagnostic]:
    decorators = _decorators(node)
    if set(decorators) <= _PROPERTIES and decorators:
        message = f"{node.name} is a property: expected the method {_call(node.name, ('self', *method.parameters))}"
        yield _at(owner, node, message, f"remove @{decorators[0]}")
        return
    if "abstractmethod" in decorators or not set(decorators) <= _TRANSPARENT:
        return
    first = () if "staticmethod" in decorators else ("cls",) if "classmethod" in decorators else ("self",)
    expected = (*first, *method.parameters)
    shown = _shown(node)
    if isinstance(node, ast.AsyncFunctionDef):
        yield _at(owner, node, f"async {shown}: expected an ordinary method", "write def; it is not awaited")
    elif not _accepts(node.args, len(expected)) or _is_swapped(node.args, expected):
        yield _at(owner, node, f"{shown}: expected {_call(node.name, expected)}", "")
    else:
        yield from _check_returns(owner, node, method, shown)


def _check_returns(owner: ClassSource, node: Function, method: TaskMethod, shown: str) -> Iterator[TaskDiagnostic]:
    inside = list(nodes_in_scope(node))
    if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in inside):
        if not method.may_yield:
            message = f"{shown}: it has a yield, so it returns a generator"
            yield _at(owner, node, message, f"return {method.returns or 'the value'}")
    elif method.returns and not any(_returns_something(each) or _ends_otherwise(each) for each in inside):
        yield _at(owner, node, f"{shown}: it returns nothing", f"return {method.returns}")


def _returns_something(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Return) else None
    return value is not None and not (isinstance(value, ast.Constant) and value.value is None)


def _ends_otherwise(node: ast.AST) -> bool:
    """Return whether a node may end a function without a return, or never end it."""
    if isinstance(node, ast.Call):
        return dotted_name(node.func).rpartition(".")[2] in ("exit", "_exit", "abort", "kill")
    return isinstance(node, ast.Raise | ast.While)


def _accepts(signature: ast.arguments, given: int) -> bool:
    """Return whether a function can be called with so many positional arguments and nothing else."""
    positional = len(signature.posonlyargs) + len(signature.args)
    has_room = given <= positional or signature.vararg is not None
    return has_room and given >= positional - len(signature.defaults) and None not in signature.kw_defaults


def _is_swapped(signature: ast.arguments, expected: Sequence[str]) -> bool:
    """Return whether the parameters have the names that were expected, in another order."""
    names = [each.arg for each in (*signature.posonlyargs, *signature.args)][: len(expected)]
    return names != list(expected) and sorted(names) == sorted(expected)


def _decorators(node: Function) -> list[str]:
    """Return the last names of a function's decorators; `()` for one that is a call or the like."""
    return [dotted_name(each).rpartition(".")[2] or "()" for each in node.decorator_list]


def _call(name: str, parameters: Iterable[str]) -> str:
    return f"{name}({', '.join(parameters)})"


_MOST_CHARACTERS: Final = 80


def _shown(node: Function) -> str:
    """Return a function's name and parameters without annotations."""
    signature = copy.deepcopy(node.args)
    for each in ast.walk(signature):
        if isinstance(each, ast.arg):
            each.annotation = None
    text = ast.unparse(signature)
    return _call(node.name, [text if len(text) <= _MOST_CHARACTERS else "..."])


_NEAR: Final = 0.6
_VERY_NEAR: Final = 0.82
"""`schedular` and `schedule` are as near as 0.824, `matrices` and `metrics` only 0.8."""
_MOST_LETTERS: Final = 2
"""Maximum difference in length between a misspelt name and the intended one."""


def _nearest(name: str, legal: Iterable[str], cutoff: float) -> str | None:
    found = difflib.get_close_matches(name, list(legal), n=1, cutoff=cutoff)
    return found[0] if found else None


def _did_you_mean(name: str, legal: Sequence[str]) -> str:
    near = _nearest(name, legal, _NEAR)
    return f'did you mean "{near}"?' if near else "one of: " + ", ".join(legal)
