"""Flags of several ranks at step boundaries: three real processes with Gloo, whose steps take different times."""

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain_runtime import ranks
from cloudtrain_runtime.context import read_context
from cloudtrain_runtime.ranks import Agreement

pytestmark = pytest.mark.processes

RANKS = 3
RANK = """
import json, os, sys, time
from dataclasses import replace
from cloudtrain_runtime import ranks
from cloudtrain_runtime.context import read_context

place = read_context(os.environ)
ranks.join_ranks(place)
agreement = ranks.Agreement(place, flags=2)
asked, seen = [], []
for step in range(1, 401):
    def ask():
        asked.append(step)
        return (place.rank == 1 and step >= 250, place.rank == 2 and step <= 1)
    found = agreement.at_boundary(ask)
    seen.append(found)
    time.sleep((0.0001, 0.0002, 0.02)[place.rank] if 100 < step <= 110 else 0)
    if found[0]:
        break
os.write(1, json.dumps({"asked": asked, "seen": seen}).encode())
os._exit(0)
"""


def test_all_ranks_see_a_flag_at_the_same_boundary_however_fast_each_is(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"CLOUDTRAIN_ML_ROOT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "rank.py")],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(RANKS)
    ]
    told = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    assert [process.returncode for process in started] == [0] * RANKS
    first = told[0]
    assert all(each == first for each in told), "they asked or saw at different boundaries"
    asked, seen = first["asked"], first["seen"]
    assert asked[0] == 1
    assert max(later - earlier for earlier, later in itertools.pairwise(asked)) <= 8
    assert seen.index([False, True]) == 1, "what is raised is seen at the next boundary"
    assert 251 <= len(seen) <= 259
    assert seen[-1] == [True, False]
    assert sum(flags != [False, False] for flags in seen) == 2


@pytest.mark.parametrize(("milliseconds", "asked"), [(1000, 1), (3, 1), (2, 2), (0.1, 8)])
def test_the_faster_its_steps_the_fewer_of_them_ask(
    monkeypatch: pytest.MonkeyPatch, milliseconds: float, asked: int
) -> None:
    now = 0.0
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now)
    agreement = Agreement(read_context({}), flags=1)
    found: list[int] = []
    for step in range(1, 65):
        now += milliseconds / 1000

        def ask(step: int = step) -> tuple[bool, ...]:
            found.append(step)
            return (True,)

        # A single rank sees at once what it raises.
        assert agreement.at_boundary(ask) == (found[-1:] == [step],)
    assert found == list(range(1, 65, asked))
