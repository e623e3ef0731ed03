"""The folder of a controller: its log, its lock, the request to stop, and why it pauses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from cloudtrain.client.home import all_homes
from cloudtrain.errors import UserError
from cloudtrain.support.controller_files import LOCK_FILE, PAUSE_FILE, STOP_FILE
from cloudtrain.support.home_folder import make_home
from cloudtrain.support.run_id import is_run_id, written_order

CONTROLLER_LOG = "controller.log"
_PAUSE_BYTES = 1024
_LOCK_ATTEMPTS = 20
_LOCK_PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class ControllerFolder:
    """The folder of what a controller controls, at `<home>/<kind>/<id>`.

    Attributes:
        noun: What is controlled, for messages: `sweep`.
        id: Its id, in the form of a run id.
        folder: The folder.
    """

    noun: ClassVar[str]

    id: str
    folder: Path

    @property
    def home(self) -> Path:
        """The folder of local runs that it is in."""
        return self.folder.parent.parent

    @property
    def log(self) -> Path:
        """The controller's log."""
        return self.folder / CONTROLLER_LOG

    @property
    def stop_file(self) -> Path:
        """The file whose existence asks the controller to stop."""
        return self.folder / STOP_FILE

    @property
    def is_controlled(self) -> bool:
        """Whether a controller of this folder runs on this machine."""
        with (self.folder / LOCK_FILE).open("a+") as file:
            return not _try_lock(file)

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the lock of the controller, if no other process does; the value says whether this one does."""
        with (self.folder / LOCK_FILE).open("a+") as file:
            # Who asks for `is_controlled` holds the lock for a moment.
            for _ in range(_LOCK_ATTEMPTS):
                if _try_lock(file):
                    yield True
                    return
                time.sleep(_LOCK_PAUSE_SECONDS)
            yield False

    def write_pause(self, cause: str) -> None:
        """Record why no run starts at present; an empty cause ends the pause.

        The file has its full size from the start, so that it can be written on a full disk.
        """
        content = cause.encode("utf-8", "replace")[:_PAUSE_BYTES].ljust(_PAUSE_BYTES)
        with contextlib.suppress(OSError):
            descriptor = os.open(self.folder / PAUSE_FILE, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.write(descriptor, content)
            finally:
                os.close(descriptor)

    def read_pause(self) -> str:
        """Return why no run starts at present; empty without a pause."""
        try:
            content = (self.folder / PAUSE_FILE).read_bytes()
        except OSError:
            return ""
        return content.decode("utf-8", "replace").strip()


def make_folder(home: Path, kind: str, name: str) -> Path:
    """Create the folder of a new controller.

    Raises:
        UserError: It exists already, or cannot be created.
    """
    folder = home / kind / name
    try:
        make_home(home)
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be created: {error.strerror}", "set CLOUDTRAIN_HOME"
        ) from None
    return folder


def known_folders(kind: str, file: str, home: Path | None = None) -> dict[str, Path]:
    """Return the folders of a kind by id, the newest first. Each has a certain file.

    Args:
        kind: Name of the folder that has them.
        file: The file.
        home: The only folder of local runs to look in; by default all of this machine that are known.
    """
    found: dict[str, Path] = {}
    homes = [home] if home is not None else all_homes()
    for each in homes:
        for path in (each / kind).glob(f"*/{file}"):
            if is_run_id(path.parent.name):
                found.setdefault(path.parent.name, path.parent)
    names = sorted(found, key=lambda name: written_order(name, found[name]), reverse=True)
    return {name: found[name] for name in names}


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
