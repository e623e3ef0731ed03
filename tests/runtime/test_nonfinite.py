"""Skipped steps, best weights, classification analysis, schedules and determinism, without a trainer."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import TRAIN
from torch import nn

from cloudtrain_runtime.contract import EarlyStopping
from cloudtrain_runtime.distributed.gradients import DistributedGradScaler
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.process.run_context import read_context
from cloudtrain_runtime.training import determinism
from cloudtrain_runtime.training.best_checkpoint import BestTracker
from cloudtrain_runtime.training.classification import ClassificationAnalysis
from cloudtrain_runtime.training.nonfinite import NonfiniteGuard, is_fused
from cloudtrain_runtime.training.schedules import (
    default_schedule,
    learning_rate_factor,
    step_metrics,
)

NAN = float("nan")


def guarded(
    folder: Path, gradients: list[float], limit: int, *, on_device: bool
) -> tuple[list[float], NonfiniteGuard]:
    """Take a step for each gradient; return the learning rate of each step, and the guard. Batches are step numbers."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    assert is_fused(optimizer)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 100)
    mesh = Mesh(replace(read_context({}), output_dir=folder))
    guard = NonfiniteGuard(
        limit, optimizer, torch.amp.GradScaler("cpu", enabled=False), mesh, on_device=on_device
    )
    rates = []
    for number, gradient in enumerate(gradients, start=1):
        batches = list(guard.recording([torch.tensor(number)]))
        assert len(batches) == 1
        model.weight.grad = torch.full_like(model.weight, gradient)
        before = model.weight.detach().clone()
        rates.append(float(optimizer.param_groups[0]["lr"]))
        advances_schedule = guard.step(number, torch.tensor(gradient), model.weight.grad.norm())
        assert torch.equal(before, model.weight.detach()) == (not math.isfinite(gradient))
        if advances_schedule:
            rate.step()
    guard.settle()
    return rates, guard


def test_a_step_skipped_on_the_device_is_known_a_step_later(tmp_path: Path) -> None:
    gradients = [1.0, NAN, NAN, 1.0, 1.0, NAN, 1.0, 1.0]
    host_rates, host = guarded(tmp_path, gradients, 2, on_device=False)
    device_rates, device = guarded(tmp_path, gradients, 2, on_device=True)
    assert host_rates == pytest.approx([0.1, 0.099, 0.099, 0.099, 0.098, 0.097, 0.097, 0.096])
    assert device_rates == pytest.approx([0.1, 0.099, 0.098, 0.098, 0.098, 0.097, 0.096, 0.096])
    assert host.state_dict() == device.state_dict() == {"in_row": 0, "skipped": 3, "owed": 0}


@pytest.mark.parametrize("on_device", [False, True])
def test_too_many_nonfinite_steps_end_the_run_with_the_batch(
    on_device: bool, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=r"not finite in 2 steps in a row, the last is step 4"):
        guarded(tmp_path, [1.0, 1.0, NAN, NAN, 1.0], 1, on_device=on_device)
    [kept] = (tmp_path / "nonfinite").iterdir()
    assert kept.name == "step-4-rank-0.pt"
    content = torch.load(kept, weights_only=True)
    assert content["batches"] == [torch.tensor(4)]
    assert math.isnan(content["loss"])


def test_a_resume_continues_the_count_of_nonfinite_steps(tmp_path: Path) -> None:
    _, first = guarded(tmp_path, [NAN], 1, on_device=True)
    state = json.loads(json.dumps(first.state_dict()))
    assert state == {"in_row": 1, "skipped": 1, "owed": 1}
    _, rest = guarded(tmp_path, [1.0], 1, on_device=True)
    rest.load_state_dict(state)
    with pytest.raises(JobError, match="2 steps in a row"):
        _ = [rest.step(2, torch.tensor(NAN), torch.tensor(NAN)), rest.settle()]


def test_a_nonfinite_metric_is_never_the_best() -> None:
    train = replace(
        TRAIN, export="best", early_stopping=EarlyStopping("validation/accuracy", 3, 0.5, "max")
    )
    best = BestTracker.of(train, ["train", "validation"])
    assert best is not None
    seen = [
        best.record(step, {"loss": 1.0, "accuracy": value})
        for step, value in enumerate((NAN, 0.5, 0.5, 0.6))
    ]
    assert seen == [False, True, False, True]
    again = BestTracker.of(train, ["validation"])
    assert again is not None
    again.resume({"best": json.loads(json.dumps(best.to_json()))}, "s3://bucket/other")
    assert again.latest is not None
    assert (again.latest.step, again.latest.value, again.latest.place) == (
        3,
        0.6,
        "s3://bucket/other",
    )


