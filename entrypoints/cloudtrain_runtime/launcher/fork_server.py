"""The fork server: a process that has imported what training needs, and forks each worker of a Task.

It is itself a fork of the agent, which has no threads yet. Where the agent needs torch itself, it has just imported it,
so a host imports torch once. Agent and server talk through a pipe: a request names a script and its environment, an
answer is a process id with its exit code, or without one when the process has just been started.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Final, NoReturn

from cloudtrain_runtime.contract.strict_json import dump_json, load_json
from cloudtrain_runtime.launcher.rank_processes import KILL_SECONDS, signal_group
from cloudtrain_runtime.process import fast_exit

_MODULES: Final = (
    # DDP and every optimizer import it.
    "torch._dynamo",
    "torch.nn.parallel.distributed",
    "torch.utils.data",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "cloudtrain_runtime.checkpoint.script_api",
    "cloudtrain_runtime.training.trainer",
    "cloudtrain_runtime.worker",
)
"""What the server imports besides torch. None of it initializes CUDA or threads, which would not survive a fork."""

_READY: Final = 0
"""In place of a process id: the server has imported everything."""

_LOST: Final = 255
"""Exit code of workers whose server has ended: the true one is unknown."""

_POLL_SECONDS: Final = 0.05
"""Time between two looks at a killed process where nothing reports its end."""

# From linux/prctl.h.
_PR_SET_CHILD_SUBREAPER: Final = 36


class ServerLostError(Exception):
    """The server has ended."""

    def __init__(self) -> None:
        super().__init__("the process that forks the ranks has ended")


class Worker:
    """A process that runs a script.

    Attributes:
        pid: Its process id. It leads a session and a process group of its own.
    """

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self._server = server

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for the signal that ended it; None while it runs."""
        self._server.receive()
        return self._server.exit_codes.get(self.pid)

    def join(self, seconds: float) -> None:
        """Wait so long for its end."""
        deadline = time.monotonic() + seconds
        while self.exit_code is None and (left := deadline - time.monotonic()) > 0:
            self._server.receive(left)


