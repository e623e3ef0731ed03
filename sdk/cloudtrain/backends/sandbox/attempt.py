"""Process of one attempt of a training job: runs the job's request and ends every process that it started.

The sandbox starts `python -m cloudtrain.backends.sandbox.attempt FOLDER` with a pipe as standard input. When the
sandbox ends, even by SIGKILL, the pipe closes and the attempt ends. SIGTERM stops the job.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from cloudtrain.backends.container.job import Outcome, run_job
from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.process_tree import adopt_orphans, descendants, kill
from cloudtrain.runs.early_end import STOPPED_BY_REQUEST
from cloudtrain.runs.status import State
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

REQUEST_FILE = "request.json"
OUTCOME_FILE = "outcome.json"


def main(argv: list[str]) -> int:
    """Run the request in a folder and write its outcome to outcome.json."""
    folder = JobFolder(Path(argv[0]))
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    threading.Thread(target=_exit_with_sandbox, daemon=True).start()
    request: dict[str, Any] = load_json((folder.root / REQUEST_FILE).read_text(encoding="utf-8"))
    try:
        outcome = run_job(
            request, folder, stop_reason=lambda: STOPPED_BY_REQUEST if stopped.is_set() else ""
        )
    except Exception as error:  # noqa: BLE001 (every error must end the job)
        print(redact(traceback.format_exc()), flush=True)  # noqa: T201 (attempt.log)
        outcome = Outcome(State.FAILED, f"the sandbox failed: {error}", {})
    # A job whose results S3 does not get is not Completed. Its instance's folder keeps them.
    state = State.FAILED if outcome.problems else outcome.state
    content = {
        "state": state,
        "reason": "; ".join(filter(None, (outcome.reason, *outcome.problems))),
        "exit_codes": dict(outcome.exit_codes),
    }
    write_atomically(folder.root / OUTCOME_FILE, dump_json(content))
    return 0


def _exit_with_sandbox() -> None:
    # The read returns when the sandbox closes its end.
    os.read(0, 1)
    kill(descendants())
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
