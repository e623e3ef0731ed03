"""Texts with all metacharacters of a shell, and with commands that create a file if a shell executes them."""

from __future__ import annotations

from pathlib import Path

TRACE = "PWNED"
NAME = f"-c $(touch {TRACE});`touch {TRACE}`|touch {TRACE}&&touch {TRACE}>{TRACE}'\"\\*~ ${{HOME}} %s é漢"
"""Valid as a file name: without slashes and line breaks."""

TEXT = f"{NAME}\n; touch {TRACE}\n$(touch {TRACE})\t#"


def traces(*folders: Path) -> list[Path]:
    """Return the files that the commands have created."""
    found = [path for folder in folders for path in folder.rglob(TRACE)]
    return [*found, *(path for path in (Path.cwd() / TRACE, Path.home() / TRACE) if path.exists())]


def plant(folder: Path) -> dict[str, str]:
    """Return texts with commands. One of them creates its file in `folder`, whatever the working directory is."""
    return {"absolute": f"$(touch {folder}/{TRACE})", "text": TEXT, "name": NAME}
