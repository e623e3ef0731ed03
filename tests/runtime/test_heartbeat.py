"""Hang detection, heartbeats and stop notices of real hosts: the launcher, torchrun and the ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.hosts import SCRIPT_RUN
from support.jobs import until

from cloudtrain.backends.container.machine import free_port, host_addresses
from cloudtrain.bundle.contents import WORKER_SOURCE
from cloudtrain_runtime.contract import WORKER_SCRIPT, MlTree, RunConfig, parse_event
from cloudtrain_runtime.launcher import stacks
from cloudtrain_runtime.launcher.hang import StallTimer
from cloudtrain_runtime.launcher.stacks import Frame, RankStack
from cloudtrain_runtime.process import heartbeat

CONFIG = replace(SCRIPT_RUN, hang_seconds=2.0)
SCRIPT = """
import ctypes, signal, subprocess, threading, time
import torch, torch.distributed as dist
from cloudtrain_runtime import heartbeat

def forward(step):
    if step == 5 and rank == world - 1:
        KIND()

def sleep():
    while True:
        time.sleep(60)

def stop():
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP); time.sleep(3600)
    # One line, because SIGCONT continues this process to dump its stack.


def hold_the_gil():
    while True: ctypes.PyDLL(None).sleep(3600)  # the signal that dumps the stacks interrupts this sleep

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
signal.signal(signal.SIGTERM, signal.SIG_IGN); subprocess.Popen(["sleep", "600"]); print("joined the group", flush=True)
for step in range(1, 9):
    forward(step)
    dist.all_reduce(torch.ones(1))
    heartbeat.tick(step)
"""


@dataclass
class Host:
    """A host: its /opt/ml and its launcher."""

    tree: MlTree
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        path = self.tree.root / "log"
        return path.read_text() if path.exists() else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        found = (parse_event(line) for line in self.log.splitlines())
        return [event for event in found if event and event["event"] == name]

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(timeout=300)

    def remaining_processes(self) -> list[psutil.Process]:
        """Return the processes that still run 10 s later; return an empty list as soon as all have exited."""
        deadline = time.monotonic() + 10
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of this host."""
        found = []
        for process in psutil.process_iter():
            try:
                is_own = process.environ().get("CLOUDTRAIN_ML_ROOT") == str(self.tree.root)
                if is_own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., list[Host]]]:
    """Return a function that starts the launchers of the hosts of a script's run."""
    hosts: list[Host] = []

    def start(
        script: str,
        config: RunConfig = CONFIG,
        *,
        count: int = 1,
        config_is_pipe: bool = False,
        **environ: str,
    ) -> list[Host]:
        names = [f"algo-{index + 1}" for index in range(count)]
        for name in names:
            hosts.append(Host(MlTree(tmp_path / name)))
            _prepare(hosts[-1].tree, script, config, name, names)
            if config_is_pipe:
                hosts[-1].tree.run_config.unlink()
                os.mkfifo(hosts[-1].tree.run_config)
        shared = _environment(names)
        for host in hosts:
            with (host.tree.root / "log").open("wb") as log:
                host.process = subprocess.Popen(
                    [sys.executable, "-m", "cloudtrain_runtime.launch"],
                    cwd=host.tree.code,
                    env={
                        **os.environ,
                        **shared,
                        "CLOUDTRAIN_ML_ROOT": str(host.tree.root),
                        **environ,
                    },
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        return hosts

    yield start
    for host in hosts:
        for process in host.processes():
            process.kill()
        if host.process is not None:
            host.process.kill()
            host.process.wait()


def _prepare(tree: MlTree, script: str, config: RunConfig, name: str, names: list[str]) -> None:
    for folder in (tree.config, tree.run_config.parent, tree.code):
        folder.mkdir(parents=True)
    (tree.code / WORKER_SCRIPT).write_text(WORKER_SOURCE)
    (tree.code / "train.py").write_text(script)
    (tree.config / "resourceconfig.json").write_text(
        json.dumps({"current_host": name, "hosts": names})
    )
    tree.run_config.write_text(config.to_json())


def _environment(names: list[str]) -> dict[str, str]:
    return {
        "CLOUDTRAIN_HOST_ADDRESSES": json.dumps(host_addresses(tuple(names))),
        "CLOUDTRAIN_RENDEZVOUS_PORT": str(free_port()),
        "CLOUDTRAIN_GPUS": "0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.promise
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("sleep", "rank 1 on algo-1 is at train.py:12 in sleep"),
        ("hold_the_gil", "rank 1 on algo-1 is at train.py:20 in hold_the_gil"),
        (
            "stop",
            "rank 1 on algo-1 is stopped by a signal (SIGSTOP), and is at train.py:15 in stop",
        ),
    ],
)
def test_a_hang_ends_the_host_and_names_the_rank(
    kind: str, cause: str, start: Callable[..., list[Host]], tmp_path: Path
) -> None:
    config = replace(
        CONFIG, checkpoint=replace(CONFIG.checkpoint, uri=(tmp_path / "saved files").as_uri())
    )
    (host,) = start(SCRIPT.replace("KIND", kind), config)
    assert host.wait() == 1, host.log
    failure = host.tree.failure.read_text()
    assert failure.startswith("hang: no step for ")
    assert failure.endswith(f" after step 4; {cause}"), failure
    assert "rank 0 is at train.py:27 in <module> (waits in torch/distributed/" in host.log
    (event,) = host.events("hang")
    assert (event["host"], event["step"], event["ranks"]) == ("algo-1", 4, [1])
    assert event["seconds"] > 2.0
    assert "in all_reduce" in (host.tree.hang / "rank-0.txt").read_text()
    assert f"in {kind}" in (host.tree.hang / "rank-1.txt").read_text()
    assert event["stacks"].endswith("/saved%20files/hang/algo-1")
    kept = tmp_path / "saved files" / "hang" / "algo-1"
    assert {path.name for path in kept.iterdir()} == {"rank-0.txt", "rank-1.txt", "summary.txt"}
    (failed,) = host.events("failed")
    assert (failed["rank"], failed["message"], failed["secondary"]) == (1, failure, False)
    assert host.remaining_processes() == []
    assert host.log.count("joined the group") == 2, "no restart after a hang"


