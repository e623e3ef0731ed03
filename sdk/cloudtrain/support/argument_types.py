"""Arguments of the Python API that have another type: one sentence in place of a traceback."""

from __future__ import annotations

from cloudtrain.errors import UserError


def check_type(name: str, given: object, expected: type) -> None:
    """Check the type of an argument that may be None.

    Raises:
        UserError: It has another type.
    """
    if given is None or isinstance(given, expected):
        return
    what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
    raise UserError(
        f"{name}: expected {expected.__name__}, got {what}",
        f"for example {name}={expected.__name__}(...)",
    )
