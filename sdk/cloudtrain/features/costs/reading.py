"""The costs of the runs and endpoints that a client lists, with what was lost and by what they are grouped."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cloudtrain.client.client import Client, client_of
from cloudtrain.client.observer import Observer
from cloudtrain.errors import CloudError, RunNotFoundError, UserError, did_you_mean
from cloudtrain.features.costs.cost_explorer import fetch_billed
from cloudtrain.features.costs.sums import Costs, LostWork, RunCost, measure_lost_work, sum_costs
from cloudtrain.job.job_fields import OWN_TAG_PREFIX
from cloudtrain.runs.billing import Billing
from cloudtrain.runs.history import read_events
from cloudtrain.runs.known_runs import job_name
from cloudtrain.runs.run import Run
from cloudtrain.runs.run_files import PLAN, read_fields
from cloudtrain.runs.run_filter import RunFilter
from cloudtrain.runs.status import State, Status
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import BACKENDS, choose_backends, facts_of
from cloudtrain.support.renamed import renamed_arguments

if TYPE_CHECKING:
    from cloudtrain.backends.base import Backend

_DELETED_ELSEWHERE = (
    "endpoints that were deleted otherwise than by `cloudtrain undeploy` on this machine"
)
_GROUPS = ("name", "user", "tag")
_KEY = "tag:"
_USER_TAG = "user"
_REQUESTS_AT_ONCE = 8


@renamed_arguments(backends="backend")
def costs(
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    by: str = "name",
    backend: str | Iterable[str] | None = None,
    billed: bool = False,
    settings: Settings | None = None,
    observer: Observer | None = None,
    client: Client | None = None,
) -> Costs:
    """Return what runs and endpoints have cost: billed seconds x price, spot savings, and what was lost.

    Args:
        since: Only runs submitted at this time or later, and hours of endpoints from then; needed with `billed`.
        until: Only runs submitted before this time, and hours of endpoints until then.
        by: What the sums are grouped by: `name` of the job, `user`, `tag` (all tags), or `tag:KEY`.
        backend: One or several; by default this machine and the account, as sandbox runs cost nothing.
        billed: Add Cost Explorer's figure. AWS bills each call.
        settings: The account; by default from environment and files.
        observer: Receives what is reported meanwhile, such as a backend that cannot be reached.
        client: The client whose runs are summed, in place of these.

    Raises:
        UserError: `by` is none of these, or `billed` has no `since`.
        CloudError: AWS refused or cannot be reached.
    """
    session = client_of(client, settings, observer).session
    named = choose_backends(backend)
    names = named
    if names is None:
        names = tuple(name for name, each in BACKENDS.items() if not each.is_simulated)
    wanted = RunFilter(since=since, until=until)
    found = session.list_runs(names, wanted, is_named=named is not None)
    backends = session.find_backends(names)
    return read_costs(found, backends, by, since=wanted.since, until=wanted.until, billed=billed)


def read_costs(
    found: Iterable[tuple[Backend, Status]],
    backends: Iterable[Backend],
    by: str,
    *,
    since: datetime | None,
    until: datetime | None,
    billed: bool,
) -> Costs:
    """Return the costs of runs and endpoints, by name, user or tags.

    Args:
        found: The runs with their backends, newest first.
        backends: The backends whose endpoints count.
        by: `name`, `user`, `tag` or `tag:KEY`.
        since: Start of the period that they were selected by.
        until: End of that period.
        billed: Add Cost Explorer's figure. AWS bills each call.

    Raises:
        UserError: `by` is none of these, or `billed` has no `since`.
        CloudError: AWS refused or cannot be reached.
    """
    if by not in _GROUPS and (not by.startswith(_KEY) or by == _KEY):
        raise UserError(
            f"costs cannot be grouped by {by!r}", f"{did_you_mean(by, _GROUPS)} (or tag:KEY)"
        )
    if billed and since is None:
        raise UserError(
            "Cost Explorer needs the start of the period", "give since, such as --since 30d"
        )
    # Each run is a description of its job.
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        runs = [*pool.map(lambda pair: _read_cost(pair[0], pair[1], by), found)]
    endpoints, missing = _read_endpoints(backends, by, since, until)
    known = [run for run in runs if run is not None] + endpoints
    costs = sum_costs(known, by, since=since, until=until, missing=missing)
    if not billed or since is None:
        return costs
    return dataclasses.replace(costs, billed=fetch_billed(since, until))


def _read_endpoints(
    backends: Iterable[Backend], by: str, since: datetime | None, until: datetime | None
) -> tuple[list[RunCost], list[str]]:
    """Return the costs of the endpoints of backends, newest first, and what they lack."""
    found: list[RunCost] = []
    missing: list[str] = []
    for backend in backends:
        try:
            for use in backend.endpoints(since, until):
                cost = RunCost(
                    run=f"{backend.name}:{use.run}",
                    state=use.state,
                    created=use.created,
                    billing=use.billing,
                    group=_group_of(Run(use.run, backend), by),
                    endpoint=use.name,
                )
                found.append(cost)
        except CloudError as error:
            hint = f" ({error.hint})" if error.hint else ""
            missing.append(f"endpoints: {error.message}{hint}")
    if found:
        missing.append(_DELETED_ELSEWHERE)
    return sorted(found, key=lambda cost: cost.created or datetime.now(UTC), reverse=True), missing


def _read_cost(backend: Backend, status: Status, by: str) -> RunCost | None:
    """Return the cost of a run; None if it does not exist any more."""
    run = Run(status.run, backend)
    try:
        billing = run.billing()
    except RunNotFoundError:
        return None
    has_failed = status.state is State.FAILED
    lost = LostWork()
    if has_failed or billing.restarts:
        lost = _read_lost(run, billing, status.ended)
    return RunCost(
        run=status.reference,
        state=str(status.state),
        created=status.created,
        billing=billing,
        has_failed=has_failed,
        lost=lost,
        group=_group_of(run, by),
        machine_seconds=_machine_seconds(status),
    )


def _machine_seconds(status: Status) -> float:
    """Return how long a run took that is not billed; 0 for others."""
    if facts_of(status.backend).uses_account or status.started is None:
        return 0.0
    now = datetime.now(UTC)
    if status.attempts:
        # Between two attempts, the machine is free.
        return sum(((each.ended or now) - each.started).total_seconds() for each in status.attempts)
    return max(0.0, ((status.ended or now) - status.started).total_seconds())


def _read_lost(run: Run, billing: Billing, ended: datetime | None) -> LostWork:
    """Return the work that a run has lost, by the events in its log. Without a log nothing is known to be saved."""
    if not billing.cost_usd:
        return LostWork()
    with contextlib.suppress(CloudError, UserError):
        end = None if ended is None else ended.timestamp()
        return measure_lost_work(read_events(run), end)
    return LostWork()


def _group_of(run: Run, by: str) -> str:
    """Return the job's name of a run, or by its plan.json the user or the tags; empty without."""
    if by == "name":
        return job_name(run.id)
    try:
        plan = read_fields(run.plan_document(), PLAN)
    except UserError:
        # Something else submitted the job, or deleted the file.
        return ""
    tags: dict[str, str] = {
        tag["Key"]: tag["Value"] for tag in plan.get("request", {}).get("Tags", ())
    }
    if by == "user":
        return str(tags.get(_USER_TAG) or plan.get("submitter", ""))
    if by != "tag":
        return tags.get(by.removeprefix(_KEY), "")
    own = (f"{key}={tags[key]}" for key in sorted(tags) if not key.startswith(OWN_TAG_PREFIX))
    return ", ".join(own)
