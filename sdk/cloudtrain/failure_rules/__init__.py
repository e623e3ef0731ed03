"""Explanations of failed runs: the first error that is not the consequence of another, its class, and what to do."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.explanation import Explanation, explain_run
from cloudtrain.failure_rules.facts import Facts, read_facts

__all__ = ["Explanation", "Facts", "FailureClass", "explain_run", "read_facts"]
