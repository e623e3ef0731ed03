"""Reports about a script: whether its ranks train together, save checkpoints and report progress.

Standard library only, like the launcher. A plan promises checkpoints and hang detection, which need the script's
cooperation. A script whose ranks exchange no data trains as many independent copies as there are ranks.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter

from cloudtrain_runtime.contract import MlTree, RunConfig
from cloudtrain_runtime.launcher.code_outputs import newest_mtime
from cloudtrain_runtime.launcher.group_joins import JoinState, read_joins
from cloudtrain_runtime.process.event_log import emit
from cloudtrain_runtime.process.heartbeat import read_heartbeats

_FIRST_SECONDS = 600.0
"""Time of the first report when the job sets no hang limit."""

_POLL_SECONDS = 0.5


class ScriptReport:
    """Emits the reports of one host: one when the script has run for `limits.hang`, one at the end. A Task has no reports."""

    def __init__(self, tree: MlTree, config: RunConfig, host: str) -> None:
        self._tree = tree
        self._config = config
        self._host = host
        self._began = time.time()
        self._has_ended = threading.Event()
        shutil.rmtree(tree.joins, ignore_errors=True)
        # An earlier attempt may have left the file.
        tree.saved.unlink(missing_ok=True)
        if config.task is None:
            tree.joins.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start the thread of the first report. Call it after the agent has been forked."""
        if self._config.task is None:
            threading.Thread(target=self._report_once, name="script report", daemon=True).start()

    def end(self) -> None:
        """Emit the final report when the ranks have ended."""
        self._has_ended.set()
        if self._config.task is None:
            self._report(JoinState.ALONE, JoinState.UNUSED)

    def _report_once(self) -> None:
        # The first report is about a script that has run for some time, however long its start has
        # taken.
        while not self._config.command and not read_joins(self._tree):
            if self._has_ended.wait(_POLL_SECONDS):
                return
        if not self._has_ended.wait(self._config.hang_seconds or _FIRST_SECONDS):
            self._report(JoinState.WAITING, JoinState.INITIALIZED)

    def _report(self, *alone: JoinState) -> None:
        joins = Counter(read_joins(self._tree))
        is_watched = self._config.hang_seconds is not None and not self._config.metrics
        has_progressed = any(
            pulse.last_nanoseconds for pulse in read_heartbeats(self._tree.heartbeats)
        )
        alone_ranks = 0 if self._config.starts_ranks else sum(joins[state] for state in alone)
        imitated = self._config.cuda_on_cpu
        emit(
            "ranks",
            host=self._host,
            seconds=time.time() - self._began,
            ranks=joins.total(),
            joined=joins[JoinState.JOINED],
            alone=alone_ranks,
            unused=joins[JoinState.INITIALIZED] + joins[JoinState.UNUSED],
            saved=self._has_saved(),
            progressed=has_progressed if is_watched else None,
            **({"cuda_on_cpu": imitated} if imitated else {}),
        )

    def _has_saved(self) -> bool:
        """Return whether the runtime has completed a checkpoint, or a file in /opt/ml/checkpoints is new."""
        if self._tree.saved.exists():
            return True
        return newest_mtime(self._tree.checkpoints) >= self._began
