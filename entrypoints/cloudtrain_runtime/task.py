"""`Task`: the user's model, data and loss, trained by the shared entrypoint."""

from __future__ import annotations

import functools
import inspect
import linecache
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, Sampler, default_collate

from cloudtrain_runtime.contract import SPLITS
from cloudtrain_runtime.data import is_iterable
from cloudtrain_runtime.data.predictions import ServedTask
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.process.run_context import context

Batch = Any
"""What `collate` returns: tensors, or tuples, lists and mappings of them. First dimension: samples."""


class Task(ServedTask, ABC):
    """A model, its data and its loss. Subclasses take `code.args` as keyword arguments.

    `model`, `datasets`, `optimizer`, `parallelize`, `pipeline` and `schedule` run once in every rank's process, with
    the same seed on all ranks; `loss` runs for each micro-batch, `metrics` for each evaluation batch, and `collate` for
    every batch, possibly in a DataLoader worker.

    Shapes: B is `train.batch_size`, the samples of one rank and micro-step; the last batch of a split may have fewer.

    Attributes:
        classes: Names of the classes in `predict`, by class number; empty if they have no names.
        tokens_per_sample: Tokens of one training sample, if it has tokens: throughput is then also reported in tokens.
        flops_per_sample: FLOPs of one sample's forward and backward pass, for the utilisation of the device; None means
            that they are counted if possible.
    """

    classes: Sequence[str] = ()
    tokens_per_sample: int | None = None
    flops_per_sample: float | None = None

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the model with its initial weights, on the CPU. The entrypoint moves and replicates it."""

    @abstractmethod
    def datasets(self) -> Mapping[str, Dataset[Any]]:
        """Return datasets by split: `train`, and optionally `validation` and `test`.

        Map-style, iterable, or a `FileStream`. Every rank must see the same samples in the same order: the entrypoint
        shares them out.
        """

    @abstractmethod
    def loss(
        self, model: nn.Module, batch: Batch
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]:
        """Return the mean loss over the batch's samples, a scalar with a gradient; or a pair of a sum and its count.

        With a pair, such as the summed loss of a batch's unmasked tokens and their number, each of them has the same
        weight: a step follows the gradient of the sum over all ranks and micro-steps, divided by their count.

        An evaluation calls it under `torch.no_grad()`. What it keeps in `self` is of this rank, and is not saved.

        Args:
            model: Call this one (it synchronises gradients), not a model kept in `self`.
            batch: What `collate` returned, on this rank's device; tensors are `[B, ...]`.
        """

    def optimizer(
        self, model: nn.Module
    ) -> torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]:
        """Return the optimizer of the model's parameters; by default AdamW with the job's `train.learning_rate`.

        A Task with `training_step` returns several, by name, each with parameters of its own.

        Args:
            model: On this rank's device, and sharded if the job says so: its parameters may be DTensors.
        """
        train = context().train
        return torch.optim.AdamW(model.parameters(), lr=train.learning_rate if train else 1e-3)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Iterable[nn.Module] | None:  # noqa: ARG002
        """Split layers over `mesh["tensor"]`, and return the modules that `data: fsdp` gathers and frees one by one.

        Called where `train.parallel` asks for more than replicas, before the model is sharded and compiled.

        Args:
            model: The full model, to be changed in place, such as by
                `torch.distributed.tensor.parallel.parallelize_module(block, mesh["tensor"], plan)`.
            mesh: The ranks by `pipeline`, `replicate`, `shard` and `tensor`; unused dimensions have size 1.

        Returns:
            The units, usually the blocks; with None the entrypoint uses the children of lists that repeat a class.
        """
        return None

    def pipeline(self, model: nn.Module, stages: int) -> Sequence[nn.Module]:  # noqa: ARG002
        """Return the model as a chain of modules, each called with the output of the previous one.

        The first gets the inputs with which `loss` calls the model; `loss` gets the output of the last. The chain may
        have more modules than `stages`: they are divided so that each rank takes about the same time.

        Args:
            model: The full model; the chain consists of its modules, so that parameters keep their names.
            stages: Number of pipeline stages.
        """
        raise TaskError(
            f"train.parallel.pipeline: {type(self).__name__} has no method pipeline() for {stages} stages"
        )

    def schedule(
        self,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return a learning-rate schedule, advanced once per optimizer step; None takes the job's `train.schedule`.

        A `ReduceLROnPlateau` is advanced after each evaluation of the validation split during training, with the metric
        of `train.early_stopping`, or the loss without it.
        """
        return None

    def after_step(self, model: nn.Module) -> None:
        """Change weights after each optimizer step, on every rank, without gradients: averages, teachers.

        Keep such weights in the model, as modules or buffers, so that they are sharded, saved, resumed and exported
        with it. It is also called after a step that was skipped because its gradient was not finite.

        Args:
            model: The model of the step, with the names of `model()`; sharded if the job says so.
        """

    def training_step(
        self,
        model: nn.Module,  # noqa: ARG002
        batch: Batch,  # noqa: ARG002
        update: Callable[[str, torch.Tensor], None],  # noqa: ARG002
    ) -> None:
        """Take one step with several optimizers, as GANs and actor-critic methods do; `loss` then only evaluates.

        `update(name, loss)` computes the gradients of a loss, the mean over the batch's samples, for the parameters of
        that optimizer alone, averages them over the ranks, clips them, and takes the optimizer's step. Every rank must
        call it for the same optimizers in the same order.

        Args:
            model: The model, whose submodules may be called; not compiled.
            batch: What `collate` returned, on this rank's device; tensors are `[B, ...]`.
            update: Call it with the name of an optimizer and a scalar loss, before the next loss is computed.
        """
        raise TaskError(f"{type(self).__name__} has no method training_step()")

    def sampler(self, dataset: Dataset[Any]) -> Sampler[int] | Sequence[int] | None:  # noqa: ARG002
        """Return the order of the training samples, as a torch Sampler with a length; None shuffles them.

        It yields the indices of one epoch, the same on every rank: each rank takes its part. Random numbers of torch,
        Python and NumPy and its `generator` are seeded by seed and epoch; `set_epoch` is called where it exists.

        Args:
            dataset: The map-style dataset of the `train` split.
        """
        return None

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:  # noqa: ARG002
        """Return further metrics of an evaluation batch: by name, a tensor `[B]` with one value per sample.

        They are averaged exactly over all samples of all ranks.
        """
        return {}

    def after_evaluation(
        self,
        split: str,  # noqa: ARG002
        metrics: Mapping[str, float],  # noqa: ARG002
    ) -> Mapping[str, float] | None:
        """Return further metrics of a split that are no means of samples, such as F1, or None.

        Called on every rank at the end of each evaluation, so it may communicate. Rank 0's values count on all ranks.

        Args:
            split: `validation` or `test`.
            metrics: The loss and the metrics of `metrics()`, as means over all samples of all ranks.
        """
        return None

    def predict(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        """Return the predicted and the true class of each sample: two tensors of integers from 0, [B] each.

        Optional, for models that classify. With it the run ends with an analysis of the test split (or of the
        validation split, where there is no other): `analysis.md` and `analysis.json` in the model folder, with the
        confusion matrix and precision, recall and F1 of each class. An attribute `classes` names them, in the order of
        their numbers. In place of predicted classes, it may return their probabilities, `[B, classes]`:
        `cloudtrain evaluate` then measures their calibration. Of a model that predicts numbers, it returns predicted
        and true numbers of equal shapes, `[B]` or `[B, ...]`, whose residuals `cloudtrain evaluate` analyses.
        """
        raise TaskError(f"{type(self).__name__} has no method predict()")

    def analyze(self, model: nn.Module, split: str) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Return an analysis of your own for `cloudtrain evaluate`, as JSON values by name, or None.

        For example the texts that a language model generates. Called on every rank after the evaluation of a split, in
        evaluation mode and without gradients. Rank 0's values are kept with the evaluated run.

        Args:
            model: The model.
            split: `train`, `validation` or `test`.
        """
        return None

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Return a batch of up to B samples: tensors `[B, ...]`, or tuples, lists and mappings of them.

        By default torch's default_collate.
        """
        return default_collate(list(samples))


_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_location(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Prefix the TaskErrors of a check, whose first argument is the Task, with the location of the Task's method."""

    def decorate(check: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(check)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return check(*args, **kwargs)
            except TaskError as error:
                raise TaskError(location_of(type(args[0]), name) + str(error)) from None

        return checked

    return decorate


def location_of(found: type, name: str) -> str:
    """Return the location of a Task's method, such as `digits.py:31:5  `; empty for the entrypoint's default."""
    method = inspect.unwrap(getattr(found, name, location_of))
    code = getattr(method, "__code__", None)
    if code is None or code.co_filename == __file__:
        return ""
    lines = linecache.getlines(code.co_filename)
    first = code.co_firstlineno - 1  # the line of the first decorator, if there is one
    starts = (["def", code.co_name], ["async", "def", code.co_name])
    found_at = (
        at
        for at in range(first, len(lines))
        if lines[at].split("(", maxsplit=1)[0].split() in starts
    )
    line = next(found_at, None)
    column = 0 if line is None else len(lines[line]) - len(lines[line].lstrip())
    return f"{shown_path(code.co_filename)}:{(first if line is None else line) + 1}:{column + 1}  "


def shown_path(file: str) -> str:
    """Return a file's path, relative to the code folder where it is in it."""
    path, folder = Path(file), Path.cwd()  # the code folder
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else file


@with_location("model")
def checked_model(task: Task) -> nn.Module:
    """Return the Task's model; raise a TaskError if it is not an nn.Module."""
    model: Any = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() must return an nn.Module; it returned {kind_of(model)}")
    return model


@with_location("datasets")
def checked_datasets(task: Task) -> dict[str, Dataset[Any]]:
    """Return the Task's datasets.

    Raises:
        TaskError: the result is not a mapping of datasets by split, or a dataset is empty or of another kind.
    """
    datasets: Any = task.datasets()
    if not isinstance(datasets, Mapping):
        kind = type(datasets).__name__
        raise TaskError(
            f'datasets() must return a mapping such as {{"train": dataset}}; it returned a {kind}'
        )
    unknown = [str(split) for split in datasets if split not in SPLITS]
    if unknown or "train" not in datasets:
        found = ", ".join(map(str, datasets)) or "none"
        raise TaskError(
            f"datasets() must have train, and may have validation and test; it has {found}"
        )
    for split, dataset in datasets.items():
        if is_iterable(dataset):
            continue  # its length is unknown
        if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
            kind = type(dataset).__name__
            raise TaskError(
                f"the {split} dataset needs __len__ and __getitem__ (map-style), or an __iter__ that starts again for "
                f"each epoch (iterable); {kind} has neither"
            )
        if len(dataset) == 0:
            raise TaskError(f"the {split} dataset is empty")
    return dict(datasets)


@with_location("optimizer")
def checked_optimizers(task: Task, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Return the Task's optimizers of a model by name; without `training_step` its only one, under an empty name.

    Raises:
        TaskError: they are no optimizers, share parameters, or have some that are not the model's.
    """
    returned: Any = task.optimizer(model)
    is_single = not overrides(task, "training_step")
    if is_single:
        expected = "optimizer() must return a torch.optim.Optimizer"
        hint = ": several optimizers need training_step(self, model, batch, update)"
        more = hint if isinstance(returned, Mapping) else ""
        optimizers: dict[Any, Any] = {"": returned}
    else:
        expected = 'with training_step(), optimizer() must return a mapping such as {"generator": optimizer}'
        if not isinstance(returned, Mapping) or not returned:
            found = "an empty one" if isinstance(returned, Mapping) else kind_of(returned)
            raise TaskError(f"{expected}; it returned {found}")
        more, optimizers = "", dict(returned)
    own, owners = {id(parameter) for parameter in model.parameters()}, dict[int, str]()
    for name, optimizer in optimizers.items():
        if not is_single and (not isinstance(name, str) or not name.isidentifier()):
            raise TaskError(f"{expected}; {name!r} is not a name of letters, digits and _")
        if not isinstance(optimizer, torch.optim.Optimizer):
            found = "it returned" if is_single else f"{name} is"
            raise TaskError(f"{expected}; {found} {kind_of(optimizer)}{more}")
        taken = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        if others := sum(each not in own for each in taken):
            raise TaskError(
                f"optimizer() must take the parameters of the model that it is given; {others} of {len(taken)} are not "
                "among them and would be neither synchronised nor saved"
            )
        for each in taken:
            if owners.setdefault(each, name) != name:
                both = f"{owners[each]} and {name}"
                raise TaskError(
                    f"optimizer() must give each parameter to one optimizer; {both} share one"
                )
    return optimizers


@with_location("schedule")
def checked_schedule(
    task: Task, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Return the Task's learning-rate schedule, or None.

    Raises:
        TaskError: it is no schedule, or belongs to another optimizer.
    """
    schedule: Any = task.schedule(optimizer)
    if schedule is None:
        return None
    expected = "schedule() must return a torch.optim.lr_scheduler.LRScheduler or None"
    if not isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
        raise TaskError(f"{expected}; it returned {kind_of(schedule)}")
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise TaskError(
            "schedule() must return a schedule of the optimizer that it is given; this one belongs to another optimizer"
        )
    return schedule


def overrides(task: Task, method: str) -> bool:
    """Return whether a Task has its own version of an optional method."""
    return getattr(getattr(task, method), "__func__", None) is not getattr(Task, method)


@with_location("sampler")
def checked_sampler(task: Task, dataset: Dataset[Any]) -> Iterable[int] | None:
    """Return the Task's sampler of its training data, or None; raise a TaskError if it cannot be shared out."""
    if not overrides(task, "sampler"):
        return None
    if is_iterable(dataset):
        raise TaskError(
            "sampler() needs a map-style train dataset (__len__, __getitem__); this one is iterable"
        )
    sampler: Any = task.sampler(dataset)
    if sampler is None:
        return None
    if not isinstance(sampler, Iterable) or not isinstance(sampler, Sized) or len(sampler) == 0:
        raise TaskError(
            f"sampler() must return a Sampler of indices with a length, or None; it returned {kind_of(sampler)}"
        )
    return sampler


def collate_function(task: Task) -> Callable[[Sequence[Any]], Batch]:
    """Return the function that collates samples: the Task's method, or torch's default."""
    plain: Callable[[Any], Batch] = default_collate
    return task.collate if overrides(task, "collate") else plain


@with_location("collate")
def check_batch(task: Task, batch: Batch) -> None:  # noqa: ARG001 (for the location)
    """Check a batch of the Task's `collate`; raise a TaskError if it has no tensor."""
    from torch.utils._pytree import tree_leaves

    plain = (type(None), bool, int, float, complex, str, bytes)
    if all(isinstance(leaf, plain) for leaf in tree_leaves(batch)):
        raise TaskError(
            "collate() must return tensors, or tuples, lists and mappings of them; "
            f"there is none in what it returned, {kind_of(batch)}"
        )


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch: a mean over its samples, or a sum with its count."""

    value: torch.Tensor  # scalar
    count: torch.Tensor | None = (
        None  # what `value` is a sum of; None where it is the mean over the samples
    )


@with_location("loss")
def checked_loss(task: Task, model: nn.Module, batch: Batch) -> BatchLoss:
    """Return the Task's loss of a batch.

    Raises:
        TaskError: it is neither a scalar tensor nor a pair of one and a count, or has no gradient in training.
    """
    returned: Any = task.loss(model, batch)
    loss, count = (
        returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)  # noqa: PLR2004
    )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = (
            f"a tensor of shape {list(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else kind_of(loss)
        )
        what = (
            "the mean over the batch's samples"
            if count is None
            else "the sum, as the first of a pair"
        )
        raise TaskError(f"loss() must return a scalar tensor, {what}; it returned {got}")
    is_number = isinstance(count, int | float) or (
        isinstance(count, torch.Tensor) and count.numel() == 1
    )
    if count is not None and not is_number:
        raise TaskError(
            f"loss() must return a number, or a scalar tensor, as the count; it returned {kind_of(count)}"
        )
    if not loss.requires_grad and torch.is_grad_enabled():
        if {parameter.requires_grad for parameter in model.parameters()} == {False}:
            raise TaskError(
                "every parameter of the model is frozen (requires_grad is False): leave some to train"
            )
        raise TaskError(
            "loss() must return a tensor that depends on the model's parameters; this one has no gradient: "
            "was it detached, made from .item(), or computed under no_grad?"
        )
    if count is not None:
        count = torch.as_tensor(count, device=loss.device).detach().double().reshape(())
    return BatchLoss(loss, count)


@with_location("metrics")
def checked_metrics(
    task: Task, model: nn.Module, batch: Batch, samples: int
) -> Mapping[str, torch.Tensor]:
    """Return the Task's metrics of an evaluation batch.

    Raises:
        TaskError: the result is not a mapping, or a metric is called `loss` or does not have one value per sample.
    """
    metrics: Any = task.metrics(model, batch)
    if not isinstance(metrics, Mapping):
        raise TaskError(
            f"metrics() must return a mapping from name to tensor; it returned {kind_of(metrics)}"
        )
    for name, values in metrics.items():
        if name == "loss":
            raise TaskError("metrics() must not have a metric called loss: that is the Task's own")
        if not isinstance(values, torch.Tensor) or list(values.shape) != [samples]:
            got = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise TaskError(
                f"metrics() must return one value per sample: {name} of a batch of {samples} has the shape {got}, "
                f"expected [{samples}] (no mean: the entrypoint averages over all samples of all ranks)"
            )
    return metrics


@with_location("after_evaluation")
def checked_evaluation(task: Task, split: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that the Task computes at the end of an evaluation.

    Raises:
        TaskError: the result is no mapping from new names to numbers.
    """
    found: Any = task.after_evaluation(split, metrics)
    if not isinstance(found, Mapping | None):
        raise TaskError(
            f"after_evaluation() must return a mapping from name to number; it returned {kind_of(found)}"
        )
    for name, value in (found or {}).items():
        if name in metrics:
            raise TaskError(
                f"after_evaluation() must not return {name}: that metric has a value already"
            )
        if not isinstance(value, int | float) and not (
            isinstance(value, torch.Tensor) and value.numel() == 1
        ):
            raise TaskError(f"after_evaluation() must return a number, or a scalar tensor, for {name}; it returned "
                            f"{shape_of(value)}")  # fmt: skip
    return {name: float(value) for name, value in (found or {}).items()}


def shape_of(value: Any) -> str:
    """Return the type of a value, with the shapes of its tensors."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of the shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(map(shape_of, value)) or 'nothing'}"
    return f"a {type(value).__name__}"


def kind_of(value: object) -> str:
    """Return the type of a value with its article, such as `a Tensor`."""
    if value is None:
        return "None"
    name = type(value).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    return f"{article} {name}"
