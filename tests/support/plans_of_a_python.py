"""Print what the SDK imports and plans with the Python that runs this, as JSON. It needs the core dependencies only."""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
import sys
import tempfile
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cloudtrain
import cloudtrain_runtime.contract
import cloudtrain_runtime.launcher
from cloudtrain.job.schema import job_schema

OF_EXTRAS = {
    "IPython",
    "PIL",
    "flask",
    "matplotlib",
    "moto",
    "numpy",
    "optuna",
    "pandas",
    "psutil",
    "ray",
    "s3torchconnector",
    "sagemaker",
    "safetensors",
    "starlette",
    "torch",
    "uvicorn",
    "werkzeug",
}
"""Modules that only an extra installs."""
MISTAKES = """\
name: Demo_
code: {directory: ., task: task:Model, args: {lr: [1, 2]}}
cluster: {instance_type: ml.p4d.24xlarge, instances: two, volume: 3 bananas}
limits: {runtime: 6, cost: 10 EUR}
checkpoint: {every: often, keep: true}
train: {batch_size: true}
nonsense: 1
"""
NOW = datetime(2026, 11, 21, 7, 43, 18, tzinfo=UTC)


def sources() -> list[Path]:
    """Return every source that is installed."""
    folders = [Path(str(each.__file__)).parent for each in (cloudtrain, cloudtrain_runtime)]
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def compile_everything() -> list[str]:
    """Compile every source, also those that need torch; return the errors and warnings."""
    found = []
    for path in sources():
        try:
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        except (SyntaxError, Warning) as error:
            found.append(f"{path}: {error}")
    return found


def import_everything() -> tuple[int, list[str]]:
    """Import every module; return how many were imported, and the errors of the others.

    A module that needs an extra is in neither. The runtime beyond its contract and launcher needs torch.
    """
    imported, failed = 0, []
    for package in (cloudtrain, cloudtrain_runtime.contract, cloudtrain_runtime.launcher):
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".templates" in each.name or each.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(each.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in OF_EXTRAS:
                    failed.append(f"{each.name}: {error}")
            except Exception as error:  # noqa: BLE001 (each is reported)
                failed.append(f"{each.name}: {type(error).__name__}: {error}")
            else:
                imported += 1
    return imported, failed


def plans(examples: Path) -> dict[str, Any]:
    """Validate and plan each example for an account and for this machine."""
    settings = cloudtrain.Settings(
        role="arn:aws:iam::123456789012:role/training",
        bucket="a-bucket",
        region="us-west-2",
        transport="boto3",
    )
    found: dict[str, Any] = {}
    for path in sorted(examples.glob("*/job.yaml")):
        job = cloudtrain.validate(path, settings=settings)
        for local in (False, True):
            plan = cloudtrain.plan(job, local=local, settings=settings, now=NOW, suffix="0a1b2c")
            answer = plan.to_json()
            if local:
                # Warnings about this machine, such as a package that is not installed.
                del answer["warnings"]
            found[f"{path.parent.name}{' here' if local else ''}"] = answer
    return found


def mistakes() -> str:
    """Return the message about a job file with many mistakes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.yaml")
        path.write_text(MISTAKES, encoding="utf-8")
        Path(folder, "task.py").write_text("class Model(:\n", encoding="utf-8")
        try:
            cloudtrain.validate(path)
        except cloudtrain.SpecError as error:
            return str(error).replace(folder, "")
    return "accepted"


if __name__ == "__main__":
    # A use of what a later Python removes is an error here, if it is cloudtrain's own.
    warnings.filterwarnings("error", module="cloudtrain")
    count, errors = import_everything()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrong = compile_everything()
    json.dump(
        {
            "python": "{}.{}".format(*sys.version_info[:2]),
            "code": hashlib.sha256(b"".join(path.read_bytes() for path in sources())).hexdigest(),
            "imported": count,
            "errors": [*errors, *wrong],
            "schema": job_schema(),
            "plans": plans(Path(sys.argv[1])),
            "mistakes": mistakes(),
        },
        sys.stdout,
    )
