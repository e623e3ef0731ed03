"""Steps of planning, and the errors, warnings and decisions that they yield."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeVar

from cloudtrain.errors import Problem
from cloudtrain.job.diagnostics import Diagnostic, Severity
from cloudtrain.job.spec import JobSpec
from cloudtrain.settings.settings import Settings
from cloudtrain.support.field_path import FieldPath

T = TypeVar("T")
Step = Generator[Diagnostic, None, T]
"""A step of planning: it yields its diagnostics and returns its value. `value = yield from step` is part of another."""

SETTING = "setting"
"""First part of the path of an account setting, in place of a field of the job."""


def error(path: FieldPath, message: str, hint: str, *, is_key: bool = False) -> Diagnostic:
    """Return an error in a field of the job, or with `is_key` in the field's name."""
    return Diagnostic(message, path, hint, is_key=is_key)


def warning(text: str) -> Diagnostic:
    """Return a warning of one sentence."""
    return Diagnostic(text, severity=Severity.WARNING)


def decision(text: str) -> Diagnostic:
    """Return a decision and its reason in one line."""
    return Diagnostic(text, severity=Severity.DECISION)


def run_step(step: Step[T]) -> tuple[T, list[Diagnostic]]:
    """Return the value of a step, and its diagnostics in order."""
    found: list[Diagnostic] = []
    while True:
        try:
            found.append(next(step))
        except StopIteration as end:
            return end.value, found


def texts_of(severity: Severity, diagnostics: Iterable[Diagnostic]) -> tuple[str, ...]:
    """Return the messages of one severity without duplicates."""
    return tuple(dict.fromkeys(each.message for each in diagnostics if each.severity is severity))


def problems_of(
    diagnostics: Iterable[Diagnostic], spec: JobSpec, settings: Settings
) -> list[Problem]:
    """Return the errors with their locations, without duplicates."""
    found: dict[Problem, None] = {}
    for each in diagnostics:
        if each.severity is Severity.ERROR and each.path[:1] == (SETTING,):
            name = str(each.path[1])
            source = settings.sources.get(name, "Settings(...)")
            problem = Problem(
                file=source,
                line=None,
                column=None,
                path=name,
                message=each.message,
                hint=each.hint,
            )
            found[problem] = None
        elif each.severity is Severity.ERROR:
            found[spec.problem_of(each)] = None
    return list(found)
