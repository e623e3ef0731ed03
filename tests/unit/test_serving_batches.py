"""Requests of a served model that wait together, and the GPUs and messages of its replicas."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest

from cloudtrain.errors import UserError
from cloudtrain.features.serving.package import ServingOptions
from cloudtrain.features.serving.served_run import serve
from cloudtrain_runtime.contract.serving_devices import assign_devices
from cloudtrain_runtime.serving.batches import Batches
from cloudtrain_runtime.serving.channel import Message, open_channel

THREADS = (None, ThreadPoolExecutor(1))


@pytest.mark.parametrize("thread", THREADS)
def test_a_lone_item_is_computed_alone(thread: Executor | None) -> None:
    calls: list[list[int]] = []

    async def run() -> list[int]:
        batches = Batches[int, int](lambda items: recorded(calls, items), 4, 0.0, thread)
        return [await batches.submit(value) for value in range(3)]

    assert asyncio.run(run()) == [0, 2, 4]
    assert calls == [[0], [1], [2]]


def recorded(calls: list[list[int]], items: list[int]) -> Sequence[int]:
    calls.append(list(items))
    return [2 * each for each in items]


@pytest.mark.parametrize("thread", THREADS)
def test_items_that_wait_are_computed_in_order_up_to_the_limit(thread: Executor | None) -> None:
    calls: list[list[int]] = []

    async def run() -> list[int]:
        batches = Batches[int, int](lambda items: recorded(calls, items), 4, 0.0, thread)
        return await asyncio.gather(*(batches.submit(value) for value in range(10)))

    assert asyncio.run(run()) == [2 * value for value in range(10)]
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_what_arrives_during_a_call_is_the_next_batch() -> None:
    calls: list[list[int]] = []

    async def run() -> list[int]:
        loop = asyncio.get_running_loop()
        begun, goes_on = asyncio.Event(), asyncio.Event()

        def compute(items: list[int]) -> Sequence[int]:
            if not calls:
                loop.call_soon_threadsafe(begun.set)
                asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result()
            return recorded(calls, items)

        with ThreadPoolExecutor(1) as thread:
            batches = Batches[int, int](compute, 8, 0.0, thread)
            first = asyncio.create_task(batches.submit(0))
            await begun.wait()
            others = [asyncio.create_task(batches.submit(value)) for value in (1, 2, 3)]
            await asyncio.sleep(0)
            goes_on.set()
            return [await first, *await asyncio.gather(*others)]

    assert asyncio.run(run()) == [0, 2, 4, 6]
    assert calls == [[0], [1, 2, 3]]


def test_an_item_waits_for_others_until_the_call_is_full() -> None:
    calls: list[list[int]] = []

    async def run() -> None:
        batches = Batches[int, int](lambda items: recorded(calls, items), 2, 3600.0, None)
        first = asyncio.create_task(batches.submit(0))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not calls
        await asyncio.gather(first, batches.submit(1))
        # Without another one it is computed when its time is over.
        short = Batches[int, int](lambda items: recorded(calls, items), 2, 0.01, None)
        await short.submit(2)

    asyncio.run(run())
    assert calls == [[0, 1], [2]]


@pytest.mark.parametrize("thread", THREADS)
def test_an_error_reaches_each_item_of_its_call_only(thread: Executor | None) -> None:
    def compute(items: list[int]) -> Sequence[int]:
        if 1 in items:
            raise ZeroDivisionError
        return items

    async def run() -> list[Any]:
        batches = Batches[int, int](compute, 2, 0.0, thread)
        cancelled = asyncio.create_task(batches.submit(7))
        await asyncio.sleep(0)
        cancelled.cancel()
        return await asyncio.gather(
            *(batches.submit(value) for value in (0, 1, 2, 3)), return_exceptions=True
        )

    found = asyncio.run(run())
    assert isinstance(found[0], ZeroDivisionError)
    assert isinstance(found[1], ZeroDivisionError)
    assert found[2:] == [2, 3]


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_messages_arrive_as_they_were_sent(size: int) -> None:
    sent = [
        Message(1, kind="application/json; x=é", accept="*/*", body=b"[1, 2]"),
        Message(2**40, status=503),
        Message(3, body=bytes(range(256)) * 1000),
    ]

    async def run() -> tuple[list[Message], bytes]:
        got: list[Message] = []
        ended = asyncio.Event()
        first, second = socket.socketpair()
        third, fourth = socket.socketpair()
        writer = await open_channel(first, got.append, lambda: None)
        for each in sent:
            writer.send(each)
        writer.close()
        loop = asyncio.get_running_loop()
        second.setblocking(False)
        data = b""
        while part := await loop.sock_recv(second, 2**20):
            data += part
        second.close()
        await open_channel(fourth, got.append, ended.set)
        third.setblocking(False)
        for start in range(0, len(data), size):
            await loop.sock_sendall(third, data[start : start + size])
            await asyncio.sleep(0)
        third.close()
        await ended.wait()
        return got, data

    got, _ = asyncio.run(run())
    assert got == sent


@pytest.mark.parametrize(
    ("replicas", "gpus", "found", "wanted"),
    [
        (3, 0, ["0"], ["", "", ""]),
        (2, 1, ["0", "1", "2"], ["0", "1"]),
        (2, 2, ["0", "1", "2", "3", "4"], ["0,1", "2,3"]),
        (3, 0.5, ["4", "GPU-a"], ["4", "4", "GPU-a"]),
        (2, 0.7, ["0", "1"], ["0", "1"]),
    ],
)
def test_each_replica_has_gpus_of_its_own(
    replicas: int, gpus: float, found: list[str], wanted: list[str]
) -> None:
    assert assign_devices(replicas, gpus, found) == wanted


@pytest.mark.parametrize(
    ("replicas", "gpus", "reason"),
    [
        (3, 0.7, "3 x 0.7 GPUs are needed, and this machine has 2: enough for 2 replicas"),
        (2, 2, "2 x 2 GPUs are needed, and this machine has 2: enough for 1 replicas"),
        (1, 1.5, "a part of one GPU, or several whole ones; got 1.5"),
    ],
)
def test_gpus_that_do_not_suffice_are_an_error(replicas: int, gpus: float, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        assign_devices(replicas, gpus, ["0", "1"])


def test_serve_refuses_what_the_server_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they need less than two GPUs, of which each has room for one."""
    pytest.importorskip("torch")
    pytest.importorskip("uvicorn")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match=r"3 x 0\.6 GPUs are needed.*: enough for 2 replicas"):
        serve("a-run", ServingOptions(replicas=3, gpus=0.6))
