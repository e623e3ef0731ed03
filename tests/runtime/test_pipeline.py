"""Pipeline parallelism: how a model is split into stages, and what a pipeline computes, saves and rejects."""

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
    BLOCKS,
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
from support.sizes import combinations
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
from cloudtrain_runtime.distributed.model_proxy import OutputProxy, capture_model_inputs
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.task import checked_loss, checked_metrics

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
SAMPLES = 3 * 16 + 7
"""Samples of an epoch: three full steps, and one step of 7 samples with fewer and smaller micro-batches."""


def job(accumulate: int = 4, **parallel: Any) -> TrainConfig:
    return replace(TRAIN, accumulate=accumulate, parallel=ParallelConfig(**parallel))


def has_losses(outcome: Outcome, expected: Sequence[float]) -> bool:
    assert outcome.reason is None, outcome.text
    return outcome.losses == pytest.approx(expected, rel=SIX_DIGITS)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The outcome of a single process."""
    outcome = losses(
        job(), 1, tmp_path_factory.mktemp("single"), samples=SAMPLES, dtype=torch.float64
    )
    assert len(outcome.losses) == 20
    assert outcome.losses[-1] < 0.6 * outcome.losses[0]
    return outcome


@pytest.mark.processes
@pytest.mark.parametrize(
    ("schedule", "data"), combinations(SCHEDULES, ("pipeline alone", "ddp", "fsdp"))
)
def test_a_pipeline_gives_the_losses_of_one_process(
    schedule: str, data: str, single: Outcome, tmp_path: Path
) -> None:
    ranks, parallel = (2, {}) if data == "pipeline alone" else (4, {"data": data})
    accumulate = 2 if "data" in parallel else 4
    train = job(accumulate, pipeline=2, schedule=schedule, **parallel)
    outcome = losses(train, ranks, tmp_path, samples=SAMPLES, dtype=torch.float64)
    assert has_losses(outcome, single.losses)
    assert outcome.grad_norms == pytest.approx(single.grad_norms, rel=SIX_DIGITS)
    assert outcome.weights is not None
    assert single.weights is not None
    assert set(outcome.weights) == set(single.weights)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "accumulate", "parallel"),
    [
        (4, 4, {"pipeline": 4}),
        (4, 6, {"pipeline": 4}),
        (4, 3, {"pipeline": 2, "schedule": "gpipe"}),
        (8, 2, {"pipeline": 2, "tensor": 2, "data": "fsdp", "schedule": "zero_bubble"}),
    ],
    ids=["four stages", "six micro-batches", "three micro-batches", "all dimensions"],
)
def test_other_sizes_give_the_losses_of_one_process(
    ranks: int, accumulate: int, parallel: Mapping[str, Any], tmp_path: Path
) -> None:
    train = replace(job(accumulate, **parallel), steps=8)
    data_ranks = ranks // train.parallel.group_size
    one_process = replace(job(accumulate * data_ranks), steps=8)
    expected = losses(one_process, 1, tmp_path / "single", samples=67, dtype=torch.float64)
    outcome = losses(train, ranks, tmp_path / "pipeline", samples=67, dtype=torch.float64)
    assert has_losses(outcome, expected.losses)


@pytest.mark.processes
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_gives_the_same_losses(precision: str, tmp_path: Path) -> None:
    options = {"precision": precision, "steps": 8, "learning_rate": 0.3}
    single = losses(replace(job(), **options), 1, tmp_path / "single", task=Steady)  # type: ignore[arg-type]
    pipeline = replace(job(pipeline=2), **options)  # type: ignore[arg-type]
    outcome = losses(pipeline, 2, tmp_path / "pipeline", task=Steady)
    assert outcome.losses == pytest.approx(
        single.losses, rel=torch.finfo(PRECISIONS[precision]).eps
    )


@pytest.mark.processes
def test_modules_exchange_tensors_of_any_shape_unpadded(single: Outcome, tmp_path: Path) -> None:
    for schedule in ("1f1b", "interleaved"):
        train = job(pipeline=2, schedule=schedule)
        outcome = losses(
            train, 2, tmp_path / schedule, samples=SAMPLES, task=Twisted, dtype=torch.float64
        )
        assert has_losses(outcome, single.losses)


@pytest.mark.processes
def test_time_in_pipeline_stages_is_not_data_time(tmp_path: Path) -> None:
    outcome = losses(replace(job(pipeline=2), steps=4), 2, tmp_path)
    steps = [event for event in outcome.events if event["event"] == "step"]
    assert steps, outcome.text
    assert sum(step["split"]["backward"] for step in steps) > sum(
        step["split"]["data"] for step in steps
    )


@pytest.mark.processes
def test_evaluation_of_a_pipeline_matches_one_process(tmp_path: Path) -> None:
    def evaluate(train: TrainConfig, ranks: int, name: str) -> list[float]:
        train = replace(train, steps=6)
        outcome = losses(
            train, ranks, tmp_path / name, arguments={"validates": 21}, dtype=torch.float64
        )
        assert outcome.reason is None, outcome.text
        found = [event for event in outcome.events if event["event"] == "evaluation"]
        assert [event["step"] for event in found] == [3, 6]
        return [event[name] for event in found for name in ("loss", "accuracy")]

    expected = evaluate(replace(job(), evaluate_every_steps=3), 1, "single")
    for number, (ranks, accumulate, parallel) in enumerate(
        [(2, 4, {"schedule": "interleaved"}), (4, 2, {}), (4, 2, {"data": "fsdp"})]
    ):
        train = replace(job(accumulate, pipeline=2, **parallel), evaluate_every_steps=3)
        assert evaluate(train, ranks, str(number)) == pytest.approx(expected, rel=SIX_DIGITS)


def saving(folder: Path) -> CheckpointConfig:
    return CheckpointConfig(folder.as_uri(), None, 5, 9, "auto")


@pytest.mark.processes
def test_resumed_pipeline_is_bit_exact_and_keeps_its_stages(tmp_path: Path) -> None:
    train, noisy = replace(job(pipeline=2), steps=10), {"dropout": 0.2}
    uninterrupted = losses(train, 2, tmp_path / "uninterrupted", arguments=noisy, task=Grouped)
    half = losses(
        replace(train, steps=5),
        2,
        tmp_path / "half",
        checkpoint=saving(tmp_path / "saved"),
        arguments=noisy,
        task=Grouped,
    )
    assert half.reason is None, half.text
    rest = losses(
        train,
        2,
        tmp_path / "rest",
        checkpoint=saving(tmp_path / "saved"),
        arguments=noisy,
        task=Grouped,
    )
    assert rest.reason is None, rest.text
    assert links(rest) == links(half)
    assert rest.losses == uninterrupted.losses[5:]
    assert uninterrupted.weights is not None
    assert rest.weights is not None
    assert all(
        torch.equal(value, rest.weights[name]) for name, value in uninterrupted.weights.items()
    )


def links(outcome: Outcome) -> list[int]:
    return next(event["links"] for event in outcome.events if event["event"] == "pipeline")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Checkpoints of five steps in several layouts, and the losses of ten steps of one process."""
    folder = tmp_path_factory.mktemp("saved")
    for name, (ranks, train) in LAYOUTS.items():
        uri = saving(folder / f"{name}-saved")
        first = replace(train, steps=5)
        half = losses(
            first, ranks, folder / name, checkpoint=uri, task=Grouped, dtype=torch.float64
        )
        assert half.reason is None, half.text
    single = losses(
        replace(job(), steps=10), 1, folder / "single", task=Grouped, dtype=torch.float64
    )
    return folder, single.losses


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
def test_a_checkpoint_resumes_in_any_layout(
    before: str, after: str, saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder, expected = saved
    shutil.copytree(folder / f"{before}-saved", tmp_path / "saved")
    ranks, train = LAYOUTS[after]
    train = replace(train, steps=10)
    uri = saving(tmp_path / "saved")
    rest = losses(
        train, ranks, tmp_path / "rest", checkpoint=uri, task=Grouped, dtype=torch.float64
    )
    assert has_losses(rest, expected[5:])


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
def test_a_checkpoint_of_another_last_stage_is_rejected(
    saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder, _ = saved
    shutil.copytree(folder / "pipeline-saved", tmp_path / "saved")
    uri = saving(tmp_path / "saved")
    other = losses(
        job(pipeline=2), 2, tmp_path / "rest", checkpoint=uri, task=Biased, dtype=torch.float64
    )
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
    assert started["parameters"] == sum(
        parameter.numel() for parameter in Small(1).model().parameters()
    )


def test_dropped_stages_keep_their_attribute_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2), "b": nn.Linear(2, 2)})
    first, second = split_chain([model["a"], model["norm"], model["b"]], [1, 2], model)
    drop_other_stages(model, [first], [second])
    assert list(model.state_dict()) == ["a.weight", "a.bias"]
    assert model["b"].weight is None
    assert model["norm"].running_mean is None


