"""Output of a run's ledger: a bar per attempt on a terminal, and one fact per line in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from cloudtrain.console import BOLD, DIM, coloured, print_text
from cloudtrain.console.cells import pad
from cloudtrain.console.facts import print_facts
from cloudtrain.console.tables import GAP
from cloudtrain.console.terminal import terminal_width
from cloudtrain.runs.ledger import Attempt, Kind, Ledger
from cloudtrain.runs.ledger_words import LETTERS, bar_text, headline, ledger_rows
from cloudtrain.support.notebook.summary import Row
from cloudtrain.support.run_id import short_id

_COLOURS = {
    Kind.START: "30;46",
    Kind.TRAINING: "30;42",
    Kind.EVALUATION: "30;44",
    Kind.CHECKPOINT: "30;45",
    Kind.REPEATED: "30;41",
    Kind.RESTART: "30;43",
    Kind.IDLE: "30;47",
    Kind.UPLOAD: "30;106",
}
"""ANSI codes of a bar's parts. Each part has the letter of its kind, too."""

_MOST_COLUMNS = 100
_LEAST_COLUMNS = 10


def print_ledger(ledger: Ledger, advice: Sequence[str]) -> None:
    """Print where the time and the money of a run went."""
    rows = ledger_rows(ledger, advice)
    width = terminal_width()
    if width is None:
        print_facts(rows)
        return
    print_text(f"{coloured(short_id(ledger.run), BOLD)}  {headline(ledger)}")
    print_text("")
    for line in bar_lines(ledger, width):
        print_text(line)
    print_text("")
    bars = {f"attempt {each.number}" for each in ledger.attempts}
    print_facts([_with_letter(row) for row in rows[2:] if row[0] not in bars])


def _with_letter(row: Row) -> Row:
    """Return a row of a kind with the letter that it has in the bars."""
    letter = LETTERS.get(Kind(row[0])) if row[0] in list(Kind) else None
    return (f"{letter} {row[0]}", row[1]) if letter else row


def bar_lines(ledger: Ledger, width: int) -> list[str]:
    """Return a bar for each attempt that had machines; the longest one fills the width.

    Args:
        ledger: The ledger.
        width: Cells of a line.
    """
    shown = [each for each in ledger.attempts if each.paid]
    names = [f"attempt {each.number}" for each in shown]
    ends = [bar_text(each) for each in shown]
    room = width - max(map(len, names), default=0) - max(map(len, ends), default=0) - 2 * GAP
    columns = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, room))
    longest = max((each.paid_seconds for each in shown), default=0.0)
    lines = []
    for name, attempt, end in zip(names, shown, ends, strict=True):
        own = max(1, round(columns * attempt.paid_seconds / longest))
        bar = "".join(
            coloured(LETTERS[kind] * cells, _COLOURS[kind])
            for kind, cells in bar_cells(attempt, own)
        )
        start = coloured(pad(name, max(map(len, names))), DIM)
        lines.append(f"{start}{' ' * GAP}{bar}{' ' * (columns - own + GAP)}{end}".rstrip())
    return lines


def bar_cells(attempt: Attempt, columns: int) -> list[tuple[Kind, int]]:
    """Return the kinds of a bar with their cells, in the order of the spans; those below half a cell are left out."""
    total = attempt.paid_seconds
    cells = []
    used = 0
    passed = 0.0
    for span in attempt.paid:
        passed += span.seconds
        # Rounded ends instead of lengths, so that the bar has its length.
        end = round(columns * passed / total)
        if end > used:
            cells.append((span.kind, end - used))
        used = end
    return cells