def test_an_analysis_has_the_metrics_of_each_class(tmp_path: Path) -> None:
    pairs = Counter({(0, 0): 8, (0, 1): 2, (1, 1): 5, (1, 0): 1, (2, 0): 4, (-100, 1): 9})
    metrics = {"validation": {"loss": 0.25}, "test": {"loss": 0.5, "accuracy": 0.65}}
    analysis = ClassificationAnalysis(
        pairs, ["cat", "dog", "b|rd", "never"], split="test", step=70, metrics=metrics
    )
    lines = analysis.write(tmp_path).read_text().splitlines()
    found = json.loads((tmp_path / "analysis.json").read_text())
    assert (found["samples"], found["step"], found["split"]) == (20, 70, "test")
    assert found["accuracy"] == pytest.approx(13 / 20)
    assert found["confusion"] == [[8, 2, 0, 0], [1, 5, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0]]
    cat, dog, bird, never = found["classes"]
    assert (cat["precision"], cat["recall"], cat["f1"], cat["support"]) == pytest.approx(
        (8 / 13, 0.8, 16 / 23, 10)
    )
    assert (dog["name"], dog["precision"], dog["recall"]) == (
        "dog",
        pytest.approx(5 / 7),
        pytest.approx(5 / 6),
    )
    assert (bird["precision"], bird["recall"], bird["f1"], bird["support"]) == (None, 0.0, 0.0, 4)
    assert (never["precision"], never["recall"], never["f1"], never["support"]) == (
        None,
        None,
        None,
        0,
    )
    assert found["averages"]["macro"]["recall"] == pytest.approx((0.8 + 5 / 6) / 3)
    assert found["averages"]["weighted"]["recall"] == pytest.approx(13 / 20)
    assert found["most_confused"][0] == {"true": "b|rd", "predicted": "cat", "count": 4}
    assert "| test | 0.5 | 0.65 |" in lines
    assert "| cat | 0.6154 | 0.8000 | 0.6957 | 10 |" in lines
    assert "| **b/rd** | 4 | 0 | 0 | 0 |" in lines


def test_an_analysis_of_many_classes_has_no_matrix(tmp_path: Path) -> None:
    pairs = Counter({(kind, kind if kind % 2 else 0): 1 for kind in range(1500)})
    analysis = ClassificationAnalysis(
        pairs, [], split="validation", step=1, metrics={"validation": {"loss": 1.0}}
    )
    assert "Confusion matrix" not in analysis.write(tmp_path).read_text()
    found = json.loads((tmp_path / "analysis.json").read_text())
    assert found["confusion"] is None
    assert len(found["classes"]) == 1500
    assert len(found["most_confused"]) == 20


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_warms_up_and_decays(schedule: str) -> None:
    train = replace(TRAIN, schedule=schedule, warmup_steps=4)
    shares = [learning_rate_factor(step, train, 20) for step in range(21)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[4] == 1.0
    if schedule == "constant":
        assert set(shares[3:]) == {1.0}
    else:
        assert all(later < earlier for earlier, later in itertools.pairwise(shares[4:]))
        assert shares[12] == pytest.approx(0.5)  # half of the decay
        assert shares[20] == pytest.approx(0.0, abs=1e-12)


def test_a_constant_rate_needs_no_schedule() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    assert default_schedule(optimizer, TRAIN, lambda: 10) is None


def test_groups_with_own_rates_are_logged_by_name() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [
        {"name": "head", "params": parameters[:1], "lr": 1.0},
        {"params": parameters[1:], "lr": 0.1},
    ]
    optimizer = torch.optim.SGD(groups)
    assert step_metrics(optimizer, {}) == {"learning_rate_head": 1.0, "learning_rate_1": 0.1}
    default_schedule(optimizer, replace(TRAIN, warmup_steps=4), lambda: 10)
    assert step_metrics(optimizer, {}) == {
        "learning_rate_head": 0.25,
        "learning_rate_1": pytest.approx(0.025),
    }
    assert (
        step_metrics(torch.optim.SGD([{"params": [each]} for each in parameters], lr=1.0), {}) == {}
    )


@pytest.fixture
def deterministic() -> Iterator[None]:
    determinism.require_deterministic_algorithms()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_an_operation_without_a_deterministic_form_is_named() -> None:
    def put_twice(values: torch.Tensor) -> Any:
        with determinism.explain_nondeterminism():
            return values.put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))

    with pytest.raises(JobError, match=r"train.deterministic: put_ has no deterministic form"):
        put_twice(torch.zeros(3))
    with pytest.raises(RuntimeError, match="of another kind"), determinism.explain_nondeterminism():
        raise RuntimeError("of another kind")


def test_the_users_cublas_workspace_is_kept() -> None:
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    determinism.configure_cublas(environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    empty: dict[str, str] = {}
    determinism.configure_cublas(empty)
    assert empty == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_the_scale_of_shards_is_that_of_torch(tmp_path: Path) -> None:
    """Same scales, weights and states as torch's own scaler, over an overflow, a raise and a resume."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    found = []
    try:
        for scaler in (torch.amp.GradScaler("cpu"), DistributedGradScaler(torch.device("cpu"))):
            model = nn.Linear(2, 1, bias=False)
            nn.init.ones_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scales = []
            for loss in (1.0, 1e38, 2.0, 3.0, 4.0):  # the second one overflows
                optimizer.zero_grad()
                scaler.scale(model.weight.sum() * loss).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                if loss == 3.0:
                    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 1999})
                scales.append(scaler.get_scale())
            found.append((scales, model.weight.tolist(), scaler.state_dict()))
    finally:
        dist.destroy_process_group()
    assert found[0] == found[1]
    assert found[0][0] == [2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**16]
