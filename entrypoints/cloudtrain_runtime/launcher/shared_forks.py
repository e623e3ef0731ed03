"""One import for all runs of a rehearsal: a process that has imported what training needs, and forks each run's server.

`python -m cloudtrain_runtime.launcher.shared_forks PLACE`, with a socket's path. The rehearsal starts it, and its end of
standard input ends it. The first agent that asks decides what is imported: the process replaces itself by an interpreter
with that agent's environment, in the folder of that run's code. Each agent gets a fork in its own mount namespace, with
its own folder, environment and output. An agent whose environment differs, or that gets no answer, imports by itself.

`python -m cloudtrain_runtime.launcher.shared_forks --run PLACE MODULE ARGUMENTS...` runs a module in such a fork, or in
this process if there is none.

Linux only, standard library only until the first request.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Final, NoReturn

from cloudtrain_runtime.contract import (
    INSTANCE_VARIABLE,
    ML_ROOT_VARIABLE,
    REHEARSAL_FORKS_VARIABLE,
)
from cloudtrain_runtime.contract.ml_tree import CONTAINER_TREE
from cloudtrain_runtime.contract.strict_json import dump_json, load_json
from cloudtrain_runtime.launcher.fork_server import ForkServer, import_modules, serve_apart

_FORKED: Final = b"forked"
_AGAIN: Final = b"again"
_REFUSED: Final = b"refused"
"""Answers: the connection leads to a fork; ask again, because the imports are about to begin; import by yourself."""

_MOST_REQUESTS: Final = 2
"""How often an agent asks: its first request may begin the imports."""

_IMPORTING: Final = "--importing"
_RUN: Final = "--run"
_WAIT_SECONDS: Final = 60.0
_STDIN: Final = 0
_NAMESPACES: Final = ("user", "mnt")
"""The namespaces of a local run's host, in the order in which a process enters them."""

# From linux/capability.h and linux/prctl.h.
_CAPABILITY_VERSION: Final = 0x20080522
_PR_SET_DUMPABLE: Final = 4
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

_OF_RUN: Final = ("CLOUDTRAIN_", "SM_", "TRAINING_JOB_")
"""Beginnings of variables that differ between the runs of a rehearsal, and that no library reads when it is imported."""


def find_shared_server(environ: Mapping[str, str]) -> ForkServer | None:
    """Return a server that a rehearsal's process has forked for this agent; None outside of a rehearsal, or without it.

    Args:
        environ: The environment of this agent.
    """
    place = environ.get(REHEARSAL_FORKS_VARIABLE)
    if not place or _has_own_path(environ):
        return None
    code = f"{environ[INSTANCE_VARIABLE]}/code"
    return _find_server(place, {"environ": dict(environ), "code": code})


def run_module(place: str, module: str, arguments: Sequence[str]) -> None:
    """Run a module in a fork, and end as it does; in this process if there is no fork.

    Args:
        place: Socket of the process that forks.
        module: The module.
        arguments: Its arguments.
    """
    spec = importlib.util.find_spec(module)
    server = _find_server(place, {"environ": dict(os.environ)})
    if server is None or spec is None or spec.origin is None:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    worker = server.start_worker(spec.origin, os.environ, arguments)
    while (code := worker.exit_code) is None:
        worker.join(_WAIT_SECONDS)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _find_server(place: str, request: Mapping[str, Any]) -> ForkServer | None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, EOFError):
            channel = _ask(place, request)
            if channel is not None:
                return ForkServer(channel)
    return None


def _has_own_path(environ: Mapping[str, str]) -> bool:
    """Return whether Python finds modules in a folder of the run, which only the run's own processes see."""
    roots = (environ.get(ML_ROOT_VARIABLE, CONTAINER_TREE.root), environ[INSTANCE_VARIABLE])
    folders = environ.get("PYTHONPATH", "").split(os.pathsep)
    return any(folder.startswith(f"{root}/") for folder in folders for root in roots)


