"""Checks of this machine: whether local runs can start here, and what is configured for SageMaker.

No check makes a network call, except to the controllers of Slurm sites.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cloudtrain.aws.credential_source import find_credential_source
from cloudtrain.aws.errors import aws_errors
from cloudtrain.backends.container.machine import free_port, this_machine
from cloudtrain.client.account import find_settings, trace_settings
from cloudtrain.client.home import HOME_VARIABLE, find_home
from cloudtrain.errors import CloudError, SettingsError, UserError
from cloudtrain.settings.settings import REQUIRED_SETTINGS
from cloudtrain.support.checks import Check, Result, failed, note, passed
from cloudtrain.support.installation import install_command, pip_install
from cloudtrain.support.units import format_size
from cloudtrain_runtime.contract.strict_json import load_json

_OLDEST_TORCH = (2, 5)
_SAGEMAKER_MAJOR = "2"
_LITTLE_SPACE_BYTES = 5 * 10**9
_TORCH_SECONDS = 120
_TORCH_PROGRAM = """
import json, torch
has_distributed = torch.distributed.is_available()
has_nccl = has_distributed and torch.distributed.is_nccl_available()
gpus = [torch.cuda.get_device_properties(each) for each in range(torch.cuda.device_count() * torch.cuda.is_available())]
print(json.dumps({
    "version": torch.__version__,
    "build": f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip
    else "CPU",
    "has_distributed": has_distributed,
    "gpus": [[each.name, each.total_memory] for each in gpus],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl and gpus else "",
}))
"""
"""Runs in a process of its own: a broken build of torch can end its process, and the SDK does not import torch."""


@dataclass(frozen=True)
class _Torch:
    """What torch reports about itself; `problem` is the reason if it cannot be imported."""

    version: str = ""
    build: str = ""
    has_distributed: bool = False
    gpus: list[tuple[str, int]] = field(default_factory=list)
    nccl: str = ""
    problem: str = ""


def check_machine() -> tuple[Check, ...]:
    """Return the checks of this machine, those for local runs first. Of the network only Slurm's controllers are asked."""
    return (*_check_local(), *_check_account(), *_check_slurm())


def _check_local() -> Iterator[Check]:
    """Check what local runs need."""
    machine, torch = this_machine(), _load_torch()
    yield passed("Python", f"{platform.python_version()}, {sys.executable}")
    yield passed("cloudtrain", version("cloudtrain"))
    yield _check_torch(torch)
    yield _check_gpus(machine.gpus, torch)
    yield _check_nccl(machine.gpus, torch)
    yield _check_psutil()
    if machine.has_ml_namespace:
        yield passed("/opt/ml", "each instance of a local run has its own (mount namespace)")
    else:
        fix = "read SM_MODEL_DIR, SM_OUTPUT_DATA_DIR and SM_CHANNEL_<NAME> in the code, which are right everywhere"
        yield note(
            "/opt/ml",
            "no mount namespace: replaced in code.args and code.env, not in the code",
            fix,
        )
    yield _check_home()
    yield _check_port()


