"""The process that serves a model's package on this machine, and its processes' end."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from cloudtrain.backends.container.machine import free_port, visible_gpus
from cloudtrain.backends.container.process_tree import kill
from cloudtrain.errors import CloudtrainError, MissingExtraError, UserError
from cloudtrain.support.installation import install_command
from cloudtrain.support.proxies import exclude_loopback
from cloudtrain_runtime.contract.strict_json import load_json

_START_SECONDS = 300.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.1
_TAIL_CHARACTERS = 2000


def require_serving() -> None:
    """Raise a MissingExtraError if a package that serving needs is not installed."""
    for module in ("torch", "numpy", "psutil", "starlette", "uvicorn"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"serving needs {module}", install_command("serve"))


class LocalServer:
    """A server of one package on 127.0.0.1. As a context manager it ends with all its processes.

    Args:
        package: Folder of the package.
        log: File for the output of all its processes.
        port: Its port; None takes a free one.

    Raises:
        MissingExtraError: a package that serving needs is not installed.
        UserError: the port is in use.
    """

    def __init__(self, package: Path, log: Path, port: int | None = None) -> None:
        require_serving()
        if port:
            _check_port(port)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._is_ready = threading.Event()
        command = [
            sys.executable,
            "-m",
            "cloudtrain_runtime.serving.server",
            str(package),
            "--port",
            str(self.port),
        ]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, "--gpus", ",".join(visible_gpus())],
                cwd=package,
                env=_environment(os.environ, package),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                # Ctrl-C reaches this process only, which then ends the server in order.
                start_new_session=True,
            )
        assert self.process.stdout is not None  # noqa: S101 (it is a pipe)
        threading.Thread(target=self._copy_output, args=(self.process.stdout,), daemon=True).start()

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the server."""
        self.stop()

    def wait_until_ready(self) -> None:
        """Wait until the model answers.

        Raises:
            CloudtrainError: it does not; the message has the end of the log.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_ready.wait(_POLL_SECONDS):
            if self.process.poll() is not None:
                raise UserError(
                    f"the model cannot be served:\n{self._reason()}", f"the log: {self._log}"
                )
            if time.monotonic() > deadline:
                raise CloudtrainError(
                    f"the server did not answer within {_START_SECONDS:g} s:\n{self._reason()}"
                )

    def wait(self) -> int:
        """Wait until the server ends; return its exit code."""
        return self.process.wait()

    def stop(self) -> None:
        """End all processes of the server, and return when none is left."""
        import psutil

        processes = []
        with contextlib.suppress(psutil.Error):
            processes = psutil.Process(self.process.pid).children(recursive=True)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_SECONDS)
        kill([each for each in processes if each.is_running()])
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _copy_output(self, stream: IO[bytes]) -> None:
        """Copy the server's output to its log, and find the line that says that it answers."""
        with stream, self._log.open("ab") as out:
            for line in stream:
                out.write(line)
                out.flush()
                with contextlib.suppress(ValueError, AttributeError):
                    if load_json(line).get("url") == self.url:
                        self._is_ready.set()

    def _reason(self) -> str:
        """Return the error that ended the server: the log's last lines, from the Task's own error on."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        own = [line for line in lines if "TaskError:" in line or "CheckpointError:" in line]
        if own:
            return own[-1].rpartition("Error: ")[2]
        return "\n".join(lines)[-_TAIL_CHARACTERS:]


def _environment(environ: Mapping[str, str], package: Path) -> dict[str, str]:
    """Return the environment of a server: the package's runtime and code, as in AWS's image."""
    return {
        # As Ray has in AWS's image: answers are the same to the last bit.
        "OMP_NUM_THREADS": "1",
        **environ,
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
        # What the Task prints is in the log at once.
        "PYTHONUNBUFFERED": "1",
        **exclude_loopback(environ),
    }


def _check_port(port: int) -> None:
    """Raise an error if the port that the user chose is in use."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"cannot use port {port}: {error.strerror}", "choose another port with --port"
            ) from None
