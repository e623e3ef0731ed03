"""The call of a function in each rank, with arguments of the command line; what rank 0 returns is kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cloudtrain_runtime.contract.function_arguments import parse_arguments
from cloudtrain_runtime.contract.returned_values import (
    RETURNED_FOLDER,
    ReturnedValueError,
    write_refusal,
    write_returned,
)

T = TypeVar("T")


def run_function(function: Callable[..., Any]) -> None:
    """Call a function as each rank of a script: the process group is not yet formed.

    Args:
        function: The function. Its arguments are those of the command line.
    """
    value = function(**parse_arguments(sys.argv[1:]))
    folder = os.environ.get("SM_OUTPUT_DATA_DIR")
    if os.environ.get("RANK", "0") != "0" or folder is None or value is None:
        return
    try:
        write_returned(value, Path(folder) / RETURNED_FOLDER)
    except ReturnedValueError as error:
        # The training is done, and its results are kept: this is no reason to fail.
        print(
            f"warning: what {function.__name__} returned does not travel back: {error}",
            file=sys.stderr,
        )
        write_refusal(str(error), Path(folder) / RETURNED_FOLDER)


def with_state(kind: type[T], state: Mapping[str, Any]) -> T:
    """Return an instance of a class with these attributes, without a call of its constructor."""
    made = object.__new__(kind)
    for name, value in state.items():
        # A frozen dataclass has a method of its own for it.
        object.__setattr__(made, name, value)
    return made
