"""Batch step: supervises one attempt of a run on the first node of its Slurm job, and decides whether another follows.

The batch script executes `python -m cloudtrain.backends.slurm.batch_step RUN_FOLDER`. Slurm signals it shortly before
the job's time limit (SIGUSR1); of a run whose saves take longer, it acts earlier by itself (stop_notice.py). `stop`
signals it after it has created a file in the run's folder (SIGUSR2). SIGTERM reaches every process of the job, so the
ranks save and end by themselves.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain.backends.container.artifacts import describe_unstored
from cloudtrain.backends.container.event_tail import read_progress
from cloudtrain.backends.container.job import LIMIT_REACHED
from cloudtrain.backends.container.job_folder import ATTEMPT_FILE, JobFolder
from cloudtrain.backends.container.process_tree import adopt_orphans
from cloudtrain.backends.container.state_file import RecordedState, read_state
from cloudtrain.backends.container.supervision import (
    Recorder,
    Supervision,
    print_line,
    write_report,
)
from cloudtrain.backends.slurm.attempts import Attempts
from cloudtrain.backends.slurm.bad_nodes import avoid
from cloudtrain.backends.slurm.commands import Slurm
from cloudtrain.backends.slurm.hosts import SrunHosts
from cloudtrain.backends.slurm.queue_states import ENDED_BY_SLURM
from cloudtrain.backends.slurm.run_files import (
    STOP_FILE,
    AttemptFiles,
    claim_job,
    has_order,
)
from cloudtrain.backends.slurm.stop_notice import needed_grace, notice_time
from cloudtrain.errors import CloudtrainError, UnreachableError
from cloudtrain.runs.attempt_chain import MOST_WITHOUT_CHECKPOINT
from cloudtrain.runs.early_end import STOPPED_BY_REQUEST
from cloudtrain.runs.progress import Progress
from cloudtrain.runs.status import State
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.backend_facts import SLURM_BACKEND
from cloudtrain_runtime.contract import GRACE_VARIABLE
from cloudtrain_runtime.contract.attempts import attempt_text, read_attempt

_LIMIT_IS_NEAR = "the time limit of the Slurm job is near"
_NOTICE = "Slurm asked it to save (SIGUSR1), as before a preemption"
_REPLACED = "another attempt of this run has begun"
_LOOK_SECONDS = 1.0
_EARLY_SECONDS = 90.0
"""How much earlier than asked for Slurm may signal the time limit."""
_REACH_SECONDS = 30.0
"""Time between two records of how long an attempt has run."""
_ANSWER_SECONDS = 600.0
"""Longest time without an answer of Slurm's controller at the end of an attempt, as while it is started again."""
_ANSWER_PAUSE_SECONDS = 5.0
_SILENT_NODE_SECONDS = 60.0
"""Time after SlurmdTimeout in which Slurm declares a silent node down."""


def main(argv: list[str]) -> int:
    """Run one attempt; return 1 if it must not run or cloudtrain itself failed, else 0."""
    root = Path(argv[0])
    job = os.environ["SLURM_JOB_ID"]
    number = int(os.environ.get("SLURM_RESTART_COUNT") or 0) + 1
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        print_line(f"{root.name} is one job, and no array: nothing is started")
        return 1
    # The submit may have been interrupted before it had recorded the job.
    recorded = claim_job(root, job)
    if recorded != job:
        print_line(f"{root.name} is job {recorded} of Slurm, not {job}: nothing is started")
        return 1
    if read_attempt(root / ATTEMPT_FILE) > number:
        print_line(f"attempt {number} of {root.name} has been replaced: nothing is started")
        return 1
    state = read_state(root)
    if state.state.is_final or state.ending in (State.SUCCEEDED, State.FAILED):
        # Slurm also starts jobs again whose training has ended.
        print_line(f"{root.name} has ended: nothing is started")
        _finish(root, state)
        return 0
    write_atomically(root / ATTEMPT_FILE, attempt_text(number))
    return _BatchStep(JobFolder(root, number), job).run()


