"""A Task's model that answers requests: its weights, the validation of inputs, and batches of several requests."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from cloudtrain_runtime.contract import MODEL_FILE
from cloudtrain_runtime.contract.serving_config import SERVING_CODE, SERVING_FILE, ServingConfig
from cloudtrain_runtime.data.predictions import (
    is_divisible,
    join,
    repeat,
    row_count,
    signature_of,
    split,
)
from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.serving.model_loading import load_weights
from cloudtrain_runtime.serving.payloads import (
    RequestError,
    accepted_type,
    decode,
    encode,
    media_type,
)
from cloudtrain_runtime.task import Task, checked_model, overrides
from cloudtrain_runtime.training.task_loading import load_task

_REFUSALS: Final = (ValueError, TypeError, KeyError, IndexError, RuntimeError, NotImplementedError)
"""What a Task's conversion or a model raises for inputs that do not fit."""
_SMALL_BYTES: Final = 2**14
_SMALL_NUMBERS: Final = 2**12


class Predictor:
    """The model of one Task in evaluation mode, on one device.

    Args:
        task: The Task.
        model: Its model with the weights to be served.
        device: Where it runs.
    """

    def __init__(self, task: Task, model: nn.Module, device: torch.device) -> None:
        self._task = task
        self._device = device
        self._model = model.to(device).eval()
        floats = [each.dtype for each in model.parameters() if each.is_floating_point()]
        self._dtype = floats[0] if floats else torch.get_default_dtype()
        embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding)]
        for each in embeddings:
            each.register_forward_pre_hook(_check_indices)
        self._has_own_input = overrides(task, "predict_input")
        self._has_own_output = overrides(task, "predict_output")
        self._takes_integers = bool(embeddings) or self._has_own_input
        self._is_divisible: dict[tuple[Any, ...], bool] = {}

    @classmethod
    def from_folder(cls, folder: Path, config: ServingConfig) -> Predictor:
        """Load the Task and weights of a model's package. The process must be in the package's code folder.

        Raises:
            JobError: the Task cannot be created, or the weights do not fit its model.
        """
        task = load_task(config.task, config.args)
        model = checked_model(task)
        load_weights(model, folder / MODEL_FILE)
        log_line(f"the model of {config.run} is loaded")
        return cls(task, model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def read(self, content_type: str, body: bytes) -> Any:
        """Return the model's validated input for a request.

        Raises:
            RequestError: the request is refused.
        """
        payload = decode(content_type, body)
        kind = "this type of content" if isinstance(payload, bytes) else ""
        try:
            inputs = _map_tensors(self._with_type, self._task.predict_input(payload))
            row_count(inputs)
        except _REFUSALS as error:
            status = 415 if kind and not self._has_own_input else 400
            raise RequestError(status, _text(error)) from None
        return inputs

    def reads_quickly(self, content_type: str, body: bytes) -> bool:
        """Return whether `read` takes less than a millisecond for certain: a small content, and no code of the Task."""
        is_image = media_type(content_type).startswith("image/")
        return len(body) <= _SMALL_BYTES and not is_image and not self._has_own_input

    def writes_quickly(self, outputs: Any) -> bool:
        """Return whether `write` takes less than a millisecond for certain."""
        if self._has_own_output or not isinstance(outputs, torch.Tensor):
            return False
        return outputs.numel() <= _SMALL_NUMBERS

    def write(self, outputs: Any, accept: str) -> tuple[bytes, str]:
        """Return the body of a response and its type.

        Raises:
            RequestError: the outputs have no form that the request accepts.
        """
        kind = accepted_type(accept)
        return encode(self._task.predict_output(outputs), kind), kind

    def predict(self, inputs: Sequence[Any], max_batch: int) -> list[Any]:
        """Return the outputs of several requests, or for each that fails a RequestError.

        Requests whose inputs have equal shapes and types go through the model together, if its outputs have a row for
        each sample. Otherwise each goes through the model alone.
        """
        if len(inputs) == 1:
            return self._run_group(inputs)
        results: list[Any] = [None] * len(inputs)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, each in enumerate(inputs):
            groups.setdefault(signature_of(each), []).append(index)
        for group in groups.values():
            for chunk in _chunks(group, [row_count(inputs[index]) for index in group], max_batch):
                for index, result in zip(
                    chunk, self._run_group([inputs[index] for index in chunk]), strict=True
                ):
                    results[index] = result
        return results

    def _run_group(self, inputs: Sequence[Any]) -> list[Any]:
        try:
            if len(inputs) == 1:
                return [self._call(inputs[0])]
            results = self._run_together(inputs)
        except torch.OutOfMemoryError:
            return [
                RequestError(503, "the model's device has not enough memory for these inputs")
            ] * len(inputs)
        except _REFUSALS as error:
            if len(inputs) == 1:
                traceback.print_exc(file=sys.stderr)
                return [RequestError(400, f"the model does not take these inputs: {_text(error)}")]
            # One request must not fail because of another.
            results = None
        if results is not None:
            return results
        return [result for each in inputs for result in self._run_group([each])]

    def _run_together(self, inputs: Sequence[Any]) -> list[Any] | None:
        """Return the outputs of several requests from one call; None if they cannot be told apart for certain."""
        signature = signature_of(inputs[0])
        if signature not in self._is_divisible:
            one, two = (self._call(repeat(inputs[0], times)) for times in (1, 2))
            self._is_divisible[signature] = is_divisible(one, two)
        if not self._is_divisible[signature]:
            return None
        return split(self._call(join(inputs)), [row_count(each) for each in inputs])

    def _call(self, inputs: Any) -> Any:
        with torch.inference_mode():
            outputs = call_model(
                self._model, _map_tensors(lambda leaf: leaf.to(self._device), inputs)
            )
        return _map_tensors(torch.Tensor.cpu, outputs)

    def _with_type(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the model's type: floating-point numbers always, integers without an own conversion."""
        if not leaf.is_floating_point() and self._takes_integers:
            return leaf
        converted = leaf.to(self._dtype)
        if not converted.isfinite().all() and leaf.isfinite().all():
            raise ValueError(f"a number is too large for {self._dtype}, the type of the model")
        return converted


def load_folder(folder: Path) -> ServingConfig:
    """Return the configuration of a model's package, and make its code importable in this process.

    Raises:
        ValueError: the package has no valid configuration.
    """
    import os

    config = ServingConfig.from_json((folder / SERVING_FILE).read_text(encoding="utf-8"))
    code = folder / SERVING_CODE
    if str(code) not in sys.path:
        sys.path.insert(0, str(code))
    os.chdir(code)
    return config


def call_model(model: Any, inputs: Any) -> Any:
    """Call a model: a tuple has its positional arguments, a mapping its keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a value with its tensors replaced. Most values are one tensor, which needs no search."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return tree_map_only(torch.Tensor, function, value)


def _chunks(indices: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Divide requests into batches of at most `most` samples; a larger request is a batch of its own."""
    chunks: list[list[int]] = []
    rows = most
    for index, size in zip(indices, sizes, strict=True):
        if rows + size > most:
            chunks.append([])
            rows = 0
        chunks[-1].append(index)
        rows += size
    return chunks


def _check_indices(module: Any, arguments: tuple[Any, ...]) -> None:
    """Refuse the indices that an embedding lacks: on a GPU they would end the process."""
    indices, most = arguments[0], int(module.num_embeddings)
    if not indices.numel() or indices.is_floating_point():  # which the embedding itself refuses
        return
    least, greatest = int(indices.min()), int(indices.max())
    if least < 0 or greatest >= most:
        raise ValueError(
            f"indices must be from 0 to {most - 1}; found {least if least < 0 else greatest}"
        )


def _text(error: BaseException) -> str:
    """Return an error's first line, with its type where the message alone does not say what it is."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"{type(error).__name__}: {lines[0]}"
        if isinstance(error, KeyError | IndexError)
        else lines[0]
    )
