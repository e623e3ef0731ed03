"""What a trial works with: its jobs, their starts and waits, and its answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from aws_day.account import FINAL, Account
from aws_day.times import Times
from aws_day.trials import RefusedError, Trial, write_job
from cloudtrain import Client, CloudtrainError, Plan, Run

_LOG_SECONDS = 120.0
"""Longest wait for a line in CloudWatch after the end of a job."""
_POOL_SECONDS = 120.0
_BILL_SECONDS = 60.0
"""Longest wait for what AWS may report later than a job's end."""


class InterruptedDayError(Exception):
    """The day ends: nothing more is started."""


class NoCapacityError(Exception):
    """A job has waited too long for its instances."""


@dataclass
class Bench:
    """One trial at work.

    Attributes:
        trial: The trial.
        account: The account.
        times: Waiting times.
        folder: Where its job folders are.
        home: Folder of the product's own files.
        is_ending: Set when the day ends early.
    """

    trial: Trial
    account: Account
    times: Times
    folder: Path
    home: Path
    is_ending: threading.Event
    answers: dict[str, tuple[Any, str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    plans: dict[str, Plan] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    has_refused: bool = False

    def __post_init__(self) -> None:
        self.client = Client(self.account.settings, home=self.home)
        for name, document in self.trial.jobs(self.times).items():
            self.paths[name] = write_job(self.folder / name, self.job_name(name), document)

    # ------------------------------------------------------------ before the start

    def make_plans(self) -> None:
        """Plan all jobs, offline."""
        for name, path in self.paths.items():
            self.plans[name] = self.client.plan(path)

    def plan(self, name: str) -> Plan:
        """Return the plan of a job."""
        return self.plans[name]

    def path(self, name: str) -> Path:
        """Return the job file of a job."""
        return self.paths[name]

    def job_name(self, name: str) -> str:
        """Return the name of a job in the account, with which the ids of its runs begin."""
        return f"{self.account.day}-{name}"

    def largest_bill(self) -> float | None:
        """Return the largest possible bill in USD, or None without a price.

        It is the estimate of the plan for each start: until the time limit, and all that AWS bills later.
        """
        total = 0.0
        for name, plan in self.plans.items():
            if plan.cost.max_usd is None:
                return None
            total += plan.cost.max_usd * self.trial.starts.get(name, 1)
        return total

    # ------------------------------------------------------------ starts

    def submit(self, name: str) -> tuple[Run, Plan]:
        """Submit a job, and return the run and its plan.

        Raises:
            RefusedError: AWS or the client refused it.
        """
        self._require_time()
        try:
            run = self.client.submit(self.paths[name], skip_check=True)
        except CloudtrainError as error:
            self.has_refused = True
            raise RefusedError(str(error)) from error
        self.started(run.id)
        return run, self.plans[name].rename(run.id)

    def resume(self, run: Run) -> Run:
        """Resume a run; return the new one."""
        self._require_time()
        again = self.client.resume(run, skip_check=True)
        self.started(again.id)
        return again

    def create(self, request: Mapping[str, Any]) -> None:
        """Send a request that differs from a plan's, which the product would not send."""
        self._require_time()
        members = {name: value for name, value in request.items() if value != []}
        try:
            self.account.client("sagemaker").create_training_job(**members)
        except ClientError as error:
            self.has_refused = True
            raise RefusedError(str(error)) from error
        self.started(request["TrainingJobName"])

    def started(self, name: str) -> None:
        """Record the name of a training job of this trial."""
        self.account.known.add(name)
        if name not in self.names:
            self.names.append(name)

    def stop(self, name: str) -> None:
        """Stop a job that the product has not started."""
        self.account.client("sagemaker").stop_training_job(TrainingJobName=name)

    def _require_time(self) -> None:
        if self.is_ending.is_set():
            raise InterruptedDayError

    # ------------------------------------------------------------ waits

    def wait(self, name: str) -> dict[str, Any]:
        """Wait until a job has ended; return its description.

        A job that waits too long for instances, or works longer than its limit and what AWS bills beyond it, is stopped.

        Raises:
            NoCapacityError: It got no instances.
        """
        while True:
            found = self.account.describe(name)
            if found["TrainingJobStatus"] in FINAL:
                return self._with_bill(name) or found
            now = datetime.now(UTC)
            since_created = (now - found["CreationTime"]).total_seconds()
            started = found.get("TrainingStartTime")
            if started is None and since_created > self.times.capacity:
                self.stop(name)
                raise NoCapacityError(f"no instances within {self.times.capacity:.0f} s")
            longest = found["StoppingCondition"]["MaxRuntimeInSeconds"] + self.times.over_limit
            if started is not None and (now - started).total_seconds() > longest:
                self.stop(name)
            self.pause(self.times.poll)

    def _with_bill(self, name: str) -> dict[str, Any] | None:
        """Return the description of an ended job when it has its bill; None if AWS reports none in time."""

        def look() -> dict[str, Any] | None:
            found = self.account.describe(name)
            has_bill = "BillableTimeInSeconds" in found or "TrainingStartTime" not in found
            return found if has_bill else None

        found: dict[str, Any] | None = self._until(look, _BILL_SECONDS)
        return found

    def final_metrics(self, name: str) -> list[dict[str, Any]]:
        """Return FinalMetricDataList, when it is there or the wait is over."""

        def look() -> list[dict[str, Any]] | None:
            return self.account.describe(name).get("FinalMetricDataList")

        return self._until(look, _BILL_SECONDS) or []

    def wait_for_event(self, name: str, kind: str) -> None:
        """Wait until a job has printed an event of a kind, or has ended."""
        while True:
            if any(each["kind"] == kind for each in self.account.events(name)):
                return
            found = self.account.describe(name)
            if found["TrainingJobStatus"] in FINAL:
                raise RuntimeError(f"the job has ended without printing {kind!r}")
            since_created = (datetime.now(UTC) - found["CreationTime"]).total_seconds()
            if since_created > self.times.capacity + self.times.runtime:
                raise NoCapacityError(f"no line of the job within {since_created:.0f} s")
            self.pause(self.times.poll)

    def events(self, name: str, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """Return what an ended job has printed, when CloudWatch has that many events of a kind or the wait is over."""

        def look() -> list[dict[str, Any]] | None:
            found = self.account.events(name)
            is_complete = sum(each["kind"] == kind for each in found) >= count
            return found if is_complete else None

        return self._until(look, _LOG_SECONDS) or self.account.events(name)

    def pool_status(self, name: str, wanted: str) -> str:
        """Return the status of a job's warm pool, when it is the wanted one or the wait is over."""

        def look() -> str | None:
            pool = self.account.describe(name).get("WarmPoolStatus", {})
            return wanted if pool.get("Status") == wanted else None

        found = self._until(look, _POOL_SECONDS)
        return found or str(self.account.describe(name).get("WarmPoolStatus", {}).get("Status"))

    def _until(self, look: Callable[[], Any], seconds: float) -> Any:
        """Return what a function finds, or None after some seconds of AWS, or of the sandbox's quicker times."""
        until = time.monotonic() + min(seconds, self.times.end)
        while (found := look()) is None and time.monotonic() < until:
            self.pause(self.times.poll)
        return found

    def pause(self, seconds: float) -> None:
        """Wait, unless the day ends meanwhile."""
        if self.is_ending.wait(seconds):
            raise InterruptedDayError

    # ------------------------------------------------------------ observations

    def checkpoint(self, name: str, file: str) -> Any:
        """Return the content of a JSON file among the checkpoints of a run; None without one."""
        uri = self.account.describe(name)["CheckpointConfig"]["S3Uri"].rstrip("/")
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        try:
            body = self.account.client("s3").get_object(Bucket=bucket, Key=f"{key}/{file}")["Body"]
        except ClientError:
            return None
        return json.loads(body.read())

    def answer(self, key: str, observed: Any, note: str = "") -> None:
        """Record an observation."""
        self.answers[key] = (observed, note)

    def note(self, found: Mapping[str, Any], *names: str) -> None:
        """Record facts that no assumption is about."""
        self.facts |= {name: found[name] for name in names}

    def bills(self) -> list[dict[str, Any]]:
        """Return the bill of each job that has started, with its estimate."""
        # A start whose response was lost has a job, too.
        own = [self.job_name(each) for each in self.plans]
        for each in self.account.jobs():
            if any(each["TrainingJobName"].startswith(name) for name in own):
                self.started(each["TrainingJobName"])
        found = []
        for name in self.names:
            try:
                found.append(self._bill(name, self.account.describe(name)))
            except (ClientError, BotoCoreError) as error:
                found.append({"job": name, "usd": None, "reason": str(error)})
        return found

    def _bill(self, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
        own = [each for each in self.plans if name.startswith(self.job_name(each))]
        plan = self.plans[own[0]]
        price = plan.cost.usd_per_hour or 0.0
        has_ended = job["TrainingJobStatus"] in FINAL
        # A job that never got instances has no times, and no bill. That of another may be late.
        nothing = None if "TrainingStartTime" in job else 0
        billable = job.get("BillableTimeInSeconds", nothing) if has_ended else None
        pool = job.get("WarmPoolStatus", {})
        kept = pool.get("ResourceRetainedBillableTimeInSeconds", 0)
        is_open = pool.get("Status") in ("Available", "InUse")
        usd = None if billable is None or is_open else price * (billable + kept) / 3600
        return {
            "job": name,
            "status": job["TrainingJobStatus"],
            "secondary": [
                {"status": each["Status"], "seconds": _seconds(each)}
                for each in job["SecondaryStatusTransitions"]
            ],
            "training_seconds": job.get("TrainingTimeInSeconds"),
            "billable_seconds": billable,
            "kept_seconds": kept,
            "usd": usd,
            "estimate_usd": plan.cost.max_usd,
        }


def _seconds(transition: Mapping[str, Any]) -> float | None:
    if "EndTime" not in transition:
        return None
    return round((transition["EndTime"] - transition["StartTime"]).total_seconds(), 1)
