"""A Task's workers: real agents, and workers that run whatever a test writes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.agents import is_running, living, run, start, written
from support.jobs import until
from torch.distributed.launcher.api import LaunchConfig

from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.launcher.agent_signals import END_RANKS_SIGNAL
from cloudtrain_runtime.launcher.failure_file import REPORTED_EXIT_CODE

ENDINGS = {
    "sys.exit(3)": "exit code 3",
    "sys.exit('words')": "exit code 1",
    "os._exit(7)": "exit code 7",
    "os.abort()": "SIGABRT",
    "os._exit(0)": "",
}

AGENTS = pytest.mark.parametrize(
    "settings", [{}, {"PET_MONITOR_INTERVAL": "0.1"}], ids=["own", "torchrun"]
)
"""The agent of a single host, and torchrun's, which acts on the settings of torchrun."""


def test_every_ending_of_a_worker_is_noticed(tmp_path: Path) -> None:
    """Each ending but the last is that of one attempt, after which the workers are restarted."""
    worker = f"""
write("forked", is_forked)
if rank == 0:
    open(f"came-{{restart}}", "w").close()
if rank == 0 and restart == 4:
    sys.exit()
if rank == 1:
    while not os.path.exists(f"came-{{restart}}"):
        time.sleep(0.01)
    exec({list(ENDINGS)}[restart])
time.sleep(600)
"""
    code, log = run(tmp_path, worker, restarts=4)
    assert code == 0, log
    assert log.count("forked True") == 10
    found = re.findall(r"^restart \d of 4: rank 0 by SIGTERM, rank 1 by (.*)$", log, re.MULTILINE)
    assert found == [text for text in ENDINGS.values() if text]
    assert "words\n" in log


def test_exit_process_runs_handlers_and_joins_threads(tmp_path: Path) -> None:
    worker = """
import atexit, multiprocessing, tempfile, threading
from cloudtrain_runtime.process.fast_exit import exit_process
class Model:
    def __del__(self): write("destroyed")
model = Model()
folder = tempfile.TemporaryDirectory()
atexit.register(lambda: write("handler", os.path.isdir(folder.name)))
threading.Thread(target=lambda: (time.sleep(0.5), write("joined"))).start()
child = multiprocessing.Process(target=time.sleep, args=(600,), daemon=True)
child.start()
write("child", child.pid, folder.name)
unflushed = open("unflushed", "w")
unflushed.write("text")
exit_process(0)
"""
    code, log = run(tmp_path, worker, ranks=1)
    assert code == 0, log
    ((child, temporary),) = written(tmp_path, "child")
    assert [
        line for line in log.splitlines() if line in ("joined", "handler True", "destroyed")
    ] == [
        "joined",
        "handler True",
    ]
    assert (tmp_path / "unflushed").read_text() == "text"
    assert not is_running(int(child))
    assert not Path(temporary).exists()


def test_first_failure_is_named_among_simultaneous_ones(tmp_path: Path) -> None:
    worker = """
if rank == 1:
    open("pid", "w").write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)
from cloudtrain_runtime.worker import record_failure
def is_gone():
    try:
        pid = open("pid").read()
    except FileNotFoundError:
        return False
    return bool(pid) and not os.path.exists(f"/proc/{pid}")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while not is_gone():
    time.sleep(0.001)
record_failure("RuntimeError: Connection closed by peer", "")
os._exit(1)
"""
    code, log = run(tmp_path, worker)
    assert code == REPORTED_EXIT_CODE
    assert MlTree(tmp_path).failure.read_text() == "rank 1 was killed by SIGKILL", log


