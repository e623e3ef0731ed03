"""The reason of a failed run is the first failure, on every host."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from support.jobs import Cli
from torch import distributed

from cloudtrain.backends.container.failure_reason import find_cause
from cloudtrain_runtime.contract.secondary_errors import is_secondary_error
from cloudtrain_runtime.launcher.failure_cause import agree_on_cause

SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000):
    dist.all_reduce(torch.ones(1000))
    if step == 20 and os.environ["RANK"] == sys.argv[2]:
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the cause")
"""
JOB = """\
name: cause
code: {script: train.py, args: [KIND, "RANK"]}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2, processes_per_instance: 1}
"""
LOST = "rank 0 on algo-1 (local rank 0) failed: RuntimeError: gloo/transport/tcp/pair.cc: Connection closed by peer"
CAUSE = "rank 1 on algo-2 (local rank 0) failed: ValueError: the cause"


@pytest.mark.promise
@pytest.mark.processes
@pytest.mark.parametrize(("kind", "rank"), [("raise", 0), ("raise", 1), ("kill", 0), ("kill", 1)])
def test_every_host_writes_the_cause(
    job: Callable[..., Path], cli: Cli, kind: str, rank: int
) -> None:
    path = job(JOB.replace("KIND", kind).replace("RANK", str(rank)), train_py=SCRIPT)
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 4, done.err
    host = f"algo-{rank + 1}"
    expected = f"rank {rank} on {host} (local rank 0) "
    assert done.json["reason"].startswith(expected), done.json["reason"]
    for each in ("algo-1", "algo-2"):
        file = (
            Path(done.json["artifacts"]["folder"])
            / "hosts"
            / each
            / "opt"
            / "ml"
            / "output"
            / "failure"
        )
        assert file.read_text().startswith(expected)


def agree(reasons: dict[str, bool], file: Path | None = None) -> list[str]:
    """Run `agree_on_cause` for several hosts; return the reason that each host writes.

    Args:
        reasons: For each host its own reason, and whether this is a secondary failure.
        file: The store, for hosts on one machine; by default, the first host has it.
    """
    store = distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9)
    )

    def one(number: int, reason: str) -> str:
        return agree_on_cause(
            reason,
            is_secondary=reasons[reason],
            endpoint=str(file or f"127.0.0.1:{store.port}"),
            hosts=len(reasons),
            options="store_type=file" if file else f"is_host={str(number == 0).lower()}",
        )

    with ThreadPoolExecutor(len(reasons)) as pool:
        return list(pool.map(one, range(len(reasons)), reasons))


@pytest.mark.parametrize("kind", ["file", "port"])
def test_hosts_with_secondary_failures_write_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "store" if kind == "file" else None
    assert agree({LOST: True, CAUSE: False, "other effect": True}, file) == [CAUSE] * 3
    monkeypatch.setattr("cloudtrain_runtime.launcher.failure_cause._WAIT_SECONDS", 1.0)
    other = tmp_path / "other" if kind == "file" else None
    assert agree({LOST: True, "other effect": True}, other) == [LOST, "other effect"]


def test_without_the_store_no_secondary_failure_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain_runtime.launcher.failure_cause._WAIT_SECONDS", 1.0)
    no_store = {"endpoint": "127.0.0.1:9", "hosts": 2, "options": "is_host=false"}
    assert agree_on_cause(LOST, is_secondary=True, **no_store) == ""  # type: ignore[arg-type]
    assert agree_on_cause(CAUSE, is_secondary=False, **no_store) == CAUSE  # type: ignore[arg-type]


def test_a_single_host_writes_its_own_reason() -> None:
    assert agree_on_cause(LOST, is_secondary=True, endpoint="", hosts=1, options="") == LOST


def failed(host: str, message: str, at: float, *, secondary: bool = False) -> dict[str, object]:
    return {
        "event": "failed",
        "host": host,
        "message": message,
        "failed_at": at,
        "secondary": secondary,
    }


def files(folder: Path, **texts: str) -> dict[str, Path]:
    """Write failure files with times one second apart; return the paths of two hosts' files."""
    for second, (name, text) in enumerate(texts.items()):
        path = folder / name.replace("_", "-")
        path.write_text(text)
        os.utime(path, (1000 + second, 1000 + second))
    return {host: folder / host for host in ("algo-1", "algo-2")}


BOTH = {"algo-1": 1, "algo-2": 1}


def test_the_earlier_of_two_causes_in_a_second_wins(tmp_path: Path) -> None:
    events = [failed("algo-1", "later", 100.4), failed("algo-2", "first", 100.3)]
    assert find_cause(events, files(tmp_path), BOTH) == "first"


def test_a_start_after_the_failure_hides_no_cause(tmp_path: Path) -> None:
    """Rank 0 can report its start after another rank has failed."""
    events = [
        failed("algo-2", "cause", 100.0),
        {"event": "started"},
        failed("algo-1", LOST, 101.0, secondary=True),
    ]
    assert find_cause(events, files(tmp_path), BOTH) == "cause"


def test_a_host_that_ended_without_a_reason_is_the_cause(tmp_path: Path) -> None:
    events = [failed("algo-1", LOST, 101.0, secondary=True)]
    found = find_cause(events, files(tmp_path), {"algo-1": 1, "algo-2": -9})
    assert found == "the container of algo-2 ended with SIGKILL; see its log"
    assert find_cause(events, files(tmp_path), {"algo-1": 1}) == LOST


def test_a_host_whose_ranks_ended_before_is_the_cause(tmp_path: Path) -> None:
    left = {"event": "left", "host": "algo-2", "ranks": [2, 3], "step": 9, "time": 100.0}
    lost = failed("algo-1", LOST, 101.0, secondary=True)
    ended = "ranks 2, 3 on algo-2 ended with exit code 0 after step 9, while others waited for "
    assert find_cause([left, lost], files(tmp_path), {"algo-1": 1}) == f"{ended}{LOST}"
    cause = failed("algo-1", "cause", 101.0)
    assert find_cause([left, cause], files(tmp_path), {"algo-1": 1}) == "cause"


def test_failure_files_of_other_launchers_give_the_cause(tmp_path: Path) -> None:
    """AWS's toolkit writes a failure file on every host and emits no event."""
    assert find_cause([], files(tmp_path, algo_1=LOST, algo_2=CAUSE), BOTH) == CAUSE
    assert find_cause([], files(tmp_path, algo_2="first", algo_1="later"), BOTH) == "first"
    assert find_cause([], files(tmp_path, algo_2=LOST, algo_1=LOST), BOTH) == LOST


def test_event_times_keep_their_fraction(capfd: pytest.CaptureFixture[str]) -> None:
    from cloudtrain_runtime.contract import parse_event
    from cloudtrain_runtime.process.event_log import emit

    emit("failed", message="m", failed_at=1_795_000_000.25)
    found = parse_event(capfd.readouterr().out)
    assert found is not None
    assert found["failed_at"] == 1_795_000_000.25


def test_a_port_in_use_is_a_cause() -> None:
    in_use = "DistNetworkError: The server socket has failed to listen on any local network address. name: EADDRINUSE"
    assert not is_secondary_error(in_use)
    assert is_secondary_error("DistNetworkError: Connection reset by peer")
