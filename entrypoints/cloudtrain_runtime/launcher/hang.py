"""Hang detection: the launcher monitors the ranks of its host, ends a hung run and keeps evidence.

Standard library only, like the launcher. Uploading needs boto3 and runs in a separate process:
`python -m cloudtrain_runtime.launcher.hang FOLDER URI` copies the files of a folder and prints the uri.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from cloudtrain_runtime.contract import FAILURE_CHARACTERS, MlTree
from cloudtrain_runtime.contract.durations import format_duration
from cloudtrain_runtime.contract.early_ends import describe_early_end
from cloudtrain_runtime.launcher.stacks import RankStack, find_outliers, main_stack
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.heartbeat import (
    DUMP_SIGNAL,
    Heartbeat,
    Phase,
    process_state,
    read_heartbeats,
    stacks_file,
)

_LONGEST_PERIOD_SECONDS = 1.0
_STACKS_SECONDS = 3.0
"""How long the launcher waits for the ranks' stacks, which take milliseconds to write."""

_TRACES_SECONDS = 8.0
"""How long the launcher waits for NCCL's flight recorder: torch polls its pipe once a second and writes a few
megabytes."""

_UPLOAD_SECONDS = 20.0
_PEERS_SECONDS = 10.0
"""How long one of several hosts waits before it ends its ranks: ranks on other hosts fail when their peers end."""

_YIELD_SECONDS = 3.0
"""How much longer a host waits whose ranks only wait for others, so that the host with the cause reports first."""

_TERM_SECONDS = 3.0
_LAST_SECONDS = 5.0
"""How long the launcher may take to exit after its ranks, before this thread ends it."""

_PIPE = "nccl-pipe-"
_TRACE = "nccl-trace-"
_EXIT_CODE = 1


def trace_variables(tree: MlTree) -> dict[str, str]:
    """Return the variables that set where NCCL's flight recorder writes, and the pipe that triggers it.

    Source: ProcessGroupNCCL.cpp of torch 2.5 to 2.13 (DumpPipe, DebugInfoWriter), which append the rank. The first name
    is that of torch 2.5; later versions read it, too. Written from the source; not yet tried on a GPU.
    """
    return {
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tree.heartbeats / _TRACE),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tree.heartbeats / _PIPE),
    }


