"""What a version has taken away from the public surface of an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

REMOVALS: Mapping[str, str] = {}
"""What may be missing or different, as the test names it, with the version that announced it and the one that did it:
`commands: cloudtrain submit: detach: names: --no-follow` -> `deprecated in 0.2.0, removed in 0.3.0`."""


def find_removals(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield what existed before and is missing or different now, and what is new and required.

    Args:
        before: The surface of an earlier version, or a part of it.
        now: The same of this version.
        path: Names of the parts above it.
    """
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        if before != now:
            yield f"{path}: was {before!r}, is {now!r}"
        return
    for name, value in before.items():
        below = f"{path}: {name}" if path else name
        if name == "required":
            # What was required may become optional.
            continue
        if name not in now:
            yield f"{below}: removed"
        else:
            yield from find_removals(value, now[name], below)
    for name in sorted(now.keys() - before.keys()):
        yield from _find_demand(name, now[name], path, is_new=not before)


def _find_demand(name: str, value: Any, path: str, *, is_new: bool) -> Iterator[str]:
    """Yield what a new entry demands of users who know only the earlier version."""
    if name == "required":
        yield f"{path}: was optional, is required"
    elif name == "default":
        yield f"{path}: had no default, has {value!r}"
    elif name == "is_flag":
        yield f"{path}: had a value, has none"
    elif isinstance(value, Mapping) and value.get("required") and not is_new:
        yield f"{path}: {name}: is new and required"
