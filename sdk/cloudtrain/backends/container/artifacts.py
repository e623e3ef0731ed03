"""What a job stores when it has ended: merged checkpoints, the model and the outputs.

A step that fails, on a full disk for example, does not change how the training has ended. What is there stays, and all
steps can be repeated.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.backends.container.filesystem import link_tree, pack_folder, store_folder
from cloudtrain.backends.container.folder_sync import HostCheckpoints
from cloudtrain.backends.container.machine import DISK_FULL
from cloudtrain.runs.result_parts import CHECKPOINTS, MODEL, OUTPUTS
from cloudtrain.runs.status import UNSTORED, State
from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.contract.file_uri import path_of


@dataclass
class Stored:
    """What a job has stored.

    Attributes:
        artifacts: Paths by name.
        problems: Why a part of the results could not be stored, and where it is instead, by part.
    """

    artifacts: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def store_artifacts(
    request: Mapping[str, Any],
    name: str,
    first: MlTree,
    checkpoints: HostCheckpoints | None,
    *,
    with_model: bool,
) -> Stored:
    """Merge the checkpoints of all hosts, and store model and outputs of the first one.

    Args:
        request: The CreateTrainingJob document.
        name: The job's name.
        first: /opt/ml of the first host.
        checkpoints: The checkpoints of several hosts; None if they are in one folder.
        with_model: Whether the job has ended in a way after which SageMaker stores the model.
    """
    stored = Stored()
    target = path_of(request["OutputDataConfig"]["S3OutputPath"]) / name / "output"
    if checkpoints is not None:
        _attempt(
            stored,
            CHECKPOINTS,
            "the hosts' checkpoints cannot be merged",
            checkpoints.folders,
            lambda: checkpoints.merge(is_final=True),
        )
    if with_model:
        is_packed = request["OutputDataConfig"].get("CompressionType") != "NONE"
        path = target / ("model.tar.gz" if is_packed else "model")
        store = pack_folder if is_packed else store_folder
        problem = f"{path.name} cannot be stored"
        if _attempt(stored, MODEL, problem, [first.model], lambda: store(first.model, path)):
            stored.artifacts["model"] = str(path)
        if any(first.model.glob("*")):
            stored.artifacts["model_folder"] = str(first.model)
    path = target / "output.tar.gz"
    problem = f"{path.name} cannot be stored"
    outputs = first.output_data
    if _attempt(stored, OUTPUTS, problem, [outputs], lambda: pack_folder(outputs, path)):
        stored.artifacts["output"] = str(path)
    return stored


def _attempt(
    stored: Stored, part: str, problem: str, sources: list[Path], store: Callable[[], object]
) -> bool:
    """Return whether a step has stored something; record why it cannot, and where its files are."""
    try:
        return bool(store())
    except OSError as error:
        why = "the disk is full" if error.errno in DISK_FULL else _reason(error)
        stored.problems[part] = f"{problem}: {why}; it is in {', '.join(map(str, sources))}"
        return False


def _reason(error: OSError) -> str:
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        return "; ".join(str(each[-1]) for each in error.args[0][:3])
    if not error.filename:
        return str(error)
    return f"{error.strerror or error} ({error.filename})"


def describe_unstored(state: State, problems: Collection[str], run: str) -> str:
    """Return what a run that has ended well could not store, and what to do; empty if it has stored all."""
    if not problems or state is State.FAILED:
        return ""
    return (
        f"{UNSTORED}: {'; '.join(problems)}. Free some space or repair that, then store them: "
        f"cloudtrain download {run}"
    )


def link_model(artifacts: Mapping[str, str], root: Path) -> dict[str, str]:
    """Give a run its unpacked model beside the archive, by hard links; return the artifacts with its folder.

    Raises:
        OSError: the files cannot be linked; the model is still in its own folder.
    """
    model = artifacts.get("model_folder")
    if model is None or Path(model) == root / "model":
        return dict(artifacts)
    link_tree(Path(model), root / "model")
    return {**artifacts, "model_folder": str(root / "model")}
