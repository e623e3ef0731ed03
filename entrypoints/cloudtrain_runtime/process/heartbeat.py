"""Heartbeats: each rank writes a few numbers to a small file that its host's launcher reads.

A rank ticks at each step. The file is mapped into memory, so a tick is a few stores and no system call, and the
launcher can read it while the rank is stopped or holds the interpreter's lock. launcher/hang.py evaluates it.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cloudtrain_runtime.process.environment import ml_tree

DUMP_SIGNAL = signal.SIGUSR2
"""Signal that makes a rank write the stacks of all its threads to its stacks file."""

_FORM = struct.Struct("=9q")
_PULSE = "rank-"
_STACKS = ".stacks"
_START_FIELD = 21
"""Index of a process's start time in /proc/PID/stat. Source: proc(5); its field 22."""


class Phase(enum.IntEnum):
    """The phase of a rank, which decides whether the launcher monitors it."""

    STARTING = 0
    """No tick so far: the rank may be preparing data or compiling a model."""
    RUNNING = 1
    PAUSED = 2
    LEFT = 3
    """The rank has done its work."""
    FAILED = 4


# Indices of the numbers in the file, as `_FORM` unpacks them.
_PHASE, _STEP, _LAST, _SLOWEST, _LEFT = range(4, 9)


@dataclass(frozen=True)
class Heartbeat:
    """The content of a rank's heartbeat file."""

    # index among the ranks of this host
    local_rank: int
    # the rank's process
    pid: int
    # start time of the process in the kernel's ticks, which distinguishes it from a later process with the same number;
    # 0 if unknown
    born: int
    # index among all ranks
    rank: int
    # identifier of its main thread, as in faulthandler's output
    main_thread: int
    phase: Phase
    # the last step that the rank reported
    step: int
    # time of the last tick on the host's monotonic clock; it changes with each tick
    last_nanoseconds: int
    # longest time between two ticks
    slowest_nanoseconds: int
    # when the rank has left, on the same clock; 0 before
    left_nanoseconds: int = 0

    @property
    def is_alive(self) -> bool:
        """Whether the process exists and is not a zombie."""
        state = process_state(self.pid)
        return state is not None and state.letter not in "ZX" and self.born in (0, state.born)


def tick(step: int) -> None:
    """Report that this rank has reached a step. The first tick starts the monitoring.

    Outside of a run it does nothing.
    """
    if _own is not None:
        _own.tick(step)


def refresh() -> None:
    """Report that this rank is alive at the same step. Unlike `tick`, it does not start the monitoring."""
    if _own is not None and _own.is_watched:
        _own.tick(_own.step)


def arm(environ: Mapping[str, str]) -> None:
    """Let the launcher monitor this process, a rank, and request its stacks. Without its folder it does nothing."""
    global _own  # noqa: PLW0603 (one process has one heartbeat)
    folder = ml_tree(environ).heartbeats
    if folder.is_dir() and _own is None:
        _own = _HeartbeatFile(folder, int(environ["LOCAL_RANK"]), int(environ["RANK"]))


def pause() -> None:
    """Pause the monitoring of this rank until its next tick, before work of unlimited duration."""
    if _own is not None:
        _own.enter(Phase.PAUSED)


@contextlib.contextmanager
def exempt() -> Iterator[None]:
    """Return a context manager that pauses the monitoring of this rank for a block of unlimited duration."""
    own = _own
    if own is None or not own.is_watched:
        yield
        return
    own.enter(Phase.PAUSED)
    try:
        yield
    finally:
        own.tick(own.step)


def leave(*, has_failed: bool = False) -> None:
    """End the monitoring of this rank, which is about to exit."""
    if _own is not None:
        _own.enter(Phase.FAILED if has_failed else Phase.LEFT)
        _forget()


def _forget() -> None:
    global _own  # noqa: PLW0603 (one process has one heartbeat)
    _own = None


