"""A value that a function has returned, as files without pickle: JSON, and one NumPy archive for arrays and tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from cloudtrain_runtime.contract.strict_json import dump_json, load_json

RETURNED_FOLDER: Final = "returned"
"""Folder in the run's outputs with the value."""

MOST_BYTES: Final = 64 * 2**20
"""Largest value that travels back."""

_VALUE: Final = "value.json"
_ARRAYS: Final = "arrays.npz"
_DEEPEST: Final = 100

_TUPLE, _SET, _ITEMS, _FLOAT, _ARRAY, _TENSOR = (
    "$tuple",
    "$set",
    "$items",
    "$float",
    "$array",
    "$tensor",
)


class ReturnedValueError(Exception):
    """A value has no such form, or its files are not what was written."""


def write_returned(value: Any, folder: Path) -> None:
    """Write a value: None, booleans, numbers, text, lists, tuples, sets, dicts, NumPy arrays and tensors of these.

    Args:
        value: The value.
        folder: Where its files go; it is made.

    Raises:
        ReturnedValueError: It has another type, or is larger than 64 MiB. The message names the part.
    """
    arrays = dict[str, Any]()
    encoded = _encode(value, "the value", arrays, 0)
    text = dump_json(encoded)
    size = len(text.encode()) + sum(each.nbytes for each in arrays.values())
    if size > MOST_BYTES:
        raise ReturnedValueError(
            f"it has {size / 1e6:,.0f} MB, and at most {MOST_BYTES / 1e6:,.0f} MB travel back"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if arrays:
        import numpy as np

        np.savez(folder / _ARRAYS, allow_pickle=False, **arrays)
    (folder / _VALUE).write_text(text, encoding="utf-8")


def write_refusal(reason: str, folder: Path) -> None:
    """Write why there is no value."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _VALUE).write_text(dump_json({"$refused": reason}), encoding="utf-8")


def read_returned(folder: Path) -> Any:
    """Return the value in a folder. Nothing in the files is executed.

    Raises:
        ReturnedValueError: The function returned a value that does not travel, or the files are damaged.
        ImportError: The value has arrays or tensors, and NumPy or PyTorch is not installed here.
    """
    try:
        found = load_json((folder / _VALUE).read_bytes())
    except (OSError, ValueError) as error:
        raise ReturnedValueError(f"{folder / _VALUE} cannot be read: {error}") from None
    if isinstance(found, dict) and "$refused" in found:
        raise ReturnedValueError(str(found["$refused"]))
    arrays = dict[str, Any]()
    if (folder / _ARRAYS).exists():
        import numpy as np

        try:
            with np.load(folder / _ARRAYS, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        except (OSError, ValueError, KeyError) as error:
            raise ReturnedValueError(f"{folder / _ARRAYS} is damaged: {error}") from None
    try:
        return _decode(found, arrays)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReturnedValueError(f"{folder / _VALUE} is damaged: {error}") from None


def encode_plain(value: Any) -> Any:
    """Return a value without arrays and tensors in the form that JSON keeps exactly.

    Raises:
        ReturnedValueError: It has another type.
    """
    arrays = dict[str, Any]()
    encoded = _encode(value, "the value", arrays, 0)
    if arrays:
        raise ReturnedValueError("the value has arrays or tensors")
    return encoded


def decode_plain(found: Any) -> Any:
    """Return the value that `encode_plain` had."""
    return _decode(found, {})


def _encode(value: Any, where: str, arrays: dict[str, Any], depth: int) -> Any:
    if depth > _DEEPEST:
        raise ReturnedValueError(f"{where} is nested deeper than {_DEEPEST} levels")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and type(value) is int:
        return value
    if isinstance(value, float) and type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, list | tuple | set | frozenset | dict):
        return _encode_container(value, where, arrays, depth)
    return _encode_numbers(value, where, arrays)


def _encode_container(value: Any, where: str, arrays: dict[str, Any], depth: int) -> Any:
    def inner(part: Any, name: object) -> Any:
        return _encode(part, f"{where}[{name!r}]", arrays, depth + 1)

    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: inner(part, key) for key, part in value.items()}
        return {_ITEMS: [[inner(key, key), inner(part, key)] for key, part in value.items()]}
    parts = [inner(part, index) for index, part in enumerate(value)]
    if isinstance(value, list):
        return parts
    return {_TUPLE if isinstance(value, tuple) else _SET: parts}


def _encode_numbers(value: Any, where: str, arrays: dict[str, Any]) -> Any:
    """Encode what NumPy and PyTorch have, neither of which is imported for it."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        if plain.layout is not torch.strided or plain.is_quantized:
            raise ReturnedValueError(f"{where} is a tensor of the layout {plain.layout}")
        bytes_ = plain.reshape(-1).view(torch.uint8).numpy()
        entry = {"dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
        return {_TENSOR: {**entry, "name": _keep(bytes_, arrays)}}
    if numpy is not None and isinstance(value, numpy.generic):
        return _encode(value.item(), where, arrays, 0)
    if numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return {_ARRAY: _keep(value, arrays)}
    kind = type(value).__name__
    raise ReturnedValueError(
        f"{where} is a {kind}. What travels back is None, numbers, text, lists, tuples, sets, dicts, NumPy arrays and "
        "tensors. Write other results into the folder SM_MODEL_DIR"
    )


def _keep(array: Any, arrays: dict[str, Any]) -> str:
    name = f"a{len(arrays)}"
    arrays[name] = array
    return name


def _decode(found: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(found, list):
        return [_decode(each, arrays) for each in found]
    if not isinstance(found, dict):
        return found
    if len(found) == 1:
        kind, content = next(iter(found.items()))
        if kind in _DECODERS:
            return _DECODERS[kind](content, arrays)
    return {key: _decode(value, arrays) for key, value in found.items()}


def _decode_tensor(content: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    import torch

    dtype = getattr(torch, content["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{content['dtype']} is no type of a tensor")
    # A copy: the array of an archive may not be written to.
    plain = torch.from_numpy(arrays[content["name"]].copy())
    return plain.view(dtype).reshape(content["shape"])


_DECODERS: Final[Mapping[str, Callable[[Any, Mapping[str, Any]], Any]]] = {
    _TUPLE: lambda content, arrays: tuple(_decode(content, arrays)),
    _SET: lambda content, arrays: set(_decode(content, arrays)),
    _ITEMS: lambda content, arrays: {
        _decode(key, arrays): _decode(value, arrays) for key, value in content
    },
    _FLOAT: lambda content, _: float(content),
    _ARRAY: lambda content, arrays: arrays[content],
    _TENSOR: _decode_tensor,
}
