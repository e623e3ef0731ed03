"""Virtual environments with the requirements of local runs (`submit --local --install`).

An environment has its own site-packages and sees those of this one after them, so that torch is not downloaded again.
It is built once per content of the requirements, Python, torch and environment of this process.
"""

from __future__ import annotations

import collections
import fcntl
import hashlib
import importlib.metadata
import posixpath
import re
import shutil
import site
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import IO

from cloudtrain.bundle.unpacking import unpack
from cloudtrain.errors import UserError
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.steps import Steps
from cloudtrain_runtime.contract import INSTALLED_FILE

FOLDER = "environments"
"""Folder of the environments, below the folder of local runs."""
_LAST_LINES = 20
_INSTALLED = "Successfully installed "
_SHOWN_VERBS = (
    "Collecting ",
    "Downloading ",
    "Using cached ",
    "Building ",
    "Installing ",
    "Preparing ",
)


def prepare_environment(
    folder: Path, archive: Path, requirements: str, steps: Steps | None = None
) -> Path:
    """Return the interpreter of an environment with the requirements of a bundle; build it unless it exists.

    Processes that need the same environment wait for the one that builds it. An environment without its marker, which
    is written last, is built again.

    Args:
        folder: Folder of all environments.
        archive: The bundle.
        requirements: Path of the requirements file in the bundle.
        steps: Receives what pip does.

    Raises:
        UserError: The environment cannot be built, or pip failed.
    """
    steps = steps or Steps()
    with tarfile.open(archive) as bundle:
        member = bundle.extractfile(requirements)
        text = b"" if member is None else member.read()
        refers_to_code = _refers_to(text.decode("utf-8", "replace"), bundle.getnames())
        # A bundle's folder is named by its digest.
        content = hashlib.sha256(
            archive.parent.name.encode() if refers_to_code else b""
        ).hexdigest()
        key = hashlib.sha256(
            "\n".join([hashlib.sha256(text).hexdigest(), content, *_base()]).encode()
        ).hexdigest()[:16]
        environment = folder / key
        python = environment / "bin" / "python"
        marker = environment / INSTALLED_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{key}.lock").open("w") as lock:
                waited = _acquire(lock, requirements, steps)
                if marker.is_file():
                    if waited is not None:
                        steps.on_done(f"Another command installed {requirements}", waited)
                else:
                    began = time.monotonic()
                    steps.on_progress(f"installing {requirements}")
                    shutil.rmtree(environment, ignore_errors=True)
                    _create(environment)
                    if refers_to_code:
                        unpack(archive, environment / "code")
                    else:
                        own = environment / "code" / requirements
                        own.parent.mkdir(parents=True)
                        own.write_bytes(text)
                    installed = _install(python, environment / "code", requirements, steps)
                    marker.touch()
                    seconds = time.monotonic() - began
                    steps.on_done(_result(installed), seconds)
        except OSError as error:
            message = f"{environment}: the environment cannot be built: {error.strerror or error}"
            raise UserError(message, "free disk space, or set CLOUDTRAIN_HOME") from None
    return python


def _acquire(lock: IO[str], requirements: str, steps: Steps) -> float | None:
    """Lock a file; if another process had to end first, report that and return the seconds."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        began = time.monotonic()
        steps.on_progress(f"waiting for another command that installs {requirements}")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return time.monotonic() - began
    return None


def _result(installed: int) -> str:
    """Return what an installation has done; pip installs nothing where this environment has all."""
    return f"Installed {count(installed, 'package')}" if installed else "Found nothing to install"


def _base() -> list[str]:
    """Return what an environment depends on besides the requirements."""
    return [sys.version, sys.prefix, importlib.metadata.version("torch")]


def _refers_to(text: str, names: list[str]) -> bool:
    """Return whether requirements name a file or folder of the bundle, such as `-r more.txt` or `./package`."""
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    known = folders.union(names)
    words = (word.removeprefix("file:") for word in re.split(r"[\s=\[\]]+", text))
    return any(posixpath.normpath(word) in known for word in words if word)


def _create(environment: Path) -> None:
    """Create an environment without pip, which sees the packages of this one after its own."""
    _run(
        [sys.executable, "-m", "venv", "--without-pip", str(environment)],
        environment.parent,
        "venv failed",
    )
    seen = [
        *site.getsitepackages(),
        *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []),
    ]
    (packages,) = environment.glob("lib/python*/site-packages")
    lines = [f"import site; site.addsitedir({each!r})\n" for each in seen]
    (packages / "zz-cloudtrain-base.pth").write_text("".join(lines), encoding="utf-8")


def _install(python: Path, code: Path, requirements: str, steps: Steps) -> int:
    """Install requirements with pip; return the number of packages that were installed."""
    options = [
        "--no-input",
        "--disable-pip-version-check",
        "--no-warn-script-location",
        "--progress-bar=off",
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        *options,
        "-r",
        requirements,
    ]
    installed = 0

    def read(line: str) -> None:
        nonlocal installed
        detail = detail_of(line)
        if detail:
            steps.on_detail(detail)
        if line.startswith(_INSTALLED):
            installed = len(line.removeprefix(_INSTALLED).split())

    _run(command, code, f"pip could not install {requirements}", read)
    return installed


def detail_of(line: str) -> str:
    """Return a line of pip that says what it does, without what is not for people; empty for other lines."""
    line = line.strip()
    if not line.startswith(_SHOWN_VERBS):
        return ""
    # After the name of a requirement: which file or package asks for it.
    line = re.sub(r" \(from .*", "", line)
    # After the version in a file's name: tags of Python and platform.
    line = re.sub(r"(-\d[^-\s]*)-\S+\.whl(\.metadata)?", r"\1", line)
    return re.sub(r"^(Installing collected packages): .*,.*", r"\1", line)


def last_errors(lines: Iterable[str]) -> list[str]:
    """Return the last lines of a command from its first error on; all of them if none is marked as one."""
    found = [line for line in lines if line]
    errors = [
        number for number, line in enumerate(found) if line.lstrip().lower().startswith("error:")
    ]
    return found[errors[0] :] if errors else found


def _run(
    command: list[str], folder: Path, message: str, read: Callable[[str], None] = lambda _: None
) -> None:
    """Run a command to its end, and call `read` with each line that it prints.

    Raises:
        UserError: It failed.
    """
    last = collections.deque[str](maxlen=_LAST_LINES)
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            for line in process.stdout or ():
                last.append(line.rstrip())
                read(line.rstrip())
        except BaseException:
            # Ctrl-C: nothing is installed after the command has ended.
            process.kill()
            raise
    if process.returncode != 0:
        end = "\n  ".join(last_errors(last))
        raise UserError(
            f"{message}; nothing was started:\n  {end}",
            "fix the requirements, or submit without --install",
        )