# Forked children, such as data-loader workers, do not share the heartbeat of their parent.
os.register_at_fork(after_in_child=_forget)


class _HeartbeatFile:
    __slots__ = ("_last", "_numbers", "_slowest", "_stacks")

    def __init__(self, folder: Path, local_rank: int, rank: int) -> None:
        self._last = self._slowest = 0
        pid = os.getpid()
        state = process_state(pid)
        main_thread = threading.main_thread().ident or 0
        content = _FORM.pack(pid, state.born if state else 0, rank, main_thread, *[0] * 5)
        # Opened for appending, so that the output of an earlier process of this rank stays.
        self._stacks: IO[bytes] = stacks_file(folder, local_rank).open("ab", buffering=0)
        faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True)
        path = folder / f"{_PULSE}{local_rank}"
        # A new file each time: an earlier process of this rank may still have the old one mapped.
        # Its bytes are written before they are mapped: a store to a hole in a file on a full disk
        # would kill this process.
        fresh = folder / f".{path.name}-{pid}"
        fresh.write_bytes(content)
        with fresh.open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), _FORM.size)).cast("q")
        fresh.replace(path)

    @property
    def is_watched(self) -> bool:
        return bool(self._last)

    @property
    def step(self) -> int:
        return self._numbers[_STEP]

    def tick(self, step: int) -> None:
        now = time.monotonic_ns()
        numbers = self._numbers
        if self._last and now - self._last > self._slowest:
            self._slowest = numbers[_SLOWEST] = now - self._last
        self._last = numbers[_LAST] = now
        numbers[_STEP] = step
        numbers[_PHASE] = 1

    def enter(self, phase: Phase) -> None:
        # With 0, the time until the next tick does not count as a step.
        self._last = 0
        if phase is Phase.LEFT:
            self._numbers[_LEFT] = time.monotonic_ns()
        self._numbers[_PHASE] = phase


_own: _HeartbeatFile | None = None


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Return the heartbeats of a host's ranks, in order of local rank."""
    found = [
        (int(path.name.removeprefix(_PULSE)), path)
        for path in folder.glob(f"{_PULSE}*")
        if not path.suffix
    ]
    pulses = [_read(local_rank, path) for local_rank, path in sorted(found)]
    return [pulse for pulse in pulses if pulse is not None]


def _read(local_rank: int, path: Path) -> Heartbeat | None:
    try:
        pid, born, rank, main_thread, *numbers = _FORM.unpack(path.read_bytes())
        phase, step, last, slowest, left = numbers
        return Heartbeat(
            local_rank=local_rank,
            pid=pid,
            born=born,
            rank=rank,
            main_thread=main_thread,
            phase=Phase(phase),
            step=step,
            last_nanoseconds=last,
            slowest_nanoseconds=slowest,
            left_nanoseconds=left,
        )
    except (OSError, ValueError, struct.error):
        return None


def stacks_file(folder: Path, local_rank: int) -> Path:
    """Return the file that a rank writes its stacks to."""
    return folder / f"{_PULSE}{local_rank}{_STACKS}"


@dataclass(frozen=True)
class ProcessState:
    """State of a process in the kernel: R running, S sleeping, D in an uninterruptible call, T stopped, Z zombie."""

    # the state; `?` if unknown
    letter: str
    # process id of its parent; 0 if unknown
    parent: int = 0
    # start time in the kernel's ticks; 0 if unknown
    born: int = 0


def process_state(pid: int) -> ProcessState | None:
    """Return the state of a process, or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _probe(pid)
    # The program's name is in brackets and may contain any character, even brackets.
    fields = ["", "", *text[text.rindex(")") + 1 :].split()]
    return ProcessState(fields[2], int(fields[3]), int(fields[_START_FIELD]))


def _probe(pid: int) -> ProcessState | None:
    """Return whether a process exists, on systems without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ProcessState("?")
