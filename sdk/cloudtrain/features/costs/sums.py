"""What runs and endpoints have cost: pure sums of billed seconds x price, spot savings, and money that was lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypeVar

from cloudtrain.features.costs.cost_explorer import Billed
from cloudtrain.runs.billing import Billing
from cloudtrain.support.backend_facts import facts_of, place_name
from cloudtrain.support.notebook.summary import Row, Summary, count
from cloudtrain.support.units import format_duration, format_usd
from cloudtrain_runtime.contract.events import Event

_HOUR = 3600
_CENTS = 2
_Key = TypeVar("_Key")


@dataclass(frozen=True)
class LostWork:
    """Seconds of a run whose work was lost.

    Attributes:
        repeated: Work after the checkpoint that a restart continued from, which was done again.
        unsaved: Work of the last attempt after its last checkpoint; None if the run has saved none.
    """

    repeated: float = 0.0
    unsaved: float | None = None


def measure_lost_work(events: Iterable[Event], ended: float | None) -> LostWork:
    """Return the work that a run has lost, by its events in their order.

    Args:
        events: Events from `parse_event`.
        ended: When the run ended, in seconds since the epoch; by default the time of its last event.
    """
    saved: dict[int, float] = {}
    began: float | None = None
    last: float | None = None
    repeated = 0.0
    for event in events:
        kind = event["event"]
        time = event.get("time")
        if time is None:
            continue
        if kind == "started":
            if began is not None and last is not None:
                # The attempt before did this since the checkpoint that the new one resumes from.
                kept_until = max(began, saved.get(event.get("step", 0), began))
                repeated += max(0.0, last - kept_until)
            began = time
        elif kind == "checkpoint":
            saved[event["step"]] = time
        last = time
    end = last if ended is None else ended
    newest = max(saved.values(), default=None)
    unsaved = None
    if newest is not None and end is not None:
        unsaved = max(0.0, end - newest)
    return LostWork(repeated, unsaved)


@dataclass(frozen=True)
class RunCost:
    """The cost of one run, or of an endpoint that serves its model.

    Attributes:
        run: Reference, such as `sagemaker:digits-261120-101500-1a2b3c`.
        state: State of the run, or status of the endpoint.
        created: When it was submitted, or the endpoint was created.
        billing: What AWS bills.
        has_failed: Whether it ended by a failure.
        lost: Work that it lost.
        group: What costs are grouped by; empty if the run has no such value.
        endpoint: Name of the endpoint; empty for a run.
        machine_seconds: How long a run with this machine's own Python took; 0 for others.
    """

    run: str
    state: str
    created: datetime | None
    billing: Billing
    has_failed: bool = False
    lost: LostWork = LostWork()
    group: str = ""
    endpoint: str = ""
    machine_seconds: float = 0.0

    @property
    def backend(self) -> str:
        """Name of its backend."""
        return self.run.partition(":")[0]

    @property
    def is_free(self) -> bool:
        """Whether it is a run on this machine, or on a cluster of one's own without a price."""
        return not facts_of(self.backend).uses_account and not self.billing.usd_per_hour

    @property
    def is_serverless(self) -> bool:
        """Whether it is an endpoint without instances, whose requests AWS bills."""
        return bool(self.endpoint) and not self.billing.instance_type

    @property
    def interrupted_usd(self) -> float:
        """Cost of the work that was done again after a restart."""
        return self._price(self.lost.repeated)

    @property
    def failed_usd(self) -> float:
        """For a failed run, the cost of what its checkpoints do not hold: all of it without a checkpoint."""
        if not self.has_failed:
            return 0.0
        own = (self.billing.cost_usd or 0.0) - self.interrupted_usd
        if self.lost.unsaved is None:
            return own
        return min(own, self._price(self.lost.unsaved))

    def _price(self, seconds: float) -> float:
        """Return the price of seconds on the instances, with the run's spot discount."""
        total = self.billing.training_seconds or self.billing.billable_seconds
        cost = self.billing.cost_usd or 0.0
        if not total:
            return 0.0
        return min(cost, cost * seconds / total)

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `costs --json`."""
        billing = self.billing
        cost = billing.cost_usd
        entry = {
            "run": self.run,
            "group": self.group,
            "state": self.state,
            "created": self.created.isoformat() if self.created else None,
            "instance_type": billing.instance_type or None,
            "instances": billing.instances,
            "billable_seconds": billing.billable_seconds,
            "usd_per_hour": billing.usd_per_hour,
            "cost_usd": None if cost is None else round(cost, _CENTS),
        }
        if self.endpoint:
            return {"endpoint": self.endpoint, **entry}
        return {
            **entry,
            "spot": billing.is_spot,
            "saved_usd": round(billing.saved_usd, _CENTS),
            "interrupted_usd": round(self.interrupted_usd, _CENTS),
            "failed_usd": round(self.failed_usd, _CENTS),
        }


@dataclass(frozen=True)
class CostGroup:
    """The sum of several runs and endpoints.

    Attributes:
        name: Job, user or tags of the runs; empty for runs without such a value.
        runs: Number of runs.
        instance_hours: Billed hours x instances, also where the price is unknown.
        cost_usd: Cost of the runs and endpoints whose price is known.
        saved_usd: Spot savings.
        interrupted_usd: Cost of work that was done again after a restart.
        failed_usd: Cost of work that failed runs have not saved.
        unpriced: Number of runs and endpoints whose price is unknown; `cost_usd` lacks them.
        endpoints: Number of endpoints.
    """

    name: str
    runs: int
    instance_hours: float
    cost_usd: float
    saved_usd: float
    interrupted_usd: float
    failed_usd: float
    unpriced: int
    endpoints: int

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `costs --json`, which has the names of the columns of `--csv`."""
        numbers = asdict(self)
        return {
            "group": numbers.pop("name"),
            **{name: round(value, _CENTS) for name, value in numbers.items()},
        }


