"""The backend of a Slurm cluster: a run is a folder that all nodes share, and a batch job that executes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain.aws.retry import Backoff
from cloudtrain.backends.base import with_key
from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.run_folders import RunFolders, last_line, modified
from cloudtrain.backends.container.state_file import (
    STATE_FILE,
    RecordedState,
    read_state,
    write_state,
)
from cloudtrain.backends.slurm.attempts import Attempts
from cloudtrain.backends.slurm.batch_request import COMMENT, LOG_FILE
from cloudtrain.backends.slurm.checks import start_checks
from cloudtrain.backends.slurm.commands import Slurm
from cloudtrain.backends.slurm.known_jobs import known_jobs
from cloudtrain.backends.slurm.known_sites import RECORDED, record_site
from cloudtrain.backends.slurm.queue_states import ENDED_BY_SLURM, describe_job
from cloudtrain.backends.slurm.run_files import STOP_FILE, claim_job, read_job
from cloudtrain.backends.slurm.slurm_output import SlurmJob
from cloudtrain.backends.slurm.target import SlurmTarget
from cloudtrain.bundle import ProgressCallback
from cloudtrain.bundle.archive import Bundle
from cloudtrain.errors import CloudtrainError, UnreachableError, UserError
from cloudtrain.planning.batch_job import BatchJob
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.plan_file import PLAN_FILE
from cloudtrain.runs.billing import Billing
from cloudtrain.runs.early_end import OUTSIDE_STOP, STOPPED_BY_REQUEST
from cloudtrain.runs.previous_run import PreviousRun
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State, Status
from cloudtrain.settings.settings import Settings
from cloudtrain.settings.slurm_sites import SlurmSite
from cloudtrain.support.backend_facts import SLURM_BACKEND
from cloudtrain.support.checks import Check
from cloudtrain.support.installation import require_local_modules
from cloudtrain.support.steps import Steps
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.redaction import redact

_SUBMIT_SECONDS = 600.0
"""Longest time between the creation of a run's folder and the record of its job."""
_ALIVE_SECONDS = 60.0
"""Time after its last sign for which an attempt that starts counts as alive."""

_SETTLE_SECONDS = 30.0
"""Time in which the record of an ended job becomes visible on other nodes."""
_FIRST_POLL_SECONDS = 1.0
_LONGEST_POLL_SECONDS = 10.0
_LOCKS = "locks"


