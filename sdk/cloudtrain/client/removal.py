"""Deletion of local runs: which may be deleted, and their folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.container.state_file import STATE_FILE
from cloudtrain.errors import UserError
from cloudtrain.job.job_fields import SWEEP_TAG, TRIAL_TAG
from cloudtrain.planning.plan_file import PLAN_FILE
from cloudtrain.runs.attempt_chain import CHAINS_FOLDER, find_chain_of_attempt, read_chain
from cloudtrain.runs.history import read_history
from cloudtrain.runs.known_runs import job_name
from cloudtrain.runs.main_metric import is_higher_better, main_metric
from cloudtrain.runs.run_files import PLAN, read_file
from cloudtrain.runs.status import Status
from cloudtrain.support.backend_facts import backends_without_account, facts_of
from cloudtrain.support.units import format_number
from cloudtrain_runtime.contract.file_uri import path_of

if TYPE_CHECKING:
    from cloudtrain.client.client import Client
    from cloudtrain.runs.run import Run

_NOTHING = "nothing is deleted"


@dataclass(frozen=True)
class Removal:
    """Local runs that are to be deleted.

    Attributes:
        runs: Their statuses, newest first.
        kept: Why other runs that were selected are kept, by run id.
    """

    runs: tuple[Status, ...]
    kept: Mapping[str, str]


@dataclass(frozen=True)
class BestTrial:
    """The best trial of a sweep.

    Attributes:
        run: Id of its run.
        reason: Why it is kept.
    """

    run: str
    reason: str


def folder_of(status: Status) -> Path:
    """Return the folder of a local run."""
    return Path(status.artifacts["folder"])


def run_folders(status: Status) -> tuple[Path, ...]:
    """Return the folder of a local run; of a chain the existing ones of all attempts, the newest last."""
    own = folder_of(status)
    record = _record_folder(status)
    if not record.is_dir():
        return (own,)
    try:
        attempts = read_chain(record).attempts
    except UserError:
        # It names no attempts, which are runs of their own without it.
        return (own,)
    folders = [own.with_name(each.run) for each in attempts]
    return tuple(each for each in folders if each.is_dir() or each.is_symlink())


def _record_folder(status: Status) -> Path:
    """Return where the record of a chain is, if the run is one."""
    return folder_of(status).parent.parent / CHAINS_FOLDER / status.run


def run_bytes(status: Status) -> int:
    """Return the size of all files of a local run."""
    return sum(map(folder_bytes, run_folders(status)))


def delete_run(status: Status) -> None:
    """Delete the folders of a local run; of a chain its attempts and then its record, so that a retry finds it."""
    record = _record_folder(status)
    for folder in run_folders(status):
        delete_folder(folder)
    if record.is_dir():
        shutil.rmtree(record)


def select_named(client: Client, names: Iterable[str]) -> Removal:
    """Return the removal of local runs that are given by name.

    Raises:
        RunNotFoundError: There is no such run.
        UserError: One of them may not be deleted; so none is.
    """
    chosen: dict[str, Status] = {}
    for name in names:
        run = client.get_run(name)
        _refuse_attempt(client, run)
        if facts_of(run.backend).uses_account:
            message = f"{run.reference} is no local run; {_NOTHING}"
            raise UserError(message, f"its files are in S3, see: cloudtrain status {run.reference}")
        status = run.status()
        if not status.state.is_final:
            message = f"{run.reference} is {status.state}; {_NOTHING}"
            raise UserError(message, f"stop it first: cloudtrain stop {run.reference}")
        if link := next((each for each in run_folders(status) if each.is_symlink()), None):
            raise UserError(
                f"{link} is a link; {_NOTHING}",
                "delete the link and its target by hand",
            )
        chosen[status.run] = status
    users = _users(chosen, client.list_runs(backend=backends_without_account()))
    for run_id, user in users.items():
        hint = f"to delete both: cloudtrain rm {run_id} {user}"
        raise UserError(
            f"{chosen[run_id].reference} has checkpoints that {chosen[run_id].backend}:{user} names; "
            f"{_NOTHING}",
            hint,
        )
    return Removal(tuple(chosen.values()), {})


def _refuse_attempt(client: Client, run: Run) -> None:
    chain = find_chain_of_attempt(run.id, client.session.context().homes)
    if chain is not None:
        raise UserError(
            f"{run.reference} is an attempt of {chain.id}, which is one run; {_NOTHING}",
            f"to delete all its attempts: cloudtrain rm {chain.id}",
        )


def select_older(
    client: Client,
    before: datetime,
    *,
    keep_best: bool,
    best_trials: Mapping[str, BestTrial] = MappingProxyType({}),
) -> Removal:
    """Return the removal of all local runs that ended before a moment.

    Runs whose checkpoints a kept run names are kept, too.

    Args:
        client: The client.
        before: The moment.
        keep_best: Keep the best of all ended runs of each job, by the best value of the metric that its job names
            (`train.early_stopping`, `train.export: best`), else by the last value of its main metric.
        best_trials: The best trial of each known sweep, by the sweep's id. It is kept as the best run of its sweep, and
            the sweep's other trials are compared with no other run.
    """
    runs = list(client.list_runs(backend=backends_without_account()))
    ended = {each.run: each for each in runs if each.state.is_final}
    moments = {run: each.ended or each.created for run, each in ended.items()}
    chosen = {
        run: each
        for run, each in ended.items()
        if (moment := moments[run]) is not None
        and moment < before
        # Those in a folder that a cluster shares are deleted by name only.
        and facts_of(each.backend).is_local
    }
    kept = {
        run: "its folder is a link"
        for run, each in chosen.items()
        if any(folder.is_symlink() for folder in run_folders(each))
    }
    kept |= {
        run: reason
        for run, reason in _best(client, ended.values(), best_trials).items()
        if keep_best and run in chosen
    }
    while found := {
        run: f"{user} names its checkpoints"
        for run, user in _users(_without(chosen, kept), runs).items()
    }:
        kept |= found
    return Removal(tuple(_without(chosen, kept).values()), kept)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder. Links are not followed."""
    return sum(
        os.lstat(os.path.join(at, name)).st_size  # noqa: PTH118
        for at, _, names in os.walk(folder)
        for name in names
    )