@AGENTS
def test_ranks_that_the_agent_kills_are_not_the_cause(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    """Rank 0 waits in a collective and does not act on SIGTERM, as ranks do whose peer was killed."""
    worker = """
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("waits", "w").close()
    time.sleep(600)
while not os.path.exists("waits"):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, log = run(tmp_path, worker, **settings)
    assert code == REPORTED_EXIT_CODE
    assert MlTree(tmp_path).failure.read_text() == "rank 1 was killed by SIGKILL", log


def test_error_file_is_written_atomically(tmp_path: Path) -> None:
    """The agent may read it when it has just ended the rank that writes it."""
    path = tmp_path / "error.json"
    code = "from cloudtrain_runtime.worker import record_failure\nwhile True: record_failure('x' * 5000, 'y' * 5000)\n"
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ) as writer:
        until(path.exists)
        texts = {path.read_text() for _ in range(3000)}
        writer.kill()
    assert all(json.loads(text) for text in texts)


def test_restart_ends_all_processes_of_the_workers(tmp_path: Path) -> None:
    worker = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
write("forked", is_forked, rank, restart, os.getpid(), child.pid)
time.sleep(600 if restart == 0 else 0)
child.kill()
"""
    agent = start(tmp_path, worker, restarts=1)
    (victim,) = [words for words in written(tmp_path, "forked", 2) if words[1] == "1"]
    os.kill(int(victim[3]), signal.SIGKILL)
    assert agent.wait(300) == 0, (tmp_path / "log").read_text()
    found = written(tmp_path, "forked", 4)
    assert {tuple(words[:3]) for words in found} == {("True", r, n) for r in "01" for n in "01"}
    until(lambda: not any(is_running(int(words[4])) for words in found))


STUCK = """
import torch.distributed as dist
if restart == 0:
    signal.signal(signal.SIGTERM, lambda *_: write("noticed", rank))  # as a Task's training loop does
dist.init_process_group("gloo")
write("in", rank, restart, os.getpid())
if rank == 0 and restart == 0:
    while True:  # a collective that does not return, even after the loss of the peer
        time.sleep(600)
if rank == 1 and restart == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.barrier()
os._exit(0)
"""


@AGENTS
def test_stuck_rank_does_not_hold_a_restart(tmp_path: Path, settings: dict[str, str]) -> None:
    """The rank takes SIGTERM for a stop notice and never reaches its next step boundary."""
    agent = start(tmp_path, STUCK, restarts=1, **settings)
    (victim,) = [words for words in written(tmp_path, "in", 2) if words[0] == "1"]
    os.kill(int(victim[2]), signal.SIGKILL)
    assert agent.wait(300) == 0, (tmp_path / "log").read_text()
    assert written(tmp_path, "noticed") == [["0"]]
    assert "restart 1 of 1: rank 0 by SIGTERM, rank 1 by SIGKILL" in (tmp_path / "log").read_text()
    assert sorted(words[:2] for words in written(tmp_path, "in", 4)) == [
        ["0", "0"],
        ["0", "1"],
        ["1", "0"],
        ["1", "1"],
    ]


@AGENTS
def test_stop_reaches_workers_and_their_children(tmp_path: Path, settings: dict[str, str]) -> None:
    worker = """
import subprocess
def on_notice(number, frame):
    time.sleep(0.5)
    write("saved", rank)
    os._exit(0)
signal.signal(signal.SIGTERM, on_notice)
write("child", subprocess.Popen(["sleep", "600"]).pid)
time.sleep(600)
"""
    agent = start(tmp_path, worker, **settings)
    children = [int(words[0]) for words in written(tmp_path, "child", 2)]
    os.kill(agent.pid, END_RANKS_SIGNAL)
    os.kill(agent.pid, signal.SIGTERM)
    assert agent.wait(20) == 128 + signal.SIGTERM  # not after the 30 s that it gives stuck workers
    assert sorted(written(tmp_path, "saved", 2)) == [["0"], ["1"]]
    until(lambda: not any(is_running(pid) for pid in children))


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("task", signal.SIGTERM),
        ("task", signal.SIGINT),
        ("task", signal.SIGHUP),
        ("script", signal.SIGTERM),
    ],
)
def test_a_signal_to_all_processes_leaves_the_ranks(
    tmp_path: Path, kind: str, sent: signal.Signals
) -> None:
    """Only the launcher, which knows the grace time, ends the ranks."""
    if kind == "script" and not hasattr(LaunchConfig, "signals_to_handle"):
        pytest.skip("torchrun's own agent ends its workers, before its option --signals-to-handle")
    worker = """
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, lambda *_: write("noticed", rank))
write("up", os.getpid())
while not os.path.exists("saved"):
    time.sleep(0.01)
os._exit(0)
"""
    agent = start(tmp_path, worker, kind=kind)
    written(tmp_path, "up", 2)
    for process in living(tmp_path):
        process.send_signal(sent)
    assert len(written(tmp_path, "noticed", 2)) == 2
    (tmp_path / "saved").touch()
    assert agent.wait(300) == 0, (tmp_path / "log").read_text()


