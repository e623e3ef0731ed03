"""The check `starts`: whether the bundle unpacks, and its requirements install in a clean environment."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cloudtrain import catalog
from cloudtrain.features.rehearsal.runs import STARTS, first_line
from cloudtrain.job.requirements import Line, read_requirements
from cloudtrain.planning.plan import Plan
from cloudtrain.support.checks import Check, failed, passed, unknown
from cloudtrain.support.notebook.summary import count
from cloudtrain_runtime.contract.strict_json import load_json

_MOST_SECONDS = 240.0
_SHARE_FOR_PIP = 0.4
"""Share of the rehearsal's time that the installation may take."""
_UNREACHABLE = re.compile(
    r"NewConnectionError|Failed to establish a new connection|Name or service not known|Temporary failure in name"
    r"|ConnectTimeoutError|ReadTimeoutError|Network is unreachable|Connection refused|Retrying \(Retry",
)
"""pip's messages without a network. pip 24 and later print "Retrying (Retry(total=..." before they give up."""
_OF_THIS_MACHINE = re.compile(
    r"Errno 28|No space left|[Ff]ailed (to build|building)|command '.*' failed|No module named pip"
)
"""pip's messages about a full disk, a package that must be compiled (the image may have the compiler), and no pip."""

_PIN = re.compile(r"===?[^,*]+")

RunProgram = Callable[..., "subprocess.CompletedProcess[str]"]


def torch_of(image: catalog.Image) -> str:
    """Return the version of torch in an image: of its tag, which may lack the last number."""
    found = re.search(r":(\d+\.\d+)(\.\d+)?-", image.gpu)
    if found is None:
        return f"{image.framework}.0"
    return found[1] + (found[2] or ".0")


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
    if done.returncode != 0 or done.stdout.strip() != version:
        return None
    return path


def check_requirements(
    plan: Plan, code: Path, folder: Path, run: RunProgram, seconds: float
) -> Check | None:
    """Return whether the job's requirements install in a clean environment; None if it has none.

    pip installs them for the image's Python into an empty virtual environment, in which the image's torch counts as
    installed, so that it is not downloaded.

    Args:
        plan: The plan of the cluster.
        code: Folder of the unpacked bundle.
        folder: Folder for the environment.
        run: Runs a program in the folder of the code.
        seconds: Time left to the rehearsal.
    """
    requirements = plan.config.requirements
    if requirements is None:
        return None
    if problem := find_contradiction(code, requirements):
        return failed(STARTS, f"{requirements} does not resolve: {problem}")
    image = catalog.find_image(plan.image)
    if image is None:
        text = f"the Python of the job's own image is unknown: {requirements} not installed"
        return unknown(STARTS, text)
    python = find_python(image.python)
    if python is None:
        text = f"the image has Python {image.python}, which is not on this machine: {requirements} not installed"
        return unknown(STARTS, text)
    limit = min(seconds * _SHARE_FOR_PIP, _MOST_SECONDS)
    until = time.monotonic() + limit

    def run_until(command: list[str]) -> subprocess.CompletedProcess[str]:
        return run(command, timeout=max(1.0, until - time.monotonic()))

    environment = folder / "environment"
    try:
        return _install(python, image, environment, requirements, run_until)
    except subprocess.TimeoutExpired:
        text = (
            f"{requirements}: pip took longer than its share of the time, {limit:.0f} s: --minutes"
        )
    except OSError as error:
        text = f"{requirements} could not be installed here: {first_line(str(error))}"
    finally:
        shutil.rmtree(environment, ignore_errors=True)
    return unknown(STARTS, text)


def find_contradiction(code: Path, requirements: str) -> str:
    """Return two lines of requirements of which no version of a package satisfies both; empty if there are none.

    Only pins (`==`, without a wildcard or a marker) are compared, which needs no package index.
    """
    pins: dict[str, Line] = {}
    for line in read_requirements(code, requirements).lines:
        is_pin = len(line.versions) == 1 and _PIN.fullmatch(line.versions[0]) is not None
        if line.name is None or line.is_conditional or not is_pin:
            continue
        first = pins.setdefault(line.name, line)
        if _release(first) != _release(line):
            return f"{first.text} and {line.text} contradict each other"
    return ""


def _release(line: Line) -> str:
    """Return a pinned version without zeros at its end: 1.2 and 1.2.0 are equal."""
    return re.sub(r"(\.0+)+$", "", line.versions[0].lstrip("= "))


def _install(
    python: str, image: catalog.Image, environment: Path, requirements: str, run: RunProgram
) -> Check:
    made = run([python, "-m", "venv", "--without-pip", str(environment)])
    if made.returncode != 0:
        return unknown(STARTS, f"no virtual environment: {first_line(made.stderr)}")
    torch = torch_of(image)
    _record_as_installed(environment, "torch", torch)
    options = [
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        "--retries",
        "1",
        "--timeout",
        "10",
    ]
    target = str(environment / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", target, "install", *options, "-r", requirements]
    resolved = run([*pip, "--dry-run", "--report", "-"])
    if resolved.returncode != 0:
        return _judge_failure(resolved, f"{requirements} does not resolve", requirements)
    versions = {
        each["metadata"]["name"]: each["metadata"]["version"]
        for each in load_json(resolved.stdout)["install"]
    }
    if "torch" in versions:
        text = f"{requirements} replaces torch {torch} of the image by {versions['torch']}, which was not rehearsed: "
        return unknown(STARTS, text + f"require packages that work with torch {torch}")
    done = run(pip)
    if done.returncode != 0:
        return _judge_failure(
            done, f"{requirements} resolves, and cannot be installed", requirements
        )
    text = f"{count(len(versions), 'package')} of {requirements} installed in a clean environment"
    return passed(STARTS, f"{text} of Python {image.python}")


def _record_as_installed(environment: Path, name: str, version: str) -> None:
    """Write the record of an installed package without the package."""
    (packages,) = environment.glob("lib/python*/site-packages")
    record = packages / f"{name}-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
    (record / "INSTALLER").write_text("cloudtrain\n", encoding="utf-8")


def _judge_failure(done: subprocess.CompletedProcess[str], what: str, requirements: str) -> Check:
    if _UNREACHABLE.search(done.stderr):
        text = f"pip reaches no package index from here: {requirements} not installed"
        return unknown(STARTS, text)
    lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "error:" in line]
    text = first_line("\n".join(lines) or done.stderr)
    if _OF_THIS_MACHINE.search(done.stderr):
        text = f"{requirements} could not be installed on this machine: {text}"
        return unknown(STARTS, text)
    return failed(STARTS, f"{what}: {text}")
