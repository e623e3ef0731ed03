"""A rank that is killed in the middle of a save."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli, processes_of

pytestmark = pytest.mark.processes

KILL_IN_SAVE = '''

import contextlib, signal
from cloudtrain_runtime.checkpoint.storage import FolderStorage

_create = FolderStorage.create

@contextlib.contextmanager
def create(self, folder, file):
    """Kill this process in the middle of a shard of step 6, once."""
    with _create(self, folder, file) as writer:
        if context().rank == 1 and not context().restarts and "step-00000006" in folder:
            writer.write(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        yield writer

FolderStorage.create = create
'''


@pytest.mark.promise
def test_a_group_resumes_from_the_last_complete_checkpoint(
    cli: Cli, small: Callable[..., Path]
) -> None:
    path = small(seconds=0.05)
    with path.with_name("small.py").open("a") as file:
        file.write(KILL_IN_SAVE)
    settings = ("cluster.processes_per_instance=2", "limits.retries=2", "checkpoint.keep=20")
    arguments = [part for setting in settings for part in ("--set", setting)]
    done = cli("submit", path, "--local", "--follow", "--json", *arguments)
    assert done.code == 0, done.err
    assert done.json["state"] == "SUCCEEDED"
    run, folder = done.json["run"], Path(done.json["artifacts"]["folder"])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    starts = [event for event in events if event["event"] == "started"]
    assert [(event["restarts"], event["step"]) for event in starts] == [(0, 0), (1, 4)]
    assert starts[1]["resumed_from"].endswith("step-00000004")
    # The incomplete checkpoint of step 6 was never loaded. The restarted group has saved step 6 again.
    listed = cli("checkpoints", run, "--json").json["checkpoints"]
    assert {entry["state"] for entry in listed if entry["step"] == 6} == {"unfinished", "complete"}
    assert [entry["step"] for entry in listed if entry["state"] == "unfinished"] == [6]
    assert cli("checkpoints", "verify", run).code == 0
    assert processes_of(run) == []
