"""Errors, warnings and decisions that are collected while a plan is made."""

from __future__ import annotations

from cloudtrain.errors import Problem
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.settings.settings import Settings
from cloudtrain.support.field_path import FieldPath


class Diagnostics:
    """Collect errors, warnings and decisions, so that the user sees all of them at once.

    Attributes:
        problems: Errors, which prevent the plan.
        warnings: One sentence each.
        decisions: What cloudtrain decided itself and why, one line each.
    """

    def __init__(self, spec: JobSpec, settings: Settings) -> None:
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.decisions: list[str] = []
        self._spec = spec
        self._settings = settings

    def add_error(self, path: FieldPath, message: str, hint: str, *, is_key: bool = False) -> None:
        """Add an error in a field of the job, or with `is_key` in the field's name. Duplicates are dropped."""
        problem = self._spec.problem_of(Diagnostic(message, path, hint, is_key=is_key))
        if problem not in self.problems:
            self.problems.append(problem)

    def add_setting_error(self, name: str, message: str, hint: str) -> None:
        """Add an error in one of the account's settings."""
        source = self._settings.sources.get(name, "Settings(...)")
        self.problems.append(Problem(source, None, None, name, message, hint))

    def add_warning(self, text: str) -> None:
        """Add a warning. Duplicates are dropped."""
        if text not in self.warnings:
            self.warnings.append(text)

    def add_decision(self, text: str) -> None:
        """Add a decision and its reason."""
        self.decisions.append(text)
