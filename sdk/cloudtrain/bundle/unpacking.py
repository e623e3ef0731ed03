"""Unpacking of archives that may come from elsewhere."""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path, PurePosixPath

_HAS_DATA_FILTER = hasattr(tarfile, "data_filter")
"""Python 3.11.4 and newer. Older versions cannot check the targets of links, so links are rejected."""


class UnpackError(Exception):
    """A file is no archive, or one that would write outside of its folder."""


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive safely: only files, folders and links inside the folder, without set-id bits.

    Raises:
        UnpackError: it is no archive, or a member is outside of the folder or a device.
    """
    try:
        with tarfile.open(archive) as packed:
            members = packed.getmembers()
            for member in members:
                _check_member(member, archive)
            if _HAS_DATA_FILTER:
                packed.extractall(folder, members, filter="data")
            else:
                packed.extractall(folder, [_without_set_id(member) for member in members])  # noqa: S202 (checked above)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UnpackError(f"{archive.name} cannot be unpacked: {error}") from None


def _check_member(member: tarfile.TarInfo, archive: Path) -> None:
    """Check the name and kind of a member. Python's data filter checks the targets of links."""
    path = PurePosixPath(member.name)
    is_link = member.issym() or member.islnk()
    if path.is_absolute() or ".." in path.parts:
        raise UnpackError(
            f"{archive.name} contains {member.name!r}, which is outside of its folder"
        )
    if not (member.isreg() or member.isdir() or (is_link and _HAS_DATA_FILTER)):
        raise UnpackError(
            f"{archive.name} contains {member.name!r}, which is neither a file nor a folder"
        )


def _without_set_id(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mode &= 0o755
    return member
