"""Weights & Biases: configuration, metrics and checkpoints of a run, with the measurements of its host."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.metrics.tracking.offline_files import OfflineFiles
from cloudtrain_runtime.metrics.tracking.tracker import (
    Connection,
    Ending,
    Value,
    describe_error,
    read_plan,
    require_package,
)
from cloudtrain_runtime.process.event_log import emit

_QUIET = {
    # The run's log is cloudtrain's, and its code is in the plan.
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_INIT_TIMEOUT": "60",
    "WANDB_RESUME": "allow",
    # It would put the account's request into the configuration, also where a local run only resembles SageMaker.
    "WANDB_SAGEMAKER_DISABLE": "true",
    "WANDB_SILENT": "true",
}
"""Variables of the package's process, where the job has no value of its own."""

_EXIT_CODES = {Ending.FINISHED: 0, Ending.STOPPED: 255, Ending.FAILED: 1}
"""Exit code by which the service shows the state: 255 is that of a run that was interrupted."""

_SAVE_SECONDS = 60.0
_MOST_PENDING = 20_000
"""Values in the state of offline files, about 2 MB, which each checkpoint writes. Then they become a segment."""


class WandbTracker:
    """Logs a run to Weights & Biases.

    A step of training is a step of the service. Its steps only rise: a value of an earlier step, such as that of a test
    with the best weights, is in the present row, and beside it its own step, as `test/step`.

    Args:
        config: The run's configuration, with `tracking.wandb`.
        folder: Folder for the package's own files on this host.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._id = os.environ.get("WANDB_RUN_ID", config.run)
        self._run: Any = None
        self._row = 0
        self._checkpoint = ""
        self._saved = time.monotonic()
        self._files: OfflineFiles | None = None
        if self._mode() == "offline" and config.tracking is not None:
            self._files = OfflineFiles(config.tracking.files, self._id)

    @property
    def name(self) -> str:
        """The service's name."""
        return "wandb"

    @property
    def place(self) -> str:
        """The service in words."""
        if self._files is not None:
            return f"Weights & Biases (offline files in {self._files.folder})"
        return f"Weights & Biases at {os.environ.get('WANDB_BASE_URL', 'https://api.wandb.ai')}"

    def require_packages(self) -> None:
        """Raise a JobError if this environment lacks the package."""
        require_package("wandb", "wandb", "tracking.wandb")

    def connect(self, started: Mapping[str, Any]) -> Connection:  # noqa: ARG002 (the id is planned)
        """Create the run, or continue it: one id is that of all runs of a training."""
        for name, value in {**_QUIET, "WANDB_MODE": self._mode()}.items():
            os.environ.setdefault(name, value)
        if self._files is None:
            self._open()
            last = self._row - 1
            # The service says which metrics it has, and one last step of all of them.
            names = self._run.summary.keys() if last >= 0 else ()
            logged = {str(name): last for name in names if not str(name).startswith("_")}
            return Connection(logged, {"wandb_run": self._id, "url": self._run.url or ""})
        logged = self._files.load()
        self._open()
        return Connection(logged, {"wandb_run": self._id, "files": self._files.folder})

    def log(self, values: Sequence[Value]) -> int:
        """Log values in rows, one for each step."""
        if self._run is None:
            # The package's own process has ended. What is not in a complete file is written again.
            self._open()
        try:
            self._write(values)
        except Exception:
            self._abandon()
            raise
        if self._files is not None:
            self._files.add(values)
            # A script may report no checkpoint.
            if time.monotonic() - self._saved >= _SAVE_SECONDS:
                self._save_files()
        return 0

    def save(self, checkpoint: str) -> None:
        """Log the newest checkpoint, and keep what has been logged until then."""
        self._checkpoint = checkpoint
        if self._run is not None:
            self._run.config.update({"cloudtrain": self._facts()}, allow_val_change=True)
        self._save_files()

    def end(self, ending: Ending) -> None:
        """Log the end of the run."""
        try:
            self._finish(_EXIT_CODES[ending])
        except Exception:  # noqa: BLE001 (of the package's process, whose end has no type of its own)
            self._abandon()
            self._finish(_EXIT_CODES[ending])

    def _save_files(self) -> None:
        if self._files is None:
            return
        self._saved = time.monotonic()
        self._files.save()
        if len(self._files.pending) >= _MOST_PENDING:
            self._finish(0)

    def _mode(self) -> str:
        planned = self._config.tracking.wandb if self._config.tracking is not None else ""
        return os.environ.get("WANDB_MODE", planned)

    def _open(self) -> None:
        """Start the package's process and a run, and log what describes the run."""
        import wandb

        config = self._config
        train = dataclasses.asdict(config.train) if config.train is not None else {}
        described = {
            "args": _redacted(config.args),
            "train": _redacted(train),
            "cloudtrain": self._facts(),
        }
        run = wandb.init(
            id=self._id,
            name=os.environ.get("WANDB_NAME", self._id),
            project=os.environ.get("WANDB_PROJECT"),
            entity=os.environ.get("WANDB_ENTITY"),
            dir=str(self._folder),
            config=described,
            allow_val_change=True,
        )
        self._run = run
        if self._files is None:
            self._row = run.starting_step
            return
        self._row = self._files.row + 1
        self._write(self._files.pending)

    def _write(self, values: Sequence[Value]) -> None:
        rows: dict[int, dict[str, float]] = {}
        row = self._row
        for each in values:
            row = max(row, each.step)
            columns = rows.setdefault(row, {"_timestamp": each.time})
            columns[each.name] = each.value
            if each.step < row:
                columns[f"{each.name.rpartition('/')[0] or each.name}/step"] = each.step
        for number, columns in rows.items():
            self._run.log(columns, step=number)
        self._row = row

    def _finish(self, exit_code: int) -> None:
        """End the run. Offline, its files so far are complete then and are copied; the next values begin new ones."""
        import wandb

        if self._run is None:
            self._open()
        run = self._run
        if self._files is None:
            run.finish(exit_code=exit_code)
            return
        self._files.save()
        file = Path(run.settings.sync_file)
        run.finish(exit_code=exit_code)
        self._run = None
        # The package's process writes the file's end when it ends itself, which this waits for.
        wandb.teardown()
        self._files.copy(file.parent, file.name)

    def _abandon(self) -> None:
        """Forget a run whose process has ended, so that the next call starts another one."""
        import wandb

        self._run = None
        # It cannot be reached.
        with contextlib.suppress(Exception):
            wandb.teardown()

    def _facts(self) -> dict[str, str]:
        """Return what cloudtrain knows about the run."""
        config = self._config
        facts = {"run": config.run, "code": config.code, "checkpoint": self._checkpoint}
        try:
            plan = read_plan(
                config.tracking.plan if config.tracking is not None else "", config.run
            )
            facts |= {"model": plan.model, "commit": plan.commit, "branch": plan.branch}
        except Exception as error:  # noqa: BLE001 (of S3 or of the file: metrics are logged without it)
            detail = f"the plan was not logged to {self.place}: {describe_error(error)}"
            emit("tracking", tracker=self.name, detail=detail)
        return {name: value for name, value in facts.items() if value}


def _redacted(value: Any) -> Any:
    """Return arguments without secrets, with numbers as they are; those of a script are one line."""
    if isinstance(value, Mapping):
        return {str(name): _redacted(part) for name, part in value.items()}
    if isinstance(value, list):
        return redact(shlex.join(map(str, value)))
    return redact(value) if isinstance(value, str) else value