class HangWatchdog:
    """Reads the heartbeats of a host's ranks, and ends the host's part of the run when one of them has stopped.

    Args:
        limit_seconds: How much longer than its slowest step so far a rank may take; None disables the watchdog.
        has_task: Whether the ranks train a Task, whose heartbeats also show whether each rank has ended its training.
        checkpoints: Uri of the run's checkpoints, next to which the evidence is uploaded, or an empty string.
        is_stopping: Returns whether the host has received a stop notice, after which it ends anyway.
    """

    def __init__(
        self,
        tree: MlTree,
        host: str,
        *,
        hosts: int,
        limit_seconds: float | None,
        has_task: bool,
        checkpoints: str,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._tree = tree
        self._host = host
        self._hosts = hosts
        self._limit = limit_seconds
        self._checkpoints = checkpoints
        self._is_stopping = is_stopping
        self._hung = threading.Event()
        self._is_done = threading.Event()
        self._failure = ""
        self._has_left = False
        self._last_resort = threading.Timer(_LAST_SECONDS, os._exit, [_EXIT_CODE])
        self._last_resort.daemon = True
        shutil.rmtree(tree.heartbeats, ignore_errors=True)
        if limit_seconds is not None or has_task:
            tree.heartbeats.mkdir(parents=True)

    def start(self, agent: int) -> None:
        """Start the watchdog thread."""
        if self._limit is None:
            return
        threading.Thread(
            target=self._run, args=(self._limit, agent), name="hang watch", daemon=True
        ).start()

    def end(self) -> int | None:
        """Wait until a hang has been handled; return its exit code, or None if there was no hang.

        Call it when the agent has ended.
        """
        if not self._hung.is_set():
            self._report_left(read_heartbeats(self._tree.heartbeats))
            return None
        self._is_done.wait()
        self._last_resort.cancel()
        # Processes that ended meanwhile may have written a failure, which is an effect and not the
        # cause.
        if self._failure:
            _write_failure(self._tree, self._failure)
        return _EXIT_CODE

    def keep_traces(self) -> None:
        """Keep the traces that NCCL's flight recorder wrote by itself after a collective timed out."""
        for path in self._tree.heartbeats.glob(f"{_TRACE}*"):
            _copy(path, self._tree.hang / path.name)

    def _run(self, limit: float, agent: int) -> None:
        period = min(_LONGEST_PERIOD_SECONDS, limit / 10)
        timer = StallTimer(2 * period)
        while True:
            time.sleep(period)
            heartbeats = read_heartbeats(self._tree.heartbeats)
            self._report_left(heartbeats)
            idle = timer.update(heartbeats)
            is_hung = any(_is_stalled(each, seconds, limit) for each, seconds in idle)
            if is_hung and not self._is_stopping():
                break
        # Other ranks stalled when they had to wait for the first one, possibly a moment later.
        stalled = [
            (each, seconds) for each, seconds in idle if _is_stalled(each, seconds, limit / 2)
        ]
        self._hung.set()
        alive = [each for each in heartbeats if each.is_alive]
        try:
            left = [each.rank for each in heartbeats if each.phase is Phase.LEFT]
            self._collect_evidence(alive, stalled, limit, left)
        finally:
            terminate_processes({agent, *(each.pid for each in alive), *descendants(os.getpid())})
            # The launcher waits for its agent, and an agent that is stuck in the kernel cannot be
            # killed.
            self._last_resort.start()
            self._is_done.set()

    def _report_left(self, heartbeats: Sequence[Heartbeat]) -> None:
        """Report once that all ranks of this host have ended: those of other hosts may wait for them."""
        has_left = bool(heartbeats) and all(each.phase is Phase.LEFT for each in heartbeats)
        if self._has_left or not has_left or self._hosts == 1:
            return
        self._has_left = True
        steps = [each.step for each in heartbeats]
        emit("left", host=self._host, ranks=[each.rank for each in heartbeats], step=min(steps))

    def _collect_evidence(
        self,
        heartbeats: Sequence[Heartbeat],
        stalled: Sequence[tuple[Heartbeat, float]],
        limit: float,
        left: Sequence[int],
    ) -> None:
        """Write the evidence, and give the other hosts time to write theirs."""
        noticed = time.monotonic()
        wait = min(_PEERS_SECONDS, limit)
        try:
            if self._report(heartbeats, stalled, left):
                wait += _YIELD_SECONDS
        except OSError as error:
            # A full disk must not keep a hung run alive.
            log_line(f"the evidence of the hang cannot be written: {error}")
        if self._hosts > 1:
            time.sleep(max(0.0, noticed + wait - time.monotonic()))

    def _report(
        self,
        heartbeats: Sequence[Heartbeat],
        stalled: Sequence[tuple[Heartbeat, float]],
        left: Sequence[int],
    ) -> bool:
        """Report where the ranks are; return whether they all only wait for ranks on other hosts.

        Args:
            heartbeats: Those of the ranks that run.
            stalled: Those of them that have not ticked for too long, with the seconds.
            left: Ranks of this host that have ended.
        """
        longest_seconds = max(seconds for _, seconds in stalled)
        stacks = self._collect_stacks(heartbeats, {each.local_rank for each, _ in stalled})
        outliers = find_outliers(stacks)
        is_waiting = not outliers and bool(stacks) and all(stack.is_waiting for stack in stacks)
        reported = outliers or stacks
        code = self._tree.code.resolve()
        step = min(each.step for each, _ in stalled)
        ranks = [stack.rank for stack in reported]
        where = _describe(reported, self._host, code) if reported else ""
        if is_waiting and left:
            # The ranks that run wait for those that have ended here, not for another host.
            where = f"{describe_early_end(left, self._host, None)}, and {where}"
            ranks = [*left]
            is_waiting = False
        position = f"; {where}" if where else f" on {self._host}"
        self._failure = (
            f"hang: no step for {format_duration(longest_seconds)} after step {step}{position}"
        )
        lines = [f"  rank {stack.rank} {stack.show(code)}" for stack in stacks]
        log_line("\n".join([self._failure, *lines]))
        (self._tree.hang / "summary.txt").write_text(self._failure + "\n", encoding="utf-8")
        _write_failure(self._tree, self._failure)
        emit(
            "failed",
            host=self._host,
            rank=ranks[0] if ranks else None,
            exit_code=_EXIT_CODE,
            message=self._failure,
            secondary=is_waiting,
        )
        stacks_uri = _upload(self._tree.hang, self._checkpoints, self._host)
        emit(
            "hang",
            host=self._host,
            step=step,
            seconds=longest_seconds,
            ranks=ranks,
            stacks=stacks_uri,
        )
        return is_waiting

    def _collect_stacks(
        self, heartbeats: Sequence[Heartbeat], stalled: set[int]
    ) -> list[RankStack]:
        folder = self._tree.heartbeats
        states = {each.pid: process_state(each.pid) for each in heartbeats}
        self._tree.hang.mkdir(parents=True, exist_ok=True)
        for each in heartbeats:
            with contextlib.suppress(OSError):
                os.truncate(stacks_file(folder, each.local_rank), 0)
            _signal(each.pid, DUMP_SIGNAL)
            # A stopped process writes its stacks only after it continues. It is terminated shortly
            # after.
            _signal(each.pid, signal.SIGCONT)
        _request_traces(folder)
        _wait(
            _STACKS_SECONDS,
            lambda: all(_is_complete(stacks_file(folder, each.local_rank)) for each in heartbeats),
        )
        stacks = []
        for each in heartbeats:
            text = _read(stacks_file(folder, each.local_rank))
            state = states[each.pid]
            letter = state.letter if state is not None else "?"
            frames = main_stack(text, each.main_thread)
            is_stalled = each.local_rank in stalled
            stacks.append(
                RankStack(
                    rank=each.rank,
                    step=each.step,
                    is_stalled=is_stalled,
                    frames=frames,
                    condition=_CONDITIONS.get(letter, ""),
                )
            )
            head = f"rank {each.rank} on {self._host}, process {each.pid}, state {letter}, step {each.step}\n"
            (self._tree.hang / f"rank-{each.rank}.txt").write_text(f"{head}\n{text}\n")
        pipes = len(list(folder.glob(f"{_PIPE}*")))
        seconds = _TRACES_SECONDS if pipes else 0.0
        _wait(seconds, lambda: len(list(folder.glob(f"{_TRACE}*"))) >= pipes)
        self.keep_traces()
        return stacks


class StallTimer:
    """Measures how long each rank has been without a tick while the launcher itself ran.

    A suspended machine or a frozen container stops the launcher, too, and is not a hang.

    Args:
        max_interval_seconds: Upper limit of the time that one update adds, however long ago the previous one was.
    """

    def __init__(self, max_interval_seconds: float) -> None:
        self._max_interval_seconds = max_interval_seconds
        self._updated_at = time.monotonic()
        self._seen: dict[int, tuple[int, int, float]] = {}

    def update(self, heartbeats: Iterable[Heartbeat]) -> list[tuple[Heartbeat, float]]:
        """Return each rank's heartbeat with the seconds since its last tick."""
        now = time.monotonic()
        passed = min(now - self._updated_at, self._max_interval_seconds)
        self._updated_at = now
        found = []
        for each in heartbeats:
            pid, last, idle = self._seen.get(each.local_rank, (0, 0, 0.0))
            has_ticked = (pid, last) != (each.pid, each.last_nanoseconds)
            idle = 0.0 if has_ticked else idle + passed
            self._seen[each.local_rank] = (each.pid, each.last_nanoseconds, idle)
            found.append((each, idle))
        return found


def _is_stalled(heartbeat: Heartbeat, idle_seconds: float, limit_seconds: float) -> bool:
    is_late = idle_seconds > limit_seconds + heartbeat.slowest_nanoseconds / 1e9
    # The agent handles a process that has ended: it restarts the ranks, or ends.
    return heartbeat.phase is Phase.RUNNING and is_late and heartbeat.is_alive


_CONDITIONS = {
    "T": "is stopped by a signal (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "is stuck in a call to a device or a file system",
}


def _describe(stacks: Sequence[RankStack], host: str, code: Path) -> str:
    first = stacks[0]
    if len(stacks) == 1:
        return f"rank {first.rank} on {host} {first.show(code)}"
    numbers = ", ".join(str(stack.rank) for stack in stacks)
    return f"ranks {numbers} on {host}: rank {first.rank} {first.show(code)}"


def _request_traces(folder: Path) -> None:
    for pipe in folder.glob(f"{_PIPE}*.pipe"):
        # Opening fails where no process reads the pipe.
        with contextlib.suppress(OSError):
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, b"dump\n")
            os.close(descriptor)