def test_a_stop_after_a_failure_does_not_hide_it(tmp_path: Path) -> None:
    """It arrives while the agent ends the other ranks, and there is no restart any more."""
    worker = """
def stop_agent(number, frame):
    agent = int(open("agent").read())
    os.kill(agent, signal.SIGUSR1)  # END_RANKS_SIGNAL
    os.kill(agent, signal.SIGTERM)
signal.signal(signal.SIGTERM, stop_agent)
write("up", rank)
while not os.path.exists("fails"):
    time.sleep(0.01)
if rank == 1:
    os._exit(3)
time.sleep(600)
"""
    agent = start(tmp_path, worker, restarts=1)
    (tmp_path / "agent").write_text(str(agent.pid))
    written(tmp_path, "up", 2)
    (tmp_path / "fails").touch()
    assert agent.wait(300) == REPORTED_EXIT_CODE
    assert MlTree(tmp_path).failure.read_text() == "rank 1 ended with exit code 3"
    assert "restart 1 of 1" not in (tmp_path / "log").read_text()


def test_stop_during_the_start_leaves_no_worker(tmp_path: Path) -> None:
    worker = """
if rank == 0:
    agent = int(open("agent").read())
    os.kill(agent, signal.SIGUSR1)  # END_RANKS_SIGNAL
    os.kill(agent, signal.SIGTERM)
time.sleep(600)
"""
    agent = start(tmp_path, worker, ranks=6)
    (tmp_path / "agent").write_text(str(agent.pid))
    assert agent.wait(300) == 128 + signal.SIGTERM
    until(lambda: not living(tmp_path))


def test_stop_during_the_imports_leaves_no_process(tmp_path: Path) -> None:
    agent = start(tmp_path, "time.sleep(600)\n")
    until(lambda: len(living(tmp_path)) > 1)
    os.kill(agent.pid, END_RANKS_SIGNAL)
    os.kill(agent.pid, signal.SIGTERM)
    agent.wait(300)
    until(lambda: not living(tmp_path))


def test_server_ends_with_a_killed_agent_and_its_workers(tmp_path: Path) -> None:
    agent = start(tmp_path, "write('up', os.getpid())\ntime.sleep(600)\n")
    workers = [int(words[0]) for words in written(tmp_path, "up", 2)]
    agent.kill()
    agent.wait()
    assert [is_running(pid) for pid in workers] == [
        True,
        True,
    ]  # as under torchrun; the container ends them
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not living(tmp_path))


def test_a_host_imports_torch_once(tmp_path: Path) -> None:
    """The server is a fork of the agent, as its command line shows, and the workers are forks of the server."""
    agent = start(tmp_path, "write('up', is_forked, os.getppid())\ntime.sleep(600)\n")
    ups = written(tmp_path, "up", 2)
    (parent,) = {int(words[1]) for words in ups}
    server = psutil.Process(parent)
    assert server.ppid() == agent.pid
    assert server.cmdline() == psutil.Process(agent.pid).cmdline()
    assert len(living(tmp_path)) == 4
    os.kill(agent.pid, END_RANKS_SIGNAL)
    agent.terminate()
    assert agent.wait(300) == 128 + signal.SIGTERM


