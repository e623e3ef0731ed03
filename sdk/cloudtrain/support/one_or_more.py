"""Arguments that are one text or several."""

from __future__ import annotations

from collections.abc import Iterable


def one_or_more(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return the texts of an argument. One text is one item: its letters are not."""
    return (given,) if isinstance(given, str) else tuple(given)
