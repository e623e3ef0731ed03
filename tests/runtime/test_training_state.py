"""The state of models and optimizers in a checkpoint: it is that of its step, and a resume restores it exactly."""

from __future__ import annotations

import copy
import difflib
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cloudtrain_runtime.checkpoint.manager import CheckpointManager
from cloudtrain_runtime.checkpoint.shards import StagingPlanner
from cloudtrain_runtime.checkpoint.training_state import shape_mismatch
from cloudtrain_runtime.contract import CheckpointConfig
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.run_context import Context

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint warns

Optimizers = list[torch.optim.Optimizer]


@pytest.fixture
def checkpoints(context: Context, tmp_path: Path) -> Callable[[], CheckpointManager]:
    return lambda: CheckpointManager(
        CheckpointConfig(str(tmp_path / "c"), None, None, 3, "auto"), context
    )


class AllTensors(nn.Module):
    """Has parameters and buffers of every kind; buffers change in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.transposed
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.reduced = nn.Parameter(torch.randn(3).bfloat16())
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2))
        self.register_buffer("view", self.transposed.data[1:3])
        self.register_buffer("same", self.transposed.data)
        self.register_buffer("small", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(5))

    def forward(self) -> torch.Tensor:
        self.count += 1
        self.flags.logical_not_()
        return (
            self.transposed.square().sum()
            + self.scalar
            + self.complex.abs().sum()
            + self.reduced.float().sum()
        )


class Target(nn.Module):
    """Two networks; the forward pass updates the second one as a moving average of the first, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.average = nn.Linear(30, 30), nn.Linear(30, 30).requires_grad_(False)

    @torch.no_grad()
    def update_average(self) -> None:
        for own, other in zip(self.average.parameters(), self.trained.parameters(), strict=True):
            own.data.mul_(0.9).add_(other, alpha=0.1)

    def forward(self) -> torch.Tensor:
        self.update_average()
        x = torch.randn(2, 30)
        return (self.trained(x) - self.average(x)).square().sum()


