"""The legal name that a wrong one most likely means."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, legal: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the legal name closest to `name`, or None when none is close.

    Args:
        name: What was given.
        legal: The legal names.
        cutoff: The least similarity, from 0 to 1.
    """
    # Imported here, so that commands and launchers without a mistake start faster.
    import difflib

    names = list(legal)
    # A name that differs only in upper and lower case comes first.
    same = [each for each in names if each.casefold() == name.casefold()]
    found = same or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, legal: Iterable[str], otherwise: str | None = None) -> str:
    """Return a hint with the nearest legal name, or another one: by default all legal names."""
    names = list(legal)
    near = nearest(name, names)
    if near is not None:
        return f'did you mean "{near}"?'
    if otherwise is not None:
        return otherwise
    return "one of: " + ", ".join(names)
