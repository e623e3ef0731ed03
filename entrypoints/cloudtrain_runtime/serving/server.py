"""A server of one model's package on this machine, on loopback only: it answers HTTP, and its replicas have the model.

    python -m cloudtrain_runtime.serving.server PACKAGE --port N

It prints one line of JSON when it answers, and ends all its processes at SIGTERM, SIGINT, or when its parent ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain_runtime.contract.serving_config import SERVING_FILE, ServingConfig
from cloudtrain_runtime.contract.serving_devices import assign_devices
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.serving.replica import ReplicaError
from cloudtrain_runtime.serving.replicas import Replicas

if TYPE_CHECKING:
    import uvicorn

    from cloudtrain_runtime.serving.http_requests import Model

_HOST = "127.0.0.1"
_PARENT_SECONDS = 1.0
_CONNECTIONS = 128
"""Most connections that wait until the server takes them."""
_LAST_REQUESTS_SECONDS = 10
"""How long requests that have begun may take after a signal."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("package", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gpus", default="", help="the GPUs of the machine, with commas between")
    options = parser.parse_args()
    for number in _SIGNALS:
        signal.signal(number, _end)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    _allow_connections()
    found = [each for each in options.gpus.split(",") if each]
    try:
        asyncio.run(serve(options.package.resolve(), options.port, found))
    except (ReplicaError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def _end(*_: object) -> None:
    """End the server, also while it starts: the exception leaves the event loop, which ends its tasks."""
    raise SystemExit(0)


def _allow_connections() -> None:
    """Let this process have as many descriptors as the machine allows: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS allows fewer than it names.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _end_with_parent(parent: int) -> None:
    """Send SIGTERM to this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


async def serve(package: Path, port: int, gpus: list[str]) -> None:
    """Start the replicas of a package and answer requests until a signal.

    Args:
        package: The package.
        port: Port on loopback.
        gpus: The machine's GPUs.

    Raises:
        ReplicaError: the model cannot be loaded.
        OSError: this machine has no room for its processes, or the port is in use.
        ValueError: the package has no valid configuration, or needs more GPUs.
    """
    config = ServingConfig.from_json((package / SERVING_FILE).read_text(encoding="utf-8"))
    replicas = Replicas(package, assign_devices(config.replicas, config.gpus, gpus))
    # With its protocol named, asyncio sends each part of an answer at once.
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        # A port that is in use is an error at once, and no client connects before the model is loaded.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, port))
        try:
            # uvicorn is imported while the replicas import PyTorch.
            server, _ = await asyncio.gather(
                asyncio.to_thread(http_server, replicas), replicas.start()
            )
            listener.listen(_CONNECTIONS)
            print(dump_json({"url": f"http://{_HOST}:{port}"}), flush=True)
            failure = asyncio.create_task(replicas.wait_for_failure())
            failure.add_done_callback(lambda _: _stop(server))
            await server.serve(sockets=[listener])
            # After a signal it has not come to this.
            await failure
        finally:
            for number in _SIGNALS:
                # A second signal must not leave processes.
                signal.signal(number, signal.SIG_IGN)
            await replicas.stop()


def _stop(server: uvicorn.Server) -> None:
    server.should_exit = True


def http_server(model: Model) -> uvicorn.Server:
    """Return the HTTP server of a model. At a signal it answers the requests that have begun, and ends."""
    import uvicorn

    from cloudtrain_runtime.serving.connections import Connection
    from cloudtrain_runtime.serving.http_requests import RequestHandler
    from cloudtrain_runtime.serving.request_log import log_requests

    config = uvicorn.Config(
        log_requests(RequestHandler(model, is_local=True)),
        # Of h11: httptools, which uvicorn prefers, has no limit on the size of a head.
        http=Connection,
        log_config=None,
        access_log=False,
        # Nothing is between it and its clients.
        proxy_headers=False,
        lifespan="off",
        ws="none",
        backlog=_CONNECTIONS,
        timeout_graceful_shutdown=_LAST_REQUESTS_SECONDS,
    )
    return uvicorn.Server(config)


if __name__ == "__main__":
    main()
