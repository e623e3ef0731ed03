"""Texts in which every metacharacter of a shell stands, and commands that leave a trace where one runs them."""

from __future__ import annotations

from pathlib import Path

TRACE = "PWNED"
NAME = f"-c $(touch {TRACE});`touch {TRACE}`|touch {TRACE}&&touch {TRACE}>{TRACE}'\"\\*~ ${{HOME}} %s é漢"
"""As a file's name: no slash and no line break."""

TEXT = f"{NAME}\n; touch {TRACE}\n$(touch {TRACE})\t#"


def traces(*folders: Path) -> list[Path]:
    """Return what a shell has left behind."""
    found = [path for folder in folders for path in folder.rglob(TRACE)]
    return [*found, *(path for path in (Path.cwd() / TRACE, Path.home() / TRACE) if path.exists())]


def plant(folder: Path) -> dict[str, str]:
    """Return texts whose commands leave their trace in a folder, wherever they are run."""
    return {"absolute": f"$(touch {folder}/{TRACE})", "text": TEXT, "name": NAME}
