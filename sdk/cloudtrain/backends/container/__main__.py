"""Supervisor of a local run: runs one job, and continues when the terminal is closed.

The local backend starts `python -m cloudtrain.backends.container RUN_FOLDER` with its output in `supervisor.log`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain.aws.retry import Backoff
from cloudtrain.backends.container.artifacts import describe_unstored, link_model
from cloudtrain.backends.container.job import PASS_VARIABLE, JobFolder, Outcome, run_job
from cloudtrain.backends.container.machine import DISK_FULL
from cloudtrain.backends.container.process_tree import adopt_orphans
from cloudtrain.backends.container.state_file import LOCK_FILE, RecordedState, write_state
from cloudtrain.planning.plan_file import PLAN_FILE
from cloudtrain.runs.run_files import PLAN, read_file
from cloudtrain.runs.status import State
from cloudtrain.settings.settings import REPORT_VARIABLE
from cloudtrain_runtime.contract import CONFIG_FILE, RunConfig
from cloudtrain_runtime.contract.bucket_owner import OWNERS_VARIABLE
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

_REPORT_SECONDS = 300.0
_RESERVE_FILE = ".reserve"
_RESERVE_BYTES = 1 << 16
_LAST_SECONDS = 30.0
_FIRST_RETRY_SECONDS = 0.1
_LONGEST_RETRY_SECONDS = 0.5


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
    recorder = _Recorder(folder.root)
    record = RecordedState(state=State.STARTING, supervisor=os.getpid())
    recorder.record(record)

    def on_transition(state: State, reason: str) -> None:
        nonlocal record
        started = datetime.now(UTC) if state is State.RUNNING else record.started
        record = record.but(state=state, reason=reason, started=started)
        recorder.record(record)

    def on_ended(state: State, reason: str) -> None:
        nonlocal record
        record = record.but(ending=state, reason=redact(reason))
        recorder.record(record)

    has_failed = False
    try:
        request: dict[str, Any] = load_json(
            (folder.root / "request.json").read_text(encoding="utf-8")
        )
        outcome = run_job(
            request,
            folder,
            is_stopped=stopped.is_set,
            on_transition=on_transition,
            on_ended=on_ended,
            environ=_with_secrets(folder, os.environ),
        )
    except Exception as error:  # noqa: BLE001 (after any error, the run must not look alive)
        has_failed = True
        _print_line(redact(traceback.format_exc()))
        outcome = Outcome(State.FAILED, _describe_error(error, folder.root), {})
    artifacts = dict(outcome.artifacts)
    try:
        artifacts = link_model(artifacts, folder.root)
    except OSError as error:
        _print_line(f"could not link the model, which is in {artifacts['model_folder']}: {error}")
    reason = outcome.reason
    if outcome.state is State.FAILED:
        reason = "; ".join(filter(None, (reason, *outcome.problems)))
    recorder.record_last(
        record.but(
            state=outcome.state,
            ending=None,
            reason=redact(reason),
            ended=datetime.now(UTC),
            artifacts=artifacts,
            unstored=redact(describe_unstored(outcome.state, outcome.problems, folder.root.name)),
        )
    )
    _write_report(folder.root)
    return int(has_failed)


def _write_report(root: Path) -> None:
    """Write report.html in another process, if the job or the settings ask for it. A failure is only printed."""
    plan = read_file(root / PLAN_FILE, PLAN)
    if not plan.get("job", {}).get("report") and os.environ.get(REPORT_VARIABLE) != "1":
        return
    options = [f"local:{root.name}", "-o", str(root / "report.html")]
    command = [sys.executable, "-P", "-m", "cloudtrain", "report", *options]
    try:
        home = str(root.parent.parent)
        subprocess.run(
            command,
            env={**os.environ, "CLOUDTRAIN_HOME": home},
            timeout=_REPORT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        _print_line(f"the report was not written: {error}")


class _Recorder:
    """Writes a run's state to state.json, also on a full disk.

    A file of 64 KiB reserves space for the last state. It is deleted before that state is written.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._reserve = root / _RESERVE_FILE
        with contextlib.suppress(OSError):
            self._reserve.write_bytes(bytes(_RESERVE_BYTES))

    def record(self, state: RecordedState) -> bool:
        """Write a state. After a failure, return False: the run continues, and the next state is written instead."""
        try:
            write_state(self._root, state)
        except OSError as error:
            _print_line(f"the state {state.state} ({state.reason}) could not be recorded: {error}")
            return False
        return True

    def record_last(self, state: RecordedState) -> None:
        """Write the final state; retry failures for up to 30 s."""
        with contextlib.suppress(OSError):
            self._reserve.unlink()
        backoff = Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS)
        deadline = time.monotonic() + _LAST_SECONDS
        while not self.record(state) and time.monotonic() < deadline:
            time.sleep(backoff.next_seconds())


def _print_line(text: str) -> None:
    """Print a line to supervisor.log, if possible."""
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode("utf-8", "replace"))


def _describe_error(error: Exception, root: Path) -> str:
    """Return the reason of a run that failed because of the local backend itself."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        place = error.filename or root
        return f"the disk is full ({place}): free some space, then continue with cloudtrain resume {root.name}"
    what = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
    return f"cloudtrain's local backend failed: {what}{error}; see supervisor.log"


def _with_secrets(folder: JobFolder, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the names of the job's secrets to pass on and the owners of the buckets.

    A secret that is set in the environment is not read from Secrets Manager.
    """
    config = RunConfig.from_json((folder.root / "config" / CONFIG_FILE).read_text(encoding="utf-8"))
    names = [name for name in (environ.get(PASS_VARIABLE, ""), *config.secrets) if name]
    return {
        **environ,
        PASS_VARIABLE: ",".join(names),
        OWNERS_VARIABLE: dump_json(config.bucket_owners),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
