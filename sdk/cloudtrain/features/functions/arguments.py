"""What a function takes, and what may be sent: arguments, options and a search space by their names."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cloudtrain.errors import UserError, did_you_mean
from cloudtrain.job.job_fields import JobFields
from cloudtrain.job.sections.cluster import Cluster

FIELDS_OF_CODE = ("env", "requirements")
"""Fields of `code` that are given directly."""


def known_fields() -> list[str]:
    """Return the fields that a job of a function takes by their names."""
    return [
        *(each for each in JobFields.model_fields if each != "code"),
        *Cluster.model_fields,
        *FIELDS_OF_CODE,
    ]


def check_fields(options: Iterable[str], place: Iterable[str] = ()) -> None:
    """Raise a UserError for an unknown option.

    Args:
        options: Names.
        place: Further names that are known.
    """
    known = [*known_fields(), "job", "name", *place]
    for each in options:
        if each not in known:
            raise UserError(f"{each}: unknown field", did_you_mean(each, known))


def check_code(code: Any) -> None:
    """Raise a UserError for what is no function and no Task class, or returns before it has run."""
    if isinstance(code, types.MethodType):
        raise UserError(
            f"{code.__name__} is a method of an object", "write a function that calls it"
        )
    if not isinstance(code, types.FunctionType | type):
        raise UserError(
            f"expected a function or a Task class, got {type(code).__name__}",
            "for a job file give its path or cloudtrain.JobSpec",
        )
    name = code.__name__
    if name == "<lambda>":
        raise UserError("a lambda has no name that a run could call", "write it with def")
    if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
        raise UserError(
            f"{name} is an async function", f"write: def {name}(...): return asyncio.run(...)"
        )
    if inspect.isgeneratorfunction(code):
        raise UserError(
            f"{name} is a generator function, whose call runs nothing", "return a list instead"
        )


def bind_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by their names.

    Raises:
        UserError: They do not fit, or have no names.
    """
    name = function.__name__
    signature = inspect.signature(function)
    check_arguments(function, kwargs, is_complete=not args)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UserError(f"{name}(): {error}", f"it takes: {signature}") from None
    found = dict[str, Any]()
    for each, value in bound.arguments.items():
        kind = signature.parameters[each].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            if value or kind is inspect.Parameter.POSITIONAL_ONLY:
                raise UserError(
                    f"{name}(): {each} has no name, and a run gets arguments by their names",
                    "give the function a parameter with a name for it",
                )
        else:
            found[each] = value
    return found


def check_arguments(
    code: Callable[..., Any], args: Mapping[str, Any], *, is_complete: bool = True
) -> None:
    """Raise a UserError for named arguments that a function or class does not take.

    Args:
        code: The function or class.
        args: Arguments by their names.
        is_complete: Whether these are all, so that a missing one is an error.
    """
    try:
        signature = inspect.signature(code)
    except (TypeError, ValueError):
        return
    parameters = signature.parameters
    known = [each for each in parameters if each != "self"]
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    unknown = next((each for each in args if each not in known), None)
    if unknown is not None and not takes_all:
        raise UserError(
            f"{code.__name__}(): got an unexpected keyword argument '{unknown}'",
            did_you_mean(unknown, known),
        )
    if not is_complete:
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        raise UserError(f"{code.__name__}(): {error}", f"it takes: {', '.join(known)}") from None


def named_space(function: Callable[..., Any], space: Mapping[str, Any]) -> dict[str, Any]:
    """Return a search space whose arguments of the function have the paths of the job's fields.

    Raises:
        UserError: A name is no argument and no field.
    """
    named = list(inspect.signature(function).parameters)
    found = dict[str, Any]()
    for key, value in space.items():
        if key in named:
            found[f"code.args.{key}"] = value
            continue
        if "." not in key and key not in known_fields():
            raise UserError(
                f"{key}: {function.__name__} has no such argument, and a job no such field",
                did_you_mean(key, [*named, *known_fields()]),
            )
        found[key] = value
    return found
