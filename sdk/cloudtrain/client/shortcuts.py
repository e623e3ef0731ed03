"""The verbs of `Client` as functions, on a default client. Their arguments are those of the methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.bundle import Contents
from cloudtrain.client.client import Client
from cloudtrain.client.observer import Observer
from cloudtrain.client.planning_inputs import Job
from cloudtrain.errors import UserError
from cloudtrain.job.spec import JobSpec, load_job
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.checkpoints import CheckpointFolder
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.runs.notebook_list import RunList
from cloudtrain.runs.run import Run, RunLike
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter
from cloudtrain.runs.status import Status
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import choose_backend
from cloudtrain.support.both_iterator import BothIterator
from cloudtrain.support.features import offer
from cloudtrain.support.renamed import renamed_arguments

if TYPE_CHECKING:
    from cloudtrain.bundle import ProgressCallback
    from cloudtrain.failure_rules import Explanation
    from cloudtrain.job.recover_causes import RecoverCause
    from cloudtrain.runs.comparison import Comparison
    from cloudtrain.runs.downloads import Download
    from cloudtrain.support.checks import Check


JobOrCode = Job | Callable[..., Any]
"""A job, the path of its file, or a function or Task class, whose job has further fields."""


def _read_code(job: JobOrCode, args: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> Job:
    """Return the job of a function or Task class; anything else as it is, without further fields.

    Raises:
        UserError: There are fields for a job that has its own.
    """
    if not callable(job):
        if args is not None or fields:
            name = "args" if args is not None else next(iter(fields))
            raise UserError(
                f"{name}: only a function or a Task class takes fields here",
                'change a job with its own method, for example job.with_values({"train.epochs": 2})',
            )
        return job
    found: JobSpec = offer("job_of")(job, args, **fields)
    return found


@renamed_arguments(path="job")
def validate(
    job: Job,
    overrides: str | Iterable[str] = (),
    *,
    instances: int | None = None,
    backend: str | None = None,
    local: bool = False,
    sandbox: bool = False,
    site: str | None = None,
    settings: Settings | None = None,
) -> JobSpec:
    """Read a job file with overrides, as the `--set` option takes them, and check it: see `Client.validate`."""
    loaded = job
    if isinstance(job, str | Path):
        loaded = load_job(job, overrides, instances=instances)
    elif overrides or instances is not None:
        raise UserError(
            "overrides and instances change a job file, not a JobSpec",
            'use its own method, for example job.with_values({"train.epochs": 2})',
        )
    return Client(settings).validate(
        loaded, backend=choose_backend(backend, local=local, sandbox=sandbox), site=site
    )


@renamed_arguments(spec="job")
def plan(
    job: JobOrCode,
    *,
    args: Mapping[str, Any] | None = None,
    backend: str | None = None,
    local: bool = False,
    sandbox: bool = False,
    site: str | None = None,
    settings: Settings | None = None,
    now: datetime | None = None,
    suffix: str | None = None,
    cuda_on_cpu: bool = False,
    observer: Observer | None = None,
    **fields: Any,
) -> Plan:
    """Return the plan of a job: see `Client.plan`; of a function or Task class: see `job_of`."""
    client = Client(settings, observer=observer)
    return client.plan(
        _read_code(job, args, fields),
        backend=choose_backend(backend, local=local, sandbox=sandbox),
        site=site,
        now=now,
        suffix=suffix,
        cuda_on_cpu=cuda_on_cpu,
    )


@renamed_arguments(spec="job")
def check(
    job: JobOrCode,
    *,
    args: Mapping[str, Any] | None = None,
    backend: str | None = None,
    sandbox: bool = False,
    site: str | None = None,
    settings: Settings | None = None,
    **fields: Any,
) -> tuple[Check, ...]:
    """Check that the account has everything that a submit needs: see `Client.check` and `job_of`."""
    return Client(settings).check(
        _read_code(job, args, fields),
        backend=choose_backend(backend, sandbox=sandbox),
        site=site,
    )


@renamed_arguments(spec="job")
def files(job: Job, *, observer: Observer | None = None) -> Contents:
    """Return the files of the bundle: see `Client.files`."""
    return Client(observer=observer).files(job)


@renamed_arguments(spec="job")
def submit(
    job: JobOrCode,
    *,
    args: Mapping[str, Any] | None = None,
    backend: str | None = None,
    local: bool = False,
    sandbox: bool = False,
    site: str | None = None,
    settings: Settings | None = None,
    skip_check: bool = False,
    new: bool = False,
    wait_for_capacity: float | None = None,
    install: bool = False,
    cuda_on_cpu: bool = False,
    recover: bool | None = None,
    observer: Observer | None = None,
    **fields: Any,
) -> Run:
    """Start a run and return it at once: see `Client.submit`; of a function or Task class: see `job_of`.

    cloudtrain.submit(MyTask, args={"layers": 4}, instances=2, train={"epochs": 3})
    """
    return Client(settings, observer=observer).submit(
        _read_code(job, args, fields),
        backend=choose_backend(backend, local=local, sandbox=sandbox),
        site=site,
        skip_check=skip_check,
        new=new,
        wait_for_capacity=wait_for_capacity,
        install=install,
        cuda_on_cpu=cuda_on_cpu,
        recover=recover,
    )


@renamed_arguments(reference="run")
def resume(
    run: RunLike,
    overrides: str | Iterable[str] = (),
    *,
    instances: int | None = None,
    from_step: int | None = None,
    settings: Settings | None = None,
    skip_check: bool = False,
    new: bool = False,
    observer: Observer | None = None,
) -> Run:
    """Start a new run from a checkpoint of one that has ended: see `Client.resume`."""
    return Client(settings, observer=observer).resume(
        run,
        overrides,
        instances=instances,
        from_step=from_step,
        skip_check=skip_check,
        new=new,
    )


def recover(
    run: RunLike,
    *,
    attempts: int | None = None,
    cost: float | str | None = None,
    time: float | str | None = None,
    on: Iterable[RecoverCause] | None = None,
    settings: Settings | None = None,
) -> Run:
    """Continue a run by itself after outside causes: see `Client.recover`."""
    return Client(settings).recover(run, attempts=attempts, cost=cost, time=time, on=on)


@renamed_arguments(references="runs")
def compare(runs: Iterable[RunLike], *, settings: Settings | None = None) -> Comparison:
    """Compare runs: see `Client.compare`."""
    return Client(settings).compare(runs)


@renamed_arguments(reference="run")
def get_run(run: RunLike, *, settings: Settings | None = None) -> Run:
    """Return a run: see `Client.get_run`."""
    return Client(settings).get_run(run)


@renamed_arguments(reference="run")
def status(run: RunLike, *, settings: Settings | None = None) -> Status:
    """Return the current status of a run: see `Client.status`."""
    return Client(settings).status(run)


@renamed_arguments(reference="run")
def logs(
    run: RunLike,
    *,
    follow: bool = False,
    only: LogFilter = ALL_LINES,
    on_trouble: Callable[[str], None] | None = None,
    settings: Settings | None = None,
) -> BothIterator[LogLine]:
    """Yield the log lines of a run's hosts: see `Client.logs`."""
    return Client(settings).logs(run, follow=follow, only=only, on_trouble=on_trouble)