def test_stages_are_cut_where_the_slowest_is_fastest() -> None:
    generator = random.Random(1)  # noqa: S311
    for _ in range(200):
        seconds = [
            generator.choice([0.0, generator.random()]) for _ in range(generator.randint(1, 8))
        ]
        parts = generator.randint(1, len(seconds))
        sizes = balance_stages(seconds, parts)
        assert len(sizes) == parts
        assert min(sizes) >= 1
        assert sum(sizes) == len(seconds)
        assert slowest(seconds, sizes) == pytest.approx(best_of_all_cuts(seconds, parts))


def slowest(seconds: Sequence[float], sizes: Sequence[int]) -> float:
    ends = list(itertools.accumulate(sizes))
    return max(sum(seconds[end - size : end]) for size, end in zip(sizes, ends, strict=True))


def best_of_all_cuts(seconds: Sequence[float], parts: int) -> float:
    """Return the time of the slowest part for the best of all possible cuts."""
    found = math.inf
    for cuts in itertools.combinations(range(1, len(seconds)), parts - 1):
        edges = [0, *cuts, len(seconds)]
        found = min(
            found, slowest(seconds, [end - start for start, end in itertools.pairwise(edges)])
        )
    return found


def test_shapes_scale_with_the_number_of_samples() -> None:
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
def test_a_pipeline_must_contain_the_whole_model(links: list[str], expected: str) -> None:
    task = Parts(*links)
    with pytest.raises(TaskError, match=re.escape(expected)):
        chain_of(task, task.model(), 2)


