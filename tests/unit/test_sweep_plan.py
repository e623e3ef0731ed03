"""The plan of a sweep: mistakes in the space, price per trial, ceiling, and samples that are refused."""

from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES

from cloudtrain import SpecError
from cloudtrain.features.sweeps import service
from cloudtrain.features.sweeps.loader import LoadedSweep, load_sweep
from cloudtrain.features.sweeps.planning import SweepPlan

pytest.importorskip("optuna")

FILE = f"""\
job: {EXAMPLES / "digits" / "job.yaml"}
space:
  train.learning_rate: {{log_uniform: [1e-4, 1e-2]}}
  train.batch_size: {{choice: [8, 16]}}
objective: validation/loss
trials: 8
parallel: 4
"""


def loaded(folder: Path, text: str) -> LoadedSweep:
    (folder / "sweep.yaml").write_text(text)
    return load_sweep(folder / "sweep.yaml")


def planned(folder: Path, text: str, **options: Any) -> SweepPlan:
    return service.plan(loaded(folder, text), **options)


def problems_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(SpecError) as error:
        planned(folder, text)
    return [str(problem).replace(f"{folder}/", "") for problem in error.value.problems]


def test_a_plan_has_the_price_per_trial_and_the_ceiling(tmp_path: Path) -> None:
    plan = planned(tmp_path, FILE)
    assert plan.trial_usd is not None
    low, high = plan.trial_usd
    assert low == high > 0
    assert plan.ceiling_usd == pytest.approx(8 * high)
    assert (plan.trials, plan.parallel, plan.planned, plan.refused) == (8, 4, 4 + 200, 0)
    assert plan.space["train.learning_rate"] == "0.0001 to 0.01, logarithmic"
    assert planned(tmp_path, FILE, backend="local").ceiling_usd == 0.0


def test_a_budget_bounds_the_ceiling_and_warns(tmp_path: Path) -> None:
    plan = planned(tmp_path, f"{FILE}limits: {{cost: 60 USD}}\n")
    assert plan.ceiling_usd == 60.0
    assert plan.warnings[0] == "limits.cost pays for 2 of 4 trials at the same time"
    assert plan.warnings[1].startswith("limits.cost is certain to pay for 2 of 8 trials")


def test_a_budget_below_one_trial_is_refused(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, f"{FILE}limits: {{cost: 5 USD}}\n")
    assert problem.startswith("sweep.yaml:8:16  limits.cost: a trial reserves ")
    assert "raise it to" in problem


def test_a_value_that_the_plan_refuses_has_its_place(tmp_path: Path) -> None:
    text = (
        FILE.replace("[8, 16]", "[8, zero, 16]")
        .replace("[1e-4", "[0")
        .replace("log_uniform", "uniform")
    )
    first, second = problems_of(tmp_path, text)
    assert first.startswith("sweep.yaml:3:35  train.learning_rate: expected more than 0, got 0")
    assert second.startswith('sweep.yaml:4:34  train.batch_size: expected an integer, got "zero"')


def test_an_unknown_field_names_the_nearest_one(tmp_path: Path) -> None:
    (found,) = problems_of(tmp_path, FILE.replace("train.batch_size", "train.batchsize"))
    assert found.startswith("sweep.yaml:4:")
    assert 'did you mean "batch_size"?' in found


def test_refused_combinations_are_a_warning(tmp_path: Path) -> None:
    text = FILE.replace(
        "train.batch_size: {choice: [8, 16]}", "train.steps: {int: [10, 30]}\n  " + WARMUP
    )
    job = (EXAMPLES / "digits" / "job.yaml").read_text().replace("epochs: 12", "steps: 30")
    (tmp_path / "job.yaml").write_text(
        job.replace("{task: digits:Digits}", f"{{directory: {DIGITS}, task: {TASK}}}")
    )
    plan = planned(
        tmp_path, text.replace(str(EXAMPLES / "digits" / "job.yaml"), "job.yaml"), backend="local"
    )
    assert 0 < plan.refused < 200
    assert plan.warnings[0].startswith(
        f"the plan refuses {plan.refused} of 200 samples, such as train.warmup: "
    )


