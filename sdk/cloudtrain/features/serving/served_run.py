"""`serve`: a run's model on this machine."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloudtrain.backends.container.machine import visible_gpus
from cloudtrain.backends.container.model_server import LocalServer, require_serving
from cloudtrain.client.client import Client, client_of
from cloudtrain.errors import CloudtrainError, UserError
from cloudtrain.features.serving.package import ServingOptions, make_package
from cloudtrain.runs.run import RunLike
from cloudtrain.settings.settings import Settings
from cloudtrain.support.argument_types import check_type
from cloudtrain_runtime.contract.serving_devices import assign_devices

_LOG = "server.log"
_POLL_SECONDS = 0.5
_MOST_PORT = 65535


class Server(LocalServer):
    """A served model: `url` answers GET /ping and POST /invocations until `stop()`, or the end of a `with` block."""

    def __init__(
        self, folder: tempfile.TemporaryDirectory[str], port: int | None, log: Path | None
    ) -> None:
        self._folder = folder
        root = Path(folder.name)
        super().__init__(root / "package", log or root / _LOG, port)

    def stop(self) -> None:
        """End all processes of the server, and delete its package."""
        super().stop()
        self._folder.cleanup()


def serve(
    run: RunLike,
    options: ServingOptions | None = None,
    *,
    port: int | None = None,
    log: str | Path | None = None,
    settings: Settings | None = None,
    client: Client | None = None,
) -> Server:
    """Serve a run's model on this machine, and return when it answers.

    Args:
        run: The run, of a Task.
        options: Checkpoint, batches, replicas and GPUs.
        port: Port on 127.0.0.1; by default a free one.
        log: File for the output of the server's processes.
        settings: The account; by default from environment and files.
        client: The client that finds the run, in place of `settings`.

    Raises:
        MissingExtraError: the extra `serve` is not installed.
        UserError: The run has no such weights, they do not fit its model, the port is in use, or GPUs are missing.
        CloudError: The run's files are in S3, which refused or cannot be reached.
    """
    check_type("options", options, ServingOptions)
    finder = client_of(client, settings)
    check_type("port", port, int)
    if port is not None and not 1 <= port <= _MOST_PORT:
        raise UserError(f"there is no port {port}", f"from 1 to {_MOST_PORT}, or leave it out")
    require_serving()
    chosen = options or ServingOptions()
    _check_gpus(chosen)
    folder = tempfile.TemporaryDirectory(prefix="cloudtrain-serve-")
    try:
        make_package(finder.get_run(run), Path(folder.name) / "package", chosen)
        server = Server(folder, port, None if log is None else Path(log))
    except BaseException:
        folder.cleanup()
        raise
    try:
        server.wait_until_ready()
    except BaseException:
        server.stop()
        raise
    return server


def _check_gpus(options: ServingOptions) -> None:
    """Raise a UserError if this machine has fewer GPUs than the replicas need."""
    found = visible_gpus()
    hint = "choose fewer --replicas or --gpus"
    if not found:
        hint = "leave out --gpus to serve on the CPU"
    try:
        # By the rule of the server.
        assign_devices(options.replicas, options.gpus, found)
    except ValueError as error:
        raise UserError(str(error), hint) from None


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise SystemExit at SIGTERM within the block, so that what it has started is ended and deleted."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def catch_end() -> threading.Event:
    """Return an event that Ctrl-C and SIGTERM set from now on."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    return ended


def wait_for_end(server: LocalServer, ended: threading.Event) -> int:
    """Wait for the event of `catch_end`, and return 0.

    Raises:
        CloudtrainError: the server has ended by itself.
    """
    while not ended.wait(_POLL_SECONDS):
        if server.process.poll() is not None:
            raise CloudtrainError(
                f"the server has ended with exit code {server.process.returncode}", "see its log"
            )
    return 0
