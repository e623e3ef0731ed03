"""The model of a package, which answers the contents of requests: what every server of it has in common."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cloudtrain_runtime.serving.batches import Batches
from cloudtrain_runtime.serving.payloads import (
    PONG,
    Answer,
    RequestError,
    error_answer,
    needed_bytes,
)
from cloudtrain_runtime.serving.predictor import Predictor, load_folder
from cloudtrain_runtime.serving.request_memory import RequestMemory

Result = TypeVar("Result")


class ModelService:
    """The model of a package, in this process.

    Args:
        folder: The package.
        thread: Where the model computes; None for the event loop's own thread.

    Raises:
        ValueError: it has no valid configuration.
        JobError: its Task cannot be created, or the weights do not fit the model.
    """

    def __init__(self, folder: Path, thread: Executor | None) -> None:
        config = load_folder(folder)
        self._predictor = Predictor.from_folder(folder, config)
        predict = partial(self._predictor.predict, max_batch=config.max_batch)
        self._batches = Batches[Any, Any](
            predict, config.max_batch, config.batch_wait_seconds, thread
        )
        self._memory = RequestMemory()

    async def answer(self, kind: str, accept: str, body: bytes) -> Answer:
        """Return the answer to a content.

        Args:
            kind: Its Content-Type.
            accept: The types that the client accepts.
            body: The content.
        """
        try:
            content, content_kind = await self._predict(kind, accept, body)
        except RequestError as error:
            return error_answer(error.status, error.message)
        except Exception:  # noqa: BLE001 (a bug of the Task must not end the process)
            traceback.print_exc(file=sys.stderr)
            return error_answer(500, "the Task failed; the server's log has the reason")
        return Answer(200, content, content_kind)

    async def ping(self) -> Answer:
        """Return 200: the model is loaded."""
        return PONG

    async def _predict(self, kind: str, accept: str, body: bytes) -> tuple[bytes, str]:
        is_small = self._predictor.reads_quickly(kind, body)
        size = await _call(is_small, needed_bytes, kind, body)
        async with self._memory.content(size):
            inputs = await _call(is_small, self._predictor.read, kind, body)
            outputs = await self._batches.submit(inputs)
            # An error keeps this frame, and with it the inputs, until the next garbage collection.
            del inputs
            if isinstance(outputs, RequestError):
                raise RequestError(outputs.status, outputs.message)
            is_small = self._predictor.writes_quickly(outputs)
            return await _call(is_small, self._predictor.write, outputs, accept)


async def _call(is_quick: bool, function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in a thread, unless it is done before a thread would begin."""
    if is_quick:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)
