"""Limits of the tests: length of their names, no upper bounds of wall-clock time.

Each table lists what exceeded a limit when the check was added. Remove entries, never add one.
"""

import ast
import functools
from collections.abc import Iterator

import pytest
from support.jobs import REPOSITORY

pytestmark = pytest.mark.promise

LONGEST_TEST_NAME = 60
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}

LONG_TEST_NAMES: frozenset[str] = frozenset()
TIMED_TESTS: frozenset[str] = frozenset()

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_in(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


@functools.cache
def all_tests() -> tuple[Function, ...]:
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in (REPOSITORY / "tests").rglob("test_*.py")
    ]
    return tuple(
        each for tree in trees for each in functions_in(tree) if each.name.startswith("test_")
    )


def is_elapsed_time(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression contains a difference of clock readings, or a variable that holds one."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in names:
            return True
        if (
            isinstance(part, ast.BinOp)
            and isinstance(part.op, ast.Sub)
            and is_clock_reading(part.left)
        ):
            return True
    return False


def is_clock_reading(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "time"
        and node.func.attr in CLOCKS
    )


def elapsed_names(function: Function) -> set[str]:
    """Return the variables of a function to which a difference of clock readings is assigned or appended."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and is_elapsed_time(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "append"
        ):
            owner = node.func.value
            if isinstance(owner, ast.Name) and any(
                is_elapsed_time(each, names) for each in node.args
            ):
                names.add(owner.id)
    return names


def has_upper_time_bound(function: Function) -> bool:
    names = elapsed_names(function)
    for check in (node for node in ast.walk(function) if isinstance(node, ast.Assert)):
        for node in ast.walk(check):
            if isinstance(node, ast.Compare):
                values = [node.left, *node.comparators]
                for operator, left, right in zip(node.ops, values[:-1], values[1:], strict=True):
                    smaller = left if isinstance(operator, ast.Lt | ast.LtE) else right
                    if isinstance(
                        operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE
                    ) and is_elapsed_time(smaller, names):
                        return True
    return False


def parse_function(text: str) -> Function:
    return next(functions_in(ast.parse(text)))


def test_names_of_tests_have_at_most_60_characters() -> None:
    found = {function.name for function in all_tests() if len(function.name) > LONGEST_TEST_NAME}
    assert sorted(found - LONG_TEST_NAMES) == []


def test_no_test_has_an_upper_bound_of_wall_clock_time() -> None:
    found = {function.name for function in all_tests() if has_upper_time_bound(function)}
    assert sorted(found - TIMED_TESTS) == []


def test_upper_time_bounds_are_detected() -> None:
    assert has_upper_time_bound(parse_function("def f():\n assert time.monotonic() - began < 4"))
    assert has_upper_time_bound(parse_function("def f():\n assert 4 >= time.time() - began"))
    assert has_upper_time_bound(
        parse_function("def f():\n took = time.monotonic() - began\n assert took < 4")
    )
    assert has_upper_time_bound(
        parse_function("def f():\n all.append(time.time() - a)\n assert min(all) < 4")
    )


def test_other_uses_of_a_clock_are_allowed() -> None:
    assert not has_upper_time_bound(
        parse_function("def f():\n assert time.monotonic() - began > 4")
    )
    assert not has_upper_time_bound(parse_function("def f():\n assert time.monotonic() < deadline"))
    assert not has_upper_time_bound(parse_function("def f():\n now = time.time() - 60\n send(now)"))