def _ask(place: str, request: Mapping[str, Any]) -> Connection | None:
    own = {"python": sys.executable, "has_safe_path": bool(sys.flags.safe_path)}
    for _ in range(_MOST_REQUESTS):
        handles = [sys.stdout.fileno(), sys.stderr.fileno(), os.open(".", os.O_RDONLY)]
        handles += [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(place)
            socket.send_fds(connection, [b"h"], handles)
        finally:
            for handle in handles[2:]:
                os.close(handle)
        channel = Connection(connection.detach())
        channel.send_bytes(dump_json({**request, **own}).encode())
        answer = channel.recv_bytes()
        if answer == _FORKED:
            return channel
        channel.close()
        if answer == _REFUSED:
            break
    return None


def main(arguments: Sequence[str]) -> None:
    """Serve at a socket until standard input ends, or run a module."""
    if arguments[0] == _RUN:
        run_module(arguments[1], arguments[2], arguments[3:])
        return
    own = None
    if arguments[0] == _IMPORTING:
        listener = socket.socket(fileno=int(arguments[1]))
        # As the agents have it: imports add variables.
        own = dict(os.environ)
        import_modules()
        _leave_output()
        # The kernel removes forks that have ended.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(arguments[0])
        listener.listen(socket.SOMAXCONN)
    while True:
        if _STDIN in wait([listener, _STDIN]):
            # The rehearsal has ended.
            return
        connection, _ = listener.accept()
        with contextlib.suppress(OSError, EOFError, ValueError):
            _answer(listener, connection, own)


def _leave_output() -> None:
    """Close the output of the first agent, which may be a pipe whose end its launcher waits for."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nothing, number)
    os.close(nothing)


def _answer(
    listener: socket.socket, connection: socket.socket, own: Mapping[str, str] | None
) -> None:
    """Answer an agent or a module.

    Args:
        listener: The socket of this process.
        connection: The connection.
        own: The environment in which this process has imported; None before that.
    """
    _, handles, _, _ = socket.recv_fds(connection, 1, 2 + 1 + len(_NAMESPACES))
    channel = Connection(connection.detach())
    try:
        request = load_json(channel.recv_bytes())
        if own is None and "code" in request:
            _begin_imports(listener, channel, handles, request)
        if own is None or not _is_same(request, own):
            channel.send_bytes(_REFUSED)
        elif os.fork() == 0:
            listener.close()
            _become_server(channel, handles, request)
    finally:
        channel.close()
        for handle in handles:
            os.close(handle)


def _begin_imports(
    listener: socket.socket,
    channel: Connection,
    handles: Sequence[int],
    request: Mapping[str, Any],
) -> NoReturn:
    """Replace this process by an interpreter with the environment of an agent, whose log gets what imports print."""
    # Before the answer: where this fails, the agent imports by itself.
    os.chdir(request["code"])
    channel.send_bytes(_AGAIN)
    try:
        os.dup2(handles[0], 1)
        os.dup2(handles[1], 2)
        for handle in handles:
            # Received descriptors would stay open in the new interpreter.
            os.set_inheritable(handle, False)
        os.set_inheritable(listener.fileno(), True)
        module = "cloudtrain_runtime.launcher.shared_forks"
        command = [request["python"], "-m", module, _IMPORTING, str(listener.fileno())]
        os.execve(command[0], command, request["environ"])  # noqa: S606 (without a shell)
    finally:
        # Agents find that nothing listens.
        os._exit(1)


def _is_same(request: Mapping[str, Any], own: Mapping[str, str]) -> bool:
    """Return whether an agent would import the same in the same environment, which does not matter to a module."""
    if request["python"] != sys.executable:
        return False
    return "code" not in request or _of_imports(request["environ"]) == _of_imports(own)


def _of_imports(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        # PATH contains a folder of the run.
        if not name.startswith(_OF_RUN) and name != "PATH"
    }


def _become_server(
    channel: Connection, handles: Sequence[int], request: Mapping[str, Any]
) -> NoReturn:
    """Be the server of an agent: in its namespaces, with its output, folder and environment."""
    try:
        out, error, folder, *namespaces = handles
        enter_namespaces(namespaces)
        os.fchdir(folder)
        os.dup2(out, 1)
        os.dup2(error, 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        # Unlike the new descriptor, its copy stays open in the ranks' children.
        os.dup2(nothing, _STDIN)
        for handle in (nothing, *handles):
            os.close(handle)
        os.environ.clear()
        os.environ.update(request["environ"])
        _set_first_folder(has_safe_path=request["has_safe_path"])
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.send_bytes(_FORKED)
        serve_apart(channel)
    finally:
        # Nothing of the process that it is a fork of may run here.
        os._exit(1)


def _set_first_folder(*, has_safe_path: bool) -> None:
    """Let Python find modules in the folder of this process first, unless the agent has a safe path."""
    if not sys.flags.safe_path:
        # An interpreter that is started with -m has its folder here, and with a safe path it has not.
        del sys.path[0]
    if not has_safe_path:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 (as the interpreter does)


def enter_namespaces(handles: Sequence[int]) -> None:
    """Enter the namespaces of a host, with the capabilities that its own processes have.

    Args:
        handles: Descriptors of the namespaces.

    Raises:
        OSError: The kernel does not allow it.
    """
    entered = [_enter(name, handle) for name, handle in zip(_NAMESPACES, handles, strict=True)]
    if any(entered) and os.geteuid() != 0:
        _drop_capabilities()


def _drop_capabilities() -> None:
    """Give up what a user namespace gives to a process that enters it, as a program that is executed there has done."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    if _LIBC.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    # With them the kernel has taken the files in /proc from this user.
    if _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _enter(name: str, handle: int) -> bool:
    """Enter a namespace if this process is in another one; return whether it was."""
    own = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
    is_same = os.path.sameopenfile(handle, own)
    os.close(own)
    if is_same:
        return False
    if _LIBC.setns(handle, 0) != 0:
        raise OSError(ctypes.get_errno(), f"setns {name}")
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
