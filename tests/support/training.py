"""Tasks that fail, or that record what the training loop does. `support.parallel_training` runs them."""

from __future__ import annotations

import json
import math
import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset

from cloudtrain_runtime.distributed import ddp, layer_chain, pipeline
from support.parallel_training import (
    VOCABULARY,
    WIDTH,
    Model,
    Small,
    Windows,
    cut_evenly,
)


class Broken(Small):
    """Has a NaN loss for some samples.

    Args:
        samples: Length of the data set.
        bad: Indices of these samples.
        options: Arguments of `Small`.
    """

    def __init__(self, samples: int, *, bad: tuple[int, ...], **options: Any) -> None:
        super().__init__(samples, **options)
        self.bad = bad

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        return {split: _Indexed(data) for split, data in super().datasets().items()}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch[0])
        return loss * (float("nan") if torch.isin(batch[1], torch.tensor(self.bad)).any() else 1.0)


class Overflowing(Small):
    """Has a gradient that overflows in fp16, on the last rank in its third micro-batch."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        return loss * 1e30 if model.training and is_last and _count("overflow") == 3 else loss


class Classifier(Small):
    """Predicts the class of each text: its first token."""

    classes = tuple(f"token {number}" for number in range(VOCABULARY))

    def __init__(self, samples: int, *, tests: int = 0, **options: Any) -> None:
        super().__init__(samples, **options)
        self.tests = tests

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        return {
            **super().datasets(),
            **({"test": Windows(self.tests, seed=3)} if self.tests else {}),
        }

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        """Draw random numbers, which must not change the training."""
        torch.rand(3)
        return super().metrics(model, batch)

    def pipeline(self, model: nn.Module, stages: int) -> Sequence[nn.Module]:
        cut_evenly()
        return super().pipeline(model, stages)

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[:, :-1])[:, 0].argmax(-1), batch[:, 1]


class Counted(Small):
    """Logs the collectives that send gradients in each step to `sent-<rank>` in a folder."""

    def __init__(self, samples: int, *, folder: str, **options: Any) -> None:
        super().__init__(samples, **options)
        self.folder = Path(folder)
        self.sent: list[str] = []
        self._patch_collectives()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model)
        optimizer.register_step_pre_hook(lambda *_: self._write())
        return optimizer

    def _write(self) -> None:
        with (self.folder / f"sent-{os.environ['RANK']}").open("a") as log:
            log.write(json.dumps(self.sent) + "\n")
        self.sent.clear()

    def _patch_collectives(self) -> None:
        """Log the all-reduce of each of DDP's buckets, and each reduce-scatter of FSDP."""
        original = DistributedDataParallel.__init__

        def with_hook(replica: Any, *args: Any, **options: Any) -> None:
            original(replica, *args, **options)
            # A lambda, because DDP checks the annotations of hooks.
            replica.register_comm_hook(None, lambda _, bucket: self._send(bucket))

        DistributedDataParallel.__init__ = with_hook  # type: ignore[method-assign]
        name = (
            "reduce_scatter_single"
            if hasattr(dist, "reduce_scatter_single")
            else "reduce_scatter_tensor"
        )
        scatter = getattr(dist, name)

        def scattered(*args: Any, **options: Any) -> Any:
            self.sent.append("reduce-scatter")
            return scatter(*args, **options)

        setattr(dist, name, scattered)

    def _send(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self.sent.append("all-reduce")
        tensor: torch.Tensor = bucket.buffer().div_(dist.get_world_size())
        work: Any = dist.all_reduce(tensor, async_op=True)
        averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(
            lambda done: done.value()[0]
        )
        return averaged


class Seen(Small):
    """Writes to `seen-<rank>` in a folder which options are active in a step: types, checkpointing, compilation."""

    def __init__(
        self, samples: int, *, folder: str, looks_inside: bool = True, **options: Any
    ) -> None:
        super().__init__(samples, **options)
        self.file = Path(folder) / f"seen-{os.environ['RANK']}"
        self.looks_inside = (
            looks_inside  # False for a compiled model, because hooks would be compiled, too
        )
        self.seen: dict[str, Any] = {"dtypes": [], "passes": 0, "compressed": 0, "compiled": False}
        self._count_compressed_buckets()

    def model(self) -> nn.Module:
        model = super().model()
        if self.looks_inside:
            for block in model.blocks:  # type: ignore[union-attr]
                block.up.register_forward_hook(self._record_pass)  # type: ignore[union-attr]
        return model

    def pipeline(self, model: nn.Module, stages: int) -> Sequence[nn.Module]:
        cut_evenly()
        return super().pipeline(model, stages)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model)
        optimizer.register_step_pre_hook(lambda *_: self._write(model))
        return optimizer

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.seen["deterministic"] = torch.are_deterministic_algorithms_enabled()
        inner = model
        if isinstance(model, DistributedDataParallel):
            self.seen["static_graph"] = model.static_graph
            self.seen["bucket_bytes"] = model.bucket_bytes_cap
            inner = model.module
        self.seen["compiled"] |= type(inner).__name__ == "OptimizedModule"
        return super().loss(model, batch)

    def _record_pass(self, module: nn.Module, arguments: Any, output: torch.Tensor) -> None:  # noqa: ARG002 (torch's)
        self.seen["passes"] += 1
        self.seen["dtypes"] = sorted({*self.seen["dtypes"], str(output.dtype)})

    def _write(self, model: nn.Module) -> None:
        block = next(iter(model.blocks))  # type: ignore[arg-type]
        self.seen["compiled"] |= block._compiled_call_impl is not None  # noqa: SLF001 (torch has no other way)
        if hasattr(block, "unshard"):
            units: Any = block._get_fsdp_state()._fsdp_param_group  # type: ignore[operator,union-attr] # noqa: SLF001
            self.seen["reshards"] = units.post_forward_mesh_info is not None
            self.seen["grid"] = list(units.mesh_info.mesh.shape)
        self.file.write_text(json.dumps(self.seen))

    def _count_compressed_buckets(self) -> None:
        """Count the buckets that DDP sends as bf16."""
        compress = ddp.bf16_compress_hook

        def counted(*arguments: Any) -> Any:
            self.seen["compressed"] += 1
            return compress(*arguments)

        ddp.bf16_compress_hook = counted  # type: ignore[assignment]