class Bounded(nn.Module):
    """An embedding with `max_norm`: the forward pass scales its vectors down."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, max_norm=0.5)

    def forward(self) -> torch.Tensor:
        return self.table(torch.tensor([0, 2])).square().sum()


class Extra(nn.Module):
    """Has an extra state that is not a tensor and grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen: list[torch.Tensor] = []
        self.total = torch.zeros(2)

    def forward(self) -> torch.Tensor:
        found: torch.Tensor = self.layer(torch.randn(4, 3)).square().mean(0)
        self.seen.append(found.detach())
        self.total += found.detach()
        return found.sum()

    def get_extra_state(self) -> dict[str, Any]:
        return {"total": self.total, "seen": dict(enumerate(self.seen))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.total, self.seen = state["total"], list(state["seen"].values())


def adam(model: nn.Module) -> Optimizers:
    return [
        torch.optim.Adam(
            [each for each in model.parameters() if each.numel()], lr=0.1, foreach=False
        )
    ]


def two_optimizers(model: nn.Module) -> Optimizers:
    first, *others = [each for each in model.parameters() if each.requires_grad and each.numel()]
    if not others:
        return [torch.optim.SGD([first], momentum=0.9, lr=0.1)]
    lr = torch.tensor(0.05)
    return [
        torch.optim.SGD([{"params": [first], "momentum": 0.9, "lr": 0.1}]),
        torch.optim.AdamW([{"params": others, "lr": lr, "amsgrad": True}], foreach=False),
    ]


def step(model: nn.Module, optimizers: Optimizers) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model().backward()
    for optimizer in optimizers:
        optimizer.step()


def values_of(model: nn.Module, optimizers: Optimizers) -> Any:
    return copy.deepcopy(
        [model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)]
    )


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        raw = left.dtype == torch.float8_e4m3fn
        return left.dtype == right.dtype and torch.equal(
            *((each.float() if raw else each) for each in (left, right))
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def delay_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay the copy of each save, as on a busy machine, until the next step has run up to the point where it waits."""
    stage = StagingPlanner.stage

    def delayed(planner: StagingPlanner, plan: Any) -> None:
        threading.Event().wait(0.2)
        stage(planner, plan)

    monkeypatch.setattr(StagingPlanner, "stage", delayed)


@pytest.mark.promise
@pytest.mark.parametrize("kind", [AllTensors, Target, Bounded, Extra])
@pytest.mark.parametrize("optimize", [adam, two_optimizers])
@pytest.mark.parametrize("seed", [1, 2])
def test_resume_is_bit_exact(
    kind: type[nn.Module],
    optimize: Callable[[nn.Module], Optimizers],
    seed: int,
    checkpoints: Callable[[], CheckpointManager],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(seed)
    model = kind()
    optimizers = optimize(model)
    saving = checkpoints()
    delay_copies(monkeypatch)
    for _ in range(seed):
        step(model, optimizers)
    before = values_of(model, optimizers)
    assert saving.save(seed, model, optimizers, {}, {})
    for _ in range(3):
        step(model, optimizers)
    assert saving.wait_for_save()

    torch.manual_seed(seed + 100)
    other = kind()
    others = optimize(other)
    step(other, others)  # creates gradients and states, which the resume must replace
    assert checkpoints().resume(other, others).step == seed
    assert same(values_of(other, others), before)
    for _ in range(3):
        step(other, others)
    assert same(values_of(other, others), values_of(model, optimizers))


@pytest.mark.parametrize("optimize", [adam, two_optimizers])
def test_a_save_before_the_first_step_changes_nothing(
    optimize: Callable[[nn.Module], Optimizers], checkpoints: Callable[[], CheckpointManager]
) -> None:
    """This happens if a gradient scaler skips the first steps."""
    ends = []
    for saves in (False, True):
        torch.manual_seed(1)
        model = Extra()
        optimizers = optimize(model)
        if saves:
            assert checkpoints().save(1, model, optimizers, {}, {}, wait=True)
        step(model, optimizers)
        ends.append(values_of(model, optimizers))
    assert same(*ends)


def test_a_parameter_without_a_state_gets_none(
    checkpoints: Callable[[], CheckpointManager],
) -> None:
    models = [nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    models[0]["a"](torch.ones(1, 2)).sum().backward()
    optimizers[0].step()
    assert checkpoints().save(1, models[0], optimizers[:1], {}, {}, wait=True)
    checkpoints().resume(models[1], optimizers[1:])
    assert same(*(optimizer.state_dict() for optimizer in optimizers))


def test_a_resume_after_a_backward_pass_loads_the_state(
    checkpoints: Callable[[], CheckpointManager],
) -> None:
    """A script may run a backward pass before it loads."""
    models = [Extra(), Extra()]
    optimizers = [adam(model) for model in models]
    step(models[0], optimizers[0])
    assert checkpoints().save(1, models[0], optimizers[0], {}, {}, wait=True)
    models[1]().backward()
    checkpoints().resume(models[1], optimizers[1])
    assert same(values_of(models[1], optimizers[1]), values_of(models[0], optimizers[0]))


def test_the_state_of_another_optimizer_is_rejected(
    checkpoints: Callable[[], CheckpointManager],
) -> None:
    model = nn.Linear(2, 2)
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    momentum.step()
    assert checkpoints().save(1, model, [momentum], {}, {}, wait=True)
    with pytest.raises(
        CheckpointError, match="its optimizer keeps momentum_buffer, this one exp_avg, exp_avg_sq"
    ):
        checkpoints().resume(model, [torch.optim.AdamW(model.parameters())])


def test_state_that_cannot_be_loaded_is_rejected_at_start(
    checkpoints: Callable[[], CheckpointManager],
) -> None:
    model, temperature = nn.Linear(2, 2), nn.Parameter(torch.zeros(()))
    with pytest.raises(CheckpointError, match="LBFGS cannot be loaded again"):
        checkpoints().resume(model, [torch.optim.LBFGS(model.parameters())])
    with pytest.raises(CheckpointError, match="1 parameters of SGD are not the model's"):
        checkpoints().resume(model, [torch.optim.SGD([*model.parameters(), temperature], lr=0.1)])


def test_names_of_large_models_are_compared_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 2,000 tensors under another prefix: only the names in the message are compared with all others."""
    compared = []
    real = difflib.get_close_matches

    def count(name: str, names: Collection[str], n: int, cutoff: float) -> list[str]:
        compared.append(name)
        return real(name, list(names), n=n, cutoff=cutoff)

    monkeypatch.setattr(difflib, "get_close_matches", count)
    saved = {f"model.layers.{index}.weight": [2] for index in range(2_000)}
    own = {f"layers.{index}.weight": [2] for index in range(2_000)}
    text = shape_mismatch(saved, own)
    assert text.startswith(
        "it has no layers.0.weight (nearest: model.layers.0.weight); it has no layers.1.weight"
    )
    assert "; and 1997 more like this; it has model.layers.0.weight, the model does not" in text
    assert len(compared) == 6
