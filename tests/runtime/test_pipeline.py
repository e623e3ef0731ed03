"""Pipelines: how a model is split, and what they compute, save and reject."""

import itertools
import math
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parallel_training import (
    ADAM_SHIFT,
    SIX_DIGITS,
    TRAIN,
    Outcome,
    Small,
    losses,
)
from support.pipelines import (
    Biased,
    Grouped,
    Growing,
    Named,
    Tied,
    Twice,
    Twisted,
)
from support.training import Steady
from torch import nn

from cloudtrain_runtime.checkpoint.inspection import Inspection
from cloudtrain_runtime.contract import CheckpointConfig, ParallelConfig, TrainConfig
from cloudtrain_runtime.distributed.fsdp import PRECISIONS
from cloudtrain_runtime.distributed.layer_chain import (
    TensorShape,
    balance_stages,
    chain_of,
    drop_other_stages,
    split_chain,
)
from cloudtrain_runtime.distributed.model_proxy import capture_model_inputs, loss_from_output, metrics_from_output
from cloudtrain_runtime.errors import TaskError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
SAMPLES = 3 * 16 + 7
"""Of an epoch: three whole steps, and one that shares 7 samples out to fewer and smaller micro-batches."""


def job(accumulate: int = 4, **parallel: Any) -> TrainConfig:
    return replace(TRAIN, accumulate=accumulate, parallel=ParallelConfig(**parallel))