class Streamed(Small):
    """Reads its samples as a stream."""

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        return {split: _Stream(data) for split, data in super().datasets().items()}


class Weighted(Small):
    """Reads a stream of samples with weights of the loss, some of them NaN.

    Args:
        samples: Length of the stream.
        bad: Indices of the samples whose weight is NaN.
        options: Arguments of `Small`.
    """

    def __init__(self, samples: int, *, bad: tuple[int, ...], **options: Any) -> None:
        super().__init__(samples, **options)
        self.bad = bad

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        weights = [math.nan if index in self.bad else 1.0 for index in range(self.samples)]
        data: Any = [*zip(super().datasets()["train"], weights, strict=True)]  # type: ignore[call-overload]
        return {"train": _Stream(data)}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        texts, weights = batch
        scores = model(texts[:, :-1]) * weights[:, None, None]
        return F.cross_entropy(scores.flatten(0, 1), texts[:, 1:].flatten())


class Normed(Small):
    """Has a last norm with sequence parallelism: each tensor rank has a partial sum of its gradients."""

    def model(self) -> nn.Module:
        return _NormedModel(self.dropout)

    def parallelize(self, model: nn.Module, mesh: Any) -> Any:
        if mesh["tensor"].size() > 1:
            parallelize_module(model, mesh["tensor"], {"last": SequenceParallel()})
        return list(model.blocks)  # type: ignore[arg-type]


class _NormedModel(Model):
    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(x_BT)
        for block in self.blocks:
            hidden = block(hidden)
        if isinstance(self.last.weight, DTensor):
            grid = self.last.weight.device_mesh
            replicated = DTensor.from_local(
                hidden, grid["tensor"] if grid.ndim > 1 else grid, [Replicate()]
            )
            normed = self.last(replicated.redistribute(placements=[Shard(1)]))
            hidden = normed.redistribute(placements=[Replicate()]).to_local()
        else:
            hidden = self.last(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


class Fused(Small):
    """Has an optimizer that updates all parameters with one fused kernel."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, fused=True)


class Steady(Small):
    """Trains with SGD, whose updates are proportional to gradients. AdamW would amplify rounding errors."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate)


class Uneven(Small):
    """Has one slow link in its chain, as on a machine with other load."""

    def __init__(self, samples: int, *, slowest: int, **options: Any) -> None:
        super().__init__(samples, **options)
        measure = pipeline.profile_chain

        def profile(links: Sequence[nn.Module], *arguments: Any) -> layer_chain.ChainProfile:
            seconds = tuple(100.0 if place == slowest else 1.0 for place in range(len(links)))
            return replace(measure(links, *arguments), seconds=seconds)

        pipeline.profile_chain = profile


class NonfiniteStart(Small):
    """Has a NaN loss in the first `bad` micro-batches, because all their targets are padding."""

    def __init__(self, samples: int, *, bad: int, **options: Any) -> None:
        super().__init__(samples, **options)
        self.bad = bad
        os.environ["CLOUDTRAIN_LOG_EVERY_STEPS"] = (
            "100"  # three logged steps in a row would end the run
        )

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.05)
        targets = batch[:, 1:] if _count("lost") > self.bad else torch.full_like(batch[:, 1:], -100)
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), targets.flatten())


class GatherRecorder(Small):
    """Writes the size in bytes of the largest object that this rank has gathered to `largest-<rank>`."""

    def __init__(self, samples: int, *, folder: str, **options: Any) -> None:
        super().__init__(samples, **options)
        file, largest = Path(folder) / f"largest-{os.environ['RANK']}", 0
        gather = dist.all_gather_object

        def measured(values: Any, value: Any, group: Any = None) -> None:
            nonlocal largest
            largest = max(largest, len(pickle.dumps(value)))
            file.write_text(str(largest))
            gather(values, value, group=group)

        dist.all_gather_object = measured


class _Stream(IterableDataset[Any]):
    def __init__(self, data: Dataset[Any]) -> None:
        self.data: Any = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


class _Indexed(Dataset[tuple[torch.Tensor, int]]):
    """Samples with their index."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data: Any = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.data[index], index


_counts: dict[str, int] = {}


def _count(name: str) -> int:
    _counts[name] = _counts.get(name, 0) + 1
    return _counts[name]
