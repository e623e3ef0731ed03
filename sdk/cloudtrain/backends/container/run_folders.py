"""Runs that are folders of files: their plan, state, events, logs and results, as commands read them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain.aws.s3_download import make_s3_client
from cloudtrain.backends.base import OnlyRuns, make_storage_environ
from cloudtrain.backends.container.artifacts import describe_unstored, link_model
from cloudtrain.backends.container.event_tail import EventSummary, read_events, read_summary
from cloudtrain.backends.container.host_log import HostLog, find_since
from cloudtrain.backends.container.job import store_again
from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.log_lines import LineTail
from cloudtrain.backends.container.resumed_checkpoint import require_checkpoint
from cloudtrain.backends.container.state_file import (
    STATE_FILE,
    RecordedState,
    read_state,
    write_state,
)
from cloudtrain.errors import CloudtrainError, RunNotFoundError, UnreadableStateError, UserError
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.plan_file import PLAN_FILE
from cloudtrain.runs.continuation import reject_other_training
from cloudtrain.runs.downloads import RunStorage
from cloudtrain.runs.hidden_failure import LAST_BYTES
from cloudtrain.runs.log_end import add_log_end
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.runs.moved_home import relocate
from cloudtrain.runs.progress import Progress, fold_events
from cloudtrain.runs.result_parts import CHECKPOINTS, PARTS
from cloudtrain.runs.run_files import CONFIG, PLAN, REQUEST, read_fields, read_file
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter
from cloudtrain.runs.status import State, Status
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import backend_option
from cloudtrain.support.checks import Check
from cloudtrain.support.home_folder import make_home
from cloudtrain.support.regular_files import open_regular, read_regular
from cloudtrain.support.run_id import is_run_id, submit_order, submitted_at
from cloudtrain.support.steps import Steps
from cloudtrain_runtime.contract import CONFIG_FILE, OUTPUTS_FOLDER, RunConfig
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

REQUEST_FILE = "request.json"
START_SECONDS = 30.0
"""Longest time between the creation of a run's folder and the first state of its supervisor."""

_STORING_LOCK = "storing.lock"
_DEATH_SECONDS = 0.25
"""Time within which a follower notices that what would record a run's end has died."""


