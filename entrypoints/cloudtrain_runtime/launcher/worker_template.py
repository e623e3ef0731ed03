"""Workers forked from a process that has imported torch once.

torchrun starts an interpreter for each rank, and each imports torch and what stands behind DDP and every optimizer:
seconds at a start, and again at each restart. Here the agent forks a process as soon as it has torch, and nothing else;
that process imports the rest and waits: the template. A worker is a fork of it. Everything else stays torchrun's own:
for its agent such a worker is the child process that it wanted to start, with a session of its own, an exit code to
wait for and a process group to signal.

The template never touches CUDA, and has one thread. Where that does not hold, or a worker needs an environment other
than the one that torch was loaded with, workers are started afresh, as torchrun does. `CLOUDTRAIN_WORKER_START=fresh`
(under `code.env`) asks for that.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from cloudtrain_runtime.contract import WORKER_SCRIPT
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.launcher import fork, linux, rendezvous
from cloudtrain_runtime.process.environment import read_run_config
from cloudtrain_runtime.process.event_log import log_line

START_VARIABLE = "CLOUDTRAIN_WORKER_START"
"""`fresh`: a new interpreter for each worker, as under plain torchrun."""

COMMAND = (sys.executable, "-u", WORKER_SCRIPT)
"""What torchrun starts for a rank, and what a forked worker stands for."""

_BEHIND_ALL = (
    "torch._dynamo",  # behind DDP and every optimizer
    "torch.nn.parallel.distributed",
    "torch.utils.data",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "cloudtrain_runtime.worker",
)
_BEHIND_CHECKPOINTS = ("torch.distributed.checkpoint.state_dict", "cloudtrain_runtime.checkpoint.script_api")
_BEHIND_TASKS = (*_BEHIND_CHECKPOINTS, "cloudtrain_runtime.training.trainer")

_OF_A_START = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|TORCH_NCCL_\w+|TORCH_FR_\w+|CUDA_VISIBLE_DEVICES"
)
"""Variables that torchrun and the agent set for each start. They are read when a process group or a context is made."""

_READ_AT_IMPORT = r"(?:(?:OMP|MKL|KMP|GOMP|OPENBLAS)_|(?:PY)?TORCH)\w+"
_SETS_VARIABLE = re.compile(
    rf"""environ\[\s*["']({_READ_AT_IMPORT})["']\s*\]\s*[|+]?=(?!=)"""
    rf"""|(?:environ\.(?:setdefault|update|pop)\(|environ\s*\|=|putenv\()[^\n]*?\b({_READ_AT_IMPORT})"""
)
"""Match a script that sets, not only reads, what torch or a library that it loads reads once at import."""

_POLL_SECONDS = 0.01
_LOADED = "loaded\n"
_GONE = "the process that they are forked from has gone"


def reason_not_to_fork(environ: Mapping[str, str]) -> str:
    """Return why workers cannot be forked here, or an empty string."""
    wish = environ.get(START_VARIABLE, "")
    if wish not in ("", "fresh"):
        return f'{START_VARIABLE} is {wish!r}; its one value is "fresh"'
    if wish or sys.platform != "linux":
        return f"{START_VARIABLE}=fresh" if wish else "only Linux hands a forked worker to the agent"
    script = _script(environ)
    found = script and _SETS_VARIABLE.search(_text(script))
    return f"{script} sets {found[1] or found[2]}, which is read when torch is loaded" if found else ""


def modules_to_preload(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what ranks will import, in an order that they could import it in; of a script what its text tells."""
    script = _script(environ)
    if script is None:
        return _BEHIND_ALL + _BEHIND_TASKS
    return _BEHIND_ALL + (_BEHIND_CHECKPOINTS if "cloudtrain_runtime" in _text(script) else ())


def _script(environ: Mapping[str, str]) -> str | None:
    config = read_run_config(environ)
    return None if config is None else config.script


def _text(script: str) -> str:
    """Return the text of the user's script; one that cannot be read says so in the ranks."""
    try:
        return Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def start_template() -> Template | None:
    """Import torch here, fork the template, and return it; None where workers must be started afresh.

    In the worker that is forked from the template later, this call does not return.
    """
    reason = reason_not_to_fork(os.environ)
    if not reason:
        import torch  # noqa: F401 (the fork has it)

        reason = "" if _may_fork() else "a library has started threads, or CUDA, before the agent"
    if reason:
        log_line(f"each worker is a new interpreter: {reason}")
        return None
    return _fork_template()


class Template:
    """The agent's end of the process that workers are forked from."""

    def __init__(self, pid: int, requests: socket.socket) -> None:
        self._pid = pid
        self._requests = requests
        self._answers = requests.makefile("r", encoding="utf-8")
        self._loaded_with = dict(os.environ)
        self._is_loaded = False

    def await_load(self) -> None:
        """Wait until it can fork; where it cannot, workers are started afresh."""
        if self._pid == 0 or self._is_loaded:
            return
        try:
            with contextlib.suppress(OSError):
                self._is_loaded = self._answers.readline() == _LOADED
        except BaseException:
            self.end()
            raise
        if not self._is_loaded:
            self._give_up(_GONE)

    def fork(self, environ: Mapping[str, str]) -> ForkedWorker | None:
        """Start a worker with this environment as a child of this process; None where it must be started afresh."""
        self.await_load()
        if self._pid == 0:
            return None
        if differing := _differing(self._loaded_with, environ):
            self._give_up(f"{', '.join(differing)} changed after torch was loaded")
            return None
        try:
            with linux.child_subreaper():
                self._requests.sendall(dump_json(dict(environ)).encode() + b"\n")
                worker = ForkedWorker(int(self._answers.readline()))
                worker.check()
        except (OSError, ValueError):
            self._give_up(_GONE)
            return None
        except BaseException:
            # A signal while it waits: the template sees the connection's end, and forks no more.
            self.end()
            raise
        return worker

    def end(self) -> None:
        """End the template. Workers are children of this process and stay."""
        if self._pid == 0:
            return
        pid, self._pid = self._pid, 0
        self._requests.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def _give_up(self, reason: str) -> None:
        log_line(f"each worker is a new interpreter: {reason}")
        self.end()


class ForkedWorker:
    """A child that this process has not started itself, with what torchrun asks of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.args = COMMAND
        self.pid = pid
        self.returncode: int | None = None

    def check(self) -> None:
        """Kill it unless the kernel has made it a child of this process.

        Raises:
            ChildProcessError: It is not, so nobody here could wait for it.
        """
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            os.kill(self.pid, signal.SIGKILL)
            raise

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process lives."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid != 0:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: The process still lived after so many seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _differing(loaded_with: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    names = sorted(loaded_with.keys() | environ.keys())
    return [n for n in names if loaded_with.get(n) != environ.get(n) and not _OF_A_START.fullmatch(n)]


def _may_fork() -> bool:
    """Tell whether a fork of this process can do anything: one thread, and no CUDA yet."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None and linux.count_threads() == 1:
        return True
    probe = os.fork()  # OpenBLAS ends its idle threads before a fork, and starts them again when they are needed
    if probe == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))  # noqa: SLF001 (what a worker would ask before it uses CUDA)
    _, status = os.waitpid(probe, 0)
    has_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return status == 0 and not has_cuda and linux.count_threads() == 1


