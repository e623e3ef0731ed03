"""The recorded versions, and a copy of what one of them has written."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ARCHIVE = "home.tar.xz"
EXPECTED = "expected.json"
SURFACE = "surface.json"
HOME_WORD = "<home>"
"""Stands for the folder of runs in recorded output."""


def recorded_versions() -> list[str]:
    """Return the recorded versions, oldest first."""
    found = [path.parent.name for path in HERE.glob(f"*/{SURFACE}")]
    return sorted(found, key=lambda version: tuple(map(int, version.split("."))))


def read_recorded(version: str, name: str) -> Any:
    """Return the content of a JSON file of a version."""
    return json.loads((HERE / version / name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Written:
    """A copy of what a version has written.

    Attributes:
        version: The version.
        root: Folder of the copy.
    """

    version: str
    root: Path

    @classmethod
    def unpack(cls, version: str, root: Path) -> Written:
        """Unpack the archive of a version."""
        with tarfile.open(HERE / version / ARCHIVE) as archive:
            archive.extractall(root, filter="data")
        return cls(version, root)

    def copy(self, root: Path) -> Written:
        """Return a copy, for a test that changes it."""
        shutil.copytree(self.root, root)
        return Written(self.version, root)

    @property
    def project(self) -> Path:
        """Folder of the jobs."""
        return self.root / "project"

    @property
    def home(self) -> Path:
        """Folder of the runs."""
        return self.project / ".cloudtrain"

    @property
    def config(self) -> Path:
        """XDG_CONFIG_HOME of its user."""
        return self.root / "config"

    @property
    def expected(self) -> Mapping[str, Any]:
        """What the version itself has read of it."""
        return {**read_recorded(self.version, EXPECTED)}

    def run(self, what: str) -> str:
        """Return the id of a run, such as the one that has `succeeded`."""
        return str(self.expected["runs"][what])

    def folder(self, what: str) -> Path:
        """Return the folder of a run."""
        return self.home / "runs" / self.run(what)


def differences(before: Any, now: Any, ignored: frozenset[str], path: str = "") -> Iterator[str]:
    """Yield what is missing or different now. New keys of an object are no difference.

    Args:
        before: JSON values that a version has recorded.
        now: The same of this version.
        ignored: Keys whose values may differ.
        path: Place of the values, for the messages.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for name, value in before.items():
            below = f"{path}.{name}"
            if name not in now:
                yield f"{below} is missing"
            elif name not in ignored:
                yield from differences(value, now[name], ignored, below)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for at, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from differences(old, new, ignored, f"{path}[{at}]")
    elif before != now:
        yield f"{path} was {before!r:.200}, is {now!r:.200}"