def close(outcome: Outcome, expected: Sequence[float]) -> bool:
    assert outcome.reason is None, outcome.text
    return outcome.losses == pytest.approx(expected, rel=SIX_DIGITS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One process."""
    outcome = losses(job(), 1, tmp_path_factory.mktemp("alone"), samples=SAMPLES, dtype=torch.float64)
    assert len(outcome.losses) == 20
    assert outcome.losses[-1] < 0.6 * outcome.losses[0]
    return outcome


@pytest.mark.processes
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {}),
        (4, {"data": "ddp"}),
        (4, {"data": "fsdp"}),
    ],
    ids=["alone", "ddp", "fsdp"],
)
def test_a_pipeline_makes_the_steps_of_one_process(
    schedule: str, ranks: int, parallel: Mapping[str, Any], alone: Outcome, tmp_path: Path
) -> None:
    accumulate = 2 if "data" in parallel else 4
    train = job(accumulate, pipeline=2, schedule=schedule, **parallel)
    outcome = losses(train, ranks, tmp_path, samples=SAMPLES, dtype=torch.float64)
    assert close(outcome, alone.losses)
    assert outcome.grad_norms == pytest.approx(alone.grad_norms, rel=SIX_DIGITS)
    assert outcome.weights is not None
    assert alone.weights is not None
    assert set(outcome.weights) == set(alone.weights)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "accumulate", "parallel"),
    [
        (4, 4, {"pipeline": 4}),
        (4, 6, {"pipeline": 4}),
        (4, 3, {"pipeline": 2, "schedule": "gpipe"}),
        (8, 2, {"pipeline": 2, "tensor": 2, "data": "fsdp", "schedule": "zero_bubble"}),
    ],
    ids=["four stages", "six micro-batches", "three micro-batches", "everything"],
)
def test_other_sizes(ranks: int, accumulate: int, parallel: Mapping[str, Any], tmp_path: Path) -> None:
    train = replace(job(accumulate, **parallel), steps=8)
    data_ranks = ranks // train.parallel.group_size
    single = replace(job(accumulate * data_ranks), steps=8)
    expected = losses(single, 1, tmp_path / "alone", samples=67, dtype=torch.float64)
    outcome = losses(train, ranks, tmp_path / "spread", samples=67, dtype=torch.float64)
    assert close(outcome, expected.losses)


@pytest.mark.processes
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision(precision: str, tmp_path: Path) -> None:
    options = {"precision": precision, "steps": 8, "learning_rate": 0.3}
    alone = losses(replace(job(), **options), 1, tmp_path / "alone", task=Steady)  # type: ignore[arg-type]
    spread = replace(job(pipeline=2), **options)  # type: ignore[arg-type]
    outcome = losses(spread, 2, tmp_path / "spread", task=Steady)
    assert outcome.losses == pytest.approx(alone.losses, rel=torch.finfo(PRECISIONS[precision]).eps)


@pytest.mark.processes
def test_links_pass_on_tensors_of_any_shape_and_see_no_padding(alone: Outcome, tmp_path: Path) -> None:
    for schedule in ("1f1b", "interleaved"):
        train = job(pipeline=2, schedule=schedule)
        outcome = losses(train, 2, tmp_path / schedule, samples=SAMPLES, task=Twisted, dtype=torch.float64)
        assert close(outcome, alone.losses)


@pytest.mark.processes
def test_the_time_in_the_stages_is_no_wait_for_data(tmp_path: Path) -> None:
    outcome = losses(replace(job(pipeline=2), steps=4), 2, tmp_path)
    steps = [event for event in outcome.events if event["event"] == "step"]
    assert steps, outcome.text
    assert sum(step["split"]["backward"] for step in steps) > sum(step["split"]["data"] for step in steps)


@pytest.mark.processes
def test_evaluation_goes_through_the_stages(tmp_path: Path) -> None:
    def measured(train: TrainConfig, ranks: int, name: str) -> list[float]:
        train = replace(train, steps=6)
        outcome = losses(train, ranks, tmp_path / name, arguments={"validates": 21}, dtype=torch.float64)
        assert outcome.reason is None, outcome.text
        found = [event for event in outcome.events if event["event"] == "evaluation"]
        assert [event["step"] for event in found] == [3, 6]
        return [event[name] for event in found for name in ("loss", "accuracy")]

    expected = measured(replace(job(), evaluate_every_steps=3), 1, "alone")
    for number, (ranks, accumulate, parallel) in enumerate(
        [(2, 4, {"schedule": "interleaved"}), (4, 2, {}), (4, 2, {"data": "fsdp"})]
    ):
        train = replace(job(accumulate, pipeline=2, **parallel), evaluate_every_steps=3)
        assert measured(train, ranks, str(number)) == pytest.approx(expected, rel=SIX_DIGITS)


def saving(folder: Path) -> CheckpointConfig:
    return CheckpointConfig(folder.as_uri(), None, 5, 9, "auto")


@pytest.mark.processes
def test_resumed_pipeline_is_bit_exact_and_keeps_its_stages(tmp_path: Path) -> None:
    train, noisy = replace(job(pipeline=2), steps=10), {"dropout": 0.2}
    whole = losses(train, 2, tmp_path / "whole", arguments=noisy, task=Grouped)
    half = losses(
        replace(train, steps=5),
        2,
        tmp_path / "half",
        checkpoint=saving(tmp_path / "saved"),
        arguments=noisy,
        task=Grouped,
    )
    assert half.reason is None, half.text
    rest = losses(train, 2, tmp_path / "rest", checkpoint=saving(tmp_path / "saved"), arguments=noisy, task=Grouped)
    assert rest.reason is None, rest.text
    assert links(rest) == links(half)
    assert rest.losses == whole.losses[5:]
    assert whole.weights is not None
    assert rest.weights is not None
    assert all(torch.equal(value, rest.weights[name]) for name, value in whole.weights.items())


def links(outcome: Outcome) -> list[int]:
    return next(event["links"] for event in outcome.events if event["event"] == "pipeline")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Checkpoints of five steps in several layouts, and the losses of ten steps of one process."""
    folder = tmp_path_factory.mktemp("saved")
    for name, (ranks, train) in LAYOUTS.items():
        uri = saving(folder / f"{name}-saved")
        first = replace(train, steps=5)
        half = losses(first, ranks, folder / name, checkpoint=uri, task=Grouped, dtype=torch.float64)
        assert half.reason is None, half.text
    whole = losses(replace(job(), steps=10), 1, folder / "whole", task=Grouped, dtype=torch.float64)
    return folder, whole.losses


LAYOUTS = {
    "one": (1, job()),
    "pipeline": (2, job(pipeline=2)),
    "pipeline x ddp": (4, job(2, pipeline=2)),
    "pipeline x fsdp": (4, job(2, pipeline=2, data="fsdp", schedule="interleaved")),
    "fsdp": (2, job(2, data="fsdp")),
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pipeline", "one"),
        ("pipeline", "pipeline x ddp"),
        ("pipeline", "pipeline x fsdp"),
        ("pipeline", "fsdp"),
        ("one", "pipeline"),
        ("pipeline x ddp", "pipeline"),
        ("pipeline x fsdp", "pipeline"),
        ("fsdp", "pipeline"),
    ],
)
def test_a_checkpoint_fits_any_layout(before: str, after: str, saved: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder, expected = saved
    shutil.copytree(folder / f"{before}-saved", tmp_path / "saved")
    ranks, train = LAYOUTS[after]
    train = replace(train, steps=10)
    uri = saving(tmp_path / "saved")
    rest = losses(train, ranks, tmp_path / "rest", checkpoint=uri, task=Grouped, dtype=torch.float64)
    assert close(rest, expected[5:])


@pytest.mark.processes
def test_an_export_has_all_stages(saved: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder, _ = saved
    states = []
    for name in ("one", "pipeline x fsdp"):
        found = Inspection((folder / f"{name}-saved").as_uri())
        found.export(found.find(), tmp_path / f"{name}.pt", form="torch", part="model")
        states.append(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=5 * ADAM_SHIFT)


@pytest.mark.processes
def test_another_model_is_refused_by_all_its_stages(saved: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder, _ = saved
    shutil.copytree(folder / "pipeline-saved", tmp_path / "saved")
    uri = saving(tmp_path / "saved")
    other = losses(job(pipeline=2), 2, tmp_path / "rest", checkpoint=uri, task=Biased, dtype=torch.float64)
    assert other.reason is not None
    assert re.search("does not fit this model: it has no head.1.bias_too", other.reason)


@pytest.mark.processes
def test_each_rank_holds_its_stages_under_the_models_names(tmp_path: Path) -> None:
    outcome = losses(replace(job(pipeline=2), steps=1), 2, tmp_path, task=Named)
    assert outcome.reason is None, outcome.text
    held = [line.split()[1:] for line in outcome.text.splitlines() if line.startswith("HOLDS")]
    assert not set(held[0]) & set(held[1])
    assert [*held[0], *held[1]] == [name for name, _ in Small(1).model().named_parameters()]
    assert "embedding.tokens.weight" in held[0]
    assert "head.1.bias" in held[1]
    started = next(event for event in outcome.events if event["event"] == "started")
    assert started["parameters"] == sum(parameter.numel() for parameter in Small(1).model().parameters())


def test_what_is_taken_out_leaves_names_behind() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2), "b": nn.Linear(2, 2)})
    first, second = split_chain([model["a"], model["norm"], model["b"]], [1, 2], model)
    drop_other_stages(model, [first], [second])
    assert list(model.state_dict()) == ["a.weight", "a.bias"]
    assert model["b"].weight is None
    assert model["norm"].running_mean is None


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    dice = random.Random(1)  # noqa: S311
    for _ in range(200):
        seconds = [dice.choice([0.0, dice.random()]) for _ in range(dice.randint(1, 8))]
        parts = dice.randint(1, len(seconds))
        sizes = balance_stages(seconds, parts)
        assert len(sizes) == parts
        assert min(sizes) >= 1
        assert sum(sizes) == len(seconds)
        assert slowest(seconds, sizes) == pytest.approx(best(seconds, parts))


