"""Transfer of batches from a loader's worker to its rank: the tensors of a batch are in one block of memory.

Each block that PyTorch shares between processes takes a connection to the worker, with an authentication, in the thread
that pins. That thread limits the rate of a fast loader, and most batches have two tensors or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

_ALIGNMENT = 64
"""Bytes between the beginnings of two tensors: a multiple of the size of any number."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor in the block."""

    dtype: torch.dtype
    shape: torch.Size
    # in bytes
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """A batch on its way to a thread of a DataLoader that pins its memory.

    Attributes:
        block: The bytes of all tensors.
        form: The batch, with a place for each tensor.
    """

    block: torch.Tensor
    form: Any

    def pin_memory(self, *_: Any) -> Any:
        """Return the batch, each of its tensors in pinned memory of its own."""
        return self._restore(torch.Tensor.pin_memory)

    def unpack(self) -> Any:
        """Return the batch, each of its tensors in memory of its own."""
        return self._restore(torch.Tensor.clone)

    def _restore(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        def restored(leaf: Any) -> Any:
            if not isinstance(leaf, _Place):
                return leaf
            content = self.block[leaf.start : leaf.start + leaf.size]
            return copy(content.view(leaf.dtype).view(leaf.shape))

        return _map_leaves(restored, self.form)


def share_collated(collate: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """Return a collate function for a worker whose batches are pinned: its result is a SharedBatch where possible."""
    if collate is default_collate:
        return lambda samples: share(_collated(samples))
    return lambda samples: share(collate(samples))


def share(batch: Any) -> Any:
    """Return a SharedBatch of lists, tuples and dicts of tensors and plain values; any other batch as it is."""
    leaves: list[Any] = []
    _map_leaves(leaves.append, batch)
    tensors = [leaf for leaf in leaves if type(leaf) is torch.Tensor]
    # A single one is in one block already.
    if len(tensors) <= 1 or not all(type(leaf) in _PLAIN or _is_movable(leaf) for leaf in leaves):
        return batch
    parts: list[torch.Tensor] = []
    end = 0

    def place(leaf: Any) -> Any:
        nonlocal end
        if type(leaf) is not torch.Tensor:
            return leaf
        content = leaf.reshape(-1).view(torch.uint8)
        found = _Place(dtype=leaf.dtype, shape=leaf.shape, start=end, size=len(content))
        parts.append(content)
        gap = -len(content) % _ALIGNMENT
        parts.append(content.new_empty(gap))
        end += len(content) + gap
        return found

    form = _map_leaves(place, batch)
    return SharedBatch(torch.cat(parts), form)


def _is_movable(leaf: Any) -> bool:
    """Return whether a copy of the bytes is a copy of the tensor, which is not shared yet."""
    return (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and leaf.is_contiguous()
        and not (leaf.is_quantized or leaf.is_conj() or leaf.is_neg() or leaf.requires_grad)
        and not leaf.is_shared()  # type: ignore[no-untyped-call]
        and leaf.numel() > 0
    )


def _map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """Return a batch of lists, tuples and dicts with the result of a function for each leaf."""
    if type(batch) is dict:
        return {name: _map_leaves(function, part) for name, part in batch.items()}
    if type(batch) is list:
        return [_map_leaves(function, part) for part in batch]
    if type(batch) is tuple:
        return tuple(_map_leaves(function, part) for part in batch)
    return function(batch)


def _collated(samples: Sequence[Any]) -> Any:
    """Return `default_collate(samples)`. In a worker that one puts each tensor into a shared block of its own."""
    given: Any = samples
    is_plain = type(given) is list and set(map(type, given)) == {tuple}
    if not is_plain or len(set(map(len, given))) > 1:
        return default_collate(given)
    return [_stacked(column) for column in zip(*samples, strict=True)]


def _stacked(column: Any) -> Any:
    is_plain = set(map(type, column)) == {torch.Tensor}
    if is_plain and column[0].layout is torch.strided and not column[0].is_nested:
        return torch.stack(column)
    return default_collate(column)