def test_a_parameter_of_the_root_module_is_rejected() -> None:
    task = Small(1)
    model = task.model()
    model.positions = nn.Parameter(torch.zeros(3))
    with pytest.raises(
        TaskError, match="leaves out positions: each parameter of the model must belong to a module"
    ):
        chain_of(task, model, 2)


def test_tied_weights_in_different_stages_are_rejected() -> None:
    task = Tied(1)
    model = task.model()
    links = chain_of(task, model, 2)
    with pytest.raises(
        TaskError, match=r"stages 0 and 1 share the parameter embedding\.tokens\.weight"
    ):
        split_chain(links, [3, 3], model)


class WithLoss(Small):
    """A task whose loss is the given function."""

    def __init__(self, function: Any) -> None:
        super().__init__(1)
        self.function = function

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self.function(model, batch)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda model, batch: model(inputs=batch).mean(), "calls the model with inputs by name"),
        (lambda model, batch: model(batch, None).mean(), "has a NoneType in place 2"),
        (lambda model, batch: batch.mean(), "does not call the model"),
    ],
)
def test_a_pipelined_model_takes_tensors_by_position(loss: Any, expected: str) -> None:
    with pytest.raises(TaskError, match=expected):
        capture_model_inputs(WithLoss(loss), torch.ones(2, 3), training=True)


def test_a_loss_cannot_access_submodules_of_a_pipeline() -> None:
    with pytest.raises(
        AttributeError, match=r"a loss can only call the model: there is no model\.head"
    ):
        capture_model_inputs(
            WithLoss(lambda model, batch: model.head(batch)), torch.ones(2, 3), training=True
        )


def test_a_loss_gets_the_output_of_the_pipeline_once() -> None:
    batch = torch.ones(2, 3)
    task = WithLoss(lambda model, batch: model(batch).mean() + (0 if model.training else 1))
    output = torch.full((2,), 4.0, requires_grad=True)
    assert checked_loss(task, OutputProxy(output), batch).value.item() == 4
    assert checked_loss(task, OutputProxy(output).eval(), batch).value.item() == 5
    twice = WithLoss(lambda model, batch: model(batch).mean() + model(batch).mean())
    with pytest.raises(TaskError, match=r"loss\(\) calls the model twice"):
        checked_loss(twice, OutputProxy(output), batch)


def test_metrics_must_call_the_model_as_the_loss_does() -> None:
    task, batch = Small(1), torch.randint(16, (2, 9))
    scores = torch.randn(2, 8, 16)
    found = checked_metrics(task, OutputProxy(scores, (batch[:, :-1],), "metrics"), batch, 2)
    assert found["accuracy"].shape == (2,)
    with pytest.raises(
        TaskError, match=r"metrics\(\) calls the model with other inputs than loss\(\) does"
    ):
        checked_metrics(task, OutputProxy(scores, (batch[:, 1:],), "metrics"), batch, 2)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("task", "train", "expected"),
    [
        (Twice, job(pipeline=2), "loss() calls the model twice"),
        (Tied, job(pipeline=2), "(tied weights)"),
        (Growing, job(pipeline=2), "pad them to one length in collate()"),
        (Small, job(1, pipeline=2), "1f1b with 2 stages needs accumulate 2 or more, and it is 1"),
        (
            Small,
            job(3, pipeline=2, schedule="interleaved"),
            "interleaved needs an accumulate that 2 divides",
        ),
        (
            Small,
            job(pipeline=2, static_graph=True),
            "train.parallel.static_graph: it does not work with a pipeline",
        ),
        (
            Small,
            job(8, pipeline=8, schedule="gpipe"),
            f"pipeline() returned {BLOCKS + 2} modules, and there are 8 stages",
        ),
    ],
    ids=["twice", "tied", "growing", "few", "uneven", "static", "short"],
)
def test_an_unsupported_pipeline_is_rejected_with_a_reason(
    task: type[Small], train: TrainConfig, expected: str, tmp_path: Path
) -> None:
    outcome = losses(replace(train, steps=3), train.parallel.pipeline, tmp_path, task=task)
    assert outcome.reason is not None
    assert expected in outcome.reason
