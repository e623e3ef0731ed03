"""Virtual environments with the requirements of local runs (`submit --local --install`).

An environment has its own site-packages and sees those of this one after them, so that torch is not downloaded again.
It is built once per content of the requirements, Python, torch and environment of this process.
"""

from __future__ import annotations

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
from pathlib import Path, PurePosixPath

from cloudtrain.bundle.unpacking import unpack
from cloudtrain.errors import UserError
from cloudtrain_runtime.contract import INSTALLED_FILE

FOLDER = "environments"
"""Folder of the environments, below the folder of local runs."""
_LAST_LINES = 20


def prepare_environment(folder: Path, archive: Path, requirements: str) -> Path:
    """Return the interpreter of an environment with the requirements of a bundle; build it unless it exists.

    Processes that need the same environment wait for the one that builds it. An environment without its marker, which
    is written last, is built again.

    Args:
        folder: Folder of all environments.
        archive: The bundle.
        requirements: Path of the requirements file in the bundle.

    Raises:
        UserError: The environment cannot be built, or pip failed.
    """
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
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not marker.is_file():
                    shutil.rmtree(environment, ignore_errors=True)
                    _create(environment)
                    if refers_to_code:
                        unpack(archive, environment / "code")
                    else:
                        own = environment / "code" / requirements
                        own.parent.mkdir(parents=True)
                        own.write_bytes(text)
                    _install(python, environment / "code", requirements)
                    marker.touch()
        except OSError as error:
            message = f"{environment}: the environment cannot be built: {error.strerror or error}"
            raise UserError(message, "free disk space, or set CLOUDTRAIN_HOME") from None
    return python


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


def _install(python: Path, code: Path, requirements: str) -> None:
    options = ["--no-input", "--disable-pip-version-check", "--no-warn-script-location"]
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
    _run(command, code, f"pip could not install {requirements}")


def _run(command: list[str], folder: Path, message: str) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        end = "\n  ".join(done.stdout.strip().splitlines()[-_LAST_LINES:])
        raise UserError(
            f"{message}; nothing was started:\n  {end}",
            "fix the requirements, or submit without --install",
        )
