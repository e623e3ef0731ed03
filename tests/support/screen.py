"""What a terminal shows after a program has written to it."""

from __future__ import annotations

import re

_PARTS = re.compile(
    r"\x1b\[(?P<arguments>[0-?]*)[ -/]*(?P<final>[@-~])"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b."
    r"|(?P<control>[\r\n\b])"
    r"|(?P<text>[^\x1b\r\n\b]+)",
    flags=re.DOTALL,
)


class Screen:
    """The lines of a terminal that is as high as needed and does not wrap lines. Colours are left out."""

    def __init__(self) -> None:
        self._lines: list[list[str]] = [[]]
        self._row = 0
        self._column = 0

    def write(self, text: str) -> None:
        """Write text with escape sequences."""
        for part in _PARTS.finditer(text):
            if part["text"] is not None:
                self._put(part["text"])
            elif part["control"] is not None:
                self._control(part["control"])
            elif part["final"] is not None:
                self._sequence(part["final"], part["arguments"])

    def lines(self) -> list[str]:
        """Return the lines without empty ones at the end."""
        text = "\n".join("".join(line).rstrip() for line in self._lines)
        return text.rstrip("\n").split("\n")

    def _put(self, text: str) -> None:
        line = self._lines[self._row]
        line.extend(" " * (self._column - len(line)))
        line[self._column : self._column + len(text)] = text
        self._column += len(text)

    def _control(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\b":
            self._column = max(0, self._column - 1)
        else:
            self._row += 1
            if self._row == len(self._lines):
                self._lines.append([])

    def _sequence(self, final: str, arguments: str) -> None:
        number = int(arguments) if arguments.isdecimal() else 0
        if final == "A":
            self._row = max(0, self._row - max(1, number))
        elif final == "B":
            self._row = min(len(self._lines) - 1, self._row + max(1, number))
        elif final == "G":
            self._column = max(0, number - 1)
        elif final == "K":
            # 2 is the whole line, and 0 the rest of it.
            first = 0 if number == 2 else self._column
            del self._lines[self._row][first:]
        elif final == "J":
            del self._lines[self._row][self._column :]
            del self._lines[self._row + 1 :]