@pytest.mark.processes
def test_each_host_reports_its_ranks_and_the_cause_first(start: Callable[..., list[Host]]) -> None:
    first, second = start(SCRIPT.replace("KIND", "sleep"), count=2)
    assert (first.wait(), second.wait()) == (1, 1), first.log + second.log
    assert "rank 3 on algo-2 is at train.py:12 in sleep" in second.tree.failure.read_text()
    # When the launcher detects the hang, one rank or both have sent no heartbeat for long enough.
    named = r"(ranks 0, 1 on algo-1: rank 0|rank [01] on algo-1) is at train.py:27 in <module> \(waits in"
    assert re.search(named, first.tree.failure.read_text())
    failures = [host.events("failed")[0] for host in (first, second)]
    assert [failure["secondary"] for failure in failures] == [True, False]
    # Each host has written its evidence before the end of the other host could affect its ranks.
    assert [sorted(path.name for path in host.tree.hang.iterdir()) for host in (first, second)] == [
        ["rank-0.txt", "rank-1.txt", "summary.txt"],
        ["rank-2.txt", "rank-3.txt", "summary.txt"],
    ]
    assert first.remaining_processes() == second.remaining_processes() == []


@pytest.mark.aws
@pytest.mark.processes
def test_the_evidence_is_uploaded_beside_the_checkpoints(
    start: Callable[..., list[Host]], aws: dict[str, str]
) -> None:
    import boto3

    client = boto3.client("s3")
    config = replace(
        CONFIG, checkpoint=replace(CONFIG.checkpoint, uri="s3://cloudtrain-test/run/checkpoints")
    )
    (host,) = start(SCRIPT.replace("KIND", "sleep"), config)
    assert host.wait() == 1
    assert host.events("hang")[0]["stacks"] == "s3://cloudtrain-test/run/checkpoints/hang/algo-1", (
        host.log
    )
    stored = client.get_object(
        Bucket="cloudtrain-test", Key="run/checkpoints/hang/algo-1/rank-1.txt"
    )
    assert "line 12 in sleep" in stored["Body"].read().decode()