def slowest(seconds: Sequence[float], sizes: Sequence[int]) -> float:
    ends = list(itertools.accumulate(sizes))
    return max(sum(seconds[end - size : end]) for size, end in zip(sizes, ends, strict=True))


def best(seconds: Sequence[float], parts: int) -> float:
    """Try all."""
    found = math.inf
    for cuts in itertools.combinations(range(1, len(seconds)), parts - 1):
        edges = [0, *cuts, len(seconds)]
        found = min(found, slowest(seconds, [end - start for start, end in itertools.pairwise(edges)]))
    return found


def test_shapes_grow_with_samples() -> None:
    flat = TensorShape.of(torch.empty(8 * 5, 3), torch.empty(7 * 5, 3), 8)
    assert flat.at(8) == (40, 3)
    assert flat.at(2) == (10, 3)
    assert flat.samples_of(torch.empty(15, 3)) == 3
    late = TensorShape.of(torch.empty(5, 8), torch.empty(5, 7), 8)
    assert late.at(1) == (5, 1)


class Parts(Small):
    def __init__(self, *links: str) -> None:
        super().__init__(1)
        self.links = links

    def pipeline(self, model: nn.Module, stages: int) -> Sequence[nn.Module]:  # noqa: ARG002
        return [model.get_submodule(link) if link else nn.Linear(1, 1) for link in self.links]


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        (["embedding", "head"], "pipeline() leaves out blocks.0.norm_1.weight"),
        (["embedding"], "pipeline() returned 1 modules, and there are 2 stages"),
        (["embedding", "blocks", "head", ""], "parameters that are not the model's"),
    ],
)
def test_a_chain_must_be_the_whole_model(links: list[str], expected: str) -> None:
    task = Parts(*links)
    with pytest.raises(TaskError, match=re.escape(expected)):
        chain_of(task, task.model(), 2)


