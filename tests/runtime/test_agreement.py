"""Agreement on flags at step boundaries: three real processes with Gloo, whose steps take different times."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.backends.container.machine import free_port
from cloudtrain_runtime.process.process_group import Agreement, Row
from cloudtrain_runtime.process.run_context import read_context

pytestmark = pytest.mark.processes

RANKS = 3
RANK = """
import json, os, sys, time
from cloudtrain_runtime.process import process_group
from cloudtrain_runtime.process.run_context import read_context

context = read_context(os.environ)
process_group.join_ranks(context)
agreement = process_group.Agreement(context, flags=2, numbers=2)
asked, seen, received = [], [], []
for step in range(1, 401):
    def ask():
        asked.append(step)
        return (context.rank == 1 and step >= 250, context.rank == 2 and step <= 1)
    def take(rows, sent_at=step):
        received.append((sent_at, step - sent_at, rows))
    row = process_group.Row((step, 0.5 * context.rank), take) if step % 25 == 0 and step <= 200 else None
    found = agreement.at_boundary(ask, row)
    seen.append(found)
    time.sleep((0.0001, 0.0002, 0.02)[context.rank] if 100 < step <= 110 else 0)
    if found[0]:
        break
agreement.poll()
os.write(1, json.dumps({"asked": asked, "seen": seen, "rows": received}).encode())
os._exit(0)
"""


def test_all_ranks_see_a_flag_at_the_same_step(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    port = str(free_port())
    shared = {
        **os.environ,
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    shared |= {"CLOUDTRAIN_ML_ROOT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "rank.py")],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(RANKS)
    ]
    reports = [json.loads(process.communicate(timeout=300)[0]) for process in started]
    for process in started:
        assert process.stdout is not None
        process.stdout.close()
    assert [process.returncode for process in started] == [0] * RANKS
    first = reports[0]
    assert all(each == first for each in reports), (
        "the ranks asked or saw flags at different boundaries"
    )
    asked, seen = first["asked"], first["seen"]
    assert asked[0] == 1
    assert max(later - earlier for earlier, later in itertools.pairwise(asked)) <= 16
    assert seen.index([False, True]) == 1, "a raised flag is seen at the next boundary"
    assert 251 <= len(seen) <= 267
    assert seen[-1] == [True, False]
    rows = [(step, rows) for step, _, rows in first["rows"]]
    assert rows == [
        (step, [[step, 0.5 * rank] for rank in range(RANKS)]) for step in range(25, 201, 25)
    ]
    delays = [delay for _, delay, _ in first["rows"]]
    assert delays.count(1) > 4, "when steps are fast, no rank waits for the others"
    assert set(delays) <= {0, 1}
    assert sum(flags != [False, False] for flags in seen) == 2


def test_a_single_rank_sees_its_flags_at_the_same_boundary() -> None:
    agreement = Agreement(read_context({}), flags=1, numbers=1)
    rows: list[list[list[float]]] = []
    found = [
        agreement.at_boundary(lambda flag=step % 3 == 0: (flag,), Row([step], rows.append))
        for step in range(64)
    ]
    assert found == [(step % 3 == 0,) for step in range(64)]
    assert rows == [[[step]] for step in range(64)]
