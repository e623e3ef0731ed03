"""Workers forked from the template: real agents, and workers that are whatever a test writes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.jobs import until

from cloudtrain_runtime.contract import WORKER_SCRIPT, CheckpointConfig, MlTree, RunConfig
from cloudtrain_runtime.launcher import worker_template
from cloudtrain_runtime.launcher.failure_file import REPORTED_EXIT_CODE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands a forked worker to the agent")

HEAD = """
import os, signal, sys, time
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
is_forked = "torch" in sys.modules
def tell(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def start(folder: Path, worker: str, *, ranks: int = 2, restarts: int = 0, **environ: str) -> subprocess.Popen[str]:
    """Start an agent whose workers run this code."""
    (folder / WORKER_SCRIPT).write_text(HEAD + worker)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--nnodes=1", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--rdzv-backend=c10d"]
    arguments += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=t", "--rdzv-conf=is_host=true"]
    shared = {"CLOUDTRAIN_ML_ROOT": str(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "cloudtrain_runtime.launcher.agent",
                *arguments,
                "--local-addr=127.0.0.1",
                WORKER_SCRIPT,
            ],
            cwd=folder,
            env={**os.environ, **shared, **environ},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def run(folder: Path, worker: str, **options: Any) -> tuple[int, str]:
    """Run an agent to its end; return its exit code and its output."""
    code = start(folder, worker, **options).wait(120)
    return code, (folder / "log").read_text()


def told(folder: Path, word: str, count: int = 1) -> list[list[str]]:
    """Wait until workers have told a word so often; return what stood behind it."""
    log = folder / "log"
    return until(
        lambda: (f := [x.split()[1:] for x in log.read_text().splitlines() if x.startswith(word)])[count - 1 :] and f
    )


# ---------------------------------------------------------------- endings


ENDINGS = {
    "sys.exit(3)": "exitcode: 3",
    "sys.exit('words')": "exitcode: 1",
    "os._exit(7)": "exitcode: 7",
    "os.abort()": "exitcode: -6",
    "os._exit(0)": "",
}


def test_each_way_to_end_is_what_it_is(tmp_path: Path) -> None:
    """One after the other: each but the last ends its attempt, and the next one starts."""
    worker = f"""
import atexit
tell("forked", is_forked)
atexit.register(tell, "handler", restart)
if rank == 0:
    open(f"came-{{restart}}", "w").close()
if rank == 0 and restart == 4:
    sys.exit()
if rank == 1:
    while not os.path.exists(f"came-{{restart}}"):  # who is told to end before it has begun tells nothing
        time.sleep(0.01)
    exec({list(ENDINGS)}[restart])
time.sleep(600)
"""
    code, log = run(tmp_path, worker, restarts=4)
    assert code == 0, log
    assert log.count("forked True") == 10
    assert re.findall(r"failed \((exitcode: -?\d+)\) local_rank: 1", log) == [text for text in ENDINGS.values() if text]
    assert "words\n" in log
    assert [words[0] for words in told(tmp_path, "handler")] == ["0", "1", "4"]  # os._exit and abort run none


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
    try:
        return bool(pid) and open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
while not is_gone():
    time.sleep(0.001)
record_failure("RuntimeError: Connection closed by peer", "")
os._exit(1)
"""
    code, log = run(tmp_path, worker)
    assert code == REPORTED_EXIT_CODE
    assert MlTree(tmp_path).failure.read_text() == "rank 1 was killed by SIGKILL", log


def test_half_an_error_file_is_never_seen(tmp_path: Path) -> None:
    """Torchrun's agent reads it when it has just ended the rank that writes it, and dies of half a file."""
    path = tmp_path / "error.json"
    code = "from cloudtrain_runtime.worker import record_failure\nwhile True: record_failure('x' * 5000, 'y' * 5000)\n"
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ) as writer:
        until(path.exists)
        texts = {path.read_text() for _ in range(3000)}
        writer.kill()
    assert all(json.loads(text) for text in texts)


# ---------------------------------------------------------------- restarts


def test_restart_forks_again_and_ends_the_other_workers(tmp_path: Path) -> None:
    worker = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
