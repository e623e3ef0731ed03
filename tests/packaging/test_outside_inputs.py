"""Each parser of data from outside, and each socket, has an entry that says who can write to it."""

from __future__ import annotations

from collections import Counter

import pytest
from support.outside_inputs import LISTENERS, OWN, PARSERS, SOCKETS, SOURCES, modules_with

pytestmark = pytest.mark.promise


def test_each_parser_says_whose_data_it_reads() -> None:
    named = [module for each in SOURCES for module in each.modules] + list(OWN)
    assert not [module for module, times in Counter(named).items() if times > 1]
    assert modules_with(PARSERS) == set(named)


def test_each_socket_says_who_can_connect() -> None:
    assert modules_with(LISTENERS) == set(SOCKETS)
