"""Nodes that a run on Slurm has lost again and again: what is recorded of them, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

from cloudtrain.backends.slurm.attempts import ATTEMPTS_FILE, Attempt, Attempts


def lost(*nodes: tuple[str, ...]) -> Attempts:
    return Attempts(
        tuple(Attempt(number, number, number, None, each) for number, each in enumerate(nodes, 1))
    )


def test_a_node_is_bad_when_two_attempts_have_lost_it() -> None:
    attempts = lost(("n1", "n2"), (), ("n2",), ("n3", "n2"))
    assert attempts.bad_nodes == {"n2": (1, 3, 4)}
    assert attempts.describe_bad_nodes() == "n2 was lost in attempts 1 and 3 and 4"
    assert lost(("n1",), ("n2",)).describe_bad_nodes() == ""


def test_what_was_lost_is_recorded(tmp_path: Path) -> None:
    attempts = lost((), ()).lose(1, ["n4"]).lose(2, [])
    attempts.write(tmp_path)
    assert Attempts.read(tmp_path) == attempts
    assert [each.lost for each in attempts.all] == [("n4",), ()]
    assert [each.detail for each in attempts.phases(continues=False)] == ["lost n4", ""]


def test_records_of_former_versions_have_no_lost_nodes(tmp_path: Path) -> None:
    former = [{"number": 1, "started": 1.0, "ended": 2.0, "checkpoint": None}]
    (tmp_path / ATTEMPTS_FILE).write_text(json.dumps(former))
    assert Attempts.read(tmp_path) == Attempts((Attempt(1, 1.0, 2.0, None),))
