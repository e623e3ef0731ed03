"""The local backend: runs the request document on this machine like SageMaker's containers."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.retry import Backoff
from cloudtrain.aws.s3_download import make_s3_client
from cloudtrain.backends.base import OnlyRuns, make_storage_environ
from cloudtrain.backends.container.artifacts import describe_unstored, link_model
from cloudtrain.backends.container.background import start_background
from cloudtrain.backends.container.event_tail import EventSummary, read_summary
from cloudtrain.backends.container.folder_sync import runtime_folders
from cloudtrain.backends.container.job import JobFolder, store_again
from cloudtrain.backends.container.log_lines import LineTail
from cloudtrain.backends.container.machine import this_machine, visible_gpus
from cloudtrain.backends.container.state_file import (
    STATE_FILE,
    RecordedState,
    find_supervisor,
    is_watched,
    read_state,
    write_state,
)
from cloudtrain.backends.local.host_log import HostLog, find_since
from cloudtrain.backends.local.target import LocalTarget
from cloudtrain.bundle import ProgressCallback
from cloudtrain.bundle.archive import Bundle
from cloudtrain.errors import (
    CloudtrainError,
    MissingExtraError,
    RunNotFoundError,
    UnreadableStateError,
    UserError,
)
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.plan_file import PLAN_FILE
from cloudtrain.preflight.secrets import check_local_secrets
from cloudtrain.runs.billing import Billing
from cloudtrain.runs.checkpoints import CheckpointFolder
from cloudtrain.runs.continuation import reject_other_training
from cloudtrain.runs.downloads import RunStorage
from cloudtrain.runs.hidden_failure import LAST_BYTES
from cloudtrain.runs.log_end import add_log_end
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.runs.moved_home import relocate
from cloudtrain.runs.previous_run import PreviousRun
from cloudtrain.runs.progress import Progress, fold_events
from cloudtrain.runs.result_parts import CHECKPOINTS, PARTS
from cloudtrain.runs.run import Run
from cloudtrain.runs.run_files import CONFIG, PLAN, REQUEST, read_fields, read_file
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter
from cloudtrain.runs.status import State, Status
from cloudtrain.settings.settings import REPORT_VARIABLE, Settings
from cloudtrain.support.backend_facts import MACHINE_BACKEND
from cloudtrain.support.home_folder import find_owner, make_home
from cloudtrain.support.installation import MODULES_OF_LOCAL_RUNS, install_command, torch_note
from cloudtrain.support.regular_files import open_regular, read_regular
from cloudtrain.support.run_id import is_run_id, submit_order, submitted_at
from cloudtrain.support.steps import Steps
from cloudtrain_runtime.contract import (
    CONFIG_FILE,
    GRACE_VARIABLE,
    OUTPUTS_FOLDER,
    check_event,
)
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.manifest import step_of_folder_name
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

if TYPE_CHECKING:
    from cloudtrain.support.checks import Check

SUPERVISOR_LOG = "supervisor.log"
_REQUEST_FILE = "request.json"
_STORING_LOCK = "storing.lock"
_START_SECONDS = 30.0
_POLL_SECONDS = 0.1
_LOG_POLL_SECONDS = 0.02
"""Longest time between two reads of a followed log."""


class LocalBackend(OnlyRuns):
    """Runs below `<home>/runs/<run>/`.

    Args:
        home: Folder of local runs.
        load_settings: Returns the account's settings.
        installs: Whether runs use an environment with their requirements.
        cuda_on_cpu: Whether runs use a stand-in for CUDA.
        steps: Receives what takes long: the installation of requirements.
    """

    name = MACHINE_BACKEND
    is_configured = True
    capacity_pause_seconds = 1.0

    def __init__(
        self,
        home: Path,
        load_settings: Callable[[], Settings] = Settings,
        *,
        installs: bool = False,
        cuda_on_cpu: bool = False,
        steps: Steps | None = None,
    ) -> None:
        self.home = home
        self.runs = home / "runs"
        self.load_settings = load_settings
        self._steps = steps or Steps()
        self._options = {"installs": installs, "cuda_on_cpu": cuda_on_cpu}
        self._summaries: dict[Path, EventSummary] = {}
        self._plans: dict[Path, tuple[int, Mapping[str, Any]]] = {}

    def target(self) -> LocalTarget:
        """Return this machine as the target of a plan."""
        return LocalTarget(self.load_settings(), self.home, this_machine(), **self._options)

    def for_previous(self, previous: PreviousRun) -> LocalBackend:
        """Return a local backend with the options of the run: --install, and --cuda-on-cpu without GPUs."""
        installs = JobFolder(self.runs / previous.run).interpreter.is_file()
        is_simulated = (
            bool(self.plan_of(previous.run).get("config", {}).get("cuda_on_cpu"))
            and not visible_gpus()
        )
        return LocalBackend(
            self.home,
            self.load_settings,
            installs=installs,
            cuda_on_cpu=is_simulated,
            steps=self._steps,
        )

    def check_ready(self) -> None:
        """Check that local runs can start on this machine.

        Raises:
            MissingExtraError: torch, psutil or numpy is not installed; or pip, if runs install.
            UserError: The grace period in the environment is no number.
        """
        for module in MODULES_OF_LOCAL_RUNS:
            if importlib.util.find_spec(module) is None:
                error = MissingExtraError(f"local runs need {module}", install_command("local"))
                note = torch_note()
                if note is not None:
                    error.add_note(note)
                raise error
        if self._options["installs"] and importlib.util.find_spec("pip") is None:
            raise MissingExtraError(
                "--install needs pip in this environment", f"{sys.executable} -m ensurepip"
            )
        grace = os.environ.get(GRACE_VARIABLE, "0")
        if not grace.replace(".", "", 1).isdigit():
            raise UserError(f"{GRACE_VARIABLE}: expected seconds, got {grace!r}", "for example 120")

    def start_checks(self, plan: Plan, *, skip: bool = False) -> Callable[[], tuple[Check, ...]]:
        """Check the checkpoints that a plan would continue from, and its secrets. Nothing takes long here.

        Raises:
            UserError: They do not exist, or are another training's; or a secret is neither set here nor readable.
            CloudError: They are in S3, which refused or cannot be reached.
        """
        del skip
        self.check_resume(plan)
        # A script need not load the checkpoints there.
        if plan.config.task is not None:
            reject_other_training(plan)
        check_local_secrets(plan.config.secrets, os.environ)
        return tuple

    def check_resume(self, plan: Plan) -> tuple[Check, ...]:
        """Return no results.

        Raises:
            UserError: The checkpoint does not exist.
            CloudError: It is in S3, which refused or cannot be reached.
        """
        run = plan.config.checkpoint.resume_run
        if run and self.may_have(run):
            self.storage_of(run).require_stored(run, CHECKPOINTS)
        _check_checkpoint(plan, self.storage_environ())
        return ()

    def storage_environ(self) -> Mapping[str, str]:
        """Return the environment of a process that reads the checkpoints of local runs."""
        return make_storage_environ(os.environ, self.load_settings())

    def storage_of(self, run: str) -> RunStorage:
        """Return where the run's results are."""
        s3 = functools.partial(make_s3_client, self.load_settings().bucket_owners)
        finish = functools.partial(self._finish_storing, run)
        return RunStorage(
            output=str(self._folder(run) / "output"),
            environ=self.storage_environ(),
            make_s3=s3,
            finish=finish,
        )

    def _finish_storing(self, run: str) -> Mapping[str, str]:
        """Store what could not be stored when a run ended; return why a part still cannot be, by part."""
        root = self._folder(run)
        if not self._record(root).unstored:
            return {}
        try:
            with (root / _STORING_LOCK).open("w") as lock:
                # Another command may be storing them.
                fcntl.flock(lock, fcntl.LOCK_EX)
                return self._store_again(root)
        except OSError as error:
            return dict.fromkeys(PARTS, f"{error.filename or root}: {error.strerror}")
        except ValueError:
            reason = f"{root / _REQUEST_FILE} is damaged: it is not the request of a run"
            return dict.fromkeys(PARTS, reason)

    def _store_again(self, root: Path) -> Mapping[str, str]:
        record = self._record(root)
        if not record.unstored:
            return {}
        request = load_json(read_regular(root / _REQUEST_FILE))
        if "TrainingJobName" not in read_fields(request, REQUEST):
            raise ValueError(request)
        stored = store_again(request, JobFolder(root))
        artifacts: Mapping[str, str] = stored.artifacts
        # The model is still in its own folder.
        with contextlib.suppress(OSError):
            artifacts = link_model(stored.artifacts, root)
        unstored = describe_unstored(record.state, stored.problems.values(), root.name)
        write_state(root, record.but(unstored=unstored, artifacts=artifacts))
        return stored.problems

    def find_active_run(self, plan: Plan) -> None:  # noqa: ARG002 (local runs cost nothing)
        """Return None: each submit starts a run."""
        return

    def submit(
        self,
        plan: Plan,
        bundle: Bundle | None,
        *,
        is_new: bool = False,
        progress: ProgressCallback | None = None,
    ) -> Run:
        """Create the run's folder and start its supervisor.

        Raises:
            UserError: The folder cannot be created, the code of an earlier run was deleted, or pip failed.
        """
        # Each submit starts a run, and copies nothing.
        del is_new, progress
        archive = path_of(plan.locations.code)
        if bundle is None and not archive.is_file():
            hint = (
                "to use the current code: cloudtrain submit --local JOB --set checkpoint.resume=RUN"
            )
            raise UserError(f"the code of the earlier run was deleted: {archive}", hint)
        python = None
        if self._options["installs"] and plan.config.requirements is not None:
            from cloudtrain.backends.local.environments import FOLDER, prepare_environment

            python = prepare_environment(
                self.home / FOLDER, archive, plan.config.requirements, self._steps
            )
        folder = self._create_folder(plan, python)
        self._start(folder)
        return Run(plan.run, self)

    def _create_folder(self, plan: Plan, python: Path | None) -> Path:
        """Create the folder of a run with all that its supervisor reads, or nothing.

        Args:
            plan: The run's plan.
            python: Interpreter of the run's environment, or None for this process's.

        Raises:
            UserError: The folder cannot be created, or the disk is full.
        """
        folder = self.runs / plan.run
        try:
            make_home(self.runs.parent)
            # Logs and code are private.
            self.runs.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir()
        except OSError as error:
            raise _not_created(folder, error) from None
        try:
            (folder / "config").mkdir()
            (folder / "config" / CONFIG_FILE).write_text(plan.config.to_json(), encoding="utf-8")
            (folder / _REQUEST_FILE).write_text(
                dump_json(plan.request, indent=1) + "\n", encoding="utf-8"
            )
            (folder / PLAN_FILE).write_text(plan.to_file() + "\n", encoding="utf-8")
            if python is not None:
                JobFolder(folder).interpreter.write_bytes(os.fsencode(python))
            write_state(folder, RecordedState(State.QUEUED))
        except OSError as error:
            # Nothing was started, so the id names no run.
            shutil.rmtree(folder, ignore_errors=True)
            raise _not_created(folder, error) from None
        return folder

    def _start(self, folder: Path) -> None:
        """Start the supervisor of a run and wait until it has recorded its process id.

        Raises:
            CloudtrainError: The supervisor ended at once, or did not start in time.
        """
        try:
            start_background(
                "the local backend",
                ["cloudtrain.backends.container", str(folder)],
                folder / SUPERVISOR_LOG,
                lambda _: read_state(folder).supervisor is not None,
                limit_seconds=_START_SECONDS,
                cwd=folder,
                env={**os.environ, REPORT_VARIABLE: str(int(self.load_settings().report))},
            )
        except CloudtrainError:
            # A full disk, which the error names.
            with contextlib.suppress(OSError):
                write_state(folder, RecordedState(State.FAILED, "the local backend did not start"))
            raise

    def billing(self, run: str) -> Billing:  # noqa: ARG002 (local runs cost nothing)
        """Return that nothing is billed."""
        return Billing()

    def plan_of(self, run: str) -> Mapping[str, Any]:
        """Return a run's plan.json."""
        return read_file(self._folder(run) / PLAN_FILE, PLAN)

    def status(self, run: str) -> Status:
        """Return the present status; FAILED for a run whose supervisor has died."""
        folder = self._folder(run)
        record = self._record(folder)
        progress = self._progress(folder)
        plan = self._plan(folder / PLAN_FILE)
        if record.state is State.SUCCEEDED and plan.get("config", {}).get("task") is None:
            progress = _add_log_ends(progress, JobFolder(folder))
        checkpoints = plan.get("checkpoint", {}).get("uri")
        artifacts = {**record.artifacts, "folder": str(folder), "checkpoints": checkpoints}
        if checkpoints and plan.get("config", {}).get("outputs"):
            artifacts["outputs"] = f"{checkpoints.rstrip('/')}/{OUTPUTS_FOLDER}"
        return Status(
            run=run,
            backend=self.name,
            state=record.state,
            reason="; ".join(filter(None, (record.reason, record.unstored))),
            created=submitted_at(run),
            started=record.started,
            ended=record.ended,
            billable_seconds=0,
            cost_usd=0.0,
            world_size=progress.world_size or plan.get("cluster", {}).get("world_size"),
            progress=progress,
            artifacts={name: place for name, place in artifacts.items() if place is not None},
        )

    def _plan(self, path: Path) -> Mapping[str, Any]:
        """Return the fields of a plan.json, which is read again only where it was written again."""
        try:
            written = path.stat().st_mtime_ns
        except OSError:
            written = 0
        known = self._plans.get(path)
        if known is None or known[0] != written:
            known = written, read_file(path, PLAN)
            self._plans[path] = known
        return known[1]

    def _progress(self, folder: Path) -> Progress:
        """Return the progress of a run. Later calls read only new events."""
        path = JobFolder(folder).events
        summary = self._summaries.get(folder) or read_summary(path)
        offset = summary.size_bytes
        known = summary.progress
        tail = LineTail(path, start=offset)
        try:
            # Another program replaced the file.
            if path.stat().st_size < offset:
                tail = LineTail(path)
                known = Progress()
            progress = fold_events(_events(tail), known)
        except FileNotFoundError:
            return _relocated(known, path)
        except OSError as error:
            raise UnreadableStateError(f"{path}: cannot be read: {error.strerror}") from None
        finally:
            tail.close()
        self._summaries[folder] = EventSummary(tail.offset, progress)
        return _relocated(progress, path)

    def _record(self, folder: Path) -> RecordedState:
        """Return the recorded state, or FAILED if the supervisor has died."""
        seen = read_state(folder)
        # The order matters: the supervisor takes its lock before it records its process id, and records its final state
        # before it ends.
        if seen.state.is_final or is_watched(folder):
            return seen
        record = read_state(folder)
        # The supervisor has started between the two reads.
        has_started = seen.supervisor is None and record.supervisor is not None
        last_write = max(
            _modified(path) for path in (folder / STATE_FILE, JobFolder(folder).events)
        )
        is_starting = record.supervisor is None and time.time() - last_write < _START_SECONDS
        if record.state.is_final or has_started or is_starting:
            return record
        last_line = _last_line(folder / SUPERVISOR_LOG)
        if record.ending is not None:
            why = ["the supervisor died while it stored them"]
            return record.but(
                state=record.ending,
                ending=None,
                ended=datetime.fromtimestamp(last_write, UTC),
                unstored=describe_unstored(record.ending, why, folder.name),
            )
        reason = "the supervisor of this run died (killed, or the machine restarted)"
        reason += f"; the last line of its log: {last_line}" if last_line else ""
        return record.but(
            state=State.FAILED, reason=reason, ended=datetime.fromtimestamp(last_write, UTC)
        )

    def poll_backoff(self) -> Backoff:
        """Return the waits between polls of the status. They are constant, because reading a folder is cheap."""
        return Backoff(_POLL_SECONDS, _POLL_SECONDS)

    def logs(
        self,
        run: str,
        *,
        follow: bool = False,
        only: LogFilter = ALL_LINES,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Iterator[LogLine]:
        """Yield the selected log lines of all hosts, each once.

        Only events have times here (see `HostLog`). With `since`, the lines up to the last older event
        are skipped, and all lines of a file that was modified before.
        """
        # Local files have no outages.
        del on_trouble
        return filter(
            only.wants,
            self._lines(self._folder(run), follow=follow, since=only.begins(time.time())),
        )

    def _lines(self, folder: Path, *, follow: bool, since: float | None) -> Iterator[LogLine]:
        logs = JobFolder(folder).logs
        hosts: dict[Path, HostLog] = {}
        polled = since or 0.0
        try:
            while True:
                # Read the state before the lines, so that the last round reads everything up to the end.
                is_over = not follow or self._record(folder).state.is_final
                for path in _log_files(logs):
                    if path not in hosts:
                        offset = 0 if since is None else find_since(path, since)
                        hosts[path] = HostLog(path, folder.name, offset=offset)
                    yield from hosts[path].read(final=is_over, at_least=polled)
                if is_over:
                    return
                polled = time.time()
                time.sleep(_LOG_POLL_SECONDS)
        except OSError as error:
            raise UnreadableStateError(
                f"{error.filename or logs}: cannot be read: {error.strerror}"
            ) from None
        finally:
            for host in hosts.values():
                host.close()

    def list(self, wanted: RunFilter = ALL_RUNS) -> Iterator[Status]:
        """Yield the selected runs of this machine, newest first. Files are read only as needed."""
        for run in self._newest_first():
            if not wanted.accepts_run(run):
                continue
            try:
                if not self.may_have(run) or not self._may_match(self.runs / run, wanted):
                    continue
                status = self.status(run)
            except UnreadableStateError as error:
                if self._is_being_created(run):
                    continue
                status = self._unknown(run, error.message)
            except Exception as error:  # noqa: BLE001 (one damaged run must not hide the others)
                why = f"{type(error).__name__}: {error}"
                status = self._unknown(run, f"{self.runs / run} cannot be read: {why}")
            if wanted.accepts(status):
                yield status

    def _unknown(self, run: str, reason: str) -> Status:
        return Status(
            run=run,
            backend=self.name,
            state=State.UNKNOWN,
            reason=reason,
            created=submitted_at(run),
        )

    def _newest_first(self) -> Iterable[str]:
        """Return the ids of all runs, newest first, by their names."""
        try:
            with os.scandir(self.runs) as entries:
                names = [entry.name for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._unreadable(error) from None
        return sorted(filter(is_run_id, names), key=submit_order, reverse=True)

    def _may_match(self, folder: Path, wanted: RunFilter) -> bool:
        """Whether the small files of a run match the filter. The events, which may be many, are not read."""
        tags = []
        if wanted.tags:
            tags = read_file(folder / _REQUEST_FILE, REQUEST).get("Tags", [])
        if not wanted.accepts_tags({tag["Key"]: tag["Value"] for tag in tags}):
            return False
        state = read_state(folder).state if wanted.states else None
        # A run that seems active may have a dead supervisor.
        return state is None or not state.is_final or state in wanted.states

    def facts(self, run: str) -> Mapping[str, str]:
        """Return the values of the job by field of job.yaml, from its undamaged files."""
        from cloudtrain.failure_rules import read_facts

        folder = self._folder(run)
        request = read_file(folder / _REQUEST_FILE, REQUEST)
        config = read_file(folder / "config" / CONFIG_FILE, CONFIG)
        return read_facts(request, config, read_file(folder / PLAN_FILE, PLAN))

    def stop(self, run: str) -> None:
        """Ask the supervisor to stop the run; without a supervisor, kill its remaining processes.

        It works with a damaged state.json and on a full disk, too.

        Raises:
            UserError: the run belongs to another user.
        """
        folder = self._folder(run)
        try:
            record = read_state(folder)
        except UnreadableStateError:
            record = None
        if record is not None and record.state.is_final:
            return
        if is_watched(folder):
            self._end_supervisor(folder, record)
            return
        from cloudtrain.backends.container.process_tree import kill, processes_of_run

        kill(processes_of_run(run))
        if record is not None:
            # A reader derives the same state.
            with contextlib.suppress(OSError):
                write_state(folder, self._record(folder))

    def _end_supervisor(self, folder: Path, record: RecordedState | None) -> None:
        supervisor = find_supervisor(folder) or (record.supervisor if record is not None else None)
        if not supervisor:
            raise UserError(
                f"{folder}: the supervisor's process id is unknown", "look for it with: ps -ef"
            )
        try:
            os.kill(supervisor, signal.SIGTERM)
        except PermissionError:
            raise UserError(
                f"{folder.name} belongs to {find_owner(folder)}", "only that user can stop it"
            ) from None
        except (ProcessLookupError, OverflowError):
            # The supervisor has just ended.
            return

    def end_warm_pool(self, run: str) -> None:
        """Raise a UserError: local runs have no warm pool."""
        raise UserError(
            f"{self.name}:{run} has no warm pool",
            "only a run on SageMaker has one (cluster.keep_alive)",
        )

    def may_have(self, run: str) -> bool:
        """Return whether this machine has a run of this id.

        Raises:
            UserError: the folder of runs cannot be read.
        """
        try:
            return (self.runs / run).is_dir()
        except OSError as error:
            raise self._unreadable(error) from None

    def _is_being_created(self, run: str) -> bool:
        """Whether a submit has just created the run's folder and not written its first state yet."""
        try:
            is_new = time.time() - (self.runs / run).stat().st_mtime < _START_SECONDS
            return is_new and not (self.runs / run / STATE_FILE).exists()
        except OSError:
            return False

    def _unreadable(self, error: OSError) -> UserError:
        hint = "choose another folder for local runs: CLOUDTRAIN_HOME"
        return UserError(f"{self.runs}: cannot be read: {error.strerror}", hint)

    def _folder(self, run: str) -> Path:
        if not self.may_have(run):
            raise RunNotFoundError(
                f"there is no local run {run} in {self.runs}", "see: cloudtrain list"
            )
        return self.runs / run


def _not_created(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"{folder}: cannot be created: {error.strerror}",
        "choose another folder for local runs: CLOUDTRAIN_HOME",
    )


def _events(tail: LineTail) -> Iterator[dict[str, Any]]:
    """Yield the events of a file, without other lines and an incomplete last line."""
    for line in tail.read():
        with contextlib.suppress(ValueError):
            if (event := check_event(load_json(line))) is not None:
                yield event


def _relocated(progress: Progress, file: Path) -> Progress:
    """Return the progress with the places of its checkpoints in the home as it is now."""
    newest = progress.checkpoint
    if newest is None:
        return progress
    saved = (newest, *progress.checkpoints_before)
    resumed_from, *uris = relocate([progress.resumed_from, *(each.uri for each in saved)], file)
    newest, *before = (replace(each, uri=uri) for each, uri in zip(saved, uris, strict=True))
    return replace(
        progress, checkpoint=newest, checkpoints_before=tuple(before), resumed_from=resumed_from
    )


def _log_files(logs: Path) -> list[Path]:
    try:
        return sorted(path for path in logs.iterdir() if path.suffix == ".log")
    except FileNotFoundError:
        return []


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _last_line(path: Path) -> str:
    """Return the last line of a small log, or an empty string."""
    try:
        lines = read_regular(path).decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


def _check_checkpoint(plan: Plan, environ: Mapping[str, str]) -> None:
    """Check that there is a complete checkpoint where a plan names one, in a process with this environment.

    Raises:
        UserError: There is none.
        CloudError: It is in S3, which refused or cannot be reached.
    """
    if "://" not in plan.resume:
        return
    config = plan.config
    is_folder = config.task is None and step_of_folder_name(plan.resume.rpartition("/")[2]) is None
    if is_folder and _has_own_form(plan.locations.checkpoints):
        return
    try:
        CheckpointFolder(plan.resume, config.checkpoint.resume_run, environ).find()
    except UserError as error:
        raise UserError(
            error.message, f"{error.hint}; to start anew: cloudtrain submit --local JOB"
        ) from None


def _has_own_form(uri: str) -> bool:
    """Return whether a script has saved files to a folder, besides checkpoints of the runtime."""
    if not uri.startswith("file:"):
        return False
    folder = path_of(uri)
    names = {each.name for each in folder.glob("*")}
    return bool(names.difference(runtime_folders(str(folder), list(names))))


def _add_log_ends(progress: Progress, folder: JobFolder) -> Progress:
    """Return the progress with what the ends of the hosts' logs show; see `add_log_end`."""
    for path in sorted(folder.logs.glob("*.log")):
        with contextlib.suppress(OSError), open_regular(path) as log:
            log.seek(max(0, path.stat().st_size - LAST_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
            progress = add_log_end(progress, lines)
            if progress.hidden_failure is not None:
                break
    return progress