class RunFolders(OnlyRuns):
    """Reads runs below `<runs>/<run>/`. A backend adds what starts and stops them, and how a run's state is found.

    Args:
        runs: Folder of the runs.
        load_settings: Returns the account's settings.

    Attributes:
        name: The backend's name.
        log_poll_seconds: Longest time between two reads of a followed log.
        folder_hint: What to do when the folder of runs cannot be used.
        shares_disk: Whether the hosts of a run share one folder of checkpoints.
    """

    name: str
    shares_disk = False
    log_poll_seconds: float
    folder_hint: str

    def __init__(self, runs: Path, load_settings: Callable[[], Settings] = Settings) -> None:
        self.runs = runs
        self.load_settings = load_settings
        self._summaries: dict[Path, EventSummary] = {}
        self._plans: dict[Path, tuple[int, Mapping[str, Any]]] = {}

    @abstractmethod
    def record_of(self, folder: Path) -> RecordedState:
        """Return the state of a run: as recorded, unless what would record a newer one is gone.

        Raises:
            UnreadableStateError: The state cannot be read.
        """

    def create_folder(
        self, plan: Plan, *, python: Path | None = None, config: RunConfig | None = None
    ) -> Path:
        """Create the folder of a run with all that its supervisor reads, or nothing.

        Args:
            plan: The run's plan.
            python: Interpreter of the run's environment, or None for that of the supervisor.
            config: The configuration that the containers read; by default the plan's.

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
            raise self._not_created(folder, error) from None
        try:
            (folder / "config").mkdir()
            (folder / "config" / CONFIG_FILE).write_text(
                (config or plan.config).to_json(), encoding="utf-8"
            )
            (folder / REQUEST_FILE).write_text(
                dump_json(plan.request, indent=1) + "\n", encoding="utf-8"
            )
            (folder / PLAN_FILE).write_text(plan.to_file() + "\n", encoding="utf-8")
            if python is not None:
                JobFolder(folder).interpreter.write_bytes(os.fsencode(python))
            write_state(folder, RecordedState(State.QUEUED))
        except OSError as error:
            # Nothing was started, so the id names no run.
            shutil.rmtree(folder, ignore_errors=True)
            raise self._not_created(folder, error) from None
        return folder

    def _not_created(self, folder: Path, error: OSError) -> UserError:
        if isinstance(error, FileExistsError) and folder.is_dir():
            # The id of a run has the time in seconds.
            return UserError(f"the run {folder.name} exists already", "submit again in a second")
        return UserError(f"{folder}: cannot be created: {error.strerror}", self.folder_hint)

    def check_resume(self, plan: Plan) -> tuple[Check, ...]:
        """Return no results.

        Raises:
            UserError: The checkpoint does not exist.
            CloudError: It is in S3, which refused or cannot be reached.
        """
        run = plan.config.checkpoint.resume_run
        if run and self.may_have(run):
            self.storage_of(run).require_stored(run, CHECKPOINTS)
        require_checkpoint(
            plan, self.storage_environ(), f"cloudtrain submit{backend_option(self.name)} JOB"
        )
        return ()

    def check_continuation(self, plan: Plan) -> None:
        """Check the checkpoints that a plan continues from.

        Raises:
            UserError: They do not exist, or are another training's.
            CloudError: They are in S3, which refused or cannot be reached.
        """
        self.check_resume(plan)
        # A script need not load the checkpoints there.
        if plan.config.task is not None:
            reject_other_training(plan)

    def require_code(self, plan: Plan) -> None:
        """Check that the code of an earlier run is still there.

        Raises:
            UserError: It was deleted.
        """
        archive = path_of(plan.locations.code)
        if not archive.is_file():
            submit = f"cloudtrain submit{backend_option(self.name)} JOB"
            raise UserError(
                f"the code of the earlier run was deleted: {archive}",
                f"to use the current code: {submit} --set checkpoint.resume=RUN",
            )

    def install(self, plan: Plan, steps: Steps) -> Path | None:
        """Build an environment with the job's requirements beside the runs, once; return its interpreter.

        Returns None for a job without requirements.

        Raises:
            UserError: The environment cannot be built, or pip failed.
        """
        requirements = plan.config.requirements
        if requirements is None:
            return None
        from cloudtrain.backends.container.environments import FOLDER, prepare_environment

        folder = self.runs.parent / FOLDER
        return prepare_environment(folder, path_of(plan.locations.code), requirements, steps)

    def storage_environ(self) -> Mapping[str, str]:
        """Return the environment of a process that reads the checkpoints of these runs."""
        return make_storage_environ(os.environ, self.load_settings())

    def storage_of(self, run: str) -> RunStorage:
        """Return where the run's results are."""
        s3 = functools.partial(make_s3_client, self.load_settings().bucket_owners)
        finish = functools.partial(self._finish_storing, run)
        return RunStorage(
            output=str(self.folder_of(run) / "output"),
            environ=self.storage_environ(),
            make_s3=s3,
            finish=finish,
        )

    def _finish_storing(self, run: str) -> Mapping[str, str]:
        """Store what could not be stored when a run ended; return why a part still cannot be, by part."""
        root = self.folder_of(run)
        if not self.record_of(root).unstored:
            return {}
        try:
            with (root / _STORING_LOCK).open("w") as lock:
                # Another command may be storing them.
                fcntl.flock(lock, fcntl.LOCK_EX)
                return self._store_again(root)
        except OSError as error:
            return dict.fromkeys(PARTS, f"{error.filename or root}: {error.strerror}")
        except ValueError:
            reason = f"{root / REQUEST_FILE} is damaged: it is not the request of a run"
            return dict.fromkeys(PARTS, reason)

    def _store_again(self, root: Path) -> Mapping[str, str]:
        record = self.record_of(root)
        if not record.unstored:
            return {}
        request = load_json(read_regular(root / REQUEST_FILE))
        if "TrainingJobName" not in read_fields(request, REQUEST):
            raise ValueError(request)
        stored = store_again(request, JobFolder.newest(root), shares_disk=self.shares_disk)
        artifacts: Mapping[str, str] = stored.artifacts
        # The model is still in its own folder.
        with contextlib.suppress(OSError):
            artifacts = link_model(stored.artifacts, root)
        unstored = describe_unstored(record.state, stored.problems.values(), root.name)
        write_state(root, record.but(unstored=unstored, artifacts=artifacts))
        return stored.problems

    def plan_of(self, run: str) -> Mapping[str, Any]:
        """Return a run's plan.json."""
        return read_file(self.folder_of(run) / PLAN_FILE, PLAN)

    def status(self, run: str) -> Status:
        """Return the present status; FAILED for a run whose supervisor has died."""
        folder = self.folder_of(run)
        record = self.record_of(folder)
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
            progress = fold_events(read_events(tail), known)
        except FileNotFoundError:
            return _relocated(known, path)
        except OSError as error:
            raise UnreadableStateError(f"{path}: cannot be read: {error.strerror}") from None
        finally:
            tail.close()
        self._summaries[folder] = EventSummary(tail.offset, progress)
        return _relocated(progress, path)

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
            self._lines(self.folder_of(run), follow=follow, since=only.begins(time.time())),
        )

    def _lines(self, folder: Path, *, follow: bool, since: float | None) -> Iterator[LogLine]:
        logs = JobFolder(folder).logs
        hosts: dict[Path, HostLog] = {}
        polled = since or 0.0
        end = _EndWatch(folder, self.record_of)
        try:
            while True:
                # Read the state before the lines, so that the last round reads everything up to the end.
                is_over = not follow or end.is_over()
                for path in _log_files(logs):
                    if path not in hosts:
                        offset = 0 if since is None else find_since(path, since)
                        hosts[path] = HostLog(path, folder.name, offset=offset)
                    yield from hosts[path].read(final=is_over, at_least=polled)
                if is_over:
                    return
                polled = time.time()
                time.sleep(self.log_poll_seconds)
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
            except CloudtrainError as error:
                # What knows more than the folder, such as a queue, gives no answer.
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
            raise self.unreadable(error) from None
        return sorted(filter(is_run_id, names), key=submit_order, reverse=True)

    def _may_match(self, folder: Path, wanted: RunFilter) -> bool:
        """Whether the small files of a run match the filter. The events, which may be many, are not read."""
        tags = []
        if wanted.tags:
            tags = read_file(folder / REQUEST_FILE, REQUEST).get("Tags", [])
        if not wanted.accepts_tags({tag["Key"]: tag["Value"] for tag in tags}):
            return False
        state = read_state(folder).state if wanted.states else None
        # A run that seems active may have a dead supervisor.
        return state is None or not state.is_final or state in wanted.states

    def facts(self, run: str) -> Mapping[str, str]:
        """Return the values of the job by field of job.yaml, from its undamaged files."""
        from cloudtrain.failure_rules import read_facts

        folder = self.folder_of(run)
        request = read_file(folder / REQUEST_FILE, REQUEST)
        config = read_file(folder / "config" / CONFIG_FILE, CONFIG)
        return read_facts(request, config, read_file(folder / PLAN_FILE, PLAN))

    def end_warm_pool(self, run: str) -> None:
        """Raise a UserError: these runs have no warm pool."""
        raise UserError(
            f"{self.name}:{run} has no warm pool",
            "only a run on SageMaker has one (cluster.keep_alive)",
        )

    def may_have(self, run: str) -> bool:
        """Return whether there is a run of this id.

        Raises:
            UserError: the folder of runs cannot be read.
        """
        try:
            return (self.runs / run).is_dir()
        except OSError as error:
            raise self.unreadable(error) from None

    def _is_being_created(self, run: str) -> bool:
        """Whether a submit has just created the run's folder and not written its first state yet."""
        try:
            is_new = time.time() - (self.runs / run).stat().st_mtime < START_SECONDS
            return is_new and not (self.runs / run / STATE_FILE).exists()
        except OSError:
            return False

    def unreadable(self, error: OSError) -> UserError:
        """Return the error for a folder of runs that cannot be read."""
        return UserError(f"{self.runs}: cannot be read: {error.strerror}", self.folder_hint)

    def folder_of(self, run: str) -> Path:
        """Return the folder of a run.

        Raises:
            RunNotFoundError: There is no such run.
        """
        if not self.may_have(run):
            raise RunNotFoundError(
                f"there is no {self.name} run {run} in {self.runs}", "see: cloudtrain list"
            )
        return self.runs / run


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


