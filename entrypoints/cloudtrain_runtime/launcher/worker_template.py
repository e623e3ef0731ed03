"""Workers forked from a process that has imported torch once.

torchrun starts an interpreter for each rank, and each one imports torch and the modules behind DDP and every optimizer,
which takes seconds at the start and at each restart. Here the agent forks a process, the template, as soon as it has
imported torch. The template imports the remaining modules and waits; each worker is a fork of it. For torchrun's agent
such a worker is an ordinary child process, with its own session, an exit code and a process group to signal.

The template never initializes CUDA and has one thread. If that is impossible, or a worker needs an environment that
differs from the one in which torch was loaded, each worker is a new interpreter, as with torchrun.
`CLOUDTRAIN_WORKER_START=fresh` (under `code.env`) selects that explicitly.
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
"""The command that torchrun starts for a rank, and that a forked worker replaces."""

_MODULES_OF_ALL = (
    "torch._dynamo",  # behind DDP and every optimizer
    "torch.nn.parallel.distributed",
    "torch.utils.data",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "cloudtrain_runtime.worker",
)
_MODULES_OF_CHECKPOINTS = ("torch.distributed.checkpoint.state_dict", "cloudtrain_runtime.checkpoint.script_api")
_MODULES_OF_TASKS = (*_MODULES_OF_CHECKPOINTS, "cloudtrain_runtime.training.trainer")

_OF_A_START = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|TORCH_NCCL_\w+|TORCH_FR_\w+|CUDA_VISIBLE_DEVICES"
)
"""Variables that torchrun and the agent set for each start. They are read when a process group is created."""

_READ_AT_IMPORT = r"(?:(?:OMP|MKL|KMP|GOMP|OPENBLAS)_|(?:PY)?TORCH)\w+"
_SETS_VARIABLE = re.compile(
    rf"""environ\[\s*["']({_READ_AT_IMPORT})["']\s*\]\s*[|+]?=(?!=)"""
    rf"""|(?:environ\.(?:setdefault|update|pop)\(|environ\s*\|=|putenv\()[^\n]*?\b({_READ_AT_IMPORT})"""
)
"""Match a script that sets, and does not only read, variables that torch or its libraries read once at import."""

_POLL_SECONDS = 0.01
_LOADED = "loaded\n"
_GONE = "the process that they are forked from has ended"


def reason_not_to_fork(environ: Mapping[str, str]) -> str:
    """Return why workers cannot be forked, or an empty string."""
    wish = environ.get(START_VARIABLE, "")
    if wish not in ("", "fresh"):
        return f'{START_VARIABLE} is {wish!r}; its one value is "fresh"'
    if wish or sys.platform != "linux":
        return f"{START_VARIABLE}=fresh" if wish else "only Linux hands a forked worker to the agent"
    script = _script(environ)
    found = script and _SETS_VARIABLE.search(_text(script))
    return f"{script} sets {found[1] or found[2]}, which is read when torch is loaded" if found else ""


def modules_to_preload(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules that ranks will import, in a valid order; for a script according to its source."""
    script = _script(environ)
    if script is None:
        return _MODULES_OF_ALL + _MODULES_OF_TASKS
    return _MODULES_OF_ALL + (_MODULES_OF_CHECKPOINTS if "cloudtrain_runtime" in _text(script) else ())


def _script(environ: Mapping[str, str]) -> str | None:
    config = read_run_config(environ)
    return None if config is None else config.script


def _text(script: str) -> str:
    """Return the source of the user's script; empty if it cannot be read, which the ranks report."""
    try:
        return Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def start_template() -> Template | None:
    """Import torch, fork the template, and return it; None if each worker must be a new interpreter.

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
    """The agent's handle of the template process."""

    def __init__(self, pid: int, requests: socket.socket) -> None:
        self._pid = pid
        self._requests = requests
        self._answers = requests.makefile("r", encoding="utf-8")
        self._loaded_with = dict(os.environ)
        self._is_loaded = False

    def await_load(self) -> None:
        """Wait until the template can fork. If it cannot, each worker is a new interpreter."""
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
        """Fork a worker with this environment as a child of this process; None if it must be a new interpreter."""
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
            # A signal during the wait: the template sees the end of the connection and stops forking.
            self.end()
            raise
        return worker

    def end(self) -> None:
        """End the template. Workers are children of this process and continue."""
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
    """A child that this process has not started itself, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.args = COMMAND
        self.pid = pid
        self.returncode: int | None = None

    def check(self) -> None:
        """Kill the worker unless the kernel has made it a child of this process.

        Raises:
            ChildProcessError: it is not a child, so this process could not wait for it.
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
    """Return whether this process can be forked safely: it has one thread and has not initialized CUDA."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None and linux.count_threads() == 1:
        return True
    probe = os.fork()  # OpenBLAS ends its idle threads before a fork and restarts them on demand
    if probe == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))  # noqa: SLF001 (what a worker would ask before it uses CUDA)
    _, status = os.waitpid(probe, 0)
    has_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return status == 0 and not has_cuda and linux.count_threads() == 1


def _fork_template() -> Template:
    ours, its = socket.socketpair()
    # The template ignores signals that are sent to the process group: it ends with the agent.
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


def _serve(requests: socket.socket, mask: fork.Mask) -> NoReturn:
    """Import the modules for training, then fork a worker for each request line, until the agent has ended."""
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
            os.kill(pid, signal.SIGKILL)  # the agent has ended, and nothing monitors this worker
    os._exit(0)


def _load() -> None:
    """Import the modules for training."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # query the driver's library, which creates no context
    gc.disable()
    for name in modules_to_preload(os.environ):
        with contextlib.suppress(ImportError):  # not in this torch
            importlib.import_module(name)
    rendezvous.connect_without_backoff()
    gc.freeze()  # so that no worker's collector traverses these objects, which would also copy their memory


def _fork_worker() -> int:
    """Fork a worker that becomes the agent's child and not this process's; return its pid, and 0 in the worker.

    An intermediate process forks it and ends, and the agent, as the subreaper, adopts the orphan.
    """
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            if os.fork() != 0:
                os._exit(0)
        except OSError:
            os._exit(1)
        os.setsid()
        os.write(write_end, str(os.getpid()).encode())
        os.close(read_end)
        os.close(write_end)
        return 0
    os.close(write_end)
    os.waitpid(between, 0)
    pid = os.read(read_end, 20)
    os.close(read_end)
    if not pid:
        log_line("a worker could not be forked")
        os._exit(1)
    return int(pid)


def _become_worker(environ: Mapping[str, str], mask: fork.Mask) -> NoReturn:
    """Run `cloudtrain_worker.py` as `python -u` would in this environment, with modules imported already."""
    gc.enable()
    sys.argv = [WORKER_SCRIPT]
    importlib.invalidate_caches()
    _reseed()
    fork.assume_identity(list(COMMAND), environ, mask)
    runpy.run_path(str(Path(WORKER_SCRIPT).absolute()), run_name="__main__")
    sys.exit(0)


def _reseed() -> None:
    """Reseed generators that seed themselves at import; `random` does so itself in every fork."""
    import torch

    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
