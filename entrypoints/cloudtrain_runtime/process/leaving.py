"""The end of a rank that has done its work: what it still waits for is named, and ended after a limit.

An interpreter waits for every thread that is no daemon and for child processes, without a limit. A client of a tracker
that is left open would so hold a finished training, and a paid cluster, until limits.runtime.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

from cloudtrain_runtime.process.event_log import emit, log_line


def limit_leaving(seconds: float, exit_code: int) -> None:
    """End this process after some seconds, unless it ends before.

    Args:
        seconds: How long threads and children may hold it.
        exit_code: Exit code of its work, which stays that of the process.
    """
    watcher = threading.Thread(target=_end_after, args=(seconds, exit_code), daemon=True)
    watcher.start()


def _end_after(seconds: float, exit_code: int) -> None:
    time.sleep(seconds)
    held_by = [*_threads(), *_children()]
    rank = os.environ.get("RANK", "0")
    emit("leaving", rank=int(rank), seconds=seconds, held_by=held_by)
    log_line(
        f"rank {rank} has done its work and did not end for {seconds:.0f} s, because it waited for "
        f"{', '.join(held_by) or 'its exit handlers'}. It is ended now, with exit code {exit_code}"
    )
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _threads() -> list[str]:
    """Return the threads that the interpreter waits for, each with the line at which it is."""
    frames = sys._current_frames()  # noqa: SLF001 (documented; the name has a historical underscore)
    found = []
    for thread in threading.enumerate():
        if thread.daemon or thread is threading.main_thread():
            continue
        frame = frames.get(thread.ident or 0)
        place = ""
        if frame is not None:
            place = f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        found.append(f"the thread {thread.name!r}{place}")
    return found


def _children() -> list[str]:
    """Return the child processes that multiprocessing waits for."""
    return [
        f"the process {child.name!r} ({child.pid})" for child in multiprocessing.active_children()
    ]
