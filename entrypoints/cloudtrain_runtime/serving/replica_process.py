"""The process of a replica: it loads the model of a package, and answers the server that has started it.

    python -m cloudtrain_runtime.serving.replica_process PACKAGE --channel FD

FD is its end of a pair of sockets. It ends when the server has closed the other end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import signal
import socket
import threading
from pathlib import Path

from cloudtrain_runtime.serving.channel import READY, Message, open_channel
from cloudtrain_runtime.serving.model_service import ModelService


def main() -> None:
    """Load the model, and answer requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("package", type=Path)
    parser.add_argument("--channel", type=int, required=True)
    options = parser.parse_args()
    # Programs that the Task starts must not keep it open.
    os.set_inheritable(options.channel, False)
    threading.Thread(target=_end_with_server, args=(options.channel,), daemon=True).start()
    asyncio.run(_serve(options.package, socket.socket(fileno=options.channel)))


async def _serve(package: Path, end: socket.socket) -> None:
    # The model computes in this thread: what arrives meanwhile waits in the socket, and becomes the next batch.
    service = ModelService(package, thread=None)
    work = set[asyncio.Task[None]]()
    has_ended = asyncio.Event()

    async def answer(request: Message) -> None:
        status, body, kind = await service.answer(request.kind, request.accept, request.body)
        channel.send(Message(request.number, status=status, kind=kind, body=body))

    def start(request: Message) -> None:
        task = asyncio.create_task(answer(request))
        work.add(task)
        task.add_done_callback(work.discard)

    channel = await open_channel(end, start, has_ended.set)
    channel.send(READY)
    await has_ended.wait()
    _end()


def _end_with_server(channel: int) -> None:
    """Wait until the server has closed its end, also while the model loads or computes, and end."""
    poll = select.poll()
    # Its end is always reported.
    poll.register(channel, 0)
    poll.poll()
    _end()


def _end() -> None:
    """End this process and what the Task has started: nobody takes answers any more.

    The interpreter's own end waits for threads, and takes a second with PyTorch.
    """
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
