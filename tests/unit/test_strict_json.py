"""The JSON writer: valid JSON for all floats."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain_runtime.contract.manifest import Manifest
from cloudtrain_runtime.contract.strict_json import decode_floats, dump_json, encode_floats

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def refuse(name: str) -> None:
    raise AssertionError(name)


@given(VALUES)
def test_output_is_json_for_every_float(value: object) -> None:
    json.loads(dump_json(value), parse_constant=refuse)


@given(VALUES)
def test_encoded_floats_come_back(value: object) -> None:
    again = decode_floats(json.loads(dump_json(encode_floats(value)), parse_constant=refuse))
    assert repr(again) == repr(value)


def test_finite_values_are_written_as_before() -> None:
    value = {"b": [1, 2.5, "ü"], "a": None}
    assert dump_json(value, indent=1, sort_keys=True) == json.dumps(value, indent=1, sort_keys=True)


def test_content_that_contains_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(ValueError, match="Circular"):
        dump_json(value)


def test_a_script_gets_its_infinite_best_loss_back() -> None:
    manifest = Manifest(
        run="demo-261120-101500-1a2b3c",
        attempt="0a1b2c3d",
        step=1,
        time=1.0,
        world_size=1,
        mesh={"data": 1},
        rng={},
        torch="2.13.0",
        code="",
        request="",
        state={"best": math.inf},
        files={},
    )
    text = manifest.to_json()
    json.loads(text, parse_constant=refuse)
    assert Manifest.from_json(text) == manifest
    assert Manifest.from_json(replace(manifest, state={"best": -math.inf}).to_json()).state == {
        "best": -math.inf
    }
