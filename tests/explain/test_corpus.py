"""Realistic logs: the first error, its rank and the advised action."""

from __future__ import annotations

import itertools

import pytest
from support.explanations import CASES, Case

from cloudtrain.failure_rules import FailureClass, explain_run
from cloudtrain.runs.log_lines import LogLine

pytestmark = pytest.mark.promise


def by_host(lines: tuple[LogLine, ...]) -> list[LogLine]:
    """Return lines in the order of a backend that reads the hosts one after the other."""
    return sorted(lines, key=lambda line: line.host)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("order", [tuple, by_host], ids=["by-clock", "by-host"])
def test_case(case: Case, order: type[tuple]) -> None:
    found = explain_run(case.status, iter(order(case.lines)), case.facts)
    expected = case.expected
    assert found.failure == expected["class"], found
    assert expected["action"] in found.action
    assert expected.get("message", "") in found.message
    assert found.message
    for name in ("host", "rank"):
        assert getattr(found, name) == expected.get(name, getattr(found, name)), found
    if "ranks" in expected:
        assert list(found.ranks) == expected["ranks"]


def test_corpus_covers_every_class() -> None:
    assert len(CASES) >= 40
    classes = {case.expected["class"] for case in CASES}
    assert classes == {str(failure) for failure in FailureClass}
    assert sum(case.name.partition("-")[2].startswith("trap-") for case in CASES) >= 8


def test_actions_have_no_placeholders_left() -> None:
    for case in CASES:
        found = explain_run(case.status, case.lines)
        assert not set("[]{}") & set(found.action), found.action
        assert len(found.traceback) <= 10


def test_an_ended_run_without_failure_has_no_class() -> None:
    for case in itertools.islice(CASES, 5):
        from dataclasses import replace

        from cloudtrain.runs.status import State

        for state in (State.SUCCEEDED, State.STOPPED):
            found = explain_run(replace(case.status, state=state, reason=""), case.lines)
            assert found.failure is None
