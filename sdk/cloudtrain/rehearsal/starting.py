"""The check `starts`: whether the bundle unpacks, its requirements resolve, and its code can be imported."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from cloudtrain import catalog
from cloudtrain.planning.plan import Plan
from cloudtrain.rehearsal.base import Check, Result
from cloudtrain.rehearsal.runs import first_line

NAME = "starts"
_RESOLVE_SECONDS = 240.0
_UNREACHABLE = re.compile(
    r"NewConnectionError|Failed to establish a new connection|Name or service not known|Temporary failure in name"
    r"|ConnectTimeoutError|ReadTimeoutError|Network is unreachable|Connection refused|Retrying \(Retry",
)
"""pip's messages without a network. pip 24 and later print "Retrying (Retry(total=..." before they give up."""

_PIN = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*===?\s*(?P<version>[^\s,*]+)$")
"""A requirement with one exact version, without a marker: another line may have the opposite marker."""

RunProgram = Callable[..., "subprocess.CompletedProcess[str]"]


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a bundle as the container does, and return the folder."""
    folder.mkdir(parents=True)
    with tarfile.open(archive) as bundle:
        bundle.extractall(folder, filter="data")
    return folder


def image_python(plan: Plan) -> str:
    """Return the Python version of the job's image, major and minor; empty for an image that is not AWS's."""
    uri = str(plan.request["AlgorithmSpecification"].get("TrainingImage", ""))
    image = catalog.find_image(uri)
    return "" if image is None else image.python


def find_python(version: str) -> str | None:
    """Return an interpreter of a Python version on this machine, or None."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        return sys.executable
    path = shutil.which(f"python{version}")
    if path is None:
        return None
    # A shim of a version manager exists for versions that are not installed.
    command = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return path if done.returncode == 0 and done.stdout.strip() == version else None


def check_requirements(plan: Plan, code: Path, folder: Path, run: RunProgram, seconds: float) -> Check | None:
    """Return whether the job's requirements resolve in a clean environment; None if it has none.

    pip resolves them for the image's Python in an empty virtual environment. It downloads what names the
    versions, and installs nothing.

    Args:
        plan: The plan of the cluster.
        code: Folder of the unpacked bundle.
        folder: Folder for the environment.
        run: Runs a program in the folder of the code.
        seconds: Longest time.
    """
    requirements = plan.config.requirements
    if requirements is None:
        return None
    if problem := find_contradiction((code / requirements).read_text(encoding="utf-8", errors="replace")):
        return Check(NAME, Result.FAILED, f"{requirements} does not resolve: {problem}")
    version = image_python(plan)
    if not version:
        return Check(NAME, Result.UNKNOWN, f"the Python of the job's own image is unknown: {requirements} not resolved")
    python = find_python(version)
    if python is None:
        text = f"the image has Python {version}, which is not on this machine: {requirements} not resolved"
        return Check(NAME, Result.UNKNOWN, text)
    try:
        return _resolve(python, folder, requirements, run, min(seconds, _RESOLVE_SECONDS))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(NAME, Result.UNKNOWN, f"{requirements} could not be resolved here: {first_line(str(error))}")


def find_contradiction(text: str) -> str:
    """Return two lines of requirements of which no version of a package satisfies both; empty if there are none.

    Only pins (`==`, without a wildcard) are compared, which needs no package index.
    """
    pins: dict[str, tuple[str, str]] = {}
    for each in text.splitlines():
        line = each.partition(" #")[0].strip()
        found = _PIN.match(line)
        if found is None:
            continue
        name, version = re.sub(r"[-_.]+", "-", found["name"]).lower(), found["version"]
        other, first = pins.setdefault(name, (version, line))
        if other != version and _release(other) != _release(version):
            return f"{first} and {line} contradict each other"
    return ""


def _release(version: str) -> list[str]:
    """Return a version without zeros at its end: 1.2 and 1.2.0 are equal."""
    parts = version.split(".")
    while parts and parts[-1] == "0":
        parts.pop()
    return parts


def _resolve(python: str, folder: Path, requirements: str, run: RunProgram, seconds: float) -> Check:
    environment = folder / "environment"
    made = run([python, "-m", "venv", "--without-pip", str(environment)], timeout=seconds)
    if made.returncode != 0:
        return Check(NAME, Result.UNKNOWN, f"no virtual environment: {first_line(made.stderr)}")
    options = ["--no-input", "--disable-pip-version-check", "--dry-run", "--quiet", "--retries", "1", "--timeout", "10"]
    target = str(environment / "bin" / "python")
    command = [sys.executable, "-m", "pip", "--python", target, "install", *options, "-r", requirements]
    done = run(command, timeout=seconds)
    if done.returncode == 0:
        text = f"{requirements} resolves in a clean environment of Python {image_python_of(python)}"
        return Check(NAME, Result.PROVEN, text)
    if _UNREACHABLE.search(done.stderr):
        return Check(NAME, Result.UNKNOWN, f"pip reaches no package index from here: {requirements} not resolved")
    lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
    return Check(
        NAME, Result.FAILED, f"{requirements} does not resolve: {first_line(chr(10).join(lines) or done.stderr)}"
    )


def image_python_of(python: str) -> str:
    """Return the version of an interpreter for a message."""
    if python == sys.executable:
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    return Path(python).name.removeprefix("python")
