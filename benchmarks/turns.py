"""Turns of programs that are compared: all are started once, and then each runs for a moment while the others wait.

The measuring process has a `Contestant` for each program, and each of its ranks has a `Turns`. They talk over a socket
in one folder, one JSON value per line, so that the ranks may be started by any launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ADDRESS = "TURNS_ADDRESS"
"""Variable with the path of the socket."""

_POLL_SECONDS = 0.05
_EXIT_SECONDS = 20.0


class Turns:
    """The side of one rank."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[ADDRESS])
        self._file = self._socket.makefile("rw", buffering=1)
        self.send(int(os.environ.get("RANK", "0")))

    def wait(self) -> None:
        """Wait for the next turn. Exit if the measuring process has ended."""
        if not self._file.readline():
            os._exit(1)

    def send(self, value: object) -> None:
        """Send a JSON value to the measuring process."""
        print(json.dumps(value), file=self._file, flush=True)


class Contestant:
    """A started program: its processes, and a connection to each of its ranks.

    Args:
        name: Its name.
        processes: Its processes; one process may start several ranks.
        log: File with their output.
        server: Socket to which the ranks connect.
        ranks: Number of ranks.
        timeout_seconds: How long a rank may take for an answer; None waits without end.
    """

    def __init__(
        self,
        name: str,
        processes: Sequence[subprocess.Popen[bytes]],
        log: Path,
        server: socket.socket,
        ranks: int,
        timeout_seconds: float | None,
    ) -> None:
        self.name, self.log, self._processes, self._timeout_seconds = (
            name,
            log,
            processes,
            timeout_seconds,
        )
        self._ranks: dict[int, Any] = {}
        try:
            for _ in range(ranks):
                file = self._accept(server).makefile("rw", buffering=1)
                self._ranks[self._read(file)] = file
        except BaseException:
            self.end()
            raise

    def take_turn(self) -> list[Any]:
        """Let all ranks run one turn; return what each sends at its end, by rank."""
        for _, file in sorted(self._ranks.items()):
            file.write("\n")
            file.flush()
        return self.read()

    def read(self) -> list[Any]:
        """Return the next value of each rank. Exit with the program's output if it has ended."""
        return [self._read(file) for _, file in sorted(self._ranks.items())]

    def finish(self) -> None:
        """Wait for the processes to end. Exit if one has failed."""
        for process in self._processes:
            if process.wait(300) != 0:
                raise self._failure()

    def end(self) -> None:
        """Close the connections, at which waiting ranks exit, and kill processes that remain."""
        for file in self._ranks.values():
            file.close()
        for process in self._processes:
            try:
                process.wait(_EXIT_SECONDS if self._ranks else 0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()

    def _accept(self, server: socket.socket) -> socket.socket:
        server.settimeout(_POLL_SECONDS)
        began = time.monotonic()
        while all(process.poll() is None for process in self._processes):
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                connection.settimeout(self._timeout_seconds)
                return connection
            if (
                self._timeout_seconds is not None
                and time.monotonic() - began > self._timeout_seconds
            ):
                break
        raise self._failure()

    def _read(self, file: Any) -> Any:
        try:
            line = file.readline()
        except TimeoutError:
            line = ""
        if not line:
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> SystemExit:
        return SystemExit(
            f"{self.name} has failed:\n{self.log.read_text(errors='replace')[-4000:]}"
        )


@contextlib.contextmanager
def start(
    name: str,
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    folder: Path,
    *,
    ranks: int,
    timeout_seconds: float | None = None,
) -> Iterator[Contestant]:
    """Start the commands of a program with their environments; wait until its ranks are connected.

    Args:
        name: The program.
        commands: Command and further environment variables of each process.
        folder: An empty folder, the processes' working directory.
        ranks: Number of ranks that connect.
        timeout_seconds: How long a rank may take to connect and for an answer; None waits without end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    address, log = str(folder / "socket"), folder / "output.log"
    with socket.socket(socket.AF_UNIX) as server, log.open("wb") as output:
        server.bind(address)
        server.listen()
        processes = [
            subprocess.Popen(
                argv,
                cwd=folder,
                env={**os.environ, **environ, ADDRESS: address},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            for argv, environ in commands
        ]
        contestant = Contestant(name, processes, log, server, ranks, timeout_seconds)
        try:
            yield contestant
        finally:
            contestant.end()
