"""The verbs of `Client` as functions, on a default client. Their arguments are those of the methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from cloudtrain.bundle import Contents
from cloudtrain.client.client import Client
from cloudtrain.client.observer import Observer
from cloudtrain.client.planning_inputs import Job
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

if TYPE_CHECKING:
    from pathlib import Path

    from cloudtrain.bundle import ProgressCallback
    from cloudtrain.failure_rules import Explanation
    from cloudtrain.runs.comparison import Comparison
    from cloudtrain.runs.downloads import Download
    from cloudtrain.support.checks import Check


def validate(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    instances: int | None = None,
    local: bool = False,
    settings: Settings | None = None,
) -> JobSpec:
    """Read a job file with overrides, as the `--set` option takes them, and check it: see `Client.validate`."""
    job = load_job(path, overrides, instances=instances)
    return Client(settings).validate(job, backend=choose_backend(local=local))


def plan(
    spec: Job,
    *,
    local: bool = False,
    settings: Settings | None = None,
    now: datetime | None = None,
    suffix: str | None = None,
    cuda_on_cpu: bool = False,
    observer: Observer | None = None,
) -> Plan:
    """Return the plan of a job: see `Client.plan`."""
    client = Client(settings, observer=observer)
    return client.plan(
        spec, backend=choose_backend(local=local), now=now, suffix=suffix, cuda_on_cpu=cuda_on_cpu
    )


def check(spec: Job, *, settings: Settings | None = None) -> tuple[Check, ...]:
    """Check that the account has everything that a submit needs: see `Client.check`."""
    return Client(settings).check(spec)


def files(spec: Job, *, observer: Observer | None = None) -> Contents:
    """Return the files of the bundle: see `Client.files`."""
    return Client(observer=observer).files(spec)


def submit(
    spec: Job,
    *,
    local: bool = False,
    sandbox: bool = False,
    settings: Settings | None = None,
    skip_check: bool = False,
    new: bool = False,
    wait_for_capacity: float | None = None,
    install: bool = False,
    cuda_on_cpu: bool = False,
    observer: Observer | None = None,
) -> Run:
    """Start a run and return it at once: see `Client.submit`."""
    return Client(settings, observer=observer).submit(
        spec,
        backend=choose_backend(local=local, sandbox=sandbox),
        skip_check=skip_check,
        new=new,
        wait_for_capacity=wait_for_capacity,
        install=install,
        cuda_on_cpu=cuda_on_cpu,
    )


def resume(
    reference: RunLike,
    overrides: Iterable[str] = (),
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
        reference,
        overrides,
        instances=instances,
        from_step=from_step,
        skip_check=skip_check,
        new=new,
    )


def compare(references: Iterable[RunLike], *, settings: Settings | None = None) -> Comparison:
    """Compare runs: see `Client.compare`."""
    return Client(settings).compare(references)


def get_run(reference: RunLike, *, settings: Settings | None = None) -> Run:
    """Return a run: see `Client.get_run`."""
    return Client(settings).get_run(reference)


def status(reference: RunLike, *, settings: Settings | None = None) -> Status:
    """Return the current status of a run: see `Client.status`."""
    return Client(settings).status(reference)


def logs(
    reference: RunLike,
    *,
    follow: bool = False,
    only: LogFilter = ALL_LINES,
    on_trouble: Callable[[str], None] | None = None,
    settings: Settings | None = None,
) -> Iterator[LogLine]:
    """Yield the log lines of a run's hosts: see `Client.logs`."""
    return Client(settings).logs(reference, follow=follow, only=only, on_trouble=on_trouble)


def explain(run: RunLike, *, settings: Settings | None = None) -> Explanation:
    """Explain why a run has failed: see `Client.explain`."""
    return Client(settings).explain(run)


def download(
    reference: RunLike,
    to: str | Path | None = None,
    *,
    what: Iterable[str] = (),
    step: int | str | None = None,
    unpack: bool = False,
    force: bool = False,
    progress: ProgressCallback | None = None,
    settings: Settings | None = None,
) -> Download:
    """Copy the model, outputs and checkpoints of a run into a folder: see `Run.download`."""
    run = get_run(reference, settings=settings)
    return run.download(to, what=what, step=step, unpack=unpack, force=force, progress=progress)


def stop(reference: RunLike, *, settings: Settings | None = None) -> Run:
    """Ask a run to end and return it: see `Client.stop`."""
    return Client(settings).stop(reference)


def list_runs(
    wanted: RunFilter = ALL_RUNS,
    *,
    backends: Iterable[str] | None = None,
    settings: Settings | None = None,
    observer: Observer | None = None,
) -> RunList:
    """Return a list of runs, newest first, which a notebook shows as a table: see `Client.list_runs`.

    It reads all of them; the iterator `Client.list_runs` fetches pages as they are needed.
    """
    return RunList(Client(settings, observer=observer).list_runs(wanted, backends=backends))


def checkpoint_folder(reference: RunLike, *, settings: Settings | None = None) -> CheckpointFolder:
    """Return the folder of a run's checkpoints, or the folder at a uri or path: see `Client.checkpoint_folder`."""
    return Client(settings).checkpoint_folder(reference)