def _load_torch() -> _Torch:
    """Return what torch reports about itself, from a process that imports it."""
    if importlib.util.find_spec("torch") is None:
        return _Torch(problem="not installed")
    program = [sys.executable, "-P", "-c", _TORCH_PROGRAM]
    try:
        done = subprocess.run(
            program, capture_output=True, text=True, check=False, timeout=_TORCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        return _Torch(problem=f"its import did not end within {_TORCH_SECONDS} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return _Torch(problem=f"cannot be imported: {last}")
    return _Torch(**load_json(done.stdout.splitlines()[-1]))


def _check_torch(torch: _Torch) -> Check:
    if torch.problem:
        return failed("torch", torch.problem, install_command("local"))
    found = f"{torch.version} ({torch.build})"
    if tuple(int(part) for part in torch.version.split(".")[:2]) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        return failed("torch", f"{found} is older than {oldest}", pip_install(f"torch>={oldest}"))
    if not torch.has_distributed:
        return failed(
            "torch", f"{found} lacks torch.distributed", "install a build from https://pytorch.org"
        )
    return passed("torch", found)


def _check_gpus(visible: int, torch: _Torch) -> Check:
    """Compare the GPUs that a plan counts with those that torch can use."""
    if visible == 0:
        return note("GPUs", "none that CUDA can use: local runs train on the CPU")
    if torch.problem:
        return note(
            "GPUs", f"{visible}; torch reads their names and memory", install_command("local")
        )
    if len(torch.gpus) < visible:
        fix = "install a build of torch for this driver (https://pytorch.org), or train on the CPU: CUDA_VISIBLE_DEVICES="
        return failed(
            "GPUs",
            f"{visible}, but torch {torch.version} ({torch.build}) can use {len(torch.gpus)}",
            fix,
        )
    return passed(
        "GPUs", ", ".join(f"{name} ({format_size(memory)})" for name, memory in torch.gpus)
    )


def _check_nccl(visible: int, torch: _Torch) -> Check:
    if visible == 0 or torch.problem or not torch.gpus:
        return note("NCCL", "not used: ranks on the CPU use Gloo")
    if not torch.nccl:
        return failed(
            "NCCL",
            f"torch {torch.version} was built without it",
            "install a build from https://pytorch.org",
        )
    return passed("NCCL", torch.nccl)


def _check_psutil() -> Check:
    if importlib.util.find_spec("psutil") is None:
        return failed("psutil", "not installed", install_command("local"))
    return passed("psutil", version("psutil"))


def _check_home() -> Check:
    """Check the folder of local runs, and the disk that holds it."""
    try:
        return _check_disk(find_home())
    except UserError as error:
        return failed("disk", error.message, error.hint)


def _check_disk(home: Path) -> Check:
    """Check the folder of local runs, or the nearest one above it that exists."""
    folder = next(each for each in (home, *home.parents) if os.access(each, os.F_OK))
    other = f"choose another folder for local runs: {HOME_VARIABLE}"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return failed("disk", f"{home}: {folder} is no folder with write permission", other)
    free = shutil.disk_usage(folder).free
    detail = f"{format_size(free)} free for local runs in {home}"
    if free < _LITTLE_SPACE_BYTES:
        return note("disk", detail, f"delete runs: cloudtrain rm --older-than 30d; or {other}")
    return passed("disk", detail)


def _check_port() -> Check:
    try:
        return passed("port", f"127.0.0.1:{free_port()} is free")
    except OSError as error:
        return failed(
            "port",
            f"torchrun needs a port of 127.0.0.1: {error}",
            "end processes that listen there",
        )


def _check_account() -> Iterator[Check]:
    """Check what is configured for SageMaker. Only a malformed settings file prevents local runs."""
    try:
        with aws_errors("read the AWS configuration"):
            source = find_credential_source(os.environ)
    except CloudError as error:
        yield note("credentials", error.message, error.hint)
    else:
        if source is not None:
            yield passed("credentials", str(source))
        else:
            fix = "run aws configure or aws sso login, or set AWS_PROFILE"
            yield note(
                "credentials", "none configured (an EC2 instance's role is not looked up)", fix
            )
    yield from _check_settings()
    sdk = _version("sagemaker")
    if sdk is not None and sdk.partition(".")[0] == _SAGEMAKER_MAJOR:
        yield passed("SageMaker SDK", sdk)
    else:
        install = install_command("sagemaker")
        fix = f"boto3 sends jobs without it; to compare them with an estimator: {install}"
        yield note(
            "SageMaker SDK",
            "not installed" if sdk is None else f"{sdk} is not {_SAGEMAKER_MAJOR}.x",
            fix,
        )
    yield passed("boto3", version("boto3"))


def _check_settings() -> Iterator[Check]:
    try:
        settings, origins = find_settings(), trace_settings()
    except SettingsError as error:
        yield from (failed(name, error.message, error.hint) for name in REQUIRED_SETTINGS)
        return
    untrusted = {each.name for each in settings.untrusted}
    for name in ("region", "role", "bucket"):
        origin = next((each for each in origins if each.name == name), None)
        if origin is None:
            yield note(name, "not set", "for SageMaker: cloudtrain configure")
            continue
        detail = f"{origin.text}, from {origin.source}" + (f":{origin.line}" if origin.line else "")
        if name in untrusted:
            yield note(name, detail, "not used before you agree: cloudtrain --trust COMMAND")
        else:
            yield passed(name, detail)


def _check_slurm() -> Iterator[Check]:
    """Check the Slurm sites of the settings. Local runs need none of them."""
    try:
        sites = find_settings().slurm
    except SettingsError:
        # The account's checks have it.
        return
    if not sites:
        return
    from cloudtrain.backends.slurm.checks import check_cluster

    for site in sites.values():
        for check in check_cluster(site):
            # The first check, of Slurm itself, has the site's name alone.
            name = f"slurm.{site.name} {check.name.removeprefix('Slurm')}".rstrip()
            problem = check.warning or check.fix
            if check.result is Result.PASS and not problem:
                yield passed(name, check.detail)
            else:
                yield note(name, check.detail, problem)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report_to_json(checks: tuple[Check, ...]) -> dict[str, Any]:
    """Return the object that `doctor --json` prints."""
    return {"ok": is_ready(checks), "checks": [_to_json(check) for check in checks]}


def _to_json(check: Check) -> dict[str, str]:
    return {
        "name": check.name,
        "result": str(check.result),
        "detail": check.detail,
        "fix": check.fix,
    }


def is_ready(checks: tuple[Check, ...]) -> bool:
    """Whether local runs can start on this machine."""
    return all(check.result != Result.FAIL for check in checks)
