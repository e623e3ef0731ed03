"""The version of a file's format, which a newer cloudtrain may have raised."""

from __future__ import annotations

from typing import Any, Final

FIELD: Final = "version"
"""Name of the version in each file that has one."""

_LIMIT: Final = 10**6
"""A greater number is no version, and too long for a message."""


class NewerFormatError(ValueError):
    """A file has a format that only a newer cloudtrain can read."""


def check_not_newer(file: str, content: Any, known: int, *, writer: str = "") -> None:
    """Check that a file is not of a newer format. Without a version, a file is of the first one.

    Args:
        file: Name of the file, for the message.
        content: Its parsed content.
        known: The newest version that this cloudtrain reads.
        writer: Version of the cloudtrain that wrote it; empty if the file does not say.

    Raises:
        NewerFormatError: The version is a greater number.
    """
    version = content.get(FIELD) if isinstance(content, dict) else None
    if not isinstance(version, int) or not known < version < _LIMIT:
        return
    by = "a newer cloudtrain"
    if writer:
        by = f"cloudtrain {writer}"
    raise NewerFormatError(
        f"{file} has version {version}, which {by} wrote; this one reads version {known}: "
        "pip install -U cloudtrain"
    )
