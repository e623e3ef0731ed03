"""Training on several ranks in every layout: evaluation, best weights, early stopping, gradients and options."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parallel_training import (
    SIX_DIGITS,
    TRAIN,
    Model,
    Outcome,
    Small,
    losses,
)
from support.training import (
    Broken,
    Classifier,
    Counted,
    Overflowing,
    Seen,
)

from cloudtrain_runtime.checkpoint.inspection import Inspection
from cloudtrain_runtime.contract import CheckpointConfig, EarlyStopping, ParallelConfig, TrainConfig

pytestmark = pytest.mark.processes

LAYOUTS = {
    "ddp": (2, ParallelConfig()),
    "ddp of 4": (4, ParallelConfig()),
    "fsdp": (2, ParallelConfig(data="fsdp")),
    "fsdp of 4": (4, ParallelConfig(data="fsdp")),
    "hybrid": (4, ParallelConfig(data="fsdp", shard=2)),
    "tensor": (2, ParallelConfig(tensor=2)),
    "fsdp x tensor": (4, ParallelConfig(data="fsdp", tensor=2)),
    "pipeline": (2, ParallelConfig(pipeline=2)),
    "pipeline x fsdp": (4, ParallelConfig(data="fsdp", pipeline=2)),
}
GLOBAL_BATCH = 16
"""Samples of a step, for any number of ranks."""


def job(ranks: int = 1, parallel: ParallelConfig | None = None, **changes: Any) -> TrainConfig:
    """Return a job whose steps have the same samples at any number of ranks."""
    parallel = parallel or ParallelConfig()
    data_ranks = ranks // parallel.tensor // parallel.pipeline
    # A pipeline needs as many micro-batches as it has stages.
    batch_size, accumulate = GLOBAL_BATCH // data_ranks // parallel.pipeline, parallel.pipeline
    train = replace(TRAIN, steps=6, batch_size=batch_size, accumulate=accumulate, parallel=parallel)
    return replace(train, **changes)


def saving(folder: Path, **changes: Any) -> CheckpointConfig:
    return replace(
        CheckpointConfig((folder / "checkpoints").as_uri(), None, None, 1, "auto"), **changes
    )


def evaluations(outcome: Outcome, split: str) -> list[dict[str, Any]]:
    assert outcome.reason is None, outcome.text
    return [
        event
        for event in outcome.events
        if event["event"] == "evaluation" and event["split"] == split
    ]


def metrics_of(outcome: Outcome, split: str) -> list[float]:
    return [
        value
        for event in evaluations(outcome, split)
        for value in (event["loss"], event["accuracy"])
    ]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The outcome of one process with 7 samples for validation and 3 for the test, each evaluated in one batch."""
    folder = tmp_path_factory.mktemp("single")
    train = job(evaluate_every_steps=2)
    return losses(
        train,
        1,
        folder,
        task=Classifier,
        arguments={"validates": 7, "tests": 3},
        dtype=torch.float64,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_norms_and_metrics_are_those_of_one_process(
    layout: str, single: Outcome, tmp_path: Path
) -> None:
    """With 4 data ranks the shares of an evaluation are uneven, and one rank has no test samples."""
    ranks, parallel = LAYOUTS[layout]
    train = job(ranks, parallel, evaluate_every_steps=2)
    arguments = {"validates": 7, "tests": 3}
    found = losses(
        train, ranks, tmp_path, task=Classifier, arguments=arguments, dtype=torch.float64
    )
    assert found.reason is None, found.text
    assert found.losses == pytest.approx(single.losses, rel=SIX_DIGITS)
    assert found.grad_norms == pytest.approx(single.grad_norms, rel=SIX_DIGITS)
    for split, samples, times in (("validation", 7, 3), ("test", 3, 1)):
        events = evaluations(found, split)
        assert [event["samples"] for event in events] == [samples] * times
        assert metrics_of(found, split) == pytest.approx(metrics_of(single, split), rel=SIX_DIGITS)
    analysis = json.loads((tmp_path / "model" / "analysis.json").read_text())
    assert sum(map(sum, analysis["confusion"])) == analysis["samples"] == 3
    assert analysis["confusion"] == confusion_of(single)


def confusion_of(single: Outcome) -> Any:
    """Return the confusion matrix of one process, computed from its weights."""
    model = Model(0.0).double()
    assert single.weights is not None
    model.load_state_dict(dict(single.weights))
    texts = Classifier(8, tests=3).datasets()["test"].texts  # type: ignore[attr-defined]
    matrix = torch.zeros(16, 16, dtype=torch.int64)
    with torch.no_grad():
        for true, predicted in zip(
            texts[:, 1], model.eval()(texts[:, :-1])[:, 0].argmax(-1), strict=True
        ):
            matrix[true, predicted] += 1
    return matrix.tolist()


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tensor", "pipeline"])
def test_evaluation_does_not_change_training(layout: str, tmp_path: Path) -> None:
    ranks, parallel = LAYOUTS[layout]
    train = job(ranks, parallel, steps=4)
    options = {"dropout": 0.3, "validates": 5}
    often = losses(
        replace(train, evaluate_every_steps=1),
        ranks,
        tmp_path / "a",
        task=Classifier,
        arguments=options,
    )
    never = losses(
        train, ranks, tmp_path / "b", task=Classifier, arguments={**options, "validates": 0}
    )
    assert len(evaluations(often, "validation")) == 4
    assert often.losses == never.losses
    assert often.grad_norms == never.grad_norms


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp x tensor", "pipeline x fsdp"])
def test_early_stopping_ends_all_ranks_after_a_resume(layout: str, tmp_path: Path) -> None:
    ranks, parallel = LAYOUTS[layout]
    rule = EarlyStopping("validation/accuracy", patience=2, min_delta=100.0, mode="max")
    train = job(ranks, parallel, steps=9, evaluate_every_steps=2, early_stopping=rule)
    options = {"arguments": {"validates": 5}, "checkpoint": saving(tmp_path)}
    first = losses(replace(train, steps=5), ranks, tmp_path, **options)  # type: ignore[arg-type]
    assert first.reason is None, first.text
    rest = losses(train, ranks, tmp_path, **options)  # type: ignore[arg-type]
    assert rest.reason is None, rest.text
    assert rest.events[-1]["step"] == 6, (
        "the first evaluation is the best, and two more do not improve on it"
    )
    assert len(rest.losses) == 1


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp x tensor", "pipeline x fsdp"])
def test_the_best_weights_are_exported(layout: str, tmp_path: Path) -> None:
    """A high learning rate makes an early evaluation the best, and the run is resumed after it."""
    ranks, parallel = LAYOUTS[layout]
    train = job(ranks, parallel, steps=10, evaluate_every_steps=2, export="best", learning_rate=3.0)
    options = {
        "task": Classifier,
        "arguments": {"validates": 7, "tests": 3},
        "checkpoint": saving(tmp_path, every_steps=1),
    }
    first = losses(replace(train, steps=7), ranks, tmp_path, **options)  # type: ignore[arg-type]
    assert first.reason is None, first.text
    found = losses(train, ranks, tmp_path, **options)  # type: ignore[arg-type]
    events = evaluations(first, "validation")[:3] + evaluations(found, "validation")
    best = min(events, key=lambda event: event["loss"])
    reported = [event for event in (*first.events, *found.events) if event["event"] == "best"]
    assert best["step"] < 10, "the learning rate is not high enough"
    assert (reported[-1]["step"], reported[-1]["metric"]) == (best["step"], "validation/loss")
    folders = {
        path.name for path in (tmp_path / "checkpoints").iterdir() if not path.name.startswith(".")
    }
    assert folders == {f"step-{best['step']:08d}", "step-00000010"}
    listed = {
        entry.step: entry.best for entry in Inspection((tmp_path / "checkpoints").as_uri()).entries
    }
    assert listed == {10: False, best["step"]: True}
    metrics = json.loads((tmp_path / "model" / "metrics.json").read_text())
    assert metrics["step"] == best["step"]
    assert metrics["validation"]["loss"] == pytest.approx(best["loss"], rel=1e-5)
    assert evaluations(found, "test")[-1]["step"] == best["step"]
    assert exported_loss(found) == pytest.approx(best["loss"], rel=1e-4)


def exported_loss(outcome: Outcome) -> float:
    model = Model(0.0)
    assert outcome.weights is not None
    model.load_state_dict(dict(outcome.weights))
    task = Classifier(8, validates=7)
    texts = task.datasets()["validation"].texts  # type: ignore[attr-defined]
    with torch.no_grad():
        return float(task.loss(model.eval(), texts))


def test_best_without_validation_is_rejected_before_training(tmp_path: Path) -> None:
    found = losses(job(2, export="best"), 2, tmp_path)
    assert found.reason is not None
    assert "train.export: best needs a validation split" in found.reason
    assert not found.losses


@pytest.mark.parametrize(("layout", "call"), [("ddp", "all-reduce"), ("fsdp", "reduce-scatter")])
def test_accumulated_gradients_are_sent_once(layout: str, call: str, tmp_path: Path) -> None:
    ranks, parallel = LAYOUTS[layout]
    sent = {}
    for accumulate in (1, 4):
        folder = tmp_path / str(accumulate)
        train = job(ranks, parallel, steps=3, batch_size=2, accumulate=accumulate)
        found = losses(train, ranks, folder, task=Counted, arguments={"folder": str(folder)})
        assert found.reason is None, found.text
        sent[accumulate] = [
            json.loads(line) for line in (folder / "sent-1").read_text().splitlines()
        ]
    assert len(sent[4]) == 3
    assert {*sent[1][-1], *sent[4][-1]} == {call}
    assert sent[4] == sent[1]


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tensor", "fsdp x tensor", "pipeline x fsdp"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout: str, tmp_path: Path) -> None:
    ranks, parallel = LAYOUTS[layout]
    train = job(ranks, parallel, steps=5, precision="fp16", skip_nonfinite=0)
    found = losses(train, ranks, tmp_path, task=Overflowing)
    assert found.reason is None, found.text
    skipped = [event["step"] for event in found.events if event["event"] == "skipped"]
    assert {1: 3, 2: 2}[train.accumulate] in skipped
    assert found.events[-1]["skipped"] == len(skipped)
    assert found.losses[-1] < found.losses[0]


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp x tensor", "pipeline x fsdp"])
def test_nonfinite_steps_are_skipped_until_the_run_ends(layout: str, tmp_path: Path) -> None:
    ranks, parallel = LAYOUTS[layout]
    train = job(ranks, parallel, steps=40, skip_nonfinite=1)
    options = {"task": Broken, "samples": 64, "checkpoint": saving(tmp_path)}
    once = losses(replace(train, steps=4), ranks, tmp_path, arguments={"bad": (0,)}, **options)  # type: ignore[arg-type]
    assert once.reason is None, once.text  # one of four steps contains the bad sample
    assert [event["event"] for event in once.events].count("skipped") == 1
    assert once.weights is not None
    assert all(bool(weight.isfinite().all()) for weight in once.weights.values())

    rest = losses(train, ranks, tmp_path, arguments={"bad": tuple(range(64))}, **options)  # type: ignore[arg-type]
    assert rest.reason is not None
    assert "not finite in 2 steps in a row" in rest.reason
    kept = sorted((tmp_path / "output" / "nonfinite").iterdir())
    loss_ranks = range(
        ranks - ranks // parallel.pipeline, ranks
    )  # a pipeline's last stage has the loss
    last = max(event["step"] for event in rest.events if event["event"] == "skipped")
    assert [path.name for path in kept] == [f"step-{last}-rank-{rank}.pt" for rank in loss_ranks]
    content = torch.load(kept[0], weights_only=True)
    assert content["step"] == last
    texts, indices = content["batches"][0]
    assert torch.equal(texts, Small(64).datasets()["train"].texts[indices])  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return losses(job(), 1, tmp_path_factory.mktemp("plain"), dtype=torch.float64)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("option", ["activation_checkpointing", "compile", "deterministic"])
def test_options_take_effect_and_do_not_change_losses(
    layout: str, option: str, plain: Outcome, tmp_path: Path
) -> None:
    if option == "compile" and torch.__version__ < "2.6":
        pytest.skip("torch 2.5 cannot compile attention in float64 for CPUs")
    ranks, parallel = LAYOUTS[layout]
    arguments = {"folder": str(tmp_path), "looks_inside": option != "compile"}
    train = job(ranks, parallel, **{option: True})
    found = losses(train, ranks, tmp_path, task=Seen, arguments=arguments, dtype=torch.float64)
    assert found.reason is None, found.text
    for rank in range(ranks):
        seen = json.loads((tmp_path / f"seen-{rank}").read_text())
        assert seen["compiled"] == (option == "compile")
        assert seen["deterministic"] == (option == "deterministic")
    assert found.losses == pytest.approx(plain.losses, rel=SIX_DIGITS)