def _fork_template() -> Template:
    ours, its = socket.socketpair()
    # The template outlives signals that are sent to the whole group: it ends with the agent.
    mask = fork.hold_signals()
    sys.stdout.flush()
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        linux.die_with_parent(agent)
        ours.close()
        _serve(its, mask)
    fork.release_signals(mask)
    its.close()
    return Template(pid, ours)


# ---------------------------------------------------------------- in the template


def _serve(requests: socket.socket, mask: fork.Mask) -> NoReturn:
    """Import what training needs, then fork a worker for each line that asks for one, until the agent has gone."""
    _load()
    if not _may_fork():
        log_line("a library has started threads, or CUDA, when it was imported")
        os._exit(1)
    stream = requests.makefile("r", encoding="utf-8")
    requests.sendall(_LOADED.encode())
    while line := stream.readline():
        pid = _fork_worker()
        if pid == 0:
            stream.close()
            requests.close()
            _become_worker(json.loads(line), mask)
        try:
            requests.sendall(f"{pid}\n".encode())
        except OSError:
            os.kill(pid, signal.SIGKILL)  # the agent has gone, and this worker is nobody's
    os._exit(0)


def _load() -> None:
    """Import what training needs."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # ask the driver's library, which makes no context
    gc.disable()
    for name in modules_to_preload(os.environ):
        with contextlib.suppress(ImportError):  # not in this torch
            importlib.import_module(name)
    rendezvous.connect_without_backoff()
    gc.freeze()  # so that no worker looks through it, which would also copy its memory


def _fork_worker() -> int:
    """Fork a worker that is not this process' child but the agent's; return its pid, and 0 in the worker.

    A process in between forks it and ends, and the kernel hands the orphan to the agent, which has asked for it.
    """
    told, tell = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            if os.fork() != 0:
                os._exit(0)
        except OSError:
            os._exit(1)
        os.setsid()
        os.write(tell, str(os.getpid()).encode())
        os.close(told)
        os.close(tell)
        return 0
    os.close(tell)
    os.waitpid(between, 0)
    pid = os.read(told, 20)
    os.close(told)
    if not pid:
        log_line("a worker could not be forked")
        os._exit(1)
    return int(pid)


def _become_worker(environ: Mapping[str, str], mask: fork.Mask) -> NoReturn:
    """Be what `python -u cloudtrain_worker.py` would be in this environment, but for what is imported already."""
    gc.enable()
    sys.argv = [WORKER_SCRIPT]
    importlib.invalidate_caches()
    _seed_anew()
    fork.assume_identity(list(COMMAND), environ, mask)
    runpy.run_path(str(Path(WORKER_SCRIPT).absolute()), run_name="__main__")
    sys.exit(0)


def _seed_anew() -> None:
    """Seed what seeds itself from the operating system when it is imported; `random` does so in every fork."""
    import torch

    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
