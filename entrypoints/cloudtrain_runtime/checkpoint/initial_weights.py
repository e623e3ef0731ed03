"""Initial weights of a model (`train.init_from`): from a checkpoint, or from a file with a state_dict."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from cloudtrain_runtime.checkpoint.loading import load_folder
from cloudtrain_runtime.checkpoint.safe_metadata import BROKEN, load_state_dict
from cloudtrain_runtime.checkpoint.training_state import (
    collect_model_state,
    restore_model,
    shape_mismatch,
)
from cloudtrain_runtime.contract import MODEL_FILE, WEIGHT_FILES
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.process.run_context import Context
from cloudtrain_runtime.s3.objects import S3Objects

_ARCHIVE: Final = ".tar.gz"


def load_initial_weights(model: nn.Module, uri: str, context: Context) -> None:
    """Load the weights that a run starts with, before its model is distributed. All ranks call this together.

    Args:
        model: The full model of this rank.
        uri: Path, `file:///` or `s3://` uri of a file with a state_dict, of a model folder or archive, of a checkpoint,
            or of a folder of checkpoints, whose newest is taken.
        context: This rank's context.

    Raises:
        CheckpointError: there is nothing to load, or it does not fit the model.
    """
    values = model.state_dict().values()
    if any(value.is_meta for value in values if isinstance(value, torch.Tensor)):
        raise CheckpointError(
            "train.init_from: the model was built on the meta device, and weights are loaded before it is distributed: "
            "build it on the CPU"
        )
    place = uri.rstrip("/")
    is_file = place.endswith(WEIGHT_FILES)
    data = _read(place if is_file else f"{place}/{MODEL_FILE}")
    if data is not None:
        saved = _parse(place, data)
        if wrong := shape_mismatch(_shapes(saved), _shapes(model.state_dict())):
            raise CheckpointError(f"train.init_from: {place} does not fit this model: {wrong}")
        model.load_state_dict(saved)
    elif is_file:
        raise CheckpointError(f"train.init_from: there is no file {uri}")
    else:
        states = collect_model_state(model)
        place = load_folder(place, states, context)
        restore_model(states, model)
    if context.is_main:
        log_line(f"the model starts with the weights of {place} (train.init_from)")


def _read(uri: str) -> bytes | None:
    """Return a file's content; None if there is no such file."""
    try:
        if uri.startswith("s3://"):
            folder, _, name = uri.rpartition("/")
            return S3Objects(folder).read(name)
        path = path_of(uri)
        return path.read_bytes() if path.is_file() else None
    except OSError as error:
        raise CheckpointError(f"train.init_from: {uri} cannot be read: {error}") from None


def _parse(uri: str, data: bytes) -> Mapping[str, Any]:
    """Return the state_dict in a file, without running code that the file names."""
    if uri.endswith(".safetensors"):
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load
        except ImportError:
            raise CheckpointError(
                f"train.init_from: {uri} needs the package safetensors: add it to code.requirements"
            ) from None
        try:
            return load(data)
        except SafetensorError as error:
            raise CheckpointError(
                f"train.init_from: {uri} is not a safetensors file: {error}"
            ) from None
    if not uri.endswith(_ARCHIVE):
        return load_state_dict(data, f"train.init_from: {uri}")
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            member = archive.extractfile(MODEL_FILE)
            data = b"" if member is None else member.read()
    except (*BROKEN, tarfile.TarError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = lines[0]
        raise CheckpointError(
            f"train.init_from: {uri} is not an archive with {MODEL_FILE}: {why}"
        ) from None
    return load_state_dict(data, f"train.init_from: {MODEL_FILE} in {uri}")


def _shapes(state: Mapping[str, Any]) -> dict[str, list[int] | None]:
    return {
        name: list(value.shape) if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
    }