def _is_complete(path: Path) -> bool:
    """Return whether a dump is complete: the main thread, the oldest, is printed last."""
    text = _read(path)
    return bool(text) and text.endswith("\n") and "most recent call first" in text


def _wait(seconds: float, is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not is_over() and time.monotonic() < deadline:
        time.sleep(0.05)
    # Let a write in progress finish.
    time.sleep(0.1 if seconds else 0.0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _write_failure(tree: MlTree, text: str) -> None:
    with contextlib.suppress(OSError):
        tree.failure.write_text(text[:FAILURE_CHARACTERS], encoding="utf-8")


def _upload(folder: Path, checkpoints: str, host: str) -> str:
    """Copy a folder to a location next to the checkpoints; return that uri, or the folder if the copy fails."""
    if not checkpoints:
        return str(folder)
    uri = f"{checkpoints.rstrip('/')}/hang/{host}"
    command = [sys.executable, "-m", "cloudtrain_runtime.launcher.hang", str(folder), uri]
    copying = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        printed, _ = copying.communicate(timeout=_UPLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        copying.kill()
        printed = f"the upload took longer than {_UPLOAD_SECONDS:.0f} s"
    # The exit code is unreliable: the launcher, which reaps every child, may have collected it.
    lines = printed.strip().splitlines() or ["the upload ended without output"]
    last = lines[-1]
    if last == uri:
        return uri
    log_line(f"the evidence of the hang stays in {folder}: it cannot be copied to {uri}: {last}")
    return str(folder)


def main(argv: list[str]) -> int:
    """Copy the files of a folder to an S3 prefix or another folder."""
    from cloudtrain_runtime.contract.file_uri import path_of
    from cloudtrain_runtime.s3.objects import S3Objects

    source = Path(argv[0])
    uri = argv[1]
    objects = S3Objects(uri) if uri.startswith("s3://") else None
    for path in sorted(path for path in source.iterdir() if path.is_file()):
        if objects is None:
            _copy(path, path_of(uri) / path.name)
        else:
            objects.put(path.name, path.read_bytes())
    print(uri)
    return 0


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process that are listed in /proc."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        state = process_state(int(entry.name))
        if state is not None and state.letter != "Z":
            parents.setdefault(state.parent, []).append(int(entry.name))
    found = list(parents.get(pid, []))
    # The list grows during the loop.
    for child in found:
        found += parents.get(child, [])
    return found


def terminate_processes(pids: Collection[int]) -> None:
    """Send SIGTERM to processes, and after a while SIGKILL to those that remain and to their new descendants."""
    for pid in pids:
        _signal(pid, signal.SIGTERM)
    _wait(_TERM_SECONDS, lambda: not any(_is_running(pid) for pid in pids))
    for pid in {*pids, *descendants(os.getpid())}:
        _signal(pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    state = process_state(pid)
    return state is not None and state.letter not in "ZX"


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EPERM):
            raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
