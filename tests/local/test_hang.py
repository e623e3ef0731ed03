"""A hang in a Task ends the run, and all commands report the reason."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli, processes_of

pytestmark = pytest.mark.processes


def test_a_rank_that_hangs_ends_the_run_with_its_stack(
    cli: Cli, small: Callable[..., Path]
) -> None:
    """The rank of the second host hangs. The rank of the first host waits for it in a collective."""
    overrides = [
        "cluster.instances=2",
        "limits.hang=10s",
        "limits.retries=3",
        "checkpoint.every=2 steps",
    ]
    arguments = [part for override in overrides for part in ("--set", override)]
    job = small(hang=True, fail_at=5, fail_rank=1)
    done = cli("submit", job, "--local", "--follow", "--json", *arguments)
    assert done.code == 4, done.err
    run = done.json["run"]
    status = cli("status", run, "--json").json
    assert status["state"] == "FAILED"
    assert status["reason"].startswith("hang: no step for 1"), status["reason"]
    assert "after step 5; rank 1 on algo-2 is at small.py:31 in loss" in status["reason"]
    assert status["last_checkpoint"]["step"] == 4
    folder = Path(done.json["artifacts"]["folder"])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    hangs = {event["host"]: event for event in events if event["event"] == "hang"}
    assert set(hangs) == {"algo-1", "algo-2"}
    assert hangs["algo-2"]["stacks"] == f"{(folder / 'checkpoints').as_uri()}/hang/algo-2"
    with tarfile.open(done.json["artifacts"]["output"]) as archive:
        assert "hang/rank-0.txt" in archive.getnames()
    explained = cli("explain", run, "--json").json
    assert (explained["class"], explained["rank"], explained["host"]) == ("hang", 1, "algo-2")
    assert "small.py:31 in loss" in explained["action"]
    assert processes_of(run) == []