def _finish(root: Path, state: RecordedState) -> None:
    """Record the end of a run whose batch step was killed while it stored the results."""
    if state.ending is not None:
        why = ["the batch step was killed while it stored them"]
        unstored = describe_unstored(state.ending, why, root.name)
        final = state.but(
            state=state.ending, ending=None, ended=datetime.now(UTC), unstored=unstored
        )
        Recorder(root).record_last(final)


class _AttemptRecorder(Recorder):
    """Records states as long as no newer attempt has begun: this one may be on a lost node that lives on."""

    def __init__(self, folder: JobFolder) -> None:
        super().__init__(folder.root)
        self._folder = folder

    def record(self, state: RecordedState) -> bool:
        """Write a state, or nothing after a newer attempt has begun."""
        return _has_newer_attempt(self._folder) or super().record(state)


class _BatchStep:
    def __init__(self, folder: JobFolder, job: str) -> None:
        self._folder = folder
        self._files = AttemptFiles(folder)
        self._job = job
        self._slurm = Slurm()
        self._signals: set[int] = set()
        self._hosts: SrunHosts | None = None
        self._looked_at = 0.0
        self._reached_at = time.time()
        self._has_stop_file = False
        self._has_replacement = False
        self._interruption: str | None = None
        self._lost: tuple[str, ...] = ()
        # Without an answer of Slurm, its signal is the notice.
        self._notice_at = math.inf
        progress = _former_progress(folder)
        checkpoint = None if progress.checkpoint is None else progress.checkpoint.step
        attempts = self._with_lost_nodes(Attempts.read(folder.root))
        self._attempts = attempts.begin(folder.attempt, time.time(), checkpoint)
        self._grace = needed_grace(os.environ, progress)
        self._notice_at = self._find_notice_time()

    def run(self) -> int:
        root = self._folder.root
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda received, _: self._signals.add(received))
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        adopt_orphans()
        self._files.create()
        self._files.beat()
        used_seconds = self._attempts.seconds
        self._attempts.write(root)
        recorder = _AttemptRecorder(self._folder)
        starting = RecordedState(state=State.STARTING, attempt=self._folder.attempt)
        if reason := self._reason_to_end():
            recorder.record_last(reason)
            return 0
        # The results of an interrupted attempt are not those of the run.
        shutil.rmtree(root / "output", ignore_errors=True)
        supervision = Supervision(self._folder, recorder, starting, "batch step")
        final = supervision.run(
            self._stop_reason,
            make_launcher=self._make_hosts,
            environ={**os.environ, GRACE_VARIABLE: str(self._grace)},
            used_seconds=used_seconds,
            stores=lambda state, reason: not self._is_interrupted(state, reason),
        )
        if self._sees_replacement():
            print_line(f"{_REPLACED}: this one records nothing")
            return 1
        self._reach(time.time())
        if supervision.has_failed or not self._is_interrupted(final.state, final.reason):
            self._close()
            recorder.record_last(final)
            write_report(root, SLURM_BACKEND)
        else:
            self._continue(final, recorder)
        return int(supervision.has_failed)

    def _reason_to_end(self) -> RecordedState | None:
        """Return the final state of a run that must not begin this attempt, or None."""
        now = datetime.now(UTC)
        number = self._folder.attempt
        if has_order(self._folder.root / STOP_FILE):
            return RecordedState(State.STOPPED, STOPPED_BY_REQUEST, ended=now, attempt=number)
        if self._attempts.is_stuck:
            reason = (
                f"{MOST_WITHOUT_CHECKPOINT} attempts in a row ended without a new checkpoint; "
                "more frequent ones (checkpoint.every), or see the logs for what is slow"
            )
            return RecordedState(State.FAILED, reason, ended=now, attempt=number)
        return None

    def _make_hosts(
        self,
        request: Mapping[str, Any],
        folder: JobFolder,
        hosts: tuple[str, ...],
        environ: Mapping[str, str],
    ) -> SrunHosts:
        self._hosts = SrunHosts(request, folder, hosts, environ)
        return self._hosts

    def _stop_reason(self) -> str:
        now = time.time()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._has_stop_file = has_order(self._folder.root / STOP_FILE)
            self._sees_replacement()
        if self._has_replacement:
            return _REPLACED
        if now - self._reached_at >= _REACH_SECONDS:
            self._reach(now)
        if self._is_stop_asked():
            return STOPPED_BY_REQUEST
        if now < self._notice_at - _EARLY_SECONDS:
            return _NOTICE if signal.SIGUSR1 in self._signals else ""
        return _LIMIT_IS_NEAR if self._is_limit_near(now) else ""

    def _is_limit_near(self, now: float) -> bool:
        if signal.SIGUSR1 in self._signals:
            return True
        if now < self._notice_at:
            return False
        # The job may have got more time.
        self._notice_at = self._find_notice_time()
        return now >= self._notice_at

    def _find_notice_time(self) -> float:
        try:
            job = self._slurm.job(self._job)
        except CloudtrainError as error:
            print_line(f"Slurm does not say when the job's time ends: {error.message}")
            return self._notice_at
        return notice_time(job, self._grace)

    def _sees_replacement(self) -> bool:
        self._has_replacement = self._has_replacement or _has_newer_attempt(self._folder)
        return self._has_replacement

    def _reach(self, now: float) -> None:
        """Record how long the attempt has run, and show its host steps that this one lives."""
        self._reached_at = now
        self._attempts = self._attempts.reach(now)
        with contextlib.suppress(OSError):
            self._files.beat()
            self._attempts.write(self._folder.root)

    def _is_stop_asked(self) -> bool:
        # A network file system may show the file late, and the signal is lost between two attempts.
        return signal.SIGUSR2 in self._signals or self._has_stop_file

    def _close(self) -> None:
        """Let processes of this attempt that live on, on a lost node, save no more."""
        text = attempt_text(self._folder.attempt, has_ended=True)
        with contextlib.suppress(OSError):
            write_atomically(self._folder.root / ATTEMPT_FILE, text)

    def _continue(self, final: RecordedState, recorder: Recorder) -> None:
        """Let Slurm start another attempt, unless it has ended the job itself."""
        why = self._interruption
        again = RecordedState(
            State.QUEUED,
            f"queued again: {why}{_continues_at(self._folder)}",
            started=final.started,
            attempt=self._folder.attempt,
        )
        ended = final.but(
            state=State.STOPPING,
            ending=State.STOPPED,
            reason=f"{why}; {ENDED_BY_SLURM}",
            ended=None,
        )
        self._close()
        recorder.record(again)
        self._record_lost_nodes()
        try:
            # The last question before the order: a cancelled job must stay cancelled.
            if self._ask(lambda: self._slurm.job_state(self._job)) == "RUNNING":
                self._ask(self._requeue)
                self._avoid_bad_nodes()
            else:
                # Of a job that Slurm itself queues again, readers see the new attempt.
                recorder.record(ended)
                self._avoid_bad_nodes()
        except CloudtrainError as error:
            reason = f"{why}, and the job could not be queued again: {error.message}"
            recorder.record_last(final.but(state=State.STOPPED, reason=reason))

    def _record_lost_nodes(self) -> None:
        if not self._lost:
            # Slurm itself ends an attempt one of whose nodes it has lost.
            self._lost = self._down_nodes(os.environ["SLURM_JOB_NODELIST"])
        self._attempts = self._attempts.lose(self._folder.attempt, self._lost)
        with contextlib.suppress(OSError):
            self._attempts.write(self._folder.root)

    def _with_lost_nodes(self, attempts: Attempts) -> Attempts:
        """Return the attempts with the nodes that the last one has lost together with its batch step."""
        if not attempts.all or read_state(self._folder.root).state in (
            State.QUEUED,
            State.STOPPING,
        ):
            return attempts
        number = attempts.all[-1].number
        try:
            plan = AttemptFiles(JobFolder(self._folder.root, number)).read_nodes()
        except (OSError, ValueError):
            return attempts
        return attempts.lose(number, self._down_nodes(",".join(plan.hosts)))

    def _down_nodes(self, nodes: str) -> tuple[str, ...]:
        try:
            return self._slurm.down_nodes(nodes)
        except CloudtrainError as error:
            print_line(f"Slurm does not say whether a node is lost: {error.message}")
            return ()

    def _avoid_bad_nodes(self) -> None:
        """Let the next attempt avoid the nodes that were lost again and again."""
        needed = int(os.environ["SLURM_JOB_NUM_NODES"])
        try:
            avoided = avoid(self._slurm, self._job, self._attempts.bad_nodes, needed=needed)
        except CloudtrainError as error:
            print_line(f"bad nodes are not avoided: {error.message}")
            return
        if avoided:
            bad = self._attempts.describe_bad_nodes()
            print_line(f"{bad}: the next attempt avoids {', '.join(avoided)}")

    def _requeue(self) -> None:
        try:
            self._slurm.requeue(self._job)
        except CloudtrainError:
            # The answer to an order that Slurm has carried out may have been lost.
            if self._slurm.job_state(self._job) in ("RUNNING", ""):
                raise

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return an answer of Slurm; ask again for minutes while its controller cannot be reached."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            try:
                return question()
            except UnreachableError:
                if time.monotonic() >= deadline:
                    raise
            self._files.beat()
            time.sleep(_ANSWER_PAUSE_SECONDS)

    def _is_interrupted(self, state: State, reason: str) -> bool:
        """Return whether something from outside has ended the attempt, so that another one follows."""
        if self._interruption is None:
            self._interruption = self._find_interruption(state, reason)
        return bool(self._interruption)

    def _find_interruption(self, state: State, reason: str) -> str:
        if self._sees_replacement():
            return _REPLACED
        if self._is_stop_asked() or has_order(self._folder.root / STOP_FILE):
            return ""
        if state is State.STOPPED:
            return "" if reason.startswith(LIMIT_REACHED) else reason
        if signal.SIGTERM in self._signals or (self._hosts is not None and self._hosts.had_signal):
            # Also of a script that has ended well: it cannot say whether it was complete.
            return "Slurm ended its processes (SIGTERM)"
        if state is State.SUCCEEDED or self._hosts is None:
            return ""
        self._lost = self._find_lost_nodes()
        return f"lost {', '.join(self._lost)}" if self._lost else ""

    def _find_lost_nodes(self) -> tuple[str, ...]:
        """Return the nodes of the job that are down. Of one that is silent, Slurm knows it after SlurmdTimeout."""
        nodes = os.environ["SLURM_JOB_NODELIST"]
        deadline = time.monotonic()
        if self._has_silent_host():
            deadline += self._silent_seconds()
        while True:
            try:
                lost = self._ask(lambda: self._slurm.down_nodes(nodes))
            except CloudtrainError as error:
                print_line(f"Slurm does not say whether a node is lost: {error.message}")
                return ()
            is_over = time.monotonic() >= deadline or not self._has_silent_host()
            if lost or is_over or self._signals:
                return tuple(lost)
            self._reach(time.time())
            time.sleep(_ANSWER_PAUSE_SECONDS)

    def _has_silent_host(self) -> bool:
        return self._hosts is not None and bool(self._hosts.unreported)

    def _silent_seconds(self) -> float:
        try:
            text = self._ask(self._slurm.config).get("SlurmdTimeout", "")
        except CloudtrainError:
            text = ""
        number = text.partition(" ")[0]
        return (float(number) if number.isdecimal() else 300.0) + _SILENT_NODE_SECONDS


def _has_newer_attempt(folder: JobFolder) -> bool:
    return read_attempt(folder.root / ATTEMPT_FILE) > folder.attempt


def _continues_at(folder: JobFolder) -> str:
    """Return where the next attempt begins, as a part of a sentence; empty without a checkpoint."""
    checkpoint = _former_progress(folder).checkpoint
    return "" if checkpoint is None else f"; continues from step {checkpoint.step:,}"


def _former_progress(folder: JobFolder) -> Progress:
    """Return the progress of former attempts."""
    try:
        return read_progress(folder.events)
    except OSError as error:
        print_line(f"{folder.events} cannot be read: {error}")
        return Progress()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
