"""Durations as text, for the SDK and the runtime."""

from __future__ import annotations

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_MOST_PARTS = 2


def format_duration(seconds: float) -> str:
    """Return seconds as people write them: `90s`, `1h30m`, `2d`; `0s` for less than nothing, from clocks that differ."""
    left = max(0, round(seconds))
    parts = list[str]()
    for unit, size in _SECONDS.items():
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:_MOST_PARTS]) or "0s"
