"""Packages of models: the folder that AWS's Ray Serve image serves, of a run's code, weights and configuration.

config.yaml            the Ray Serve application
deployment.py          creates it
serving.json           Task, arguments, batches, replicas and GPUs
model.pt               weights
cloudtrain_runtime/    the runtime of this cloudtrain, which serves the Task
code/                  the run's code, and requirements.txt
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloudtrain import catalog
from cloudtrain.bundle.contents import RUNTIME_FOLDER
from cloudtrain.errors import UserError
from cloudtrain.job.requirements import read_requirements
from cloudtrain.job.static_analysis.conventions import read_conventions
from cloudtrain.runs.run import Run
from cloudtrain.runs.saved_model import task_of, unpack_code, write_weights
from cloudtrain_runtime.contract import MODEL_FILE
from cloudtrain_runtime.contract.python_source import find_module
from cloudtrain_runtime.contract.serving_config import SERVING_CODE, SERVING_FILE, ServingConfig

CONFIG_FILE: Final = "config.yaml"
REQUIREMENTS_FILE: Final = "requirements.txt"
_DEPLOYMENT: Final = "deployment"
_RUNTIME: Final = "cloudtrain_runtime"

_IMAGE_MODULES: Final = frozenset(
    {
        *(
            "boto3",
            "botocore",
            "cv2",
            "fastapi",
            "httpx",
            "numpy",
            "pandas",
            "PIL",
            "pydantic",
            "ray",
            "requests",
        ),
        *(
            "safetensors",
            "scipy",
            "sklearn",
            "soundfile",
            "starlette",
            "torch",
            "torchaudio",
            "torchcodec",
        ),
        *("torchvision", "tqdm", "transformers", "uvicorn", "yaml"),
    }
)
"""Modules in AWS's images of Ray Serve. Source: scripts/ray/pyproject.toml of AWS's Deep Learning Containers, 2026."""
_APPLICATION: Final = f"""# The application of Ray Serve in this package. Written by cloudtrain.
applications:
  - name: model
    route_prefix: /
    import_path: {_DEPLOYMENT}:app
"""
_DEPLOYMENT_SOURCE: Final = '''"""The application of this package. Written by cloudtrain."""

from pathlib import Path

from cloudtrain_runtime.serving.application import build

app = build(Path(__file__).resolve().parent)
'''


@dataclass(frozen=True)
class ServingOptions:
    """How a model is to be served.

    Attributes:
        checkpoint: Step of a checkpoint, or `best`; None takes the weights that the run exported at its end.
        max_batch: Most samples that the model gets at once.
        batch_wait_seconds: How long a request waits for others.
        replicas: Number of processes with the model.
        gpus: GPUs of a replica, such as 0.5.
    """

    checkpoint: int | str | None = None
    max_batch: int = 16
    batch_wait_seconds: float = 0.0
    replicas: int = 1
    gpus: float = 0.0


def make_package(run: Run, folder: Path, options: ServingOptions) -> str:
    """Write the package of a run's model into a new folder; return its Task, `module:Class`.

    Raises:
        UserError: the run trained no Task, or has no such weights.
        CloudError: its files are in S3, which refused or cannot be reached.
    """
    plan = run.plan_document()
    hint = "a model in Hugging Face's layout: cloudtrain deploy RUN --engine vllm; else write a Task with the model"
    task, arguments = task_of(run.id, plan, "served", hint)
    folder.mkdir(parents=True)
    code = folder / SERVING_CODE
    unpack_code(run, plan, code)
    write_weights(run, plan, folder / MODEL_FILE, options.checkpoint)
    shutil.copytree(
        RUNTIME_FOLDER, folder / _RUNTIME, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
    )
    serving = ServingConfig(
        run=run.id,
        task=task,
        args=arguments,
        max_batch=options.max_batch,
        batch_wait_seconds=options.batch_wait_seconds,
        replicas=options.replicas,
        gpus=options.gpus,
    )
    (folder / SERVING_FILE).write_text(serving.to_json(), encoding="utf-8")
    (folder / CONFIG_FILE).write_text(_APPLICATION, encoding="utf-8")
    (folder / f"{_DEPLOYMENT}.py").write_text(_DEPLOYMENT_SOURCE, encoding="utf-8")
    if named := plan["config"].get("requirements"):
        # It may be the same file.
        content = _below(code, named).read_bytes()
        (code / REQUIREMENTS_FILE).write_bytes(content)
    elif (code / REQUIREMENTS_FILE).exists():
        # The job does not name it, and AWS's image would install it.
        (code / REQUIREMENTS_FILE).unlink()
    return task


def _below(code: Path, named: str) -> Path:
    """Return a file of the unpacked code by the name that the run's plan has for it.

    Raises:
        UserError: it is no file of the code. Whoever can write the plan could name one of this machine.
    """
    path = code / named
    if not path.resolve().is_relative_to(code.resolve()) or not path.is_file():
        raise UserError(f"{named!r} is no file of the run's code", "submit the job again")
    return path


def missing_packages(package: Path, task: str) -> tuple[str, ...]:
    """Return the modules that a Task certainly imports and that neither AWS's image nor its requirements contain.

    Args:
        package: Folder of the package.
        task: `module:Class` of the Task.
    """
    code = package / SERVING_CODE
    has: frozenset[str] | None = frozenset()
    if (code / REQUIREMENTS_FILE).exists():
        has = read_requirements(code, REQUIREMENTS_FILE).names
    name, _, class_name = task.partition(":")
    file = find_module(code, name)
    # Without names, the requirements may bring any package.
    if file is None or has is None:
        return ()
    has |= catalog.installed_with(has)
    found = read_conventions(code, str(file.relative_to(code)), task=class_name)
    return tuple(
        sorted(
            module
            for module, _ in found.imports
            if module not in _IMAGE_MODULES and has.isdisjoint(catalog.packages_of(module))
        )
    )


def pack(package: Path, target: Path) -> None:
    """Write a package to model.tar.gz; equal packages give equal bytes."""
    with (
        target.open("wb") as out,
        gzip.GzipFile("", "wb", compresslevel=1, fileobj=out, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in _files(package):
            header = tarfile.TarInfo(path.relative_to(package).as_posix())
            header.size = path.stat().st_size
            header.mode = 0o644
            with path.open("rb") as content:
                archive.addfile(header, content)


def digest_folder(folder: Path) -> str:
    """Return a digest of names and contents, which equal packages share."""
    found = hashlib.sha256()
    for path in _files(folder):
        found.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as content:
            while chunk := content.read(2**20):
                found.update(chunk)
    return found.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