def test_a_parameter_at_the_root_belongs_to_no_link() -> None:
    task = Small(1)
    model = task.model()
    model.positions = nn.Parameter(torch.zeros(3))
    with pytest.raises(TaskError, match="leaves out positions: each parameter of the model must belong to a module"):
        chain_of(task, model, 2)


def test_tied_weights_are_refused_where_they_are_apart() -> None:
    task = Tied(1)
    model = task.model()
    links = chain_of(task, model, 2)
    with pytest.raises(TaskError, match=r"stages 0 and 1 share the parameter embedding\.tokens\.weight"):
        split_chain(links, [3, 3], model)


class Asks(Small):
    """Has a loss that does what a test says."""

    def __init__(self, loss: Any) -> None:
        super().__init__(1)
        self._loss = loss

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self._loss(model, batch)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda model, batch: model(inputs=batch).mean(), "calls the model with inputs by name"),
        (lambda model, batch: model(batch, None).mean(), "has a NoneType in place 2"),
        (lambda model, batch: batch.mean(), "does not call the model"),
    ],
)
def test_a_pipeline_takes_tensors_by_position(loss: Any, expected: str) -> None:
    with pytest.raises(TaskError, match=expected):
        capture_model_inputs(Asks(loss), torch.ones(2, 3), training=True)


def test_a_loss_cannot_look_into_a_model_that_is_elsewhere() -> None:
    with pytest.raises(AttributeError, match=r"a loss can only call the model: there is no model\.head"):
        capture_model_inputs(Asks(lambda model, batch: model.head(batch)), torch.ones(2, 3), training=True)


def test_a_loss_gets_what_the_pipeline_returned_once() -> None:
    batch = torch.ones(2, 3)
    task = Asks(lambda model, batch: model(batch).mean() + (0 if model.training else 1))
    output = torch.full((2,), 4.0, requires_grad=True)
    assert loss_from_output(task, output, batch, training=True).item() == 4
    assert loss_from_output(task, output, batch, training=False).item() == 5
    with pytest.raises(TaskError, match=r"loss\(\) calls the model twice"):
        loss_from_output(
            Asks(lambda model, batch: model(batch).mean() + model(batch).mean()), output, batch, training=True
        )


def test_metrics_must_ask_what_the_loss_asks() -> None:
    task, batch = Small(1), torch.randint(16, (2, 9))
    scores = torch.randn(2, 8, 16)
    found = metrics_from_output(task, scores, (batch[:, :-1],), batch, 2)
    assert found["accuracy"].shape == (2,)
    with pytest.raises(TaskError, match=r"metrics\(\) calls the model with other inputs than loss\(\) does"):
        metrics_from_output(task, scores, (batch[:, 1:],), batch, 2)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("task", "train", "expected"),
    [
        (Twice, job(pipeline=2), "loss() calls the model twice"),
        (Tied, job(pipeline=2), "(tied weights)"),
        (Growing, job(pipeline=2), "pad them to one length in collate()"),
        (Small, job(1, pipeline=2), "1f1b with 2 stages needs accumulate 2 or more, and it is 1"),
        (Small, job(3, pipeline=2, schedule="interleaved"), "interleaved needs an accumulate that 2 divides"),
        (Small, job(pipeline=2, static_graph=True), "train.parallel.static_graph: it does not work with a pipeline"),
        (Small, job(8, pipeline=8, schedule="gpipe"), "pipeline() returned 6 modules, and there are 8 stages"),
    ],
    ids=["twice", "tied", "growing", "few", "uneven", "static", "short"],
)
def test_what_does_not_fit_is_told(task: type[Small], train: TrainConfig, expected: str, tmp_path: Path) -> None:
    outcome = losses(replace(train, steps=3), train.parallel.pipeline, tmp_path, task=task)
    assert outcome.reason is not None
    assert expected in outcome.reason