@AGENTS
def test_a_lost_server_ends_its_workers_and_the_run(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    """Without the server the agent receives no exit codes, so it ends the workers."""
    worker = "write('forked', os.getppid(), os.getpid())\ntime.sleep(600)\n"
    agent = start(tmp_path, worker, restarts=1, **settings)
    server = psutil.Process(int(written(tmp_path, "forked", 2)[0][0]))
    # It waits for requests again when it has told the agent of both workers.
    until(lambda: server.status() == psutil.STATUS_SLEEPING)
    server.kill()
    assert agent.wait(300) == 1, (tmp_path / "log").read_text()
    assert "the process that forks the ranks has ended" in (tmp_path / "log").read_text()
    assert not any(is_running(int(words[1])) for words in written(tmp_path, "forked", 2))


PROBE = """
import gc, json, multiprocessing, random, resource
main = sys.modules["__main__"]
changing = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "CLOUDTRAIN_WORKER_START", "TORCHELASTIC_SIGNALS_TO_HANDLE")
found = {
    "arguments": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "cwd": os.getcwd(), "path": sys.path,
    "flags": repr(sys.flags),
    "main": [__name__, main.__file__, vars(main) is globals()],
    "environ": {name: value for name, value in os.environ.items() if name not in changing},
    "handlers": {s.name: repr(signal.getsignal(s)) for s in signal.Signals},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT" in name},
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()], "nice": os.nice(0), "umask": os.umask(0o22),
    "multiprocessing": [multiprocessing.get_start_method(), multiprocessing.current_process().daemon],
    "threads": len(os.listdir("/proc/self/task")),
    "interpreter": [gc.isenabled(), sys.getrecursionlimit(), repr(sys.excepthook)],
    "affinity": sorted(os.sched_getaffinity(0)),
}
import torch, numpy
found["torch"] = [torch.get_num_threads(), torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()]
found["dtype"] = repr(torch.get_default_dtype())
seeds = [random.random(), float(numpy.random.random()), torch.initial_seed()]
write("FOUND " + json.dumps({"found": found, "forked": is_forked, "seeds": seeds}, default=str))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_worker_finds_the_state_of_a_new_interpreter(tmp_path: Path) -> None:
    def probe(name: str, **environ: str) -> list[dict[str, Any]]:
        folder = tmp_path / name
        folder.mkdir()
        code, log = run(folder, PROBE, ODD=os.fsdecode(b"\xff"), **environ)
        assert code == 0, log
        lines = [line.partition(" ")[2] for line in log.splitlines() if line.startswith("FOUND ")]
        found = [json.loads(line.replace(str(folder), "FOLDER")) for line in lines]
        return sorted(found, key=lambda rank: rank["found"]["environ"]["RANK"])

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        forked, fresh = probe("forked"), probe("fresh", CLOUDTRAIN_WORKER_START="fresh")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [rank["forked"] for rank in forked + fresh] == [True, True, False, False]
    for ours, theirs in zip(forked, fresh, strict=True):
        assert (
            ours["found"].pop("environ").items() ^ theirs["found"].pop("environ").items() == set()
        )
        differing = {
            name for name, value in ours["found"].items() if value != theirs["found"][name]
        }
        assert differing == set(), [
            (ours["found"][name], theirs["found"][name]) for name in differing
        ]
    assert all(
        one != other for one, other in zip(forked[0]["seeds"], forked[1]["seeds"], strict=True)
    )


def test_the_program_of_rank_0_can_use_the_port(tmp_path: Path) -> None:
    """Also one that does not set SO_REUSEADDR, as some servers do not."""
    worker = """
import socket
deadline = time.monotonic() + 30
while True:
    try:
        plain = socket.socket()
        plain.bind(("", int(os.environ["MASTER_PORT"])))
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.1)
"""
    code, log = run(tmp_path, worker, ranks=1, kind="script")
    assert code == 0, log


def test_scripts_get_new_interpreters(tmp_path: Path) -> None:
    code, log = run(tmp_path, "write('forked', is_forked)\n", kind="script")
    assert code == 0, log
    assert log.count("forked False") == 2


def test_unknown_start_method_is_reported(tmp_path: Path) -> None:
    code, log = run(tmp_path, "write('forked', is_forked)\n", CLOUDTRAIN_WORKER_START="frseh")
    assert code == 0, log
    assert "its one value is" in log
    assert log.count("forked False") == 2


def test_threads_of_openblas_allow_forks(tmp_path: Path) -> None:
    worker = "import numpy\nnumpy.ones((300, 300)) @ numpy.ones((300, 300))\nwrite('forked', is_forked)\n"
    code, log = run(tmp_path, worker, ranks=1, OMP_NUM_THREADS="2")
    assert code == 0, log
    assert "forked True" in log, log


LOADERS = """
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return i * i

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver", None):
        loader = DataLoader(Squares(), batch_size=3, num_workers=1, multiprocessing_context=method)
        write("loaded", method, [batch.tolist() for batch in loader])
"""


def test_data_loaders_of_every_kind_work(tmp_path: Path) -> None:
    code, log = run(tmp_path, LOADERS, ranks=1)
    assert code == 0, log
    for method in ("fork", "spawn", "forkserver", None):
        assert f"loaded {method} [[0, 1, 4], [9, 16, 25]]" in log