class SlurmBackend(RunFolders):
    """Runs below `<folder of the site>/runs/<run>/`.

    Args:
        site: The cluster.
        load_settings: Returns the account's settings.
        installs: Whether runs use an environment with their requirements, which the submit builds.
        steps: Receives what takes long.
    """

    name = SLURM_BACKEND
    log_poll_seconds = 0.5
    is_configured = True
    shares_disk = True
    capacity_pause_seconds = 60.0

    def __init__(
        self,
        site: SlurmSite,
        load_settings: Callable[[], Settings] = Settings,
        *,
        installs: bool = False,
        steps: Steps | None = None,
    ) -> None:
        super().__init__(site.folder / "runs", load_settings)
        self.site = site
        self._slurm = Slurm()
        self._installs = installs
        self._steps = steps or Steps()

    @property
    def folder_hint(self) -> str:  # type: ignore[override]
        """What to do when the folder of runs cannot be used."""
        return f"choose a folder of your own that all nodes share: folder in [slurm.{self.site.name}], {self.site.origin}"

    def target(self) -> SlurmTarget:
        """Return the cluster as the target of a plan."""
        return SlurmTarget(self.load_settings(), self.site, installs=self._installs)

    def for_previous(self, previous: PreviousRun) -> SlurmBackend:
        """Return this backend: a run is resumed on its own cluster.

        Raises:
            UserError: Only the folder of the site is known here.
        """
        if self.site.origin == RECORDED:
            raise UserError(
                f"the settings here have no Slurm site with the folder {self.site.folder}",
                f"resume {previous.run} in the folder whose cloudtrain.toml has it",
            )
        installs = JobFolder(self.runs / previous.run).interpreter.is_file()
        # Of sites that share a folder, the one that the run was submitted to.
        name = (self.plan_of(previous.run).get("batch_job") or {}).get("site")
        site = self.load_settings().slurm.get(str(name))
        if site is None or site.folder != self.site.folder:
            site = self.site
        return SlurmBackend(site, self.load_settings, installs=installs, steps=self._steps)

    def check_ready(self) -> None:
        """Check that this machine can submit to Slurm, and has what its runs need.

        Raises:
            MissingExtraError: torch, psutil or numpy is not installed.
            UserError: Slurm's commands are missing.
            UntrustedSettingsError: A file beside the job gives the site, and the user has not agreed to it.
        """
        self.site.require_trust()
        self._slurm.version()
        # The Python of the nodes is checked there.
        if self.site.python is None:
            require_local_modules("runs on Slurm")

    def start_checks(self, plan: Plan, *, skip: bool = False) -> Callable[[], tuple[Check, ...]]:
        """Check the checkpoints that a plan continues from, the site, and whether Slurm would accept the job.

        Raises:
            UserError: They do not exist, or are another training's; or Slurm would refuse an option.
            CloudError: They are in S3, which refused or cannot be reached.
        """
        self.check_continuation(plan)
        assert plan.batch_job is not None  # noqa: S101 (every plan of this target has one)
        return start_checks(self.site, plan.batch_job, self._slurm, skip=skip)

    def find_active_run(self, plan: Plan) -> Run | None:
        """Return the active run of the same request and code, or None."""
        wanted = f"{COMMENT}{plan.identity}"
        for job in self._slurm.jobs():
            has_ended = describe_job(job).end is not None
            if job.comment != wanted or has_ended or not self.may_have(job.name):
                continue
            if not self.record_of(self.runs / job.name).state.is_final:
                return Run(job.name, self, attached=True)
        return None

    def submit(
        self,
        plan: Plan,
        bundle: Bundle | None,
        *,
        is_new: bool = False,
        progress: ProgressCallback | None = None,
    ) -> Run:
        """Create the run's folder and queue its job, or attach to the active run of the same request and code.

        Raises:
            UserError: The folder cannot be created, or the code of an earlier run was deleted.
            CloudError: Slurm refused the job; nothing remains.
        """
        del progress
        assert plan.batch_job is not None  # noqa: S101 (every plan of this target has one)
        with self._lock(plan.identity):
            if not is_new and (active := self.find_active_run(plan)) is not None:
                return active
            self._store_code(plan, bundle)
            python = self.install(plan, self._steps) if self._installs else None
            folder = self.create_folder(plan, python=python, config=with_key(plan.config))
            job = self._queue(plan.batch_job, folder)
            # The batch step claims it, too, if this process ends before.
            if claim_job(folder, job) != job:
                # An answer that came late: Slurm has two jobs of this run, and the first one has started.
                self._slurm.cancel(job)
        record_site(os.environ, self.site)
        return Run(plan.run, self)

    def _queue(self, job: BatchJob, folder: Path) -> str:
        """Submit a job; return its id. The folder remains unless Slurm has refused the job."""
        try:
            return self._slurm.submit(job)
        except UnreachableError as error:
            raise UnreachableError(
                f"{error.message}; {folder.name} may be in the queue or not",
                f"submit again: the same command attaches to it; or see: cloudtrain status {self.name}:{folder.name}",
            ) from None
        except CloudtrainError:
            # Without a job, the id names no run.
            shutil.rmtree(folder, ignore_errors=True)
            raise

    @contextlib.contextmanager
    def _lock(self, identity: str) -> Iterator[None]:
        """Let one submit of a request at a time pass, on all login nodes that share the folder."""
        folder = self.site.folder / _LOCKS
        try:
            # With the code of the jobs.
            self.site.folder.mkdir(0o700, parents=True, exist_ok=True)
            folder.mkdir(exist_ok=True)
            file = (folder / identity[:32]).open("w")
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be written: {error.strerror}", self.folder_hint
            ) from None
        with file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX)
            except OSError as error:
                raise UserError(
                    f"{folder}: its file system has no locks: {error.strerror}",
                    f"mount it with locks (Lustre: -o flock; NFS: with lockd), or {self.folder_hint}",
                ) from None
            yield

    def _store_code(self, plan: Plan, bundle: Bundle | None) -> None:
        """Copy the code to the shared folder, unless it is there."""
        archive = path_of(plan.locations.code)
        if archive.is_file():
            return
        if bundle is None:
            self.require_code(plan)
            return
        partial = archive.with_name(f".{archive.name}.{os.getpid()}")
        try:
            archive.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.path, partial)
            partial.replace(archive)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(
                f"{archive}: cannot be written: {error.strerror}", self.folder_hint
            ) from None

    def billing(self, run: str) -> Billing:
        """Return the time on the nodes, at the price that the site had at the submit; 0 without one."""
        folder = self.folder_of(run)
        return _bill(self._plan(folder / PLAN_FILE), Attempts.read(folder))

    def status(self, run: str) -> Status:
        """Return the present status, with the attempts, and the cost where the site has a price."""
        found = super().status(run)
        attempts = Attempts.read(self.folder_of(run))
        if attempts.all:
            known = attempts.phases(continues=_has_nodes(found.state, attempts))
            # The recorded start is that of the newest attempt.
            found = replace(found, started=known[0].started, attempts=known)
        bad = attempts.describe_bad_nodes()
        if bad and not found.state.is_final:
            found = replace(found, reason="; ".join(filter(None, (found.reason, bad))))
        billing = _bill(self._plan(self.folder_of(run) / PLAN_FILE), attempts)
        if not billing.usd_per_hour:
            return found
        return replace(found, billable_seconds=billing.billable_seconds, cost_usd=billing.cost_usd)

    def record_of(self, folder: Path) -> RecordedState:
        """Return the state of a run: as recorded, or as Slurm knows it while the record is not final."""
        record = read_state(folder)
        if record.state.is_final:
            return record
        known = self._find_job(folder.name, read_job(folder), known_jobs().find)
        if known is None:
            known = _forgotten_job(folder)
        if known is None:
            return self._without_job(folder, record)
        if known.state == "CANCELLED" and (past := known_jobs().history(known.id)) is not None:
            # Only accounting knows who has cancelled a job.
            known = replace(known, cancelled_by=past.cancelled_by)
        merged = _merge(record, known, modified(folder / STATE_FILE))
        is_failed_script = merged.state is State.FAILED and record.attempt is None
        if is_failed_script and (line := last_line(folder / LOG_FILE)):
            merged = merged.but(
                reason=f"{merged.reason}; the last line of {LOG_FILE}: {redact(line)}"
            )
        if merged.state.is_final and record.ending is None and (folder / STOP_FILE).exists():
            return merged.but(state=State.STOPPED, reason=STOPPED_BY_REQUEST)
        return merged

    def _find_job(
        self, run: str, job: str, find: Callable[[str], SlurmJob | None]
    ) -> SlurmJob | None:
        """Return the job of a run, also of one whose submit was interrupted before it had recorded it.

        Args:
            run: The run.
            job: The recorded id, or an empty text.
            find: Returns the job of an id.
        """
        found = find(job) if job else None
        if found is not None and found.name == run:
            return found
        if job and found is None:
            return None
        # Also where the id is another job's: ids begin again when a cluster is built anew.
        return next(iter(self._slurm.jobs(name=run)), None)

    def _without_job(self, folder: Path, record: RecordedState) -> RecordedState:
        """Return the state of a run whose job Slurm does not know (any more)."""
        written = modified(folder / STATE_FILE)
        ended = datetime.fromtimestamp(written, UTC)
        if record.ending is not None:
            return record.but(state=record.ending, ending=None, ended=ended)
        if not read_job(folder) and time.time() - written < _SUBMIT_SECONDS:
            return record
        state, reason = _end_without_job(folder, record)
        return record.but(state=state, reason=reason, ended=ended)

    def poll_backoff(self) -> Backoff:
        """Return the waits between polls of the status, which ask Slurm's controller."""
        return Backoff(_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS)

    def stop(self, run: str) -> None:
        """Cancel a job that waits; ask the batch step of one that runs to save and stop."""
        folder = self.folder_of(run)
        record = self.record_of(folder)
        if record.state.is_final:
            return
        # What is in the folder decides which job gets a signal.
        self.site.require_trust()
        (folder / STOP_FILE).touch()
        known = self._find_job(run, read_job(folder), self._slurm.job)
        if known is None:
            return
        if known.state == "PENDING":
            self._slurm.cancel(known.id)
            write_state(
                folder,
                record.but(
                    state=State.STOPPED,
                    reason=f"{STOPPED_BY_REQUEST} {_since(record)}",
                    ended=datetime.now(UTC),
                ),
            )
            return
        self._slurm.signal(known.id, "USR2")