@pytest.mark.processes
def test_a_hang_triggers_nccls_flight_recorder(start: Callable[..., list[Host]]) -> None:
    """A thread replaces torch's monitor: it creates the pipe, and writes its trace after a write to the pipe."""
    script = """
import os, threading, time
from cloudtrain_runtime import heartbeat

def monitor():
    rank = os.environ["RANK"]
    pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
    os.mkfifo(pipe)
    with open(pipe, "rb") as trigger:
        trigger.read(1)
    open(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + rank, "wb").write(b"trace")

threading.Thread(target=monitor, daemon=True).start()
heartbeat.tick(1)
while True:
    time.sleep(60)
"""
    (host,) = start(script, CLOUDTRAIN_GPUS="2")
    assert host.wait() == 1
    traces = {path.name: path.read_bytes() for path in host.tree.hang.glob("nccl-trace-*")}
    assert traces == {"nccl-trace-0": b"trace", "nccl-trace-1": b"trace"}, host.log


@pytest.mark.processes
def test_a_hang_ends_the_host_if_the_upload_fails(start: Callable[..., list[Host]]) -> None:
    config = replace(CONFIG, checkpoint=replace(CONFIG.checkpoint, uri="/proc/unwritable"))
    (host,) = start(SCRIPT.replace("KIND", "sleep"), config)
    assert host.wait() == 1
    assert "it cannot be copied to /proc/unwritable/hang/algo-1" in host.log
    assert "rank 1 on algo-1" in host.tree.failure.read_text()


SLOW = """
import os, time
from cloudtrain_runtime import heartbeat

rank = int(os.environ["RANK"])
time.sleep(2.0)            # the time before the first tick does not count
heartbeat.tick(1)
if rank == 0:
    os._exit(0)            # a rank that has exited is not monitored
time.sleep(0.9)
heartbeat.tick(2)
time.sleep(1.5)            # longer than the limit, shorter than the slowest step plus the limit
heartbeat.tick(3)
with heartbeat.exempt():
    time.sleep(3.5)
heartbeat.tick(4)
heartbeat.pause()
if os.fork() == 0:
    heartbeat.tick(99)     # a tick of a child process does not count for this rank
    os._exit(0)
time.sleep(3.5)
heartbeat.tick(5)
print("reached the end", flush=True)
"""


@pytest.mark.processes
def test_slow_ranks_and_exited_ranks_are_no_hang(start: Callable[..., list[Host]]) -> None:
    (host,) = start(SLOW, replace(CONFIG, hang_seconds=1.0))
    assert host.wait() == 0, host.log
    assert "reached the end" in host.log
    assert not host.tree.failure.exists()


@pytest.mark.processes
def test_without_a_limit_ranks_are_not_monitored(start: Callable[..., list[Host]]) -> None:
    script = "import time; from cloudtrain_runtime import heartbeat; heartbeat.tick(1); time.sleep(1); heartbeat.tick(2)"
    (host,) = start(script, replace(CONFIG, hang_seconds=None))
    assert host.wait() == 0, host.log
    assert not host.tree.heartbeats.exists()


@pytest.mark.processes
def test_restarted_ranks_are_monitored_from_their_first_tick(
    start: Callable[..., list[Host]],
) -> None:
    script = """
import os, time
from cloudtrain_runtime import watch  # the name of `heartbeat` in version 0.1
is_restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
time.sleep(4.0 if is_restarted else 0.0)  # longer than the limit: the previous process's heartbeat must not count
for step in range(1, 6):
    watch.tick(step)
    if step == 3 and not is_restarted:
        os.kill(os.getpid(), 9)
while is_restarted:
    time.sleep(60)
"""
    (host,) = start(script, replace(CONFIG, processes_per_instance=1, max_restarts=1))
    assert host.wait() == 1, host.log
    assert (
        "after step 5; rank 0 on algo-1 is at train.py:11 in <module>"
        in host.tree.failure.read_text()
    )


