"""Regular expressions that are compiled when they are first used."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pkgutil
import re
import sys

import pytest

import cloudtrain
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern


def test_a_lazy_pattern_has_the_methods_of_a_pattern() -> None:
    lazy = lazy_pattern(r"(\w)(\d+)", re.IGNORECASE)
    compiled = re.compile(r"(\w)(\d+)", re.IGNORECASE)
    for text in ("A12", "xA12 b3", ""):
        for name in ("match", "search", "fullmatch"):
            found, expected = getattr(lazy, name)(text), getattr(compiled, name)(text)
            assert (found and found.groups()) == (expected and expected.groups())
        assert lazy.findall(text) == compiled.findall(text)
        assert lazy.sub(r"\2", text) == compiled.sub(r"\2", text)
    assert (lazy.pattern, lazy.flags, lazy.groups) == (compiled.pattern, compiled.flags, 2)
    assert copy.deepcopy(lazy).fullmatch("a1") is not None


def test_a_lazy_pattern_is_compiled_at_its_first_use() -> None:
    lazy = lazy_pattern("(")
    with pytest.raises(re.error):
        lazy.search("")


def test_each_lazy_pattern_can_be_compiled() -> None:
    for found in pkgutil.walk_packages(cloudtrain.__path__, "cloudtrain."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(found.name)
    modules = [each for name, each in sys.modules.items() if name.startswith("cloudtrain")]
    values = [value for each in modules for value in vars(each).values()]
    patterns = [each for each in values if type(each) is type(lazy_pattern(""))]
    assert len(patterns) > 50
    for each in patterns:
        assert each.groups >= 0
