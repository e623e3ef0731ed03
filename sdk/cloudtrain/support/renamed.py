"""Names of arguments that were other ones in the previews of 0.1.0: a call with an old name works, and warns."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def renamed_arguments(
    **renamed: str,
) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """Decorate a function whose arguments have new names: `@renamed_arguments(old="new")`.

    A call with both names is a TypeError, as it is for an argument that is given twice.
    """

    def decorate(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        @functools.wraps(function)
        def call(*arguments: _Given.args, **given: _Given.kwargs) -> _Result:
            for old in renamed.keys() & given.keys():
                new = renamed[old]
                if new in given:
                    raise TypeError(
                        f"{function.__name__}() got both {new!r} and its old name {old!r}"
                    )
                warnings.warn(
                    f"the argument {old!r} of {function.__name__}() is {new!r} now",
                    DeprecationWarning,
                    stacklevel=2,
                )
                given[new] = given.pop(old)
            return function(*arguments, **given)

        return call

    return decorate
