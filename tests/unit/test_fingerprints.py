"""Fingerprints of values: equal for equal content, another for other content."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain_runtime.contract.fingerprints import Fingerprints

OWN = __name__.partition(".")[0]


def fingerprint(value: Any) -> str:
    return Fingerprints([OWN]).of(value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)  # fmt: skip


@given(value=PLAIN)
def test_a_copy_has_the_same_fingerprint(value: Any) -> None:
    assert fingerprint(copy.deepcopy(value)) == fingerprint(value)


@given(one=PLAIN, other=PLAIN)
def test_what_prints_otherwise_has_another_fingerprint(one: Any, other: Any) -> None:
    assert (fingerprint(one) == fingerprint(other)) == (repr(one) == repr(other))


@dataclass
class Config:
    rate: float = 0.1
    layers: list[int] = field(default_factory=list)


class Point(NamedTuple):
    x: int
    y: int


class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2


class Node:
    def __init__(self, name: str) -> None:
        self.name = name
        self.other: Node | None = None


class Own(dict[str, int]):
    pass


def ring(*names: str) -> Node:
    """Return the first of objects that lead to each other."""
    nodes = [Node(name) for name in names]
    for node, other in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        node.other = other
    return nodes[0]


def function(code: str) -> types.FunctionType:
    """Return the function `f` that code defines."""
    names: dict[str, Any] = {"__name__": __name__}
    exec(code, names)  # noqa: S102 (the test's own code)
    found = names["f"]
    assert isinstance(found, types.FunctionType)
    return found


def of_class(body: str) -> type:
    names: dict[str, Any] = {"__name__": __name__}
    exec(f"class A:\n {body}", names)  # noqa: S102 (the test's own code)
    return names["A"]  # type: ignore[no-any-return]


DIFFERENT: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (lambda: 1, lambda: 1.0),
    (lambda: 0.0, lambda: -0.0),
    (lambda: {"a": 1, "b": 2}, lambda: {"b": 2, "a": 1}),
    (lambda: {1, 2}, lambda: frozenset({1, 2})),
    (lambda: Config(layers=[1]), lambda: Config(layers=[2])),
    (lambda: Point(1, 2), lambda: (1, 2)),
    (lambda: Kind.SMALL, lambda: Kind.LARGE),
    (lambda: ring("a", "b"), lambda: ring("a", "c")),
    (lambda: ring("a", "b"), lambda: ring("a", "b", "a")),
    (lambda: Own(a=1), lambda: Own(a=2)),
    (lambda: collections.deque([1], 2), lambda: collections.deque([1], 3)),
    (lambda: functools.partial(pow, 2), lambda: functools.partial(pow, 3)),
    (lambda: Path("a"), lambda: Path("b")),
    (lambda: [].append, lambda: [1].append),
    (lambda: str.upper, lambda: str.lower),
    (lambda: function("def f(x): return x + 1"), lambda: function("def f(x): return x - 1")),
    (lambda: function("def f(x=1): ..."), lambda: function("def f(x=2): ...")),
    (lambda: function("def f(*, x=1): ..."), lambda: function("def f(*, x=2): ...")),
    (lambda: function("def f(x): return a.b(x)"), lambda: function("def f(x): return a.c(x)")),
    (
        lambda: function("def f(x):\n  if x: return 1\n  return 2"),
        lambda: function("def f(x):\n  if not x: return 1\n  return 2"),
    ),
    (
        lambda: function("def f():\n  for i in g(): pass\n  h()"),
        lambda: function("def f():\n  for i in g(): h()"),
    ),
    (lambda: of_class("x = 1"), lambda: of_class("x = 2")),
    (lambda: of_class("def f(self): return 1"), lambda: of_class("def f(self): return 2")),
    (lambda: of_class("f = staticmethod(len)"), lambda: of_class("f = staticmethod(repr)")),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_other_content_has_another_fingerprint(number: int) -> None:
    one, other = DIFFERENT[number]
    assert fingerprint(one()) == fingerprint(one())
    assert fingerprint(other()) == fingerprint(other())
    assert fingerprint(one()) != fingerprint(other())


def test_what_cannot_be_copied_is_its_type() -> None:
    assert fingerprint(threading.Lock()) == fingerprint(threading.Lock())
    assert fingerprint(threading.Lock()) != fingerprint(threading.RLock())


def test_code_is_the_same_in_a_cell_and_in_a_module() -> None:
    # Python compiles calls of a module's functions in another way beside its import.
    alone = function("def f(): return json.dumps([])")
    beside = function("import json\ndef f(): return json.dumps([])")
    assert alone.__code__.co_code != beside.__code__.co_code or alone.__code__ == beside.__code__
    assert fingerprint(alone) == fingerprint(beside)
    assert fingerprint(function("import json\n\n\ndef f(): return json.loads([])")) != fingerprint(
        alone
    )


def test_the_order_of_attributes_does_not_count() -> None:
    one, other = Node("a"), Node("a")
    vars(other).clear()
    vars(other).update(other=None, name="a")
    assert fingerprint(one) == fingerprint(other)


def test_parts_name_what_differs() -> None:
    found = Fingerprints([OWN])
    assert set(found.parts(Node("a"))) == {"its attribute name", "its attribute other", "its value"}
    parts = found.parts(function("def f(a, b=1, *, c=2): ..."))
    assert list(parts) == ["its code", "its documentation", "the default of b", "the default of c"]
    assert "its method f" in found.parts(of_class("def f(self): ..."))


def test_arrays_and_tensors_are_their_bytes() -> None:
    numpy = pytest.importorskip("numpy")
    for one, other in (
        (numpy.arange(3), numpy.arange(3) + 1),
        (numpy.arange(3), numpy.arange(3.0)),
        (numpy.zeros((2, 3)), numpy.zeros((3, 2))),
        (numpy.array([1, None]), numpy.array([2, None])),
        (numpy.float32(1), numpy.float64(1)),
    ):
        assert fingerprint(one.copy()) == fingerprint(one)
        assert fingerprint(one) != fingerprint(other)
    torch = pytest.importorskip("torch")
    for one, other in (
        (torch.arange(3), torch.arange(3) + 1),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, requires_grad=True), torch.zeros(2)),
        (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
    ):
        assert fingerprint(copy.deepcopy(one)) == fingerprint(one)
        assert fingerprint(one) != fingerprint(other)
