"""Import and creation of a Task, with the mistakes that only its class shows."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain_runtime.contract import task_methods
from cloudtrain_runtime.contract.task_methods import TASK_METHODS
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.process.notebook_cells import name_cells
from cloudtrain_runtime.task import Task, kind_of, location_of, shown_path

_GENERATORS = ("parallelize", "pipeline")
"""The methods that may yield their result."""


def load_task(reference: str, arguments: Mapping[str, Any]) -> Task:
    """Import and create the Task named `module:Class`.

    Raises:
        TaskError: the class does not exist, is not a Task, or does not accept these arguments.
    """
    module_name, _, class_name = reference.partition(":")
    name_cells()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise TaskError(str(task_methods.missing_module(Path.cwd(), module_name))) from None
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [each for each in vars(module).values() if isinstance(each, type)]
        known = [each.__name__ for each in classes if each.__module__ == module_name]
        raise TaskError(
            str(task_methods.missing_class(shown_path(str(module.__file__)), class_name, known))
        )
    if not issubclass(found, Task):
        raise TaskError(_class_location(found) + str(task_methods.not_a_task(class_name)))
    if inspect.isabstract(found):
        raise TaskError("; ".join(_missing_methods(found, class_name)))
    create: Callable[..., Task] = found
    try:
        task = create(**arguments)
    except TypeError as error:
        if _takes(create, arguments):
            # The error comes from within its __init__.
            raise
        wrong = task_methods.check_arguments(class_name, _signature(create), arguments)
        message = "; ".join(map(str, wrong))
        if not message:
            message = f"code.args: {class_name} cannot be created: {error}"
        raise TaskError(message) from None
    if mistakes := list(_wrong_methods(task)):
        raise TaskError("; ".join(mistakes))
    return task


def _class_location(found: type) -> str:
    try:
        return f"{shown_path(inspect.getfile(found))}:{inspect.getsourcelines(found)[1]}:1  "
    except (OSError, TypeError):
        # There is no source.
        return ""


def _missing_methods(found: type[Task], name: str) -> Iterator[str]:
    """Yield the mistakes in the methods of a class of which Python creates no object."""
    own = [each for each in found.__mro__ if each not in Task.__mro__]
    defined = {key: value for each in reversed(own) for key, value in vars(each).items()}
    missing: frozenset[str] = found.__abstractmethods__
    methods = {
        key: _signature(value) if inspect.isfunction(value) else None
        for key, value in defined.items()
        if key not in missing
    }
    for method, mistake in task_methods.check_methods(name, methods, Path.cwd()):
        where = location_of(found, method) if method else _class_location(found)
        yield f"{where}{mistake}"
    for method in sorted(missing - TASK_METHODS.keys()):
        yield f"{_class_location(found)}{name} has no {method}()"


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature.

    Since Python 3.14 annotations are evaluated when they are read, and may contain names that only type checkers know.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def _takes(function: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    try:
        # The callable may have no signature.
        with contextlib.suppress(ValueError):
            _signature(function).bind(**arguments)
    except TypeError:
        return False
    return True


def _wrong_methods(task: Task) -> Iterator[str]:
    """Yield a message for each method that the entrypoint cannot use."""
    for name in TASK_METHODS:
        try:
            message = _method_mistake(task, name)
        except (TypeError, ValueError):
            # The method has no signature.
            continue
        if message:
            yield location_of(type(task), name) + message


def _method_mistake(task: Task, name: str) -> str:
    """Return why the entrypoint cannot use a method; empty if it can."""
    method = getattr(task, name)
    declared = inspect.getattr_static(type(task), name)
    if not callable(method):
        kind = kind_of(method)
        if isinstance(declared, property | functools.cached_property):
            kind = "a property"
        return f"{name} is {kind}: expected the method {task_methods.call_of(name)}"
    signature = _signature(method)
    first = tuple[str, ...]()
    # Where the object has an attribute of that name, this is not the method.
    if inspect.getattr_static(task, name) is declared:
        if inspect.isfunction(declared):
            signature = _signature(declared)
            first = ("self",)
        elif isinstance(declared, classmethod):
            signature = _signature(declared.__func__)
            first = ("cls",)
    shown = task_methods.show(name, signature)
    if inspect.iscoroutinefunction(method):
        return f"async {shown}: expected an ordinary method; write def; it is not awaited"
    if inspect.isgeneratorfunction(method) and name not in _GENERATORS:
        return f"{shown}: it has a yield, so it returns a generator; return {TASK_METHODS[name].returns or 'the value'}"
    return task_methods.check_signature(name, signature, first)
