"""Values that a function returns, as files and back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain_runtime.contract.function_arguments import parse_arguments, spell_argument
from cloudtrain_runtime.contract.returned_values import (
    ReturnedValueError,
    read_returned,
    write_refusal,
    write_returned,
)

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.tuples(st.text()), inner)
    ),
    max_leaves=10,
)


def same(one: Any, two: Any) -> bool:
    """Return whether values are equal, types included; NaN equals NaN."""
    if type(one) is not type(two):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(two)) or one == two
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    return bool(one == two)


@given(value=VALUES)
def test_a_value_comes_back(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("value") / "returned"
    write_returned(value, folder)
    assert same(read_returned(folder), value)


def test_sets_and_arrays_come_back(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    value = {
        "a": np.arange(6).reshape(2, 3),
        "s": {1, 2},
        "x": np.float32(0.5),
        "e": np.zeros((0, 2)),
    }
    write_returned(value, tmp_path)
    found = read_returned(tmp_path)
    assert found["s"] == {1, 2}
    assert found["x"] == 0.5
    for name in ("a", "e"):
        assert found[name].dtype == value[name].dtype
        assert np.array_equal(found[name], value[name])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool", "complex64"])
def test_tensors_come_back(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([[1, 0], [2, 3]]).to(getattr(torch, name)).t()
    write_returned([tensor, torch.tensor(1.5, requires_grad=True)], tmp_path)
    found, scalar = read_returned(tmp_path)
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    assert scalar.shape == ()
    assert scalar.item() == 1.5


def test_what_does_not_travel_is_named(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    for value, message in (
        ({"a": [1, object()]}, r"the value\['a'\]\[1\] is a object"),
        (np.array([object()]), "the value is a ndarray"),
        (b"bytes", "the value is a bytes"),
        (np.zeros(9 * 2**20), "75 MB, and at most 67 MB"),
    ):
        with pytest.raises(ReturnedValueError, match=message):
            write_returned(value, tmp_path / "x")
        assert not (tmp_path / "x").exists()


def test_a_value_that_contains_itself_is_refused(tmp_path: Path) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ReturnedValueError, match="nested deeper than 100 levels"):
        write_returned(value, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *["", "[", '{"$tensor": 1}', '{"$tensor": {"dtype": "load", "shape": [], "name": "a0"}}'],
        *['{"$array": "a0"}', '{"$items": 3}', '{"$float": "x"}', '{"$items": [[[], 1]]}'],
    ],
)  # fmt: skip
def test_damaged_files_are_an_error(tmp_path: Path, text: str) -> None:
    pytest.importorskip("torch")
    (tmp_path / "value.json").write_text(text)
    with pytest.raises(ReturnedValueError):
        read_returned(tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    np.savez(tmp_path / "arrays.npz", a0=np.array([object()], dtype=object))
    (tmp_path / "value.json").write_text(json.dumps({"$array": "a0"}))
    with pytest.raises(ReturnedValueError, match="is damaged"):
        read_returned(tmp_path)


def test_a_refusal_is_read_as_one(tmp_path: Path) -> None:
    write_refusal("it is a lock", tmp_path)
    with pytest.raises(ReturnedValueError, match="it is a lock"):
        read_returned(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)  # fmt: skip


@given(value=JSON)
def test_arguments_come_back(value: Any) -> None:
    spelled = spell_argument(value)
    words = ["--x"] if spelled is True else ["--x", str(spelled)]
    assert same(parse_arguments([*words, "--last", "1"]), {"x": value, "last": 1})


@pytest.mark.parametrize("value", ["0.1", "true", "--x", "", "nan", "1e3", "plain text", "[1"])
def test_texts_stay_texts(value: str) -> None:
    assert parse_arguments(["--x", str(spell_argument(value))]) == {"x": value}


EXACT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(), inner)
    ),
    max_leaves=5,
)


@given(value=EXACT)
def test_tuples_and_keys_of_arguments_come_back(value: Any) -> None:
    spelled = spell_argument(value)
    words = ["--x"] if spelled is True else ["--x", str(spelled)]
    assert same(parse_arguments(words), {"x": value})


@pytest.mark.parametrize("value", [object(), {1: object()}])
def test_what_is_no_argument_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        spell_argument(value)
