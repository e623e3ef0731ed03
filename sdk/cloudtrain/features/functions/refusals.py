"""Objects of a notebook that cannot travel, and the way out for each."""

from __future__ import annotations

import io
import types
from typing import Any, Final

Refusal = tuple[str, str]
"""A message and the way out."""

IN_A_FILE: Final = (
    "make it inside the function, or save it to a file of the job's data and read it there"
)
IN_A_NOTEBOOK: Final = (
    "change it in its own cell, or write the job in the notebook with .write(FOLDER)"
)
_INSIDE: Final = "make it inside the function"
_AT_THE_TOP: Final = "define it at the top level of a cell"
_LIVE: Final = {
    "torch": ("Tensor", "Parameter"),
    "numpy": ("ndarray",),
    "pandas": ("DataFrame", "Series"),
}
"""Types of data by their package: what such a name has is not in the code."""
_WITH_A_STATE: Final = {
    "torch": ("Generator",),
    "numpy": ("Generator", "RandomState"),
    "random": ("Random",),
}
"""Types by their package whose objects change with each use."""


def refuse_object(name: str, value: Any) -> Refusal | None:
    """Return why an object cannot travel; None if it may."""
    if isinstance(value, type) and value.__module__ == "__main__":
        is_inner = "<locals>" in value.__qualname__
        return (f"{name} is defined inside a function", _AT_THE_TOP) if is_inner else None
    if name == "get_ipython" or type(value).__module__.startswith("IPython.core.interactiveshell"):
        return f"{name} is of the notebook", "use it in a cell, and pass what it returned"
    if isinstance(value, types.MethodType) and not isinstance(value.__self__, type):
        return f"{name} is a method of an object", "call the method inside the function"
    return _refuse_stream(name, value) or _refuse_data(name, value)


def refuse_function(name: str, value: types.FunctionType) -> Refusal | None:
    """Return why a function that was not decorated cannot travel; None if it may."""
    closed = [each for each in value.__code__.co_freevars if each != "__class__"]
    if closed:
        inside = value.__qualname__.partition(".<locals>")[0]
        return (
            f"{name} is defined inside {inside} and uses its {', '.join(closed)}",
            f"{_AT_THE_TOP}, and pass what it uses as arguments",
        )
    if "<locals>" in value.__qualname__:
        return f"{name} is defined inside a function", _AT_THE_TOP
    return None


def refuse_content(name: str, value: Any) -> Refusal | None:
    """Return why an object without an expression is not made again; None if it may be."""
    kind = type(value)
    if kind in (list, dict, set, tuple):
        return _refuse_container(name, value)
    for plain in (dict, list, set):
        if isinstance(value, plain) and not kind.__module__.startswith("collections"):
            return (
                f"{name} is a {kind.__name__}, a {plain.__name__} of its own kind",
                f"{_INSIDE}, or use {plain.__name__}({name})",
            )
    return None


def _refuse_container(name: str, value: Any) -> Refusal | None:
    contents = list(value.values() if isinstance(value, dict) else value)
    for each in contents:
        refusal = refuse_object(f"a part of {name}", each)
        if refusal is not None:
            return refusal
    if all(type(each) in (int, float, str, bytes, bool) for each in contents):
        return f"{name} has more than 100 KB of constants", IN_A_FILE
    return None


def _refuse_stream(name: str, value: Any) -> Refusal | None:
    if isinstance(value, io.IOBase):
        return f"{name} is an open file", "open it inside the function, and name it under data"
    if isinstance(value, types.GeneratorType | types.CoroutineType):
        return f"{name} is a running {type(value).__name__}", _INSIDE
    if hasattr(type(value), "__next__"):
        return f"{name} is an iterator, which changes with each use", _INSIDE
    return None


def _refuse_data(name: str, value: Any) -> Refusal | None:
    for kind in type(value).__mro__:
        package = kind.__module__.partition(".")[0]
        if kind.__name__ in _LIVE.get(package, ()):
            return f"{name} is a {type(value).__name__} of the notebook", IN_A_FILE
        if kind.__name__ in _WITH_A_STATE.get(package, ()):
            return f"{name} is a {type(value).__name__}, which changes with each use", _INSIDE
        if kind.__module__ == "torch.nn.modules.module" and kind.__name__ == "Module":
            return _refuse_model(name, value)
        if kind.__module__.startswith("torch.optim"):
            return f"{name} is an optimizer of the notebook", _INSIDE
    return None


def _refuse_model(name: str, value: Any) -> Refusal | None:
    if not any(True for each in (value.parameters(), value.buffers()) for _ in each):
        # Such as a loss: its statement says all of it.
        return None
    return (
        f"{name} is a model of the notebook with weights",
        f"{_INSIDE}; to start from its weights, save them and name the file under data",
    )
