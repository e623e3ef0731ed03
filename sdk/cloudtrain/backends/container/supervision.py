"""Supervision of a run: executes its job, records its states, and describes its end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain.aws.retry import Backoff
from cloudtrain.backends.container.artifacts import describe_unstored, link_model
from cloudtrain.backends.container.host_launcher import PASS_VARIABLE, LocalHosts
from cloudtrain.backends.container.job import MakeLauncher, Outcome, run_job
from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.machine import DISK_FULL
from cloudtrain.backends.container.state_file import RecordedState, write_state
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


class Recorder:
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
            print_line(f"the state {state.state} ({state.reason}) could not be recorded: {error}")
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


class Supervision:
    """Executes the job of a run's folder.

    Args:
        folder: The run's folder, with request.json and config/run.json.
        recorder: Records the states.
        record: The first state, which is recorded at once.
        supervisor: What supervises it, such as `local backend`, for the reason of a run that failed because of it.

    Attributes:
        has_failed: Whether cloudtrain itself failed.
    """

    def __init__(
        self, folder: JobFolder, recorder: Recorder, record: RecordedState, supervisor: str
    ) -> None:
        self.has_failed = False
        self._folder = folder
        self._recorder = recorder
        self._record = record
        self._supervisor = supervisor
        recorder.record(record)

    def run(
        self,
        stop_reason: Callable[[], str],
        *,
        make_launcher: MakeLauncher = LocalHosts,
        environ: Mapping[str, str] = os.environ,
        used_seconds: float = 0.0,
        stores: Callable[[State, str], bool] = lambda *_: True,
    ) -> RecordedState:
        """Execute the job, and return its final state, which is not recorded yet.

        Args:
            stop_reason: Returns why to stop the job, or an empty text; called many times per second.
            make_launcher: Returns what starts the containers.
            environ: Environment with the credentials and variables to pass on.
            used_seconds: Part of the job's time limit that former attempts have used.
            stores: Returns whether the results of a job with this final state and reason are stored.
        """
        root = self._folder.root
        try:
            request: dict[str, Any] = load_json((root / "request.json").read_text(encoding="utf-8"))
            outcome = run_job(
                request,
                self._folder,
                stop_reason=stop_reason,
                on_transition=self._on_transition,
                on_ended=self._on_ended,
                environ=_with_secrets(self._folder, environ),
                make_launcher=make_launcher,
                used_seconds=used_seconds,
                stores=stores,
            )
        except Exception as error:  # noqa: BLE001 (after any error, the run must not look alive)
            self.has_failed = True
            print_line(redact(traceback.format_exc()))
            outcome = Outcome(State.FAILED, self._describe_error(error), {})
        return self._final(outcome)

    def _on_transition(self, state: State, reason: str) -> None:
        started = datetime.now(UTC) if state is State.RUNNING else self._record.started
        self._record = self._record.but(state=state, reason=reason, started=started)
        self._recorder.record(self._record)

    def _on_ended(self, state: State, reason: str) -> None:
        self._record = self._record.but(ending=state, reason=redact(reason))
        self._recorder.record(self._record)

    def _final(self, outcome: Outcome) -> RecordedState:
        root = self._folder.root
        artifacts = dict(outcome.artifacts)
        try:
            artifacts = link_model(artifacts, root)
        except OSError as error:
            print_line(
                f"could not link the model, which is in {artifacts['model_folder']}: {error}"
            )
        reason = outcome.reason
        if outcome.state is State.FAILED:
            reason = "; ".join(filter(None, (reason, *outcome.problems)))
        return self._record.but(
            state=outcome.state,
            ending=None,
            reason=redact(reason),
            ended=datetime.now(UTC),
            artifacts=artifacts,
            unstored=redact(describe_unstored(outcome.state, outcome.problems, root.name)),
        )

    def _describe_error(self, error: Exception) -> str:
        """Return the reason of a run that failed because of its supervisor."""
        root = self._folder.root
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            place = error.filename or root
            return f"the disk is full ({place}): free some space, then continue with cloudtrain resume {root.name}"
        what = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        return f"cloudtrain's {self._supervisor} failed: {what}{error}; see supervisor.log"


def write_report(root: Path, backend: str) -> None:
    """Write report.html in another process, if the job or the settings ask for it. A failure is only printed."""
    plan = read_file(root / PLAN_FILE, PLAN)
    if not plan.get("job", {}).get("report") and os.environ.get(REPORT_VARIABLE) != "1":
        return
    options = [f"{backend}:{root.name}", "-o", str(root / "report.html")]
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
        print_line(f"the report was not written: {error}")


def print_line(text: str) -> None:
    """Print a line to the supervisor's log, if possible."""
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode("utf-8", "replace"))


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
