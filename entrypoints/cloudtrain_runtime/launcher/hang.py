"""A hang ends the run and leaves evidence: the launcher's watch over the ranks of its host.

Standard library only, like the launcher. What needs more (uploading) runs in a process of its own:
`python -m cloudtrain_runtime.launcher.hang FOLDER URI` copies a folder's files there and prints nothing but the uri.
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
from dataclasses import dataclass
from pathlib import Path

from cloudtrain_runtime.contract import FAILURE_CHARACTERS, MlTree
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
"""How long ranks may take to write their stacks; they need milliseconds."""

_TRACES_SECONDS = 8.0
"""How long NCCL's flight recorder may take: torch looks at its pipe once a second and writes a few megabytes."""

_UPLOAD_SECONDS = 20.0
_OTHERS_SECONDS = 10.0
"""How long a host of several waits before it ends its ranks: theirs fail when their peers have gone."""

_YIELD_SECONDS = 3.0
"""How much longer a host waits whose ranks only wait for others: the cause should be told first."""

_TERM_SECONDS = 3.0
_LAST_SECONDS = 5.0
"""How long the launcher may take to end after its ranks, before this thread ends it."""

_PIPE = "nccl-pipe-"
_TRACE = "nccl-trace-"
_MINUTE = 60
_EXIT_CODE = 1


def trace_variables(tree: MlTree) -> dict[str, str]:
    """Return where NCCL's flight recorder writes, and the pipe that has it write.

    Source: ProcessGroupNCCL.cpp of torch 2.5 to 2.13 (DumpPipe, DebugInfoWriter); each adds the rank. The name of the
    former is that of torch 2.5, which later ones read as well. Built from it and not seen on a GPU so far.
    """
    return {
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tree.watch / _TRACE),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tree.watch / _PIPE),
    }


@dataclass(frozen=True)
class StalledRank:
    """A rank that had no step for too long."""

    pulse: Heartbeat
    seconds: float


