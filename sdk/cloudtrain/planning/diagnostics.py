"""What a plan in the making has to say: what is refused, what to look out for, what was chosen and why."""

from __future__ import annotations

from cloudtrain.errors import Problem
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.settings.settings import Settings
from cloudtrain.support.field_path import FieldPath


class Notes:
    """Collects problems, warnings and decisions, so that all of them are told at once.

    Attributes:
        problems: Each stops the plan.
        warnings: One sentence each.
        decisions: Choices that cloudtrain made itself and why, one line each.
    """

    def __init__(self, spec: JobSpec, settings: Settings) -> None:
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.decisions: list[str] = []
        self._spec = spec
        self._settings = settings

    def refuse(self, at: FieldPath, message: str, hint: str, *, is_key: bool = False) -> None:
        """Note that a field of the job, or with `is_key` its name, cannot be as it is."""
        problem = self._spec.problem_of(Diagnostic(message, at, hint, is_key=is_key))
        if problem not in self.problems:
            self.problems.append(problem)

    def refuse_setting(self, name: str, message: str, hint: str) -> None:
        """Note that one of the account's settings cannot be as it is."""
        source = self._settings.sources.get(name, "Settings(...)")
        self.problems.append(Problem(source, None, None, name, message, hint))

    def warn(self, text: str) -> None:
        """Note what the user should know, once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def decide(self, text: str) -> None:
        """Note a choice and its reason."""
        self.decisions.append(text)
