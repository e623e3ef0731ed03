"""The budget of a sweep holds, whatever its runs do; simulated without runs."""

import random

import pytest

from cloudtrain.controllers.budget import Budget
from cloudtrain.features.sweeps.trial import Trial, TrialState, settle

SWEEPS = 1000


def simulate(seed: int, *, most_use: float = 1.0) -> tuple[list[float], Budget, int]:
    """Return the real cost at each moment, the last budget, and the number of trials of a random sweep.

    Runs succeed, fail, are killed at once, or overrun their time limit up to the reserve, which is the rest of their
    reservation; the controller forgets everything but the records. `most_use` is what a run costs of its reservation.
    """
    rng = random.Random(seed)  # noqa: S311 (no secret)
    limit, parallel = rng.uniform(1, 100), rng.randint(1, 8)
    records: dict[int, Trial] = {}
    paid: dict[int, float] = {}
    history = []
    for _ in range(120):
        active = [trial for trial in records.values() if trial.state.is_active]
        budget = Budget.of(limit, records.values())  # as after a restart
        reservation = rng.uniform(0.1, 20)
        if len(active) < parallel and budget.allows(reservation) and rng.random() < 0.7:
            records[len(records)] = Trial(len(records), {}, reservation_usd=reservation)
        elif active:
            trial = rng.choice(active)
            used = rng.choice((0.0, rng.random() * 0.8, 0.8 + 0.2 * rng.random(), most_use))
            paid[trial.number] = used * trial.reservation_usd
            is_known = rng.random() > 0.05  # else it counts as all of the reservation
            ended = settle(trial, paid[trial.number] if is_known else None)
            records[trial.number] = ended.but(
                state=rng.choice((TrialState.SUCCEEDED, TrialState.FAILED))
            )
        history.append(sum(paid.values()))
    return history, Budget.of(limit, records.values()), len(records)


def most_allowed(budget: Budget) -> float:
    """Return the largest reservation in cents that may start now, in US dollars."""
    return max(cents for cents in range(2000) if budget.allows(cents / 100)) / 100


def test_a_thousand_random_sweeps_stay_within_their_budget() -> None:
    trials = 0
    for seed in range(SWEEPS):
        costs, budget, count = simulate(seed)
        assert budget.limit_usd is not None
        assert max(costs) <= budget.limit_usd + 1e-6
        assert budget.spent_usd + budget.reserved_usd <= budget.limit_usd + 1e-6
        trials += count
    assert trials > 5 * SWEEPS


def test_a_larger_overrun_stops_further_trials() -> None:
    overruns = 0
    for seed in range(200):
        _, budget, _ = simulate(seed, most_use=1.5)
        if budget.is_overrun:
            overruns += 1
            assert not budget.allows(0.0)
            assert not budget.can_ever_allow(0.0)
    assert overruns > 100


def test_a_trial_returns_what_it_did_not_use() -> None:
    running = Trial(0, {}, state=TrialState.RUNNING, reservation_usd=8.0)
    assert most_allowed(Budget.of(10.0, [running])) == 2.0
    ended = settle(running, 3.0).but(state=TrialState.SUCCEEDED)
    assert most_allowed(Budget.of(10.0, [ended])) == 7.0
    assert (
        most_allowed(Budget.of(10.0, [settle(running, None).but(state=TrialState.FAILED)])) == 2.0
    )


def test_a_continued_trial_keeps_the_cost_of_its_earlier_runs() -> None:
    first = settle(Trial(0, {}, reservation_usd=5.0), 2.0).but(state=TrialState.WAITING)
    second = first.but(state=TrialState.PLANNED, reservation_usd=5.0)
    assert most_allowed(Budget.of(10.0, [second])) == 3.0


@pytest.mark.parametrize("limit", [None, 5.0])
def test_free_trials_need_no_budget(limit: float | None) -> None:
    assert Budget(limit).allows(0.0)
