"""Successive halving: rungs, promotions, and the work that it saves."""

import random

from cloudtrain.features.sweeps.halving import Rule, last_promotion, next_promotion, rung_lengths
from cloudtrain.features.sweeps.trial import Trial, TrialState

RULE = Rule(factor=3, is_maximized=False)


def reached(number: int, length: int, objective: float, *earlier: tuple[int, float]) -> Trial:
    rungs = {str(rung): value for rung, value in (*earlier, (length, objective))}
    state = TrialState.WAITING if length < 90 else TrialState.SUCCEEDED
    return Trial(number, {}, state=state, length=length, objective=objective, rungs=rungs)


def test_rungs_end_with_the_jobs_own_length() -> None:
    assert rung_lengths(90, 3, None) == (10, 30, 90)
    assert rung_lengths(100, 3, 20) == (20, 60, 100)
    assert rung_lengths(2, 3, None) == (1, 2)


def test_only_the_best_third_of_a_rung_continues() -> None:
    lengths = (10, 30, 90)
    trials = [reached(number, 10, objective) for number, objective in enumerate((3.0, 1.0))]
    assert next_promotion(trials, lengths, RULE) is None
    trials.append(reached(2, 10, 2.0))
    promoted = next_promotion(trials, lengths, RULE)
    assert promoted is not None
    assert promoted.number == 1
    trials[1] = promoted.but(state=TrialState.RUNNING, length=30)
    assert next_promotion(trials, lengths, RULE) is None
    assert next_promotion(trials, lengths, Rule(3, is_maximized=True)) is trials[0]


def test_longer_rungs_continue_first() -> None:
    trials = [reached(number, 30, float(number), (10, float(number))) for number in range(3)]
    trials += [reached(number, 10, -1.0) for number in range(3, 9)]
    promoted = next_promotion(trials, (10, 30, 90), RULE)
    assert promoted is not None
    assert promoted.number == 0


def test_one_trial_gets_all_steps_even_of_a_few() -> None:
    trials = [reached(0, 10, 2.0), reached(1, 10, 1.0)]
    promoted = last_promotion(trials, (10, 30, 90), RULE)
    assert promoted is not None
    assert promoted.number == 1
    done = [trials[0], reached(1, 90, 0.5, (10, 1.0))]
    assert last_promotion(done, (10, 30, 90), RULE) is None


def test_halving_finds_the_best_with_half_of_the_steps() -> None:
    """Each trial has a final loss; the loss after some steps is near to it."""
    found, steps, trials_of_each, lengths = 0, 0, 27, (10, 30, 90)
    for seed in range(50):
        rng = random.Random(seed)  # noqa: S311 (no secret)
        final = [rng.random() for _ in range(trials_of_each)]
        trials: dict[int, Trial] = {}
        while True:
            known = list(trials.values())
            promoted = next_promotion(known, lengths, RULE)
            if promoted is None and len(trials) == trials_of_each:
                promoted = last_promotion(known, lengths, RULE)
                if promoted is None:
                    break
            number = len(trials) if promoted is None else promoted.number
            at = 0 if promoted is None else lengths.index(promoted.length or 0) + 1
            steps += lengths[at] - (0 if promoted is None else promoted.length or 0)
            loss = final[number] + 1.0 / lengths[at]
            before = (
                ()
                if promoted is None
                else tuple((int(rung), value) for rung, value in promoted.rungs.items())
            )
            trials[number] = reached(number, lengths[at], loss, *before)
        complete = [trial for trial in trials.values() if trial.length == 90]
        best = min(complete, key=lambda trial: trial.objective or 0.0)
        found += final[best.number] == min(final)
    assert found == 50
    assert steps <= 50 * trials_of_each * 90 / 2