def _bill(plan: Mapping[str, Any], attempts: Attempts) -> Billing:
    seconds = round(attempts.seconds)
    return Billing(
        instances=plan.get("cluster", {}).get("instances", 0),
        usd_per_hour=plan.get("cost", {}).get("usd_per_hour") or 0.0,
        billable_seconds=seconds,
        training_seconds=seconds,
    )


def _forgotten_job(folder: Path) -> SlurmJob | None:
    """Return the job of a run that Slurm's controller has forgotten, from accounting."""
    job = read_job(folder)
    found = known_jobs().history(job) if job else None
    return found if found is not None and found.name == folder.name else None


def _has_nodes(state: State, attempts: Attempts) -> bool:
    """Whether the newest recorded attempt still has its nodes."""
    if state is State.STARTING:
        # This can be that of an attempt that has recorded nothing yet.
        return time.time() - attempts.all[-1].ended < _ALIVE_SECONDS
    return state in (State.RUNNING, State.STOPPING)


def _merge(record: RecordedState, job: SlurmJob, written: float) -> RecordedState:
    """Return the state of a run whose record is not final, and whose job Slurm knows.

    Args:
        record: The record.
        job: The job.
        written: When the record was written, in seconds since the epoch.
    """
    known = describe_job(job)
    words = "; ".join(filter(None, (known.reason, known.hint)))
    if known.end is not None:
        if not _is_settled(record, job, written):
            return record
        why = record.reason.removesuffix(f"; {ENDED_BY_SLURM}") if record.ending else ""
        if known.end.is_cause and (why.startswith(OUTSIDE_STOP) or "(SIGTERM)" in why):
            why = ""
        return record.but(
            state=record.ending or known.state,
            ending=None,
            reason="; ".join(filter(None, (why, words))),
            ended=job.ended or datetime.fromtimestamp(written, UTC),
        )
    number = (job.restarts or 0) + 1
    if known.state is State.QUEUED:
        return _queued(record, words, number)
    if known.state is State.RUNNING and (record.attempt or 0) < number:
        what = "the job" if number == 1 else f"attempt {number}"
        return record.but(state=State.STARTING, reason=f"Slurm has started {what}", ending=None)
    if known.state in (State.RUNNING, State.STOPPING):
        return record
    return record.but(state=known.state, reason=words)


