"""What a study proposes: no combination of values twice, whichever process asks."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.features.sweeps.loader import make_sweep
from cloudtrain.features.sweeps.space import point_of
from cloudtrain.features.sweeps.stored_sweep import StoredSweep
from cloudtrain.features.sweeps.study import Study
from cloudtrain.features.sweeps.trial import Trial, TrialState
from cloudtrain.job.spec import JobSpec

pytest.importorskip("optuna")

SPACE = {
    "code.args.rate": {"choice": [0.1, 0.2]},
    "code.args.width": {"int": [8, 16], "step": 4},
}
COMBINATIONS = 2 * 3


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., StoredSweep]:
    """Return a function that creates a sweep."""
    (tmp_path / "train.py").write_text("")
    job = JobSpec.model_validate(
        {
            "name": "searched",
            "code": {"script": "train.py", "directory": str(tmp_path)},
            "cluster": {"instance_type": "ml.m5.large"},
        }
    )

    def create(strategy: str, space: dict[str, Any] = SPACE) -> StoredSweep:
        fields = {"space": space, "objective": "validation/loss", "strategy": strategy, "trials": 9}
        home = tmp_path / f"home-{strategy}"
        return StoredSweep.create(home, make_sweep(job, fields), "local", ("a" * 64, 0.0, 9))

    return create


def run_all(stored: StoredSweep, *, is_killed: bool) -> list[Trial]:
    """Run trials until none is proposed, each in a process of its own, which may die after its proposal."""
    while True:
        with contextlib.closing(Study(stored)) as study:
            if is_killed:
                study.propose()
        with contextlib.closing(Study(stored)) as study:
            trial = study.propose()
            if trial is None:
                return study.trials()
            objective = abs(trial.values["code.args.rate"] - 0.2) + trial.values["code.args.width"]
            study.save(dataclasses.replace(trial, state=TrialState.SUCCEEDED, objective=objective))


@pytest.mark.parametrize("strategy", ["random", "bayesian", "grid"])
def test_each_combination_is_proposed_once(
    store: Callable[..., StoredSweep], strategy: str, tmp_path: Path
) -> None:
    trials = run_all(store(strategy), is_killed=False)
    assert [each.number for each in trials] == list(range(COMBINATIONS))
    assert len({point_of(each.values) for each in trials}) == COMBINATIONS
    (tmp_path / f"home-{strategy}").rename(tmp_path / "first")
    killed = run_all(store(strategy), is_killed=True)
    assert [each.values for each in killed] == [each.values for each in trials]


def test_an_active_trial_is_not_proposed_again(store: Callable[..., StoredSweep]) -> None:
    with contextlib.closing(
        Study(store("bayesian", {"code.args.rate": SPACE["code.args.rate"]}))
    ) as study:
        first = study.propose()
        assert first is not None
        study.save(dataclasses.replace(first, state=TrialState.RUNNING))
        second = study.propose()
        assert second is not None
        study.save(dataclasses.replace(second, state=TrialState.FAILED))
        assert {first.values["code.args.rate"], second.values["code.args.rate"]} == {0.1, 0.2}
        assert study.propose() is None


@pytest.mark.parametrize("strategy", ["random", "bayesian", "grid"])
def test_a_proposal_is_one_transaction(store: Callable[..., StoredSweep], strategy: str) -> None:
    """Each transaction waits for the disk, and meanwhile the controller starts nothing."""
    stored = store(strategy)
    with contextlib.closing(Study(stored)) as study:
        before = transactions_of(stored.database)
        assert study.propose() is not None
        assert transactions_of(stored.database) == before + 1


@pytest.mark.parametrize("strategy", ["random", "grid"])
@pytest.mark.parametrize(
    "values",
    [
        {"uniform": [1e-6, 2e-5], "step": 1.2345678e-6},
        {"uniform": [0, 1], "step": 1 / 3},
        {"uniform": [1e-7, 1e-5], "step": 1e-6 / 3},
    ],
    ids=str,
)
def test_a_step_of_many_digits_is_proposed(
    store: Callable[..., StoredSweep], strategy: str, values: dict[str, Any]
) -> None:
    """The rounded value is no exact multiple of the step."""
    stored = store(strategy, {"code.args.rate": values})
    with contextlib.closing(Study(stored)) as study:
        rates = []
        while len(rates) < 4 and (trial := study.propose()) is not None:
            rates.append(trial.values["code.args.rate"])
            study.save(dataclasses.replace(trial, state=TrialState.FAILED))
    assert len(set(rates)) == len(rates) == 4


def transactions_of(database: Path) -> int:
    """Return how many transactions have changed a file of SQLite, by its header (sqlite.org/fileformat.html, 1.3.7)."""
    return int.from_bytes(database.read_bytes()[24:28], "big")