class HangWatchdog:
    """Looks at the pulses of a host's ranks, and ends the host when one of them has stopped.

    Args:
        tree: The host's /opt/ml.
        host: Its name.
        hosts: How many hosts the run has.
        limit_seconds: How long a rank may go without a step beyond its slowest one so far; None watches nothing.
        checkpoints: Uri of the run's checkpoints, beside which the evidence is kept, or an empty string.
        is_stopping: Whether the host has been told to stop: then it ends anyway.
    """

    def __init__(
        self,
        tree: MlTree,
        host: str,
        *,
        hosts: int,
        limit_seconds: float | None,
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
        shutil.rmtree(tree.watch, ignore_errors=True)
        if limit_seconds is not None:
            tree.watch.mkdir(parents=True)

    def start(self, agent: int) -> None:
        """Begin, in a thread of its own.

        Args:
            agent: The process that starts the ranks.
        """
        if self._limit is not None:
            threading.Thread(target=self._run, args=(self._limit, agent), name="hang watch", daemon=True).start()

    def end(self) -> int | None:
        """Wait for the end of a hang; return the exit code that it has, or None when there was none.

        To be called when the agent has ended.
        """
        if not self._hung.is_set():
            return None
        self._is_done.wait()
        # Whoever ended meanwhile has written what it saw of the end, which is not the cause.
        if self._failure:
            _write_failure(self._tree, self._failure)
        return _EXIT_CODE

    def keep_traces(self) -> None:
        """Keep what NCCL's flight recorder has written by itself, after a collective that timed out."""
        for path in self._tree.watch.glob(f"{_TRACE}*"):
            _copy(path, self._tree.hang / path.name)

    # ------------------------------------------------------------ noticing

    def _run(self, limit: float, agent: int) -> None:
        period = min(_LONGEST_PERIOD_SECONDS, limit / 10)
        clock = StallTimer(2 * period)
        while True:
            time.sleep(period)
            pulses = read_heartbeats(self._tree.watch)
            looked = clock.look(pulses)
            if any(_is_silent(pulse, still, limit) for pulse, still in looked) and not self._is_stopping():
                break
        # The others stopped when they had to wait for the first, which may be a moment later.
        silent = [StalledRank(pulse, still) for pulse, still in looked if _is_silent(pulse, still, limit / 2)]
        self._hung.set()
        ranks = [pulse for pulse in pulses if pulse.is_alive]
        try:
            self._tell(ranks, silent, limit)
        finally:
            terminate_processes({agent, *(pulse.pid for pulse in ranks), *descendants(os.getpid())})
            self._is_done.set()
            # The launcher waits for its agent, and an agent stuck in the kernel cannot even be killed.
            last = threading.Timer(_LAST_SECONDS, os._exit, [_EXIT_CODE])
            last.daemon = True
            last.start()

    # ------------------------------------------------------------ evidence

    def _tell(self, pulses: Sequence[Heartbeat], silent: Sequence[StalledRank], limit: float) -> None:
        """Leave the evidence, and the other hosts the time to leave theirs."""
        noticed, wait = time.monotonic(), min(_OTHERS_SECONDS, limit)
        try:
            if self._report(pulses, silent):
                wait += _YIELD_SECONDS
        except OSError as error:  # a full disk must not keep a dead run alive
            log_line(f"what is known of the hang cannot be written: {error}")
        if self._hosts > 1:
            time.sleep(max(0.0, noticed + wait - time.monotonic()))

    def _report(self, pulses: Sequence[Heartbeat], silent: Sequence[StalledRank]) -> bool:
        """Write down and tell where the ranks stand; return whether they only wait for those of other hosts."""
        longest = max(silent, key=lambda silence: silence.seconds)
        stands = self._stands(pulses, {silence.pulse.local_rank for silence in silent})
        odd = find_outliers(stands)
        is_waiting = not odd and bool(stands) and all(stand.is_waiting for stand in stands)
        told = odd or stands
        code = self._tree.code.resolve()
        step = min(silence.pulse.step for silence in silent)
        start = f"hang: no step for {format_duration(longest.seconds)} after step {step}"
        self._failure = f"{start}; {_place(told, self._host, code)}" if told else f"{start} on {self._host}"
        log_line("\n".join([self._failure, *(f"  rank {stand.rank} {stand.show(code)}" for stand in stands)]))
        (self._tree.hang / "summary.txt").write_text(self._failure + "\n", encoding="utf-8")
        _write_failure(self._tree, self._failure)
        ranks = [stand.rank for stand in told]
        emit(
            "failed",
            host=self._host,
            rank=ranks[0] if ranks else None,
            exit_code=_EXIT_CODE,
            message=self._failure,
            secondary=is_waiting,
        )
        kept = _upload(self._tree.hang, self._checkpoints, self._host)
        emit("hang", host=self._host, step=step, seconds=longest.seconds, ranks=ranks, stacks=kept)
        return is_waiting

    def _stands(self, pulses: Sequence[Heartbeat], silent: set[int]) -> list[RankStack]:
        """Have the ranks write their stacks; return where they stand."""
        folder = self._tree.watch
        states = {pulse.pid: process_state(pulse.pid) for pulse in pulses}
        self._tree.hang.mkdir(parents=True, exist_ok=True)
        _ask_for_stacks(folder, pulses)
        _ask_for_traces(folder)
        _wait(_STACKS_SECONDS, lambda: all(_is_written(stacks_file(folder, pulse.local_rank)) for pulse in pulses))
        stands = []
        for pulse in pulses:
            text = _read(stacks_file(folder, pulse.local_rank))
            state = states[pulse.pid]
            letter = state.letter if state is not None else "?"
            frames = main_stack(text, pulse.main_thread)
            is_silent = pulse.local_rank in silent
            stands.append(RankStack(pulse.rank, pulse.step, is_silent, frames, _TROUBLES.get(letter, "")))
            head = f"rank {pulse.rank} on {self._host}, process {pulse.pid}, state {letter}, step {pulse.step}\n"
            (self._tree.hang / f"rank-{pulse.rank}.txt").write_text(head + _kernel_place(pulse.pid) + text + "\n")
        pipes = len(list(folder.glob(f"{_PIPE}*")))
        _wait(_TRACES_SECONDS if pipes else 0.0, lambda: len(list(folder.glob(f"{_TRACE}*"))) >= pipes)
        self.keep_traces()
        return stands


class StallTimer:
    """How long each rank has been without a tick while the launcher itself ran.

    A machine that sleeps and a container that is frozen stop both, and are no hang.

    Args:
        longest_seconds: What one look counts at most, however long ago the last one was.
    """

    def __init__(self, longest_seconds: float) -> None:
        self._longest = longest_seconds
        self._looked = time.monotonic()
        self._seen: dict[int, tuple[int, int, float]] = {}

    def look(self, pulses: Iterable[Heartbeat]) -> list[tuple[Heartbeat, float]]:
        """Return each rank with the seconds that it has stood still."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, self._longest), now
        found = []
        for pulse in pulses:
            pid, last, still = self._seen.get(pulse.local_rank, (0, 0, 0.0))
            still = still + passed if (pid, last) == (pulse.pid, pulse.last_nanoseconds) else 0.0
            self._seen[pulse.local_rank] = (pulse.pid, pulse.last_nanoseconds, still)
            found.append((pulse, still))
        return found


def format_duration(seconds: float) -> str:
    """Return `12 min`, or `40 s` when it is less than two minutes."""
    return f"{seconds:.0f} s" if seconds < 2 * _MINUTE else f"{seconds / _MINUTE:.0f} min"


def _is_silent(pulse: Heartbeat, still_seconds: float, limit_seconds: float) -> bool:
    is_late = still_seconds > limit_seconds + pulse.slowest_nanoseconds / 1e9
    # A process that has gone is the agent's business: it starts the ranks again, or ends.
    return pulse.phase is Phase.RUNNING and is_late and pulse.is_alive


_TROUBLES = {
    "T": "is stopped by a signal (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "is stuck in a call to a device or a file system",
}


def _place(stands: Sequence[RankStack], host: str, code: Path) -> str:
    first = stands[0]
    if len(stands) == 1:
        return f"rank {first.rank} on {host} {first.show(code)}"
    numbers = ", ".join(str(stand.rank) for stand in stands)
    return f"ranks {numbers} on {host}: rank {first.rank} {first.show(code)}"


def _ask_for_stacks(folder: Path, pulses: Iterable[Heartbeat]) -> None:
    for pulse in pulses:
        _empty(stacks_file(folder, pulse.local_rank))
        _signal(pulse.pid, DUMP_SIGNAL)
        # One that is stopped writes its stacks when it goes on; it is ended in a moment.
        _signal(pulse.pid, signal.SIGCONT)


def _ask_for_traces(folder: Path) -> None:
    for pipe in folder.glob(f"{_PIPE}*.pipe"):
        with contextlib.suppress(OSError):  # nobody reads it
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, b"dump\n")
            os.close(descriptor)


def _empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.truncate(path, 0)


def _is_written(path: Path) -> bool:
    """Whether a dump is whole: the main thread, the oldest, comes last."""
    text = _read(path)
    return bool(text) and text.endswith("\n") and "most recent call first" in text


def _wait(seconds: float, is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not is_over() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.1 if seconds else 0.0)  # what has begun is written to its end


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _kernel_place(pid: int) -> str:
    """Return where the kernel has put a process to sleep, where it tells."""
    place = _read(Path(f"/proc/{pid}/wchan")).strip()
    return f"kernel: {place}\n\n" if place not in ("", "0") else "\n"


def _write_failure(tree: MlTree, text: str) -> None:
    with contextlib.suppress(OSError):
        tree.failure.write_text(text[:FAILURE_CHARACTERS], encoding="utf-8")


# ---------------------------------------------------------------- keeping


def _upload(folder: Path, checkpoints: str, host: str) -> str:
    """Copy a folder beside the checkpoints; return where it lies, which is where it was when that cannot be done."""
    if not checkpoints:
        return str(folder)
    uri = f"{checkpoints.rstrip('/')}/hang/{host}"
    command = [sys.executable, "-m", "cloudtrain_runtime.launcher.hang", str(folder), uri]
    copying = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        printed, _ = copying.communicate(timeout=_UPLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        copying.kill()
        printed = f"it took longer than {_UPLOAD_SECONDS:.0f} s"
    # Its exit code may have gone to the launcher, which reaps every child.
    last = (printed.strip().splitlines() or ["it ended without a word"])[-1]
    if last == uri:
        return uri
    log_line(f"what is known of the hang stays in {folder}: it cannot be copied to {uri}: {last}")
    return str(folder)


def main(argv: list[str]) -> int:
    """Copy the files of a folder to an S3 prefix or another folder."""
    from cloudtrain_runtime.checkpoint.storage import path_of
    from cloudtrain_runtime.s3.objects import s3_client

    source, uri = Path(argv[0]), argv[1]
    files = sorted(path for path in source.iterdir() if path.is_file())
    if uri.startswith("s3://"):
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        client = s3_client()
        for path in files:
            client.put_object(Bucket=bucket, Key=f"{prefix}/{path.name}", Body=path.read_bytes())
    else:
        for path in files:
            _copy(path, path_of(uri) / path.name)
    print(uri)
    return 0


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


# ---------------------------------------------------------------- ending


def descendants(pid: int) -> list[int]:
    """Return all processes below one, as far as /proc tells."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        state = process_state(int(entry.name))
        if state is not None and state.letter != "Z":
            parents.setdefault(state.parent, []).append(int(entry.name))
    found = list(parents.get(pid, []))
    for child in found:  # grows while it is read
        found += parents.get(child, [])
    return found


def terminate_processes(pids: Collection[int]) -> None:
    """SIGTERM processes, and after a while SIGKILL those that are left and what they have started since."""
    for pid in pids:
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + _TERM_SECONDS
    while time.monotonic() < deadline and any(_is_there(pid) for pid in pids):
        time.sleep(0.05)
    for pid in {*pids, *descendants(os.getpid())}:
        _signal(pid, signal.SIGKILL)


def _is_there(pid: int) -> bool:
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
