"""Paths in the files of a run whose home was renamed, moved or copied after they were written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_RUNS = "runs"


def relocate(content: Any, file: Path) -> Any:
    """Return the content of a run's file with the paths of its home as it is now.

    A file names its own run by an absolute path, so it shows where the home was when it was written. A copy of a home
    therefore leads to the copied checkpoints, and not to those of the original.

    Args:
        content: Parsed JSON.
        file: Path of the file, below `<home>/runs/<run>`.
    """
    folder = next((each for each in file.absolute().parents if each.parent.name == _RUNS), None)
    if folder is None:
        return content
    marker = f"/{_RUNS}/{folder.name}"
    named = (text for text in _strings(content) if marker in f"{text}/")
    found = {text.partition(marker)[0] for text in named if text.startswith(("/", "file:///"))}
    home = folder.parent.parent
    moved = {before: home.as_uri() if before.startswith("file:") else str(home) for before in found}
    moved = {before: now for before, now in moved.items() if before != now}
    return _replaced(content, moved) if moved else content


def _strings(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for each in content.values():
            yield from _strings(each)
    elif isinstance(content, list):
        for each in content:
            yield from _strings(each)


def _replaced(content: Any, moved: dict[str, str]) -> Any:
    if isinstance(content, dict):
        return {name: _replaced(each, moved) for name, each in content.items()}
    if isinstance(content, list):
        return [_replaced(each, moved) for each in content]
    if not isinstance(content, str):
        return content
    for before, now in moved.items():
        if content == before or content.startswith(f"{before}/"):
            return now + content[len(before) :]
    return content
