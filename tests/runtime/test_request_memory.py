"""Requests of a served model wait for memory in the order of their arrival."""

from __future__ import annotations

import asyncio
import io

import pytest

from cloudtrain_runtime.serving import request_memory
from cloudtrain_runtime.serving.payloads import NPY, RequestError, needed_bytes
from cloudtrain_runtime.serving.request_memory import RequestMemory

JSON = "application/json"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_memory, "MOST_CONTENT_BYTES", 100)
    monkeypatch.setattr(request_memory, "MOST_BODY_BYTES", 10)


def test_contents_never_take_more_together() -> None:
    async def run() -> tuple[list[int], int]:
        memory, order, held, most = RequestMemory(), list[int](), 0, 0

        async def request(number: int, size: int) -> None:
            nonlocal held, most
            async with memory.content(size):
                order.append(number)
                held += size
                most = max(most, held)
                await asyncio.sleep(0.01)
                held -= size

        await asyncio.gather(*(request(*each) for each in enumerate([60, 60, 30, 30, 30, 100])))
        return order, most

    order, most = asyncio.run(run())
    assert most <= 100
    assert order == [0, 1, 2, 3, 4, 5], "the large one waits for its turn, and the others behind it"


def test_a_content_that_is_too_large_is_read_alone() -> None:
    async def run() -> bool:
        memory = RequestMemory()
        async with memory.content(10_000):
            waiting = asyncio.ensure_future(memory.content(1).__aenter__())
            await asyncio.sleep(0.05)
            was_waiting = not waiting.done()
        await waiting
        return was_waiting

    assert asyncio.run(run())


def test_a_request_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_memory, "WAIT_SECONDS", 0.05)

    async def run() -> None:
        memory = RequestMemory()
        async with memory.content(100):
            with pytest.raises(RequestError) as refused:
                async with memory.content(1):
                    pass
            assert refused.value.status == 503
        async with memory.content(1):
            pass

    asyncio.run(run())


def test_the_bodies_of_all_requests_have_a_bound() -> None:
    async def run() -> None:
        memory = RequestMemory()
        with memory.body() as first, memory.body() as second:
            first(6)
            second(4)
            with pytest.raises(RequestError) as refused:
                second(1)
            assert refused.value.status == 503
        with memory.body() as third:
            third(10)

    asyncio.run(run())


def test_the_memory_of_a_content_is_known_before_it_is_read() -> None:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("1", (5000, 4000)).save(out, "PNG")
    assert len(out.getvalue()) < 10_000
    assert needed_bytes("image/png", out.getvalue()) == 2**26 + 32 * 5000 * 4000
    assert needed_bytes("image/png", b"no image") == 2**26
    assert needed_bytes(JSON, b"[1, 2]") == 40 * 6
    assert needed_bytes(NPY, bytes(5)) == 50
