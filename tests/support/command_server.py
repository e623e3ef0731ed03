"""Run commands and programs in processes that are forked from a server, which has imported their modules once.

A command of a test is a real process: with its own environment, folder, streams, signals and exit code. It starts in
some 30 ms, because it does not start an interpreter and imports nothing that the server has. What depends on the start
of the interpreter (site packages, PYTHON variables, the time of `--help`) needs the fixture `cli_process`.

Programs that import torch or Lightning have a server of their own (`serve_programs`): the import takes seconds.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from support.aws_models import share_models
from support.jobs import Finished, command

_SECONDS = 600  # a command that takes longer hangs
_LARGEST_REQUEST = 1 << 20


class CommandServer:
    """The address of a server of commands or programs."""

    def __init__(self, address: Path) -> None:
        self._address = str(address)

    def run(
        self,
        *arguments: str | Path,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Finished:
        """Run a command to its end, with this process's environment and folder where no others are given."""
        argv = [str(command()), *map(str, arguments)]
        return self._run({"arguments": argv}, environ, cwd)

    def run_program(
        self,
        text: str,
        *arguments: str | Path,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Finished:
        """Run a program to its end, as `python -c TEXT` does."""
        request = {"arguments": ["-c", *map(str, arguments)], "program": text}
        return self._run(request, environ, cwd)

    def _run(
        self, asked: dict[str, Any], environ: Mapping[str, str] | None, cwd: Path | None
    ) -> Finished:
        with (
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
        ):
            connection.settimeout(_SECONDS)
            connection.connect(self._address)
            request = {
                **asked,
                "environ": {**os.environ, **(environ or {})},
                "cwd": str(cwd or Path.cwd()),
            }
            streams = array.array("i", [out.fileno(), err.fileno()])
            connection.sendmsg(
                [json.dumps(request).encode()],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)],
            )
            answer = connection.recv(32)
            assert answer, "the server of commands has ended"
            return Finished(int(answer), _text(out.fileno()), _text(err.fileno()))


def _text(stream: int) -> str:
    os.lseek(stream, 0, os.SEEK_SET)
    with open(os.dup(stream), newline=None) as file:  # noqa: PTH123 (a descriptor)
        return file.read()


def serve_commands() -> contextlib.AbstractContextManager[CommandServer]:
    """Start a server; return what runs commands there. It ends with this process."""
    return serve_programs()


@contextlib.contextmanager
def serve_programs(*modules: str) -> Iterator[CommandServer]:
    """Start a server that has imported these modules, or cloudtrain's if there are none; yield what runs programs there."""
    with tempfile.TemporaryDirectory(prefix="cloudtrain-commands-") as folder:
        address = Path(folder, "socket")
        program = [sys.executable, "-m", "support.command_server", str(address), *modules]
        paths = os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parents[1])])
        server = subprocess.Popen(
            program,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the server of commands did not start"
        try:
            yield CommandServer(address)
        finally:
            server.stdin.close()
            server.wait(_SECONDS)
            server.stdout.close()


# ---------------------------------------------------------------- in the server


def _serve(address: str, modules: Sequence[str]) -> None:
    """Run each command in a child, until standard input ends: with the process that started this one."""
    leave = _Leave()
    atexit.register(leave)  # the first exit handler, which runs last
    if modules:
        for name in modules:
            importlib.import_module(name)
        gc.freeze()
    else:
        _import_all()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            return
        connection, _ = listener.accept()
        content, controls, _, _ = connection.recvmsg(_LARGEST_REQUEST, socket.CMSG_SPACE(8))
        streams = array.array("i", controls[0][2])
        request = json.loads(content)
        if "AWS_ENDPOINT_URL" in request["environ"]:
            _import_sdk()
        _reap()
        if os.fork() == 0:
            listener.close()
            _run(request, streams, connection, leave)
        connection.close()
        for stream in streams:
            os.close(stream)


def _import_all() -> None:
    """Import every module of cloudtrain that its extras allow. None of them imports torch, moto or the SDK."""
    import cloudtrain

    share_models()
    for module in pkgutil.walk_packages(cloudtrain.__path__, "cloudtrain."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    gc.freeze()


@functools.cache
def _import_sdk() -> None:
    """Import the SageMaker SDK, which takes longer than all other work of a submit."""
    import botocore.session

    from cloudtrain.backends.sagemaker.sdk_import import load_sdk
    from cloudtrain.errors import MissingExtraError

    with contextlib.suppress(MissingExtraError):
        load_sdk()
    models = botocore.session.get_session().get_component("data_loader")
    for service in ("ec2", "iam", "logs", "s3", "sagemaker", "service-quotas", "sts"):
        models.load_service_model(service, "service-2")
    gc.freeze()


def _reap() -> None:
    """Collect the children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class _Leave:
    """Exit after all exit handlers, without the destruction of every module, which takes longer than most commands."""

    def __init__(self) -> None:
        self.code: int | None = None

    def __call__(self) -> None:
        if self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)


def _run(
    request: dict[str, Any], streams: array.array[int], connection: socket.socket, leave: _Leave
) -> NoReturn:
    """Run the command in a child of this process, and send its exit code."""
    process = os.fork()
    if process:
        _, status = os.waitpid(process, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    connection.close()
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, stream in enumerate([nothing, *streams]):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = request["arguments"]
    try:
        _start(request.get("program"))
        leave.code = 0
    except SystemExit as end:
        leave.code = int(end.code or 0)
    sys.exit(leave.code)


def _start(program: str | None) -> None:
    if program is None:
        from cloudtrain.__main__ import main

        main()
        return
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    sys.path.insert(0, "")
    exec(compile(program, "<string>", "exec"), main_module.__dict__)  # noqa: S102 (as `python -c`)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
