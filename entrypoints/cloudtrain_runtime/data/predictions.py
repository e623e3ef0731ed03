"""Conversion of a served request's content to the tensors of a model, and of its outputs back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

_WRAPPERS: Final = ("inputs", "instances")
_NUMBERS: Final = "biuf"
"""NumPy's kinds of types: booleans, integers and floating-point numbers."""


class ServedTask:
    """The two methods of a Task that convert the requests and responses of a served model."""

    def predict_input(self, payload: Any) -> Any:
        """Return the model's input for a request that is served: a tensor `[N, ...]`, or a tuple or mapping of them.

        A tuple becomes the model's positional arguments, a mapping its keyword arguments. A ValueError rejects the
        request with its message. By default numbers, arrays and images become tensors: nested lists of numbers, alone
        or as `inputs` or `instances` of an object; an object of them for a model with several inputs; a NumPy array;
        and a PIL image, which becomes one sample `[1, C, H, W]` from 0 to 1.

        Args:
            payload: The parsed JSON; the array of application/x-npy; the PIL image of image/*; else the bytes.
        """
        if isinstance(payload, bytes):
            message = "send application/json, application/x-npy or an image: only predict_input() takes others"
            raise ValueError(message)  # noqa: TRY004 (a 4xx)
        if hasattr(payload, "getbands"):
            # A PIL image.
            return _image(payload)
        if isinstance(payload, Mapping):
            names = [name for name in _WRAPPERS if name in payload]
            if len(payload) != 1 or not names:
                raise ValueError('expected an object such as {"inputs": [...]}, with this key only')
            return _tensors(payload[names[0]], names[0])
        return _tensors(payload, "the content")

    def predict_output(self, outputs: Any) -> Any:
        """Return the content of the response for what the model returned; by default `{"outputs": outputs}`.

        Args:
            outputs: The model's outputs for the samples of this request, on the CPU. Tensors in the result become
                lists, or the array where the request accepts application/x-npy.
        """
        return {"outputs": outputs}


def _tensors(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        if not value:
            raise ValueError(f"{name} is empty")
        return {key: _tensor(part, f"{name}.{key}") for key, part in value.items()}
    return _tensor(value, name)


def _tensor(value: Any, name: str) -> torch.Tensor:
    import numpy as np

    try:
        array = np.asarray(value)
    except (ValueError, OverflowError, RecursionError):
        raise ValueError(f"{name}: expected rows of equal lengths") from None
    if array.dtype.kind not in _NUMBERS:
        raise ValueError(f"{name}: expected numbers, got {_kind(value)}")
    if array.ndim == 0 or array.size == 0:
        got = "none" if array.ndim else "a single number"
        raise ValueError(f"{name}: expected samples, got {got}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name} has numbers that are not finite")
    if array.dtype == np.uint64 or array.dtype.itemsize > np.dtype(np.int64).itemsize:
        raise ValueError(f"{name}: its numbers of type {array.dtype} are too large")
    native = array.dtype.newbyteorder("=")
    # A copy, because torch needs one that it may write to.
    return torch.from_numpy(np.array(array, dtype=native))


def _kind(value: Any) -> str:
    """Return the kind of the first part that is no number."""
    while isinstance(value, Sequence) and not isinstance(value, str) and value:
        value = next((part for part in value if not isinstance(part, int | float)), value[0])
    kind = type(value).__name__
    return {"str": "text", "NoneType": "null", "dict": "an object"}.get(kind, kind)


def _image(image: Any) -> torch.Tensor:
    import numpy as np

    if image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    pixels = torch.from_numpy(np.array(image)).float().div_(255)
    # [H, W] of a gray image, [H, W, C] of one in colours.
    if pixels.ndim == 2:  # noqa: PLR2004
        return pixels.unsqueeze(0).unsqueeze(0)
    return pixels.permute(2, 0, 1).unsqueeze(0)


def row_count(tensors: Any) -> int:
    """Return the number of samples in tensors, which all of them must have.

    Raises:
        ValueError: there is no tensor, or their first dimensions differ.
    """
    sizes = {
        leaf.shape[0] if leaf.ndim else 0
        for leaf in tree_leaves(tensors)
        if isinstance(leaf, torch.Tensor)
    }
    if len(sizes) != 1 or 0 in sizes:
        found = ", ".join(str(size) for size in sorted(sizes)) or "no tensor"
        raise ValueError(
            f"all inputs need the same number of samples, and at least one; found {found}"
        )
    return next(iter(sizes))


def signature_of(tensors: Any) -> tuple[Any, ...]:
    """Return what inputs must share so that one call of the model can take them together."""
    leaves, structure = tree_flatten(tensors)
    parts = [
        (tuple(leaf.shape[1:]), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    ]
    return (str(structure), *parts)


def join(inputs: Sequence[Any]) -> Any:
    """Return inputs of one signature as one, with the samples of all."""
    if len(inputs) == 1:
        return inputs[0]

    def joined(*parts: Any) -> Any:
        return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else parts[0]

    return tree_map(joined, *inputs)


def repeat(inputs: Any, times: int) -> Any:
    """Return inputs with the first sample of all, this often."""

    def first(leaf: Any) -> Any:
        return torch.cat([leaf[:1]] * times) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(first, inputs)


def is_divisible(one: Any, two: Any) -> bool:
    """Return whether a model's outputs have a row for each sample, from what it has returned for one and for two.

    A length alone does not say so: it may equal the number of samples by chance.
    """
    shapes = []
    for samples, outputs in ((1, one), (2, two)):
        leaves, structure = tree_flatten(outputs)
        if not all(isinstance(leaf, torch.Tensor) and len(leaf.shape) for leaf in leaves):
            return False
        if any(leaf.shape[0] != samples for leaf in leaves):
            return False
        shapes.append((structure, [leaf.shape[1:] for leaf in leaves]))
    return bool(leaves) and shapes[0] == shapes[1]


def split(outputs: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the outputs of each request, of divisible outputs with the samples of all."""
    leaves, structure = tree_flatten(outputs)
    pieces = zip(*(leaf.split(list(sizes)) for leaf in leaves), strict=True)
    return [tree_unflatten(list(each), structure) for each in pieces]