def delete_folder(folder: Path) -> None:
    """Delete a run's folder, without following links. Its state is deleted last, so that a retry finds the run."""
    with os.scandir(folder) as entries:
        parts = sorted(entries, key=lambda entry: entry.name == STATE_FILE)
    for part in parts:
        if part.is_dir(follow_symlinks=False):
            shutil.rmtree(part.path)
        else:
            Path(part.path).unlink()
    folder.rmdir()


def _without(runs: Mapping[str, Status], kept: Mapping[str, str]) -> dict[str, Status]:
    return {run: status for run, status in runs.items() if run not in kept}


def _best(
    client: Client, ended: Iterable[Status], best_trials: Mapping[str, BestTrial]
) -> dict[str, str]:
    """Return the best run of each job and sweep, with the reason to keep it. Runs without a value have no part."""
    by_job: dict[str, list[Status]] = {}
    for status in ended:
        if _sweep_of(status) not in best_trials:
            by_job.setdefault(job_name(status.run), []).append(status)
    found = {each.run: each.reason for each in best_trials.values()}
    for job, runs in by_job.items():
        metric, is_higher, values = _compared(client, runs)
        known = {run: value for run, value in values.items() if value is not None}
        if known:
            best = (max if is_higher else min)(known, key=known.__getitem__)
            found[best] = f"best {metric} of {job}: {format_number(known[best])}"
    return found


def _sweep_of(status: Status) -> str:
    """Return the sweep that a run is a trial of; empty for none."""
    tags = read_file(folder_of(status) / PLAN_FILE, PLAN).get("job", {}).get("tags") or {}
    return str(tags.get(SWEEP_TAG, "")) if TRIAL_TAG in tags else ""


def _compared(client: Client, runs: Sequence[Status]) -> tuple[str, bool, dict[str, float | None]]:
    """Return the metric that compares the runs of a job, whether higher is better, and its value by run."""
    rule = next((rule for run in runs if (rule := _rule_of_best(run)) is not None), None)
    if rule is not None:
        metric, is_higher = rule
        choose = max if is_higher else min
        of_run = {
            run.run: read_history(client.get_run(run)).metrics.get(metric, ()) for run in runs
        }
        values = {
            run: choose((each.value for each in all_values if each.value is not None), default=None)
            for run, all_values in of_run.items()
        }
        if any(value is not None for value in values.values()):
            return metric, is_higher, values
    main = (
        main_metric(
            name
            for run in runs
            for name, value in run.progress.metrics.items()
            if value is not None
        )
        or ""
    )
    return main, is_higher_better(main), {run.run: run.progress.metrics.get(main) for run in runs}


def _rule_of_best(status: Status) -> tuple[str, bool] | None:
    """Return the metric by which a run chooses its best weights, and whether higher is better; None without one."""
    train = read_file(folder_of(status) / PLAN_FILE, PLAN).get("config", {}).get("train") or {}
    rule = train.get("early_stopping")
    if isinstance(rule, Mapping) and isinstance(rule.get("metric"), str):
        return rule["metric"], rule.get("mode") == "max"
    return ("validation/loss", False) if train.get("export") == "best" else None


def _users(chosen: Mapping[str, Status], runs: Iterable[Status]) -> dict[str, str]:
    """Return the chosen runs whose checkpoints a run that is not chosen names, each with that run."""
    found: dict[str, str] = {}
    folders = {
        folder.resolve(): run for run, status in chosen.items() for folder in run_folders(status)
    }
    ids = {folder.name: run for folder, run in folders.items()}
    for status in runs:
        if status.run in chosen or "folder" not in status.artifacts:
            continue
        plans = [read_file(folder / PLAN_FILE, PLAN) for folder in run_folders(status)]
        for named in (each for plan in plans for each in _named_places(plan)):
            path = path_of(named) if named.startswith("file:") else Path(named)
            places = [path, *path.parents] if path.is_absolute() else []
            used = [folders[place] for place in places if place in folders]
            if (name := named.rpartition(":")[2]) in ids:
                used.append(ids[name])
            found |= dict.fromkeys(used, status.run)
    return found


def _named_places(plan: Mapping[str, Any]) -> list[str]:
    """Return every uri, path or run of checkpoints in a plan.json, and the folder of offline files of a tracker."""
    tracking = plan.get("config", {}).get("tracking")
    files = tracking.get("files") if isinstance(tracking, Mapping) else None
    sections = [plan, plan.get("config", {}), plan.get("job", {})]
    found = [section.get("checkpoint") for section in sections]
    checkpoints = [each for each in found if isinstance(each, Mapping)]
    places = [each.get(name) for each in checkpoints for name in ("uri", "resume")]
    return [each for each in (*places, files) if isinstance(each, str) and each]
