"""Workspace of a rehearsal: its folder and its processes: nothing of them is left when the rehearsal ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from cloudtrain.backends.container.process_tree import kill
from cloudtrain.backends.container.state_file import is_held
from cloudtrain.client.receipts import FOLDER
from cloudtrain.errors import UserError
from cloudtrain.support.home_folder import make_home
from cloudtrain.support.units import format_size
from cloudtrain_runtime.contract import INSTANCE_VARIABLE, ML_ROOT_VARIABLE

if TYPE_CHECKING:
    import psutil

LEAST_FREE_BYTES = 2 * 10**9
"""Free disk space below which no rehearsal starts: runs, their checkpoints and copies of the code."""
_ROUNDS = 20


class Workspace:
    """A folder for one rehearsal. Use it as a context manager.

    Args:
        home: Folder of local runs.
        keep: Keep the folder at the end.

    Attributes:
        folder: The folder.
        keep: Whether it is kept at the end; an interrupt deletes it in any case.
    """

    def __init__(self, home: Path, *, keep: bool) -> None:
        self._home = home
        self.keep = keep
        self.folder = home / FOLDER / f"run-{secrets.token_hex(4)}"
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Create the folder, after those are deleted that killed rehearsals have left.

        Raises:
            UserError: It cannot be created, or the disk is almost full.
        """
        try:
            make_home(self._home)
            delete_abandoned(self._home)
            free = shutil.disk_usage(self._home).free
            if free < LEAST_FREE_BYTES:
                message = f"{self._home} has {format_size(free)} free, and a rehearsal needs "
                message += f"{format_size(LEAST_FREE_BYTES)}"
                raise UserError(message, "free disk space, or name another folder: CLOUDTRAIN_HOME")
            self.folder.parent.mkdir(exist_ok=True)
            self._acquire_lock()
            self.folder.mkdir()
        except OSError as error:
            self._lock.close()
            message = f"{self.folder}: cannot be created: {error.strerror}"
            raise UserError(message, "name another folder: CLOUDTRAIN_HOME") from None
        return self

    def _acquire_lock(self) -> None:
        """Create the lock file beside the folder, which this process holds as long as it lives."""
        path = _lock_of(self.folder)
        partial = path.with_name(f".{path.name}")
        file = self._lock.enter_context(partial.open("wb"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Only now do other rehearsals find it.
        partial.rename(path)
        self._lock.callback(path.unlink, missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End all processes of the rehearsal, and delete the folder unless it is to be kept."""
        with self._lock:
            end_processes(self.folder)
            if kind is not None or not self.keep:
                shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def home(self) -> Path:
        """Folder of the rehearsed runs."""
        return self.folder / "home"

    def run(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a program with a time limit; it and what it starts end together.

        Raises:
            TimeoutExpired: It took longer, and was killed.
        """
        root = str(self.folder / "check")
        environment = {**env, ML_ROOT_VARIABLE: root, INSTANCE_VARIABLE: root}
        with subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                out, error = process.communicate(timeout=timeout)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(list(command), process.returncode, out, error)


def _lock_of(folder: Path) -> Path:
    # Beside the folder, so that a deletion that was interrupted is completed by the next rehearsal.
    return folder.with_name(f"{folder.name}.lock")


def delete_abandoned(home: Path) -> None:
    """Delete the folders of rehearsals that were killed, and end their processes. Folders that were kept have no lock.

    Args:
        home: Folder of local runs.
    """
    for lock in sorted((home / FOLDER).glob("run-*.lock")):
        # The rehearsal has just ended, or belongs to another user.
        with contextlib.suppress(OSError):
            if not is_held(lock):
                folder = lock.with_suffix("")
                end_processes(folder)
                shutil.rmtree(folder, ignore_errors=True)
                lock.unlink()


def end_processes(folder: Path) -> None:
    """Kill all processes of a rehearsal: supervisors, containers, a sandbox and what checks have started."""
    for _ in range(_ROUNDS):
        found = processes_below(folder)
        if not found:
            return
        kill(found)


def processes_below(folder: Path) -> list[psutil.Process]:
    """Return the processes of this user that work for a folder: by their environment or command line."""
    import psutil

    place = str(folder.resolve())
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if _names(process, place):
                found.append(process)
        except (psutil.Error, OSError):
            # It has ended, for which psutil has no error of its own everywhere, or belongs to
            # another user.
            continue
    return found


def _names(process: psutil.Process, place: str) -> bool:
    if process.environ().get(INSTANCE_VARIABLE, "").startswith(place):
        return True
    # Not a user's pager or shell in the folder: only programs of cloudtrain.
    words = process.cmdline()
    is_own = "-m" in words and any(
        word.split(".")[0] in ("cloudtrain", "cloudtrain_runtime") for word in words
    )
    return is_own and any(place in word for word in words)


@contextlib.contextmanager
def interrupting_on_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as an interrupt in this block, so that everything is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (the handler's signature)
        raise KeyboardInterrupt

    before: dict[int, Any] = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