def _is_settled(record: RecordedState, job: SlurmJob, written: float) -> bool:
    """Return whether the record of a run whose job has ended is the last one, and not only the last that is visible here."""
    if record.ending is not None or not job.nodes:
        # Without nodes, nothing was running that could have written another.
        return True
    ended = written if job.ended is None else job.ended.timestamp()
    return time.time() - max(written, ended) >= _SETTLE_SECONDS


def _end_without_job(folder: Path, record: RecordedState) -> tuple[State, str]:
    """Return how a run has ended whose job Slurm has forgotten, and that has recorded no end."""
    if (folder / STOP_FILE).exists():
        return State.STOPPED, STOPPED_BY_REQUEST
    job = read_job(folder)
    if not job:
        return State.FAILED, "its job was never queued: the submit was interrupted"
    if record.attempt is not None:
        return State.FAILED, (
            f"Slurm no longer knows job {job}, which has recorded no end (see {LOG_FILE} in {folder}): "
            f"continue with cloudtrain resume {folder.name}"
        )
    if line := last_line(folder / LOG_FILE):
        what = f"the batch script ended before the run started; the last line of {LOG_FILE}: "
        state = State.STOPPED if "CANCELLED AT" in line else State.FAILED
        return state, f"{what}{redact(line)}"
    # As after scancel; Slurm forgets a job after some minutes.
    return (
        State.STOPPED,
        f"Slurm's job {job} ended before it started, and Slurm no longer says why",
    )


def _since(record: RecordedState) -> str:
    return "before it started" if record.attempt is None else "while it waited to continue"


def _queued(record: RecordedState, words: str, number: int) -> RecordedState:
    """Return the state of a run of which Slurm has said that its attempt `number` waits."""
    if record.state in (State.STARTING, State.RUNNING) and (record.attempt or 0) >= number:
        # It has started since Slurm was asked.
        return record
    # Why it waits again; a run that has not run yet has no attempt.
    why = record.reason.removesuffix(f"; {ENDED_BY_SLURM}") if record.attempt is not None else ""
    if why:
        words = words.removeprefix("queued again; ")
    reason = "; ".join(filter(None, (why, words)))
    return RecordedState(State.QUEUED, reason, started=record.started, attempt=record.attempt)