def test_ticks_outside_of_a_run_do_nothing() -> None:
    heartbeat.tick(1)
    heartbeat.pause()
    heartbeat.leave()
    with heartbeat.exempt():
        heartbeat.tick(2)


def test_a_rank_is_watched_again_after_an_exempt_block(tmp_path: Path) -> None:
    folder = MlTree(tmp_path).heartbeats
    folder.mkdir(parents=True)

    def state() -> tuple[int, int]:
        (found,) = heartbeat.read_heartbeats(folder)
        return found.phase, found.step

    heartbeat.arm({"CLOUDTRAIN_ML_ROOT": str(tmp_path), "LOCAL_RANK": "0", "RANK": "0"})
    try:
        heartbeat.tick(3)
        with heartbeat.exempt():
            assert state() == (heartbeat.Phase.PAUSED, 3)
        assert state() == (heartbeat.Phase.RUNNING, 3)
    finally:
        heartbeat.leave()


NOTICED = """
import os, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: (print("got SIGTERM", flush=True), sys.exit(3)))
output = Path(os.environ["CLOUDTRAIN_ML_ROOT"], "output")
if HANDLES_NOTICES:
    (output / "in-training-loop").touch()
print("ready", flush=True)
while not (HANDLES_NOTICES and (output / "stop-notice").exists()):
    time.sleep(0.05)
time.sleep(2.0)
print("saved and exited", flush=True)
"""


@pytest.mark.processes
def test_a_script_that_handles_the_notice_gets_no_sigterm(start: Callable[..., list[Host]]) -> None:
    (host,) = start(NOTICED.replace("HANDLES_NOTICES", "True"))
    until(lambda: host.log.count("ready") == 2)
    assert host.process is not None
    host.process.send_signal(signal.SIGTERM)
    until(host.tree.stop_notice.exists)
    host.process.send_signal(signal.SIGTERM)
    assert host.wait() == 0, host.log
    assert host.log.count("saved and exited") == 2
    assert "got SIGTERM" not in host.log


@pytest.mark.processes
def test_script_that_ignores_the_notice_ends_after_the_grace(
    start: Callable[..., list[Host]],
) -> None:
    script = NOTICED.replace("not (HANDLES_NOTICES and", "not (False and").replace(
        "HANDLES_NOTICES", "True"
    )
    (host,) = start(script, CLOUDTRAIN_STOP_GRACE_SECONDS="21")
    until(lambda: host.log.count("ready") == 2)
    assert host.process is not None
    host.process.send_signal(signal.SIGTERM)
    assert host.wait() != 0
    assert "got SIGTERM" in host.log


@pytest.mark.processes
def test_another_script_gets_sigterm_at_once(start: Callable[..., list[Host]]) -> None:
    (host,) = start(NOTICED.replace("HANDLES_NOTICES", "False"))
    until(lambda: host.log.count("ready") == 2)
    assert host.process is not None
    host.process.send_signal(signal.SIGTERM)
    assert host.wait() != 0
    assert "got SIGTERM" in host.log


@pytest.mark.processes
def test_a_stop_before_the_ranks_start_prevents_their_start(
    start: Callable[..., list[Host]], tmp_path: Path
) -> None:
    config = tmp_path / "algo-1" / "input" / "data" / "cloudtrain" / "run.json"
    (host,) = start("print('trained')", config_is_pipe=True)
    assert host.process is not None
    with config.open("w") as pipe:  # opening returns when the launcher opens the pipe for reading
        host.process.send_signal(signal.SIGTERM)
        until(host.tree.stop_notice.exists)
        pipe.write(CONFIG.to_json())
    assert host.wait() == 128 + signal.SIGTERM, host.log
    assert "trained" not in host.log
    assert not host.tree.failure.exists()


