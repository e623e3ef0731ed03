"""Asynchronous successive halving (ASHA): which trials continue to the next rung. Pure.

Source: L. Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, algorithm 2. A trial of a
rung continues when it is among the best 1/factor of the trials that have reached this rung so far, and has not
continued yet. Rungs are looked at from the longest to the shortest; if no trial can continue, a new one starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cloudtrain.errors import Problem
from cloudtrain.features.sweeps.loader import LoadedSweep
from cloudtrain.features.sweeps.spec import HYPERBAND, Rungs
from cloudtrain.features.sweeps.trial import Trial, TrialState
from cloudtrain.job.spec import JobSpec


@dataclass(frozen=True)
class Rule:
    """How trials of a rung are compared: the best 1/`factor` continue."""

    factor: int
    is_maximized: bool

    def order(self, objective: float) -> float:
        """Return a key by which the best objective comes first."""
        return -objective if self.is_maximized else objective


def rung_lengths(last: int, factor: int, first: int | None) -> tuple[int, ...]:
    """Return the lengths of the rungs, ascending; the last one is the job's own length.

    Args:
        last: Steps or epochs of the job.
        factor: Ratio of two rungs.
        first: Length of the first rung; by default two rungs before the last.
    """
    length = first or max(1, math.ceil(last / factor**2))
    lengths = []
    while length < last:
        lengths.append(length)
        length *= factor
    return (*lengths, last)


def length_field(job: JobSpec) -> str:
    """Return the field with the length of a Task: `train.steps` or `train.epochs`."""
    return (
        "train.steps" if job.train is not None and job.train.steps is not None else "train.epochs"
    )


def lengths_of(sweep: LoadedSweep) -> tuple[int, ...]:
    """Return the lengths of hyperband's rungs; empty with other strategies."""
    train = sweep.job.train
    rungs = sweep.spec.rungs or Rungs()
    if sweep.spec.strategy != HYPERBAND or train is None:
        return ()
    return rung_lengths(train.steps or train.epochs or 1, rungs.factor, rungs.first)


def check_hyperband(sweep: LoadedSweep) -> list[Problem]:
    """Return why the runs of a job cannot continue exactly from rung to rung; nothing with other strategies."""
    if sweep.spec.strategy != HYPERBAND:
        return []
    train = sweep.job.train
    at = ("strategy",)
    hint = "use strategy: random with pruning: asha"
    if train is None:
        return [
            sweep.problem(at, "hyperband continues runs of a Task, and this job is a script", hint)
        ]
    for path in ("train.steps", "train.epochs", "train.schedule"):
        if path in sweep.spec.space:
            return [
                sweep.problem(
                    ("space", path), "hyperband needs the same value in all trials", "remove it"
                )
            ]
    if train.schedule != "constant":
        message = f"train.schedule: {train.schedule} depends on the last step, so a run could not continue exactly"
        return [
            sweep.problem(at, message, f"use schedule: constant, or {hint.removeprefix('use ')}")
        ]
    length = train.steps or train.epochs or 1
    rungs = sweep.spec.rungs
    if rungs is not None and rungs.first is not None and rungs.first >= length:
        message = f"expected less than {length_field(sweep.job)}, which is {length}"
        return [
            sweep.problem(
                ("rungs", "first"), message, f"use {max(1, math.ceil(length / rungs.factor**2))}"
            )
        ]
    return []


def next_promotion(trials: Iterable[Trial], lengths: tuple[int, ...], rule: Rule) -> Trial | None:
    """Return the waiting trial that continues to its next rung now, or None.

    Args:
        trials: All trials.
        lengths: Lengths of the rungs, ascending.
        rule: How trials are compared.
    """
    trials = tuple(trials)
    for length in reversed(lengths[:-1]):
        values = [
            (trial.rungs[str(length)], trial) for trial in trials if str(length) in trial.rungs
        ]
        ordered = sorted(values, key=lambda pair: (rule.order(pair[0]), pair[1].number))
        for _, trial in ordered[: len(ordered) // rule.factor]:
            if trial.state is TrialState.WAITING and trial.length == length:
                return trial
    return None


def last_promotion(trials: Iterable[Trial], lengths: tuple[int, ...], rule: Rule) -> Trial | None:
    """Return the trial that continues though its rung is too small, so that one trial gets the job's own length.

    It is asked when no trial is active, none is left to start, and `next_promotion` returns None.
    """
    trials = tuple(trials)
    waiting = [
        trial
        for trial in trials
        if trial.state is TrialState.WAITING and trial.objective is not None
    ]
    if not waiting or any(
        trial.state is TrialState.SUCCEEDED and trial.length == lengths[-1] for trial in trials
    ):
        return None
    longest = max(trial.length or 0 for trial in waiting)
    candidates = [trial for trial in waiting if trial.length == longest]
    return min(candidates, key=lambda trial: (rule.order(trial.objective or 0.0), trial.number))