def explain(run: RunLike, *, settings: Settings | None = None) -> Explanation:
    """Explain why a run has failed: see `Client.explain`."""
    return Client(settings).explain(run)


@renamed_arguments(reference="run")
def download(
    run: RunLike,
    to: str | Path | None = None,
    *,
    what: str | Iterable[str] = (),
    step: int | str | None = None,
    unpack: bool = False,
    force: bool = False,
    progress: ProgressCallback | None = None,
    settings: Settings | None = None,
) -> Download:
    """Copy the model, outputs and checkpoints of a run into a folder: see `Run.download`."""
    found = Client(settings).get_run(run)
    return found.download(to, what=what, step=step, unpack=unpack, force=force, progress=progress)


@renamed_arguments(reference="run")
def stop(run: RunLike, *, settings: Settings | None = None) -> Run:
    """Ask a run to end and return it: see `Client.stop`."""
    return Client(settings).stop(run)


@renamed_arguments(backends="backend")
def list_runs(
    wanted: RunFilter = ALL_RUNS,
    *,
    backend: str | Iterable[str] | None = None,
    settings: Settings | None = None,
    observer: Observer | None = None,
) -> RunList:
    """Return a list of runs, newest first, which a notebook shows as a table: see `Client.list_runs`.

    It reads all of them; the iterator `Client.list_runs` fetches pages as they are needed.
    """
    return RunList(Client(settings, observer=observer).list_runs(wanted, backend=backend))


@renamed_arguments(reference="run")
def checkpoint_folder(run: RunLike, *, settings: Settings | None = None) -> CheckpointFolder:
    """Return the folder of a run's checkpoints, or the folder at a uri or path: see `Client.checkpoint_folder`."""
    return Client(settings).checkpoint_folder(run)
