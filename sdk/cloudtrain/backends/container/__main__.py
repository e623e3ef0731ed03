"""Supervisor of a local run: runs one job, and continues when the terminal is closed.

The local backend starts `python -m cloudtrain.backends.container RUN_FOLDER` with its output in `supervisor.log`.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from pathlib import Path

from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.process_tree import adopt_orphans
from cloudtrain.backends.container.state_file import LOCK_FILE, RecordedState
from cloudtrain.backends.container.supervision import Recorder, Supervision, write_report
from cloudtrain.runs.early_end import STOPPED_BY_REQUEST
from cloudtrain.runs.status import State
from cloudtrain.support.backend_facts import MACHINE_BACKEND


def main(argv: list[str]) -> int:
    """Run the job of the request.json in a folder; return 1 if cloudtrain itself failed, else 0."""
    folder = JobFolder(Path(argv[0]))
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Held until this process ends. If another process can take the lock, the run has no supervisor.
    lock = (folder.root / LOCK_FILE).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # `stop` reads it if state.json is damaged.
    lock.write(str(os.getpid()))
    lock.flush()
    adopt_orphans()
    recorder = Recorder(folder.root)
    starting = RecordedState(state=State.STARTING, supervisor=os.getpid())
    supervision = Supervision(folder, recorder, starting, "local backend")
    recorder.record_last(supervision.run(lambda: STOPPED_BY_REQUEST if stopped.is_set() else ""))
    write_report(folder.root, MACHINE_BACKEND)
    return int(supervision.has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
