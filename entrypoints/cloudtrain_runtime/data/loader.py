"""Loading of batches, in this process or in workers, and their transfer to the device."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset, default_collate

from cloudtrain_runtime.data.samplers import GlobalOrderSampler
from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.process.loader_workers import OutliveStopSignal
from cloudtrain_runtime.process.run_context import Context
from cloudtrain_runtime.process.seeds import IsolatedRandomState, random_number, seed_worker
from cloudtrain_runtime.process.shared_memory import most_workers

Collate = Callable[[Sequence[Any]], Any]

_MAX_WORKERS = 8


@dataclass(frozen=True)
class Loading:
    """How each rank loads its share of a dataset."""

    # the Task's collate function
    collate: Collate
    # samples per rank and micro-step
    batch_size: int
    # micro-steps per optimizer step
    accumulate: int = 1
    # seed of the order of samples
    seed: int = 0
    # whether every rank gets equally many samples in each step
    drop_last: bool = False
    # loader processes of each rank; None means up to 8 with a GPU, and none without
    workers: int | None = None
    # the Task's order of the training samples; None for the drawn one
    sampler: Iterable[int] | None = None


def worker_count(context: Context, asked: int | None) -> int:
    """Return the number of loader processes of a rank: `asked`, else up to 8 with a GPU, and none without.

    A small /dev/shm allows fewer: a worker that finds no space there is killed by SIGBUS.
    """
    wanted = asked
    if wanted is None and context.device.type == "cuda":
        wanted = min(_MAX_WORKERS, (os.cpu_count() or 1) // context.local_world_size)
    elif wanted is None:
        wanted = 0
    most = most_workers(context.local_world_size)
    if most is None or wanted <= most:
        return wanted
    if context.local_rank == 0:
        _warn_of_shared_memory(most, wanted)
    return most


@functools.cache
def _warn_of_shared_memory(most: int, wanted: int) -> None:
    log_line(
        f"warning: {most} loader workers per rank instead of {wanted}: /dev/shm is too small for more"
    )


class Loader:
    """A DataLoader whose workers end when it is closed.

    DataLoaders end their workers when nothing refers to their iterator any more. Only this object refers to it, and not
    the generators and frames that use the batches.

    Args:
        dataset: The dataset.
        options: Options of the DataLoader.
    """

    def __init__(self, dataset: Dataset[Any], **options: Any) -> None:
        self._loader: DataLoader[Any] | None = DataLoader(dataset, **options)
        self._iterator: Iterator[Any] = iter(())
        self._outlive: OutliveStopSignal | None = options.get("worker_init_fn")
        _open_loaders.add(self)

    def __iter__(self) -> Iterator[Any]:
        if self._loader is None:
            raise RuntimeError("the loader is closed")
        self._iterator = iter(self._loader)
        return _Batches(self)

    def next_batch(self) -> Any:
        """Return the next batch of the present iteration; raise StopIteration after the last one."""
        return next(self._iterator)

    def close(self) -> None:
        """End the workers."""
        if self._outlive is not None:
            self._outlive.end()
        self._iterator = iter(())
        self._loader = None


class _Batches:
    """Iterator over a loader's batches that does not keep its workers alive."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._loader.next_batch()


_open_loaders: weakref.WeakSet[Loader] = weakref.WeakSet()


def close_loaders() -> None:
    """End the workers of all loaders of this process, which is about to exit.

    With pinned memory and persistent workers, PyTorch before 2.13 waits in exit handlers for each worker: 5 s, because
    nothing has told it to end.
    """
    for loader in list(_open_loaders):
        loader.close()


def make_loader(
    dataset: Dataset[Any],
    sampler: Sampler[list[int]],
    collate: Collate,
    context: Context,
    *,
    workers: int,
) -> Loader:
    """Return a loader of this rank's batches, the sampler's, for any number of epochs."""
    options = loader_options(context, workers)
    gather = _gatherer(dataset) if collate is default_collate else None
    if gather is not None:
        gathered = _GatheredDataset(gather)
        return Loader(gathered, batch_sampler=sampler, collate_fn=_unchanged, **options)
    if not workers:
        return Loader(dataset, batch_sampler=sampler, collate_fn=collate, **options)
    return Loader(
        _SeededDataset(dataset, context.seed),
        batch_sampler=cast("Sampler[list[Any]]", _EpochTaggedSampler(sampler)),
        collate_fn=collate,
        **options,
    )


def loader_options(context: Context, workers: int) -> dict[str, Any]:
    """Return the options of every DataLoader."""
    options: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": context.device.type == "cuda",
        # The sampler draws the order; without a generator the loader would draw from the global
        # random state.
        "generator": torch.Generator().manual_seed(context.seed),
    }
    if workers:
        options |= {
            # Not the default, which Python 3.14 changes to a server that would import torch again
            # for each rank.
            "multiprocessing_context": "fork",
            "worker_init_fn": OutliveStopSignal(),
            "persistent_workers": True,
        }
    return options


