"""Supervisor of a local run: runs one job, and continues when the terminal is closed.

The local backend starts `python -m cloudtrain.backends.container RUN_FOLDER` with its output in `supervisor.log`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from cloudtrain.backends.container.job import (
    PASS_VARIABLE,
    JobFolder,
    Outcome,
    Transition,
    run_job,
)
from cloudtrain.backends.container.machine import visible_gpus
from cloudtrain.backends.container.process_tree import adopt_orphans
from cloudtrain.backends.container.state_file import LOCK_FILE, RecordedState
from cloudtrain.backends.container.state_recorder import Recorder, describe_error, print_line
from cloudtrain.runs.status import State
from cloudtrain_runtime.contract import CONFIG_FILE, GRACE_VARIABLE, STOP_GRACE_SECONDS, RunConfig
from cloudtrain_runtime.contract.bucket_owner import OWNERS_VARIABLE
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.contract.strict_json import dump_json


def main(argv: list[str]) -> int:
    """Run the job of the request.json in a folder; return 1 if cloudtrain itself failed, else 0."""
    folder = JobFolder(Path(argv[0]))
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (the handler's signature)
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Held until this process ends. If another process can take the lock, the run has no supervisor.
    lock = (folder.root / LOCK_FILE).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.write(str(os.getpid()))  # `stop` reads it if state.json is damaged
    lock.flush()
    adopt_orphans()
    recorder = Recorder(folder.root)
    record = RecordedState(state=State.STARTING, supervisor=os.getpid())
    recorder.record(record)

    def on_transition(transition: Transition) -> None:
        nonlocal record
        started = datetime.now(UTC) if transition.state is State.RUNNING else record.started
        record = record.but(state=transition.state, reason=transition.reason, started=started)
        recorder.record(record)

    has_failed = False
    try:
        request: dict[str, Any] = json.loads((folder.root / "request.json").read_text(encoding="utf-8"))
        outcome = run_job(
            request,
            folder,
            gpus=visible_gpus(),
            stop_grace_seconds=float(os.environ.get(GRACE_VARIABLE, STOP_GRACE_SECONDS)),
            is_stopped=lambda: stopped,
            on_transition=on_transition,
            environ=with_secrets(folder, os.environ),
        )
    except Exception as error:  # noqa: BLE001 (after any error, the run must not look alive)
        has_failed = True
        print_line(redact(traceback.format_exc()))
        outcome = Outcome(State.FAILED, describe_error(error, folder.root), {})
    artifacts = dict(outcome.artifacts)
    model = artifacts.pop("model_folder", None)
    if model is not None:
        # Hard links give the unpacked model beside the archive without a second copy.
        try:
            shutil.copytree(model, folder.root / "model", copy_function=os.link, symlinks=True, dirs_exist_ok=True)
            artifacts["model_folder"] = str(folder.root / "model")
        except OSError as error:
            artifacts["model_folder"] = model
            print_line(f"could not link the model, which is in {model}: {error}")
    recorder.record_last(
        record.but(state=outcome.state, reason=redact(outcome.reason), ended=datetime.now(UTC), artifacts=artifacts)
    )
    return int(has_failed)


def with_secrets(folder: JobFolder, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the names of the job's secrets to pass on and the owners of the buckets.

    A secret that is set in the environment is not read from Secrets Manager.
    """
    config = RunConfig.from_json((folder.root / "config" / CONFIG_FILE).read_text(encoding="utf-8"))
    names = [name for name in (environ.get(PASS_VARIABLE, ""), *config.secrets) if name]
    return {**environ, PASS_VARIABLE: ",".join(names), OWNERS_VARIABLE: dump_json(config.bucket_owners)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