class _EndWatch:
    """Whether a followed run has ended, asked many times a second.

    An end is a change of the state's file, which one call of the system shows. That what would record it has died is
    looked for less often, because it takes a dozen calls.
    """

    def __init__(self, folder: Path, record_of: Callable[[Path], RecordedState]) -> None:
        self._folder = folder
        self._record_of = record_of
        self._seen: object = None
        self._asked_at = float("-inf")

    def is_over(self) -> bool:
        """Return whether the run's state is final.

        Raises:
            UnreadableStateError: The state cannot be read.
        """
        version = self._version()
        now = time.monotonic()
        if version == self._seen and now - self._asked_at < _DEATH_SECONDS:
            return False
        self._seen = version
        self._asked_at = now
        return self._record_of(self._folder).state.is_final

    def _version(self) -> object:
        try:
            found = (self._folder / STATE_FILE).stat()
        except OSError:
            # Reading the state will show the problem.
            return object()
        return found.st_ino, found.st_mtime_ns


def _log_files(logs: Path) -> list[Path]:
    try:
        found = [path for path in logs.iterdir() if path.suffix == ".log"]
    except FileNotFoundError:
        return []
    return sorted(found, key=_attempt_and_host)


def _attempt_and_host(log: Path) -> tuple[int, str]:
    number = log.stem.partition(".")[2]
    return int(number) if number.isdecimal() else 1, log.name


def modified(path: Path) -> float:
    """Return when a file was written last, in seconds since the epoch; 0 if it cannot be read."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


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


def last_line(path: Path) -> str:
    """Return the last line of a small log, or an empty string."""
    try:
        lines = read_regular(path).decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