def load_in_process(
    dataset: Dataset[Any], sampler: Sampler[list[int]], collate: Collate, *, seed: int | None = None
) -> Iterator[Any]:
    """Yield this rank's batches, loaded in this process: like a DataLoader without workers, but with less overhead.

    With a seed, random augmentations depend on it, the epoch and the batch only, as they do in workers.
    """
    if seed is None:
        gather = _gatherer(dataset) if collate is default_collate else None
        if gather is not None:
            if isinstance(sampler, GlobalOrderSampler):
                yield from map(gather, sampler.tensors())
                return
            yield from map(gather, map(torch.tensor, sampler))
            return
        for indices in sampler:
            yield collate(_fetched(dataset, indices))
        return
    for tagged in _EpochTaggedSampler(sampler):
        with IsolatedRandomState(_seed_of(tagged, seed)):
            batch = collate(_fetched(dataset, tagged[1]))
        yield batch


def _seed_of(tagged: tuple[int, list[int]], seed: int) -> int:
    """Return the seed for loading a batch of an epoch."""
    epoch, indices = tagged
    return random_number(seed, epoch, indices[0]) >> 1


def _fetched(dataset: Any, indices: list[int]) -> Any:
    if (fetch := getattr(dataset, "__getitems__", None)) is not None:
        return fetch(indices)
    return [dataset[index] for index in indices]


def _gatherer(dataset: Dataset[Any]) -> Callable[[torch.Tensor], list[torch.Tensor]] | None:
    """Return a function that gathers a batch from tensors in memory; None for any other dataset.

    The batch equals that of default_collate, which takes ten times as long.
    """
    if type(dataset) is TensorDataset:
        tensors = dataset.tensors
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        return lambda indices: [tensor.index_select(0, indices) for tensor in tensors]
    if type(dataset) is Subset and (gather_all := _gatherer(dataset.dataset)) is not None:
        places = torch.as_tensor(dataset.indices)
        places = places.where(places >= 0, places + len(dataset.dataset))  # type: ignore[arg-type]
        return lambda indices: gather_all(places[indices])
    return None


class _EpochTaggedSampler(Sampler[tuple[int, list[int]]]):
    """Adds the epoch to each batch of a sampler, because persistent workers have no other way to know it."""

    def __init__(self, sampler: Sampler[list[int]]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        epoch = self.sampler.epoch if isinstance(self.sampler, GlobalOrderSampler) else 0
        return ((epoch, indices) for indices in self.sampler)


class _SeededDataset(Dataset[list[Any]]):
    """A dataset in a loader's worker whose random augmentations depend on the batch only.

    After a resume in the middle of an epoch, workers start again and each batch may be loaded by another worker.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitems__(self, tagged: tuple[int, list[int]]) -> Any:
        seed_worker(_seed_of(tagged, self.seed))
        return _fetched(self.dataset, tagged[1])


class _GatheredDataset(Dataset[list[Any]]):
    """A dataset of tensors in memory, of which entire batches are gathered. It draws no random numbers."""

    def __init__(self, gather: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        self._gather = gather

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return self._gather(torch.tensor(indices))


def _unchanged(batch: Any) -> Any:
    return batch


NO_BATCH: Any = object()
"""Marks that there is no further batch."""


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with every tensor moved to a device; for the CPU, the batch itself."""
    if device.type == "cpu":
        return batch
    return _moved(batch, device)[0]


def _moved(batch: Any, device: torch.device) -> tuple[Any, list[torch.Tensor]]:
    """Return a batch on a device, and its tensors there, which may be still being copied."""
    leaves, form = tree_flatten(batch)
    moved = [
        leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    return tree_unflatten(moved, form), [leaf for leaf in moved if isinstance(leaf, torch.Tensor)]


class DevicePrefetcher:
    """Batches on the device, each copied there while the one before it is used.

    The copies have a CUDA stream of their own, which the stream that computes waits for one by one.

    Args:
        pull: Returns the next batch on the host, or NO_BATCH if there is none at present.
        is_ahead: Whether a batch is pulled before the one in front of it is used.
    """

    def __init__(self, pull: Callable[[], Any], device: torch.device, *, is_ahead: bool) -> None:
        self._pull = pull
        self._device = device
        is_ahead = is_ahead and device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if is_ahead else None  # type: ignore[no-untyped-call]
        self._next_copy: _Copy | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._copies is None:
            batch = self._pull()
            if batch is NO_BATCH:
                raise StopIteration
            return to_device(batch, self._device)
        present = self._next_copy or self._start_copy(self._copies)
        if present is None:
            raise StopIteration
        self._next_copy = self._start_copy(self._copies)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(present.is_copied)
        for tensor in present.tensors:
            # Otherwise the allocator could reuse its memory for the next copy while kernels still
            # read it.
            tensor.record_stream(computing)
        return present.batch

    def _start_copy(self, copies: torch.cuda.Stream) -> _Copy | None:
        batch = self._pull()
        if batch is NO_BATCH:
            return None
        with torch.cuda.stream(copies):
            moved, tensors = _moved(batch, self._device)
            return _Copy(moved, tensors, copies.record_event())


@dataclass(frozen=True, slots=True)
class _Copy:
    # on the device
    batch: Any
    # those of the batch
    tensors: list[torch.Tensor]
    is_copied: torch.cuda.Event