class ForkServer:
    """The agent's end of the pipe to the server. The server ends with the agent.

    Attributes:
        exit_codes: By process id, the exit codes of workers that have ended.
        channel: The pipe, for those who wait for several things.
    """

    def __init__(self, channel: Connection) -> None:
        self.exit_codes: dict[int, int] = {}
        self.channel = channel
        self._is_ready = False
        self._running: set[int] = set()

    def start_worker(
        self, script: str, environ: Mapping[str, str], arguments: Sequence[str] = ()
    ) -> Worker:
        """Fork a process that runs a script with this environment, as `python script ARGUMENTS` would.

        Raises:
            ServerLostError: The server has ended.
        """
        words = [script, *arguments]
        request = dump_json({"words": words, "environ": dict(environ)}).encode()
        try:
            return self._request(request)
        except (OSError, EOFError):
            self._lose_workers()
            raise ServerLostError from None

    def is_ready(self) -> bool:
        """Return whether the server has imported everything, so that it forks at once.

        Raises:
            ServerLostError: The server has ended.
        """
        try:
            while not self._is_ready and self.channel.poll():
                self._receive_one()
        except (OSError, EOFError):
            raise ServerLostError from None
        return self._is_ready

    def receive(self, seconds: float = 0.0) -> None:
        """Take the exit codes that have arrived; if there is none, wait so long for one."""
        try:
            while self.channel.poll(seconds):
                self._receive_one()
                seconds = 0.0
        except (OSError, EOFError):
            self._lose_workers()

    def _request(self, request: bytes) -> Worker:
        self.channel.send_bytes(request)
        while True:
            pid, has_started = self._receive_one()
            if has_started:
                return Worker(pid, self)

    def _receive_one(self) -> tuple[int, bool]:
        """Take an answer; return the process id, and whether the process has just been started."""
        pid, exit_code = load_json(self.channel.recv_bytes())
        if pid == _READY:
            self._is_ready = True
            return pid, False
        if exit_code is None:
            self._running.add(pid)
            # An earlier process may have had the same id.
            self.exit_codes.pop(pid, None)
            return pid, True
        self._running.discard(pid)
        self.exit_codes[pid] = exit_code
        return pid, False

    def _lose_workers(self) -> None:
        """End the workers, whose exit codes nobody receives any more."""
        lost = list(self._running)
        self._running.clear()
        self.exit_codes |= dict.fromkeys(lost, _LOST)
        for pid in lost:
            signal_group(pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_SECONDS
        for pid in lost:
            _wait_for_end(pid, deadline)


def start_server(*, needs_torch: bool) -> ForkServer:
    """Fork the server, which imports torch and what training needs while this process continues.

    Call it before this process has threads and with the collector off, and set what torch reads at import before.

    Args:
        needs_torch: Whether this process needs torch, too, and therefore imports it before the fork.
    """
    # First, so that it runs after the exit handlers of all other modules.
    fast_exit.register()
    if needs_torch:
        importlib.import_module("torch")
    ours, theirs = Pipe()
    # Else each worker would print what waits here.
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        ours.close()
        _run_server(theirs)
    theirs.close()
    return ForkServer(ours)


def _run_server(agent: Connection) -> NoReturn:
    exit_code = 1
    try:
        import_modules()
        # Either error means that the agent has ended.
        with contextlib.suppress(EOFError, ConnectionError):
            _serve(agent, set())
        exit_code = 0
    except BaseException:  # noqa: BLE001 (the frames below belong to the agent)
        traceback.print_exc()
    finally:
        # The interpreter's shutdown would take 0.5 s.
        os._exit(exit_code)


def import_modules() -> None:
    """Import torch and what the training of a Task needs, so that forks of this process have it."""
    # A signal to all processes of a host is a notice for the ranks, which save and then end. They
    # are children of this process, and would look dead if it ended before them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Query the driver's library, which creates no context.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    importlib.import_module("torch")
    for name in _MODULES:
        # Another version of torch may not have the module.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # No worker's collector traverses these objects, which would also copy their memory.
    gc.freeze()


def serve_apart(agent: Connection) -> NoReturn:
    """Serve an agent of which this process is no child, and end all descendants when the agent has ended: nothing else does.

    Linux only.
    """
    # What a rank starts in a session of its own stays a descendant.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    running: set[int] = set()
    try:
        with contextlib.suppress(EOFError, ConnectionError):
            _serve(agent, running)
    except BaseException:  # noqa: BLE001 (the frames below belong to another process)
        traceback.print_exc()
    finally:
        for pid in running:
            signal_group(pid, signal.SIGKILL)
        _end_descendants()
        os._exit(0)


def _end_descendants() -> None:
    """Kill the children of this process, and then their children, which become its own, until there are none."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        for path in Path("/proc/self/task").glob("*/children"):
            for pid in path.read_text(encoding="ascii").split():
                # Only a child of this process, which nothing else waits for, has this id.
                os.kill(int(pid), signal.SIGKILL)
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended == 0:
            time.sleep(_POLL_SECONDS)


def _serve(agent: Connection, running: set[int]) -> NoReturn:
    """Fork a worker for each request, and answer with the exit codes of those that have ended.

    Args:
        agent: The agent's end of the pipe.
        running: Receives the process ids of the workers that run.
    """
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    agent.send_bytes(dump_json([_READY, None]).encode())
    while True:
        ready = wait([agent, woken])
        if woken in ready:
            os.read(woken, 4096)
            for pid, exit_code in _ended(running):
                running.discard(pid)
                agent.send_bytes(dump_json([pid, exit_code]).encode())
        if agent in ready:
            request = load_json(agent.recv_bytes())
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                agent.close()
                os.close(woken)
                os.close(wakes)
                _run_worker(request["words"], request["environ"])
            running.add(pid)
            agent.send_bytes(dump_json([pid, None]).encode())


def _wait_for_end(pid: int, deadline: float) -> None:
    """Wait for the end of a killed process of another parent (Linux only)."""
    if sys.platform != "linux":
        return
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        # Neither every interpreter nor every sandbox has descriptors of processes.
        while _is_running(pid) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return
    try:
        # Readable when the process has ended.
        wait([handle], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(handle)


def _is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended (Linux only)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The name before the state is in parentheses and may contain any character.
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def _ended(pids: Iterable[int]) -> list[tuple[int, int]]:
    """Return those of these children that have ended, with their exit codes."""
    states = [os.waitpid(pid, os.WNOHANG) for pid in pids]
    return [(pid, os.waitstatus_to_exitcode(status)) for pid, status in states if pid != 0]


def _run_worker(words: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    exit_code = 1
    try:
        _run_script(words, environ)
        exit_code = 0
    except SystemExit as error:
        exit_code = _exit_code(error.code)
    except BaseException:  # noqa: BLE001 (this is the outermost frame)
        sys.excepthook(*sys.exc_info())
    fast_exit.exit_process(exit_code)


def _run_script(words: Sequence[str], environ: Mapping[str, str]) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # A server that was started under nohup ignores signals. torchrun's agent handles them, so its
    # workers do not.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = list(words)
    importlib.invalidate_caches()
    gc.enable()
    # Generators that were seeded in the server; `random` reseeds itself in every fork.
    sys.modules["torch"].seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    runpy.run_path(str(Path(words[0]).absolute()), run_name="__main__")


def _exit_code(value: str | int | None) -> int:
    """Return the exit code of a SystemExit, and print its message, as the interpreter does."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    print(value, file=sys.stderr)
    return 1
