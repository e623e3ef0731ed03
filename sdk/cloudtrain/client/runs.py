"""Verbs about runs: find, list, show, explain and stop them, and read their checkpoints."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.client.account import find_settings
from cloudtrain.client.backend_lookup import find_backend, local_backend, sagemaker_backend, sandbox_backend
from cloudtrain.client.resume_checks import storage_environ
from cloudtrain.client.sandbox import find_sandbox
from cloudtrain.errors import EXIT_RUN_FAILED, CloudError, CloudtrainError, UntrustedSettingsError
from cloudtrain.planning.plan import SAGEMAKER
from cloudtrain.runs.checkpoints import CheckpointFolder
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.runs.previous_run import checkpoints_of
from cloudtrain.runs.run import Run
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter, submission_time
from cloudtrain.runs.status import Status
from cloudtrain.settings.settings import Settings
from cloudtrain.support.run_id import is_run_id

if TYPE_CHECKING:
    from cloudtrain.backends.base import Backend
    from cloudtrain.failure_rules import Explanation


def get_run(reference: str, *, settings: Settings | None = None) -> Run:
    """Return a run from `<backend>:<run id>` or a bare run id.

    Raises:
        RunNotFoundError: No backend at hand has this run.
    """
    backend, run = find_backend(reference, settings)
    return Run(run, backend)


def status(reference: str, *, settings: Settings | None = None) -> Status:
    """Return the current status of a run.

    Raises:
        RunNotFoundError: There is no such run.
    """
    return get_run(reference, settings=settings).status()


def logs(
    reference: str,
    *,
    follow: bool = False,
    only: LogFilter = ALL_LINES,
    on_trouble: Callable[[str], None] | None = None,
    settings: Settings | None = None,
) -> Iterator[LogLine]:
    """Yield the log lines of a run's hosts that match a filter; with `follow` until the run has ended.

    Raises:
        RunNotFoundError: There is no such run.
    """
    return get_run(reference, settings=settings).logs(follow=follow, only=only, on_trouble=on_trouble)


def explain(run: str | Run, *, settings: Settings | None = None) -> Explanation:
    """Explain why a run has failed: the first primary error of all ranks, its class, and what to do.

    Args:
        run: The run, or its reference.
        settings: The account; by default from environment and files.

    Raises:
        RunNotFoundError: There is no such run.
        CloudError: AWS refused or cannot be reached.
    """
    from cloudtrain.failure_rules import explain_run

    handle = run if isinstance(run, Run) else get_run(run, settings=settings)
    found = handle.status()
    # The log of a run that has succeeded or was stopped is not needed.
    lines = handle.logs() if found.exit_code in (None, EXIT_RUN_FAILED) else ()
    return explain_run(found, lines, handle.facts())


def stop(reference: str, *, settings: Settings | None = None) -> Run:
    """Ask a run to end and return it; `run.wait()` waits for the end.

    Raises:
        RunNotFoundError: There is no such run.
    """
    run = get_run(reference, settings=settings)
    run.stop()
    return run


def list_runs(
    wanted: RunFilter = ALL_RUNS,
    *,
    local: bool = True,
    sagemaker: bool | None = None,
    settings: Settings | None = None,
    on_unreachable: Callable[[CloudtrainError], None] | None = None,
) -> Iterator[Status]:
    """Yield runs, newest first. Pages are fetched lazily.

    Args:
        wanted: Which runs; by default all.
        local: Whether to list this machine's runs, and those of its sandbox while that runs.
        sagemaker: Whether to list the account's; by default when the settings are complete.
        settings: The account; by default from environment and files.
        on_unreachable: Called when the account's runs cannot be listed; by default the error is raised.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    sources: list[Iterator[Status]] = []
    if local:
        sources.append(local_backend().list(wanted))
        if (found := find_sandbox()) is not None:
            sources.append(sandbox_backend(found, found.settings(Settings())).list(wanted))
    settings = settings or find_settings()
    if sagemaker or (sagemaker is None and not settings.missing):
        try:
            sources.append(_list_while_reachable(sagemaker_backend(settings), wanted, on_unreachable))
        except UntrustedSettingsError as error:
            if on_unreachable is None:
                raise
            on_unreachable(error)
    yield from heapq.merge(*sources, key=submission_time, reverse=True)


def checkpoint_folder(reference: str, *, settings: Settings | None = None) -> CheckpointFolder:
    """Return the folder of a run's checkpoints, or the folder at a uri or path.

    Args:
        reference: A run, `s3://bucket/prefix`, `file:///...` or a path that contains a slash.
        settings: The account; by default from environment and files.

    Raises:
        RunNotFoundError: There is no such run.
        CloudError: AWS refused or cannot be reached.
    """
    if "/" in reference or (not is_run_id(reference) and Path(reference).is_dir()):
        return CheckpointFolder(reference, environ=storage_environ(SAGEMAKER, settings))
    backend, run = find_backend(reference, settings)
    return CheckpointFolder(
        checkpoints_of(backend.plan_of(run), run).checkpoints, run, storage_environ(backend.name, settings)
    )


def _list_while_reachable(
    backend: Backend, wanted: RunFilter, on_unreachable: Callable[[CloudtrainError], None] | None
) -> Iterator[Status]:
    try:
        yield from backend.list(wanted)
    except CloudError as error:
        if on_unreachable is None:
            raise
        on_unreachable(error)