tell("forked", is_forked, rank, restart, os.getpid(), child.pid)
time.sleep(600 if restart == 0 else 0)
child.kill()
"""
    agent = start(tmp_path, worker, restarts=1)
    (victim,) = [words for words in told(tmp_path, "forked", 2) if words[1] == "1"]
    os.kill(int(victim[3]), signal.SIGKILL)
    assert agent.wait(60) == 0, (tmp_path / "log").read_text()
    found = told(tmp_path, "forked", 4)
    assert {tuple(words[:3]) for words in found} == {("True", r, n) for r in "01" for n in "01"}
    # The child of the killed worker is nobody's, as under torchrun, which signals the groups of those that still live.
    left = {int(words[4]): words[1:3] for words in found if _lives(int(words[4]))}
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert list(left.values()) in ([], [["1", "0"]])


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # whoever inherits it may reap late
    except psutil.NoSuchProcess:
        return False


def workers_and_template(agent: int) -> tuple[list[psutil.Process], list[psutil.Process]] | None:
    """Return the agent's two workers and its other children, or None while a worker is still its template's child."""
    children = psutil.Process(agent).children()
    workers = [child for child in children if child.cmdline()[1:] == ["-u", WORKER_SCRIPT]]
    return (workers, [child for child in children if child not in workers]) if len(workers) == 2 else None


def test_without_its_template_the_agent_starts_workers_afresh(tmp_path: Path) -> None:
    agent = start(tmp_path, "tell('forked', is_forked, restart)\ntime.sleep(0 if restart else 600)\n", restarts=1)
    told(tmp_path, "forked", 2)
    workers, (the_template,) = until(lambda: workers_and_template(agent.pid))
    time.sleep(1)  # the agent may be about to read what the template has answered
    the_template.kill()
    until(lambda: the_template.status() == psutil.STATUS_ZOMBIE)
    assert [worker.status() == psutil.STATUS_ZOMBIE for worker in workers] == [False, False]
    workers[0].kill()
    assert agent.wait(60) == 0
    assert sorted(told(tmp_path, "forked", 4)) == [["False", "1"], ["False", "1"], ["True", "0"], ["True", "0"]]
    assert "the process that they are forked from has ended" in (tmp_path / "log").read_text()


# ---------------------------------------------------------------- signals


def test_stop_reaches_workers_and_their_children(tmp_path: Path) -> None:
    worker = """
import subprocess
def on_notice(number, frame):
    time.sleep(0.5)
    tell("saved", rank)
    os._exit(0)
signal.signal(signal.SIGTERM, on_notice)
tell("child", subprocess.Popen(["sleep", "600"]).pid)
time.sleep(600)
"""
    agent = start(tmp_path, worker)
    children = [int(words[0]) for words in told(tmp_path, "child", 2)]
    os.kill(agent.pid, signal.SIGTERM)
    assert agent.wait(20) == 128 + signal.SIGTERM
    assert sorted(told(tmp_path, "saved", 2)) == [["0"], ["1"]]
    until(lambda: not any(psutil.pid_exists(pid) for pid in children), 5)


def test_stop_during_the_start_reaches_every_worker(tmp_path: Path) -> None:
    """Torchrun itself loses those that it has started by then."""
    worker = """
def on_notice(number, frame):
    tell("noticed", rank)
    os._exit(0)
signal.signal(signal.SIGTERM, on_notice)
if rank == 0:
    os.kill(int(open("agent").read()), signal.SIGTERM)
