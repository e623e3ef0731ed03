"""The replicas of a model: requests go to the least busy one, and one that ends is started again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.serving.payloads import PONG, Answer, RequestError
from cloudtrain_runtime.serving.replica import Replica, ReplicaError
from cloudtrain_runtime.serving.request_memory import WAIT_SECONDS

_LONGEST_PAUSE_SECONDS: Final = 60.0
"""Between two starts of a replica that can no longer load the model."""


class Replicas:
    """The processes with the model of one package.

    Args:
        package: The package.
        devices: For each replica its GPUs, as the value of CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, package: Path, devices: Sequence[str]) -> None:
        self._package = package
        self._devices = devices
        self._ready: list[Replica] = []
        self._has_ready = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all replicas, and return when they have loaded the model.

        Raises:
            ReplicaError: one has ended before.
            OSError: this machine cannot start one.
        """
        try:
            async with asyncio.TaskGroup() as group:
                starts = [group.create_task(self._start(each)) for each in self._devices]
        except* (ReplicaError, OSError) as errors:
            raise errors.exceptions[0] from None
        for start, devices in zip(starts, self._devices, strict=True):
            keeper = asyncio.create_task(self._keep(start.result(), devices))
            self._keepers.append(keeper)

    async def answer(self, kind: str, accept: str, body: bytes) -> Answer:
        """Return the answer of the least busy replica to a content."""
        await self._wait_until_ready()
        replica = min(self._ready, key=lambda each: each.load)
        return await replica.answer(kind, accept, body)

    async def ping(self) -> Answer:
        """Return 200 when a replica can answer."""
        await self._wait_until_ready()
        return PONG

    async def wait_for_failure(self) -> None:
        """Wait until a replica is no longer kept, which is a fault, and raise its error."""
        await asyncio.gather(*self._keepers)

    async def stop(self) -> None:
        """End all processes."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(each.stop() for each in self._ready))

    async def _wait_until_ready(self) -> None:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                # One that was ready may have ended before this request goes on.
                while not self._ready:
                    await self._has_ready.wait()
        except TimeoutError:
            raise RequestError(503, "the model is being loaded again: try again later") from None

    async def _start(self, devices: str) -> Replica:
        replica = await Replica.start(self._package, devices)
        self._ready.append(replica)
        self._has_ready.set()
        return replica

    async def _keep(self, replica: Replica, devices: str) -> None:
        """Start a replica again whenever it has ended."""
        while True:
            await replica.wait_for_end()
            self._ready.remove(replica)
            if not self._ready:
                self._has_ready.clear()
            code = await replica.finish()
            log_line(f"a process with the model has ended with exit code {code}: starting it again")
            replica = await self._start_again(devices)

    async def _start_again(self, devices: str) -> Replica:
        pause = 1.0
        while True:
            try:
                return await self._start(devices)
            except (ReplicaError, OSError) as error:
                log_line(f"cannot start a process with the model: {error}: trying again")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
