"""A process with the model, which answers the requests of the server that has started it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Final, Self

from cloudtrain_runtime.serving.channel import Channel, Message, open_channel
from cloudtrain_runtime.serving.payloads import Answer, error_answer

_STOP_SECONDS: Final = 3.0
_LAST_ANSWERS_SECONDS: Final = 1.0


class ReplicaError(Exception):
    """A process has ended before it had loaded the model."""


class Replica:
    """One process with the model; `start` makes it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting = dict[int, asyncio.Future[Answer]]()
        self._is_loaded = asyncio.Event()
        self._has_closed = asyncio.Event()
        self._channel: Channel
        self._process: asyncio.subprocess.Process

    @property
    def load(self) -> int:
        """Number of requests that it has not answered."""
        return len(self._waiting)

    @classmethod
    async def start(cls, package: Path, devices: str) -> Self:
        """Start a process, and return when it has loaded the model.

        Args:
            package: The model's package.
            devices: Its GPUs, as the value of CUDA_VISIBLE_DEVICES; without any it serves on the CPU.

        Raises:
            ReplicaError: it has ended before.
            OSError: this machine cannot start it, such as for want of descriptors.
        """
        self = cls()
        own, other = socket.socketpair()
        with other:
            self._channel = await open_channel(own, self._take_answer, self._has_closed.set)
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "cloudtrain_runtime.serving.replica_process"),
                    *(str(package), "--channel", str(other.fileno())),
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": devices},
                    pass_fds=[other.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    # The log. Standard output is for one line, with the address.
                    stdout=sys.stderr,
                    start_new_session=True,
                )
            except BaseException:
                self._channel.close()
                raise
        try:
            await self._wait_until_loaded()
        except BaseException:
            # It does not see that its channel is closed before PyTorch is imported.
            self._kill_group()
            await self.stop()
            raise
        return self

    async def answer(self, kind: str, accept: str, body: bytes) -> Answer:
        """Return the model's answer to a content, or an error if the process ends before."""
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._channel.send(Message(number, kind=kind, accept=accept, body=body))
        return await answer

    async def wait_for_end(self) -> None:
        """Return when the process has ended, or closed its channel: it takes no more requests."""
        await _first(self._process.wait(), self._has_closed.wait())

    async def finish(self) -> int:
        """Take the last answers of a process that ends, and return its exit code. Other requests get an error."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_ANSWERS_SECONDS):
                    await self._process.wait()
        finally:
            self._kill_group()
        code = await self._process.wait()
        # What the Task has started in another group may keep its end open.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ANSWERS_SECONDS):
                await self._has_closed.wait()
        self._channel.close()
        error = error_answer(500, "the model's process has ended; the server's log has the reason")
        for each in self._waiting.values():
            if not each.done():
                each.set_result(error)
        self._waiting.clear()
        return code

    async def stop(self) -> None:
        """End the process and what it has started."""
        self._channel.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await self._process.wait()
        self._kill_group()
        await self._process.wait()

    async def _wait_until_loaded(self) -> None:
        await _first(self._is_loaded.wait(), self._process.wait())
        if not self._is_loaded.is_set():
            code = await self._process.wait()
            raise ReplicaError(f"a process with the model has ended with exit code {code}")

    def _take_answer(self, message: Message) -> None:
        # The first message has no answer.
        self._is_loaded.set()
        waiting = self._waiting.pop(message.number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(Answer(message.status, message.body, message.kind))

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


async def _first(*waits: Coroutine[None, None, object]) -> None:
    """Return when one of several waits has ended; the others are cancelled."""
    tasks = [asyncio.create_task(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in tasks:
            each.cancel()
