"""Progress and metrics that a script reports: `report(step, total, loss=...)`."""

from __future__ import annotations

import atexit
import operator
import os
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, SupportsFloat

from cloudtrain_runtime.contract import HOST_RANK_VARIABLE
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.environment import read_run_config, torchrun_variables
from cloudtrain_runtime.process.event_log import emit

_INTERVAL_SECONDS = 1.0
_FIRST_INTERVAL_SECONDS = 0.1
_MAX_RECORDS = 1_000
"""Calls that are kept before their newest values are collected, which limits the memory of fast loops."""

_FIRST_LINES = 300
"""Number of event lines that may follow each other in the shorter interval, so that short runs have curves, too."""


def report(step: int, total: int | None = None, **metrics: SupportsFloat) -> None:
    """Report a script's progress, and values of metrics at this step.

    Every rank may call it after each step: it is the rank's heartbeat for `limits.hang`. The values of rank 0 count;
    `status`, `follow` and the curves show them. A background thread prints at most one value per metric and second
    (ten per second at first), always with the last one. A call costs microseconds and waits for neither the GPU nor
    the log. Outside of a run it does nothing.

    Args:
        step: Optimizer steps done, including those before a resume.
        total: Optimizer steps of the whole run, for the time left.
        **metrics: Numbers, or tensors with one element: `loss=0.25`. A name without a slash belongs to the training
            split; others are passed as `**{"validation/accuracy": 0.9}`.

    Raises:
        TypeError: a metric is not a number, or `step` or `total` is not an integer.
        ValueError: one of them is negative, or a metric is too large for a float.
    """
    if type(step) is not int or step < 0:
        step = _count("step", step)
    if total is not None and (type(total) is not int or total < 0):
        total = _count("total", total)
    heartbeat.tick(step)
    buffer = _buffer if _is_prepared else _prepare()
    if buffer is None:
        return
    for name, value in metrics.items():
        if type(value) is not float:
            metrics[name] = _checked(name, value)
    buffer.record(step, total, metrics)


class MetricBuffer:
    """Keeps the newest value of each metric with its step, until they are printed. Threads may share it."""

    def __init__(self) -> None:
        # Its methods are atomic.
        self._records: deque[tuple[int, int | None, Mapping[str, Any]]] = deque()
        self._printing = threading.Lock()
        self._values: dict[str, tuple[int, Any]] = {}
        self._step: int | None = None
        self._total: int | None = None
        self._lines = 0

    @property
    def interval_seconds(self) -> float:
        """Time between two prints."""
        return _FIRST_INTERVAL_SECONDS if self._lines < _FIRST_LINES else _INTERVAL_SECONDS

    def record(self, step: int, total: int | None, metrics: Mapping[str, Any]) -> None:
        """Keep values that `float` accepts. The mapping must not change afterwards."""
        self._records.append((step, total, metrics))
        if len(self._records) > _MAX_RECORDS:
            with self._printing:
                self._collect()

    def flush(self) -> None:
        """Print what has been recorded since the last call, one line per step."""
        with self._printing:
            self._collect()
            values = self._values
            self._values = {}
            by_step: dict[int, dict[str, float]] = {}
            if self._step is not None:
                # The newest step is printed also if it has no values.
                by_step[self._step] = {}
            self._step = None
            for name, (step, value) in values.items():
                by_step.setdefault(step, {})[name] = float(value)
            total = {} if self._total is None else {"total_steps": self._total}
            for step, found in sorted(by_step.items()):
                loss = {"loss": found.pop("loss")} if "loss" in found else {}
                others = {"metrics": found} if found else {}
                emit("step", step=step, **total, **loss, **others)
                self._lines += 1

    def _collect(self) -> None:
        """Keep the newest step, and the newest values of the records."""
        while self._records:
            self._step, total, metrics = self._records.popleft()
            self._values.update({name: (self._step, value) for name, value in metrics.items()})
            if total is not None:
                self._total = total


def _print_forever(buffer: MetricBuffer) -> None:
    while True:
        buffer.flush()
        _pause(buffer.interval_seconds)


def _count(name: str, value: Any) -> int:
    """Return a count of steps that is no plain int, such as one of NumPy."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"report: {name} must be an integer, got {type(value).__name__}") from None
    if count < 0:
        raise ValueError(f"report: {name} must not be negative, got {count}")
    return count


def _checked(name: str, value: Any) -> Any:
    """Return a value that `float` accepts later; of a tensor one without its graph, which would keep memory.

    Raises:
        TypeError: there is none.
    """
    if isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"report: {name} is too large for a float") from None
    detach = getattr(value, "detach", None)
    if detach is not None and value.numel() == 1:
        # The caller may change the tensor in place.
        return detach().clone()
    # A number of NumPy, for example, whose texts have `__float__`, too.
    is_number = hasattr(value, "__float__") and not isinstance(value, str)
    if detach is None and is_number and getattr(value, "size", 1) == 1:
        return float(value)
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise TypeError(
        f"report: {name} must be a number or a tensor with one element, got {type(value).__name__}{shape}"
    )


_pause = threading.Event().wait
_buffer: MetricBuffer | None = None
_is_prepared = False
_preparing = threading.Lock()


def _prepare() -> MetricBuffer | None:
    """Return the buffer of rank 0 in a run, which a thread prints; None on other ranks and outside of a run."""
    global _buffer, _is_prepared  # noqa: PLW0603 (one process has one run)
    with _preparing:
        if not _is_prepared:
            environ = {**os.environ, **torchrun_variables(os.environ)}
            rank = environ.get("RANK", environ.get(HOST_RANK_VARIABLE, "0"))
            if rank == "0" and read_run_config(environ) is not None:
                _buffer = MetricBuffer()
                threading.Thread(
                    target=_print_forever, args=(_buffer,), name="progress report", daemon=True
                ).start()
                atexit.register(_flush)
            _is_prepared = True
    return _buffer


def _flush() -> None:
    if _buffer is not None:
        _buffer.flush()


def _forget() -> None:
    global _buffer, _is_prepared
    _buffer, _is_prepared = None, True


# Forked children, such as data-loader workers, do not report for their parent.
os.register_at_fork(after_in_child=_forget)
