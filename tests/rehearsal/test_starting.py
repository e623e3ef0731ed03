"""Requirements that contradict each other are found without a package index."""

from __future__ import annotations

import pytest

from cloudtrain.rehearsal.starting import find_contradiction


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("psutil==5.9.8\nnumpy>=2\nPSUtil == 6.0.0  # newer\n", "psutil==5.9.8 and PSUtil == 6.0.0"),
        ("a.b[x]==1.0\na-b==2\n", "a.b[x]==1.0 and a-b==2"),
        ("psutil==5.9\npsutil==5.9.0\n", ""),
        ('psutil==5.9; python_version < "3.12"\npsutil==6.0; python_version >= "3.12"\n', ""),
        ("psutil==5.*\npsutil==5.9.8\npsutil>=6\n-r more.txt\n--index-url https://example.org/a==b\n", ""),
    ],
)
def test_contradicting_pins_are_found(text: str, found: str) -> None:
    assert find_contradiction(text).startswith(found)
    assert bool(find_contradiction(text)) == bool(found)