DUMP = """\
Thread 0x00007f0000000002 [pin] (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f0000000003 (most recent call first):
  File "/opt/ml/code/other.py", line 1 in take

Thread 0x00007f0000000001 (most recent call first):
  File "/opt/conda/lib/python3.11/site-packages/torch/autograd/graph.py", line 829 in _engine_run_backward
  File "/opt/ml/code/nets/gpt.py", line 42 in step
"""
CODE = Path("/opt/ml/code")


def test_the_main_threads_stack_is_read() -> None:
    frames = stacks.main_stack(DUMP, 0x7F0000000001)
    assert [frame.function for frame in frames] == ["_engine_run_backward", "step"]
    assert stacks.main_stack(DUMP, 0x99)[0].function == "take", (
        "without a main thread: the one that got the signal"
    )
    assert stacks.main_stack("", 1) == ()
    shown = RankStack(0, 7, True, frames).show(CODE)
    assert (
        shown
        == "is at nets/gpt.py:42 in step (waits in torch/autograd/graph.py:829 in _engine_run_backward)"
    )
    shown = RankStack(0, 7, True, frames[:1]).show(CODE)
    assert shown == "waits in torch/autograd/graph.py:829 in _engine_run_backward", (
        "no cause, see the rules of explain"
    )


@pytest.mark.parametrize(
    ("changes", "outliers"),
    [
        ({}, []),
        ({2: {"condition": "is stopped"}}, [2]),
        ({1: {"step": 6}}, [1]),
        ({3: {"frames": (Frame("/opt/ml/code/train.py", 17, "forward"),)}}, [3]),
        ({0: {"frames": ()}}, [0]),
        ({0: {"is_stalled": False}}, [1, 2, 3]),
        (
            {1: {"frames": (Frame("/x/site-packages/torch/distributed/other.py", 5, "barrier"),)}},
            [1],
        ),
    ],
)
def test_rank_that_differs_from_the_others_is_found(
    changes: dict[int, dict[str, Any]], outliers: list[int]
) -> None:
    waiting = (Frame("/x/site-packages/torch/distributed/c10d.py", 10, "all_reduce"),)
    ranks = [
        replace(RankStack(rank, 7, True, waiting), **changes.get(rank, {})) for rank in range(4)
    ]
    assert [outlier.rank for outlier in stacks.find_outliers(ranks)] == outliers


def test_a_frozen_host_is_no_hang() -> None:
    timer = StallTimer(max_interval_seconds=0.01)
    beat = heartbeat.Heartbeat(0, 1, 0, 0, 0, heartbeat.Phase.RUNNING, 5, 1000, 0)
    timer.update([beat])
    time.sleep(0.3)
    ((_, idle),) = timer.update([beat])
    assert idle <= 0.01, "the launcher itself did not run for 0.3 s, so this time must not count"
    ((_, idle),) = timer.update([replace(beat, last_nanoseconds=2000)])
    assert idle == 0.0


LEAVES = """
import os
import torch, torch.distributed as dist
from cloudtrain_runtime import heartbeat

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
heartbeat.tick(3)
if rank != 1:
    dist.recv(torch.ones(1), 2 - rank)  # rank 2 waits for rank 0, and rank 0 for rank 2
"""


@pytest.mark.processes
def test_a_hang_after_a_rank_has_left_names_that_rank(start: Callable[..., list[Host]]) -> None:
    (host,) = start(LEAVES, replace(CONFIG, processes_per_instance=3))
    assert host.wait() == 1, host.log
    failure = host.tree.failure.read_text()
    assert "; rank 1 on algo-1 ended with exit code 0, and ranks 0, 2 on algo-1: rank 0" in failure
    (failed,) = host.events("failed")
    assert (failed["rank"], failed["secondary"]) == (1, False)