time.sleep(600)
"""
    agent = start(tmp_path, worker, ranks=6)
    (tmp_path / "agent").write_text(str(agent.pid))
    assert agent.wait(60) == 128 + signal.SIGTERM
    assert ["0"] in told(tmp_path, "noticed")  # the others may not have come so far; which one prints first is chance
    assert not _living(tmp_path)


def test_a_notice_while_it_still_loads_leaves_nothing_behind(tmp_path: Path) -> None:
    agent = start(tmp_path, "tell('up')\ntime.sleep(600)\n")
    (the_template,) = until(lambda: psutil.Process(agent.pid).children())
    os.kill(agent.pid, signal.SIGTERM)
    agent.wait(20)
    until(lambda: not the_template.is_running() or the_template.status() == psutil.STATUS_ZOMBIE, 5)
    assert not _living(tmp_path)


def test_the_template_ends_with_a_killed_agent(tmp_path: Path) -> None:
    agent = start(tmp_path, "tell('up')\ntime.sleep(600)\n")
    told(tmp_path, "up", 2)
    before = _living(tmp_path)
    assert len(before) == 4
    agent.kill()
    agent.wait()
    until(lambda: len(_living(tmp_path)) == 2, 5)  # the workers, as under torchrun; the container ends them
    for worker in _living(tmp_path):
        assert worker.cmdline()[1:] == ["-u", WORKER_SCRIPT]
        worker.kill()


def _living(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("CLOUDTRAIN_ML_ROOT") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


# ---------------------------------------------------------------- when not


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('os.environ["OMP_NUM_THREADS"] = "4"', "OMP_NUM_THREADS"),
        ("os.environ.setdefault('TORCH_LOGS', '+dynamo')", "TORCH_LOGS"),
        ("os.environ.update(MKL_NUM_THREADS='1')", "MKL_NUM_THREADS"),
        ('os.environ["TORCHDYNAMO_DISABLE"] = "1"', "TORCHDYNAMO_DISABLE"),
        ("os.putenv('KMP_AFFINITY', 'x')", "KMP_AFFINITY"),
        ("os.environ |= {'OMP_NUM_THREADS': '2'}", "OMP_NUM_THREADS"),
        ("os.environ[ 'A' ] = os.environ['OMP_NUM_THREADS'] = '2'", "OMP_NUM_THREADS"),
        ('print(os.environ.get("OMP_NUM_THREADS"))', ""),
        ('restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])', ""),
        ('if os.environ["OMP_NUM_THREADS"] == "1": os.environ["A"] = os.environ["TORCH_LOGS"]', ""),
        ('os.environ["WANDB_MODE"] = "offline"', ""),
    ],
)
def test_a_script_that_sets_what_torch_reads_when_it_is_loaded(tmp_path: Path, line: str, name: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import os\n{line}\nimport torch\n")
    _write_run(tmp_path, str(script))
    found = worker_template.reason_not_to_fork({"CLOUDTRAIN_ML_ROOT": str(tmp_path)})
    assert found == (f"{script} sets {name}, which is read when torch is loaded" if name else "")


@pytest.mark.parametrize(
    ("text", "checkpoints", "loop"),
    [(None, True, True), ("import torch\n", False, False), ("from cloudtrain_runtime import context\n", True, False)],
)
def test_what_is_imported_ahead_is_what_the_ranks_need(
    tmp_path: Path, text: str | None, checkpoints: bool, loop: bool
) -> None:
    script = None if text is None else tmp_path / "train.py"
    if script is not None:
        script.write_text(text or "")
    _write_run(tmp_path, None if script is None else str(script))
    found = worker_template.modules_to_preload({"CLOUDTRAIN_ML_ROOT": str(tmp_path)})
    assert "torch._dynamo" in found
    assert ("cloudtrain_runtime.checkpoint.script_api" in found) == checkpoints
    assert ("cloudtrain_runtime.training.trainer" in found) == loop


def test_a_script_that_cannot_be_read_is_the_ranks_matter(tmp_path: Path) -> None:
    _write_run(tmp_path, str(tmp_path / "absent.py"))
    environ = {"CLOUDTRAIN_ML_ROOT": str(tmp_path)}
    assert (
        worker_template.reason_not_to_fork(environ),
        "cloudtrain_runtime.training.trainer" in worker_template.modules_to_preload(environ),
    ) == ("", False)


def _write_run(folder: Path, script: str | None) -> None:
    task = "train:Task" if script is None else None
    checkpoint = CheckpointConfig("", 600, None, 3, "auto")
    config = RunConfig("t", task, script, [], None, 2, "torch_distributed", 0, None, checkpoint)
    path = MlTree(folder).run_config
    path.parent.mkdir(parents=True)
    path.write_text(config.to_json())


def test_the_way_out_and_a_slip_in_it() -> None:
    assert worker_template.reason_not_to_fork({"CLOUDTRAIN_WORKER_START": "fresh"}) == "CLOUDTRAIN_WORKER_START=fresh"
    assert "its one value is" in worker_template.reason_not_to_fork({"CLOUDTRAIN_WORKER_START": "frseh"})


def test_a_thread_of_a_library_means_afresh(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    code, log = run(tmp_path, "tell('forked', is_forked)\nos._exit(0)\n", PYTHONPATH=str(tmp_path))
    assert code == 0
    assert log.count("forked False") == 2, log
    assert "a library has started threads" in log


def test_threads_of_openblas_do_not(tmp_path: Path) -> None:
    code, log = run(
        tmp_path,
        "import numpy\nnumpy.ones((300, 300)) @ numpy.ones((300, 300))\ntell('forked', is_forked)\n",
        ranks=1,
        OMP_NUM_THREADS="2",
    )
    assert code == 0
    assert "forked True" in log, log


def test_a_rank_that_comes_first_finds_the_others(tmp_path: Path) -> None:
    """Rank 0 opens the store only when rank 1 is on its way to it."""
    worker = """
import torch.distributed as dist
on_its_way = os.path.join(os.getcwd(), "on-its-way")
while rank == 0 and not os.path.exists(on_its_way): time.sleep(0.01)
if rank == 1:
    open(on_its_way, "w").close()
dist.init_process_group("gloo")
names = [None, None]
dist.all_gather_object(names, f"rank {rank}")
tell("met", names)
os._exit(0)
"""
    code, log = run(tmp_path, worker)
    assert code == 0, log
    assert log.count("met ['rank 0', 'rank 1']") == 2
