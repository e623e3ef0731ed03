"""What the dashboard shows of a sweep."""

import dataclasses
from pathlib import Path

import pytest
from support.recorded_sweeps import write_sweep

from cloudtrain.errors import RunNotFoundError
from cloudtrain.features.sweeps import service
from cloudtrain.features.sweeps.page_record import (
    importance_of,
    list_sweeps,
    sweep_document,
    sweep_row,
)
from cloudtrain.features.sweeps.space import Space
from cloudtrain.features.sweeps.stored_sweep import find_stored


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("optuna")
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "home"))
    return write_sweep(tmp_path / "home", tmp_path / "code")


def test_the_field_that_decides_is_the_most_important(sweep: str) -> None:
    stored = find_stored(sweep)
    status, space = service.read_status(stored), Space.of(stored.sweep.spec.space)
    values = [space.sample(0, number) for number in range(60)]
    trials = [
        dataclasses.replace(
            status.trials[0],
            number=number,
            values=each,
            objective=abs(each["code.args.rate"] - 0.3),
        )
        for number, each in enumerate(values)
    ]
    shares = importance_of(dataclasses.replace(status, trials=tuple(trials)), space)
    assert shares is not None
    assert max(shares, key=lambda path: shares[path]) == "code.args.rate"
    assert sum(shares.values()) == pytest.approx(1.0)


def test_the_best_trial_is_no_pruned_one(sweep: str) -> None:
    found = sweep_document(sweep)
    assert found["is_final"]
    assert found["best"]["objective"] == min(each["objective"] for each in found["trials"][:-1])


def test_choices_have_an_axis_of_labels(sweep: str) -> None:
    found = sweep_document(sweep)
    rate, optimizer, width = found["axes"]
    assert rate["values"] == [each["values"]["code.args.rate"] for each in found["trials"]]
    assert optimizer["labels"] == ["adam", "sgd"]
    chosen = [optimizer["labels"][place] for place in optimizer["values"]]
    assert chosen == [each["values"]["code.args.optimizer"] for each in found["trials"]]
    assert all(8 <= value <= 64 for value in width["values"])


def test_few_trials_have_no_importance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "home"))
    few = write_sweep(tmp_path / "home", tmp_path / "code", trials=4)
    assert sweep_document(few)["importance"] is None


def test_sweeps_are_listed_and_an_unknown_one_is_refused(sweep: str) -> None:
    assert sweep in list_sweeps()
    with pytest.raises(RunNotFoundError):
        sweep_document("absent")


def test_the_list_has_the_state_and_the_best_of_a_sweep(sweep: str) -> None:
    row = sweep_row(sweep)
    assert (row["sweep"], row["name"], row["state"]) == (sweep, "searched", "SUCCEEDED")
    assert row["is_final"]
    assert row["planned_trials"] == len(sweep_document(sweep)["trials"])
    assert row["best"] == sweep_document(sweep)["best"]["objective"]
    assert (row["metric"], row["is_maximized"]) == ("validation/loss", False)