TRAINING_PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/november"
WARMUP = "train.warmup: {choice: [5 steps, 20 steps]}"
DIGITS, TASK = EXAMPLES / "digits", '"digits:Digits"'


def test_a_grid_has_all_combinations_or_some_at_random(tmp_path: Path) -> None:
    text = (
        FILE.replace("log_uniform: [1e-4, 1e-2]", "choice: [1e-4, 1e-3, 1e-2]") + "strategy: grid\n"
    )
    assert planned(tmp_path, text.replace("trials: 8\n", ""), backend="local").trials == 6
    assert planned(tmp_path, text, backend="local").trials == 6
    assert planned(tmp_path, text.replace("trials: 8", "trials: 4"), backend="local").trials == 4


@pytest.mark.parametrize("strategy", ["random", "bayesian", "grid"])
def test_a_space_with_fewer_combinations_says_so(tmp_path: Path, strategy: str) -> None:
    space = "train.batch_size: {choice: [8, 16, 32]}"
    text = FILE.replace("  train.batch_size: {choice: [8, 16]}\n", "").replace(
        "train.learning_rate: {log_uniform: [1e-4, 1e-2]}", space
    )
    plan = planned(tmp_path, f"{text}strategy: {strategy}\n")
    assert plan.trials == 3
    assert plan.warnings == ("3 combinations, 8 trials asked: 3 will run",)
    assert plan.trial_usd is not None
    assert plan.ceiling_usd == pytest.approx(3 * plan.trial_usd[1])
    assert planned(tmp_path, text.replace("trials: 8", "trials: 3")).warnings == ()
    by_sagemaker = planned(tmp_path, f"{text}engine: sagemaker\nstrategy: random\n")
    assert (by_sagemaker.trials, by_sagemaker.warnings) == (8, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.batch_size", ""),
        ("train.epochs", "hyperband needs the same value in all trials"),
        ("tags.team", "a sweep needs this field to find its runs"),
    ],
)
def test_hyperband_needs_equal_lengths(change: str, message: str, tmp_path: Path) -> None:
    text = FILE.replace("train.batch_size", change) + "strategy: hyperband\n"
    if message:
        assert message in problems_of(tmp_path, text)[0]
    else:
        assert planned(tmp_path, text).lengths == (2, 6, 12)


@pytest.mark.parametrize(
    ("cluster", "limit", "said"),
    [
        (
            "{instance_type: ml.p6-b200.48xlarge}",
            "60 USD",
            "no price is known for an instance type",
        ),
        (
            "{prefer: [ml.p4d.24xlarge, ml.p4de.24xlarge]}",
            "60 USD",
            "no price is known for an instance type",
        ),
        (
            f"{{instance_type: ml.p5.48xlarge, training_plan: '{TRAINING_PLAN}'}}",
            "60 USD",
            "trials",
        ),
        (f"{{instance_type: ml.p5.48xlarge, training_plan: '{TRAINING_PLAN}'}}", "", ""),
    ],
)
def test_a_budget_needs_prices_that_bound_it(
    cluster: str, limit: str, said: str, tmp_path: Path
) -> None:
    job = (EXAMPLES / "digits" / "job.yaml").read_text()
    job = job.replace("cluster:\n  instance_type: ml.p4d.24xlarge", f"cluster: {cluster}")
    (tmp_path / "job.yaml").write_text(
        job.replace("{task: digits:Digits}", f"{{directory: {DIGITS}, task: {TASK}}}")
    )
    text = FILE.replace(str(EXAMPLES / "digits" / "job.yaml"), "job.yaml")
    text += f"limits: {{cost: {limit}}}\n" if limit else ""
    if said.startswith("no price"):
        assert said in problems_of(tmp_path, text)[0]
        return
    warnings = planned(tmp_path, text).warnings
    found = [each for each in warnings if each.startswith("limits.cost does not limit")]
    assert bool(found) == bool(said)