@dataclass(frozen=True)
class UnknownPrice:
    """An instance type without a known price, and the runs and endpoints that used it.

    Attributes:
        instance_type: Instance type.
        region: Region.
        runs: Number of runs.
        instance_hours: Their billed hours x instances.
        endpoints: Number of endpoints.
    """

    instance_type: str
    region: str
    runs: int
    instance_hours: float
    endpoints: int = 0

    def __str__(self) -> str:
        counts = ((self.runs, "run"), (self.endpoints, "endpoint"))
        parts = [count(number, noun) for number, noun in counts if number]
        place = self.instance_type
        if self.region:
            place = f"{place} in {self.region}"
        return f"{place}: {', '.join(parts)}, {self.instance_hours:,.1f} instance hours"


@dataclass(frozen=True)
class Costs:
    """The costs of runs and endpoints.

    Attributes:
        since: Start of the period: runs by the time of the submit, endpoints by their hours; None for all.
        until: End of the period; None for now.
        by: What the groups are: `name`, `user`, `tag` or `tag:KEY`.
        runs: The runs, newest first.
        groups: The sums, the highest cost first.
        total: The sum of all runs and endpoints.
        unknown_prices: Instance types without a known price.
        endpoints: The endpoints, newest first.
        missing: What the sums lack besides, one sentence each.
        billed: What Cost Explorer reports, or None.
    """

    since: datetime | None
    until: datetime | None
    by: str
    runs: tuple[RunCost, ...]
    groups: tuple[CostGroup, ...]
    total: CostGroup
    unknown_prices: tuple[UnknownPrice, ...]
    endpoints: tuple[RunCost, ...] = ()
    missing: tuple[str, ...] = ()
    billed: Billed | None = None

    def __repr__(self) -> str:
        return _summarize(self).to_text()

    def _repr_html_(self) -> str:
        return _summarize(self).to_html()

    def without_free_runs(self) -> Costs:
        """Return the costs without the runs that cost nothing."""
        known = [each for each in (*self.runs, *self.endpoints) if not each.is_free]
        return sum_costs(known, self.by)

    def describe_free_runs(self) -> str:
        """Return how many runs cost nothing, and how long they took; empty without one."""
        free = [each for each in self.runs if each.is_free]
        if not free:
            return ""
        backends = dict.fromkeys(each.backend for each in free)
        texts = [
            _describe_free(backend, [each for each in free if each.backend == backend])
            for backend in backends
        ]
        return f"{'; '.join(texts)}: nothing was billed"

    @property
    def is_simulated(self) -> bool:
        """Whether the sums are what the account would bill for the sandbox's runs."""
        known = [each for each in (*self.runs, *self.endpoints) if not each.is_free]
        return bool(known) and all(facts_of(each.backend).is_simulated for each in known)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `costs --json` prints."""
        return {
            "since": self.since.isoformat() if self.since else None,
            "until": self.until.isoformat() if self.until else None,
            "by": self.by,
            "total": self.total.to_json(),
            "groups": [group.to_json() for group in self.groups],
            "unknown_prices": [
                {name: value for name, value in asdict(each).items() if name != "instance_hours"}
                for each in self.unknown_prices
            ],
            "missing": list(self.missing),
            "runs": [run.to_json() for run in self.runs],
            "endpoints": [endpoint.to_json() for endpoint in self.endpoints],
            "billed": None if self.billed is None else self.billed.to_json(),
        }


def sum_costs(
    costs: Iterable[RunCost],
    by: str = "name",
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    missing: Iterable[str] = (),
) -> Costs:
    """Return the sums of runs and endpoints by group and in total.

    Args:
        costs: The runs and endpoints, newest first.
        by: What their `group` is.
        since: Start of the period that they were selected by.
        until: End of that period.
        missing: What they lack, one sentence each.
    """
    counted = tuple(costs)
    groups = [_sum(name, members) for name, members in _by(counted, lambda run: run.group).items()]
    unpriced = _by(
        (run for run in counted if run.billing.cost_usd is None and not run.is_serverless),
        lambda run: (run.billing.instance_type, run.billing.region),
    )
    serverless = (
        f"{run.endpoint} is serverless: AWS bills its requests"
        for run in counted
        if run.is_serverless
    )
    return Costs(
        since=since,
        until=until,
        by=by,
        runs=tuple(run for run in counted if not run.endpoint),
        groups=tuple(sorted(groups, key=lambda group: (-group.cost_usd, group.name))),
        total=_sum("total", counted),
        unknown_prices=tuple(_unknown_price(members) for members in unpriced.values()),
        endpoints=tuple(run for run in counted if run.endpoint),
        missing=(*serverless, *missing),
    )


def _unknown_price(members: Sequence[RunCost]) -> UnknownPrice:
    found = _sum("", members)
    billing = members[0].billing
    return UnknownPrice(
        instance_type=billing.instance_type,
        region=billing.region,
        runs=found.runs,
        instance_hours=found.instance_hours,
        endpoints=found.endpoints,
    )


def _by(runs: Iterable[RunCost], key: Callable[[RunCost], _Key]) -> dict[_Key, list[RunCost]]:
    found: dict[_Key, list[RunCost]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return found


def _sum(name: str, runs: Sequence[RunCost]) -> CostGroup:
    costs = [run.billing.cost_usd for run in runs]
    seconds = sum(
        (run.billing.billable_seconds + run.billing.warm_pool_seconds) * run.billing.instances
        for run in runs
    )
    endpoints = sum(bool(run.endpoint) for run in runs)
    return CostGroup(
        name=name,
        runs=len(runs) - endpoints,
        instance_hours=seconds / _HOUR,
        cost_usd=sum(cost for cost in costs if cost is not None),
        saved_usd=sum(run.billing.saved_usd for run in runs),
        interrupted_usd=sum(run.interrupted_usd for run in runs),
        failed_usd=sum(run.failed_usd for run in runs),
        unpriced=costs.count(None),
        endpoints=endpoints,
    )


def _describe_free(backend: str, runs: Sequence[RunCost]) -> str:
    """Return how long runs took, and for how many hours they had nodes of a cluster."""
    took = format_duration(sum(each.machine_seconds for each in runs))
    text = f"{count(len(runs), f'{backend} run')}, {took} {place_name(backend)}"
    hours = _sum("", runs).instance_hours
    return f"{text} ({hours:,.1f} node hours)" if hours else text


def _summarize(costs: Costs) -> Summary:
    """Return a summary of costs: the total, and each group."""
    total = costs.total
    rows: list[Row] = [
        ("total", f"{format_usd(total.cost_usd)} for {total.instance_hours:,.1f} instance hours")
    ]
    rows += [("without a price", str(each)) for each in costs.unknown_prices]
    rows.append(("saved by spot", f"{format_usd(total.saved_usd)}"))
    rows.append(("lost", f"{format_usd(total.interrupted_usd + total.failed_usd)}"))
    rows += [
        (group.name or "(none)", f"{format_usd(group.cost_usd)}, {count(group.runs, 'run')}")
        for group in costs.without_free_runs().groups
    ]
    if free := costs.describe_free_runs():
        rows.append(("not billed", free))
    return Summary(f"Costs of {count(total.runs, 'run')} by {costs.by}", rows)
