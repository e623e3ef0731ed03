"""Output that a notebook updates in place; lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from cloudtrain.support.notebook.summary import Summary


def is_notebook() -> bool:
    """Return whether this code runs in a kernel of IPython, whose front end can update an output."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class LiveTable:
    """A table in the output of a notebook's cell that is updated in place."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown: dict[str, str] | None = None

    def show(self, summary: Summary) -> None:
        """Show a summary in place of the one before it."""
        content = {"text/html": summary.to_html(), "text/plain": summary.to_text()}
        if content == self._shown:
            return
        self._shown = content
        if self._handle is None:
            from IPython.display import display

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def write_line(text: str) -> None:
    """Write a line to standard output at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
