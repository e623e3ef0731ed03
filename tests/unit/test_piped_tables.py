"""What scripts read in a pipe: every column, every row and every digit, whatever a terminal shows."""

from datetime import UTC, datetime

import pytest

from cloudtrain.console.metrics import print_comparison
from cloudtrain.console.tables import Column, table_lines
from cloudtrain.controllers.budget import Budget
from cloudtrain.features.costs.output import print_costs
from cloudtrain.features.costs.sums import RunCost, sum_costs
from cloudtrain.features.evaluation.output import print_ranking
from cloudtrain.features.sweeps.output import print_sweep, print_sweep_plan, print_trial
from cloudtrain.features.sweeps.planning import SweepPlan
from cloudtrain.features.sweeps.results import SweepState, SweepStatus, describe_trial
from cloudtrain.features.sweeps.trial import Trial, TrialState
from cloudtrain.runs.billing import Billing
from cloudtrain.runs.comparison import ComparedMetric, ComparedSetting, Comparison
from cloudtrain.runs.evaluations import EvaluatedSplit, Evaluation, Measurement, rank_evaluations

RUNS = ("local:digits-261125-223727-71810a", "local:digits-261125-223800-82921b")


def test_a_column_can_be_kept_without_any_value() -> None:
    columns = (Column("a"), Column("b", keep="both"), Column("c", keep="pipe"))
    assert table_lines(columns, [("1", "", "")], None) == ["a  b  c", "1"]
    assert table_lines(columns, [("1", "", "")], 80) == ["A  B", "1"]


@pytest.mark.parametrize("width", [None, 80])
def test_compare_keeps_a_run_without_values(
    width: int | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloudtrain.console.metrics.terminal_width", lambda: width)
    monkeypatch.setattr("cloudtrain.console.tables.terminal_width", lambda: width)
    settings = (ComparedSetting("train.learning_rate", (0.1, None)),)
    metrics = (ComparedMetric("train/loss", (0.5, None), (0.5, None), None),)
    print_comparison(Comparison(RUNS, settings, metrics))
    header = capsys.readouterr().out.splitlines()[0]
    expected = [run.partition(":")[2] if width is None else run[-6:] for run in RUNS]
    assert header.split() == expected
    print_comparison(Comparison(RUNS, (), ()))
    assert capsys.readouterr().out.split() == expected


def test_a_ranking_has_all_columns(capsys: pytest.CaptureFixture[str]) -> None:
    split = EvaluatedSplit(100, {"loss": Measurement(0.5)}, {})
    made = datetime(2026, 11, 25, tzinfo=UTC)
    found = [Evaluation(f"{run}-evaluation", run, made, {"test": split}) for run in RUNS]
    print_ranking(rank_evaluations(found))
    header, first, _ = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "step", "test/loss"]
    assert first.split()[0] == "1"


TRIAL = Trial(
    0,
    {"train.learning_rate": 0.00123456789},
    state=TrialState.SUCCEEDED,
    run=RUNS[0].partition(":")[2],
    objective=2696.123456,
)
SWEEP = SweepStatus(
    sweep="rates-261125-223727-71810a",
    state=SweepState.SUCCEEDED,
    reason="",
    engine="optuna",
    backend="local",
    metric="validation/loss",
    is_maximized=False,
    trials=(TRIAL,),
    planned_trials=1,
    budget=Budget.of(None, (TRIAL,)),
)


def test_a_pipe_gets_numbers_without_separators(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = (ComparedMetric("train/loss", (0.5,) * 2, (2696.123456, 0.123456), 1),)
    print_comparison(Comparison(RUNS, (), metrics))
    assert capsys.readouterr().out.splitlines()[1].split() == ["train/loss", "2696.12", "0.123456*"]


def test_a_sweep_has_six_digits_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_sweep(SWEEP)
    facts, table = capsys.readouterr().out.split("\n\n")
    assert "best    trial 0, validation/loss 2696.12, learning_rate=0.00123457" in facts
    assert "SUCCEEDED  2696.12    learning_rate=0.00123457" in table
    assert describe_trial(TRIAL).startswith("trial 0 SUCCEEDED, objective 2696.12 (learning_rate=")
    print_trial(SWEEP.sweep, TRIAL)
    lines = capsys.readouterr().out.splitlines()
    assert "objective  2696.12" in lines
    assert "values     train.learning_rate: 0.00123456789" in lines


def test_a_sweep_has_four_digits_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloudtrain.features.sweeps.output.is_terminal", lambda: True)
    monkeypatch.setattr("cloudtrain.console.tables.terminal_width", lambda: 80)
    print_sweep(SWEEP)
    facts, table = capsys.readouterr().out.split("\n\n")
    assert "best    trial 0, validation/loss 2,696, learning_rate=0.001235" in facts
    assert "SUCCEEDED  2,696" in table
    print_trial(SWEEP.sweep, TRIAL)
    assert "objective  2,696" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("ceiling", [0.0, None, 12.0])
def test_rungs_follow_the_trials(ceiling: float | None, capsys: pytest.CaptureFixture[str]) -> None:
    plan = SweepPlan(
        name="rates",
        strategy="hyperband",
        engine="optuna",
        space={"train.learning_rate": "0.1 to 1"},
        trials=9,
        parallel=2,
        trial_usd=(0.0, 0.0),
        ceiling_usd=ceiling,
        budget_usd=None,
        lengths=(2, 6),
        planned=4,
        refused=0,
        warnings=(),
        digest="",
    )
    print_sweep_plan(plan, "sagemaker")
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    limit = [] if ceiling == 0 else ["limit"]
    assert names == ["sweep", "space", "trials", "rungs", "price", *limit, "planned"]


@pytest.mark.parametrize(
    ("by", "terminal", "rows"),
    [("user", False, 2), ("name", False, 0), ("user", True, 0)],
)
def test_a_pipe_gets_the_groups_of_local_runs(
    by: str,
    terminal: bool,
    rows: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cloudtrain.features.costs.output.is_terminal", lambda: terminal)
    run = RunCost(RUNS[0], "SUCCEEDED", None, Billing(), group="ada", machine_seconds=60.0)
    print_costs(sum_costs([run], by))
    *table, sentence = capsys.readouterr().out.splitlines()
    assert sentence == "1 local run, 1m on this machine: nothing was billed"
    assert [line.split()[0] for line in table] == [by, "ada"][:rows]
