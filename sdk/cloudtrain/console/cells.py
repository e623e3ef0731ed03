"""Text in the cells of a terminal: its width, and how it is filled, cut and wrapped."""

from __future__ import annotations

CUT = "…"
"""Stands for the rest of a text that was cut."""


def cut_text(text: str, room: int) -> str:
    """Return a text cut at its end with `…` to a number of a terminal's cells."""
    if cell_count(text) <= room:
        return text
    kept = ""
    used = 0
    for character in text:
        used += cell_count(character)
        if used > room - 1:
            break
        kept += character
    return kept.rstrip() + CUT


def cell_count(text: str) -> int:
    """Return the cells of a terminal that a text takes: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(map(_cells_of, text))


def pad(text: str, cells: int) -> str:
    """Return a text with spaces behind it, up to a number of a terminal's cells."""
    return text + " " * (cells - cell_count(text))


def _cells_of(character: str) -> int:
    # Few texts need it.
    import unicodedata

    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def wrapped(text: str, room: int) -> list[str]:
    """Return a text as lines of a number of cells, broken between words only: paths can be copied."""
    lines = [""]
    for word in text.replace("\n", " ").split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_count(longer) <= room or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return [line.rstrip(" ") for line in lines]
