"""`Summary`: names and values that describe an object, as a short text and as an HTML table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cloudtrain_runtime.contract.redaction import redact

Row = tuple[str, str]
"""Name and value of a line."""

MOST_ROWS = 9
"""Rows of a text, which has ten lines with its title."""

_MOST_CHARACTERS = 160
_MOST_HTML_CHARACTERS = 1000

# The colours are those of the page, so that the table works on light and on dark pages.
_TABLE = "border-collapse:collapse;font-size:0.9em;color:inherit"
_CAPTION = "caption-side:top;text-align:left;font-weight:600;white-space:nowrap;color:inherit"
_ROW = "background:transparent;border-top:1px solid rgba(128,128,128,0.3)"
_CELL = "text-align:left;vertical-align:top;padding:0.15em 0.6em 0.15em 0"
_NAME = f"{_CELL};font-weight:normal;opacity:0.7;white-space:nowrap"
_VALUE = f"{_CELL};white-space:pre-wrap;overflow-wrap:anywhere"


@dataclass(frozen=True)
class Summary:
    """Names and values that describe an object, most important first.

    Attributes:
        title: The object in a few words.
        rows: Names and values. A row without a name continues the one before it.
        details: More rows, which only the HTML table has.
    """

    title: str
    rows: Sequence[Row] = ()
    details: Sequence[Row] = ()

    def to_text(self) -> str:
        """Return one to ten lines of printable text."""
        rows = self.rows
        if len(rows) > MOST_ROWS:
            rows = (*rows[: MOST_ROWS - 1], ("", "..."))
        width = max((len(name) for name, _ in rows), default=0)
        lines = [f"  {name:<{width}}  {printable(value)}".rstrip() for name, value in rows]
        return "\n".join([printable(self.title), *lines])

    def to_html(self) -> str:
        """Return a table in HTML with all values escaped."""
        body = "".join(
            f'<tr style="{_ROW}"><th scope="row" style="{_NAME}">{_escape(name)}</th>'
            f'<td style="{_VALUE}">{_escape(value)}</td></tr>'
            for name, value in (*self.rows, *self.details)
        )
        caption = f'<caption style="{_CAPTION}">{_escape(self.title)}</caption>'
        return f'<table class="cloudtrain" style="{_TABLE}">{caption}<tbody>{body}</tbody></table>'


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 file`, `2,000 files`."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"


def name_numbers(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges: `0-7, 9`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _escape(text: str) -> str:
    # Only for notebooks.
    import html

    return html.escape(printable(text, _MOST_HTML_CHARACTERS))


def printable(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a text as one line without secrets and escape sequences, which text of a job can contain.

    Args:
        text: The text.
        most: Number of characters from which on the text is shortened.
    """
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in redact(text))
    if len(shown) <= most:
        return shown
    return f"{shown[: most - 3]}..."
