"""The runs that the dashboard shows, kept current by threads that read with the client."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudtrain.client.client import Client
from cloudtrain.client.observer import Observer
from cloudtrain.errors import CloudtrainError, SettingsError
from cloudtrain.features.dashboard.run_record import RunRecord, known_facts, ledger_part, run_row
from cloudtrain.runs.comparison import read_plan
from cloudtrain.runs.run import Run
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter
from cloudtrain.runs.status import Status
from cloudtrain.support.backend_facts import BACKENDS

LOCAL_SECONDS = 1.0
"""Pause between two lists of this machine's runs. Only those since the oldest active run are read again."""

BILLED_SECONDS = 20.0
"""Pause between two lists of an account's runs, whose calls AWS limits."""

_ALL_AGAIN_SECONDS = 60.0
"""Pause between two lists of all runs, which finds deleted ones."""

_IDLE_SECONDS = 5.0
"""Time after the last question of a page until lists are no longer read."""

_ABANDONED_SECONDS = 60.0
"""Time after the last question about a run until its log is no longer followed."""

_OVERLAP = timedelta(seconds=5)


class FollowedRun:
    """A run whose log a thread follows."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.record = RunRecord()
        self.plan = read_plan(run)
        self.status = run.status()
        self.error = ""
        self.asked_at = self._read_at = time.monotonic()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._follow, daemon=True, name=f"follow {run.id}")
        self._thread.start()

    @property
    def is_live(self) -> bool:
        """Whether the thread still reads."""
        return self._thread.is_alive()

    @property
    def is_usable(self) -> bool:
        """Whether its record is current: it is read to the end, or still being read."""
        return self.is_live or not (self.error or self._is_abandoned)

    def ledger(self) -> dict[str, Any]:
        """Return where its time and money went so far, as the page shows it."""
        facts = self._facts if self.status.state.is_final else {}
        return ledger_part(self.status, self.record, facts)

    @functools.cached_property
    def _facts(self) -> Mapping[str, str]:
        return known_facts(self.run)

    def wait_read(self, seconds: float) -> None:
        """Wait until an ended run's log is read, at most this long."""
        if self.status.state.is_final:
            self._thread.join(seconds)

    def refresh(self) -> None:
        """Read the status again, unless the run has ended or it was read just now."""
        pause = BILLED_SECONDS / 2 if self.run.is_billed else LOCAL_SECONDS
        if self.status.state.is_final or time.monotonic() - self._read_at < pause:
            return
        self._read_at = time.monotonic()
        try:
            self.status = self.run.status()
            self.error = ""
        except CloudtrainError as error:
            self.error = error.for_terminal()

    def _follow(self) -> None:
        try:
            for line in self.run.logs(follow=True):
                self.record.add(line)
                if time.monotonic() - self.asked_at > _ABANDONED_SECONDS:
                    self._is_abandoned = True
                    return
        except CloudtrainError as error:
            self.error = error.for_terminal()
        except Exception as error:  # noqa: BLE001 (the page shows it; else its curves would end silently)
            self.error = f"the log cannot be shown further: {type(error).__name__}: {error}"


class RunFeed(Observer):
    """Rows of all runs, and the runs that pages show. Nothing is read while no page asks.

    Attributes:
        client: The client that reads them.
        has_listed: Set when all backends have been listed once.
        unreachable: Why runs of a backend are missing, by its name.
    """

    def __init__(self) -> None:
        self.client = Client(observer=self)
        self.has_listed = threading.Event()
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[int, dict[str, Any]]] = {}
        self._statuses: dict[str, Status] = {}
        self._deleted: dict[str, int] = {}
        self._plans: dict[str, Mapping[str, Any]] = {}
        self.unreachable: dict[str, str] = {}
        self._versions = itertools.count(1)
        self._followed: dict[str, FollowedRun] = {}
        self._listed: dict[str, float] = {}
        self._listed_all: dict[str, float] = {}
        self._current = ""
        self._asked_at = 0.0
        self._wanted = threading.Event()
        threading.Thread(target=self._keep_current, daemon=True, name="list runs").start()

    def changes(self, version: int) -> tuple[int, list[dict[str, Any]], list[str]]:
        """Return the newest version, the rows that have changed since a version, and references of deleted runs."""
        self._asked_at = time.monotonic()
        self._wanted.set()
        with self._lock:
            rows = [row for changed, row in self._rows.values() if changed > version]
            deleted = [name for name, changed in self._deleted.items() if changed > version]
            newest = max(
                [version, *(changed for changed, _ in self._rows.values()), *self._deleted.values()]
            )
        return newest, rows, deleted

    def follow(self, reference: str) -> FollowedRun:
        """Return a run whose log is followed; its status is current.

        Raises:
            RunNotFoundError: There is no such run.
            CloudError: AWS refused or cannot be reached.
        """
        with self._lock:
            found = self._followed.get(reference)
        if found is None or not found.is_usable:
            new = FollowedRun(self.client.get_run(reference))
            with self._lock:
                # Another page may have asked at the same time.
                known = self._followed.get(reference)
                found = known if known is not None and known.is_usable else new
                self._followed[reference] = found
        found.asked_at = time.monotonic()
        found.refresh()
        return found

    def on_unreachable(self, error: CloudtrainError) -> None:
        """Keep why the runs of the backend that is being listed are missing."""
        self.unreachable[self._current] = f"{self._current}: {error.for_terminal()}"

    def _keep_current(self) -> None:
        while True:
            self._wanted.wait()
            if time.monotonic() - self._asked_at > _IDLE_SECONDS:
                self._wanted.clear()
                continue
            for name, facts in BACKENDS.items():
                pause = BILLED_SECONDS if facts.is_billed else LOCAL_SECONDS
                if time.monotonic() - self._listed.get(name, float("-inf")) >= pause:
                    self._list(name)
            self.has_listed.set()
            self._read_plans()
            time.sleep(LOCAL_SECONDS / 4)

    def _list(self, name: str) -> None:
        """Read the runs of a backend that may have changed, and now and then all of them."""
        began = time.monotonic()
        is_full = began - self._listed_all.get(name, float("-inf")) >= _ALL_AGAIN_SECONDS
        wanted = ALL_RUNS if is_full else RunFilter(since=self._oldest_active(name))
        self._current = name
        self.unreachable.pop(name, None)
        try:
            found = list(self.client.list_runs(wanted, backend=(name,)))
        except SettingsError:
            # This account is not in use.
            found = []
        except CloudtrainError as error:
            self.on_unreachable(error)
            found = []
        found = [status for status in found if status.backend == name]
        with self._lock:
            for status in found:
                self._store(status)
            if is_full and name not in self.unreachable:
                self._drop_missing(name, {status.reference for status in found})
        self._listed[name] = time.monotonic()
        if is_full:
            self._listed_all[name] = self._listed[name]

    def _oldest_active(self, name: str) -> datetime | None:
        """Return the time since which runs may have changed: that of the oldest active one, else after the newest."""
        with self._lock:
            rows = [
                row
                for _, row in self._rows.values()
                if row["backend"] == name and row["created"] is not None
            ]
        if not rows:
            return None
        active = [row["created"] for row in rows if not row["is_final"]]
        if active:
            return datetime.fromtimestamp(min(active), UTC) - _OVERLAP
        # An ended run is not read again: the log of a long one takes seconds.
        after_newest = datetime.fromtimestamp(max(row["created"] for row in rows), UTC) + timedelta(
            seconds=1
        )
        return min(after_newest, datetime.now(UTC) - _OVERLAP)

    def _store(self, status: Status) -> None:
        self._statuses[status.reference] = status
        row = run_row(status, self._plans.get(status.reference))
        old = self._rows.get(status.reference)
        if old is None or old[1] != row:
            self._rows[status.reference] = (next(self._versions), row)
            self._deleted.pop(status.reference, None)

    def _drop_missing(self, name: str, found: set[str]) -> None:
        gone = [
            key
            for key, (_, row) in self._rows.items()
            if row["backend"] == name and key not in found
        ]
        for key in gone:
            del self._rows[key], self._statuses[key]
            self._deleted[key] = next(self._versions)

    def _read_plans(self) -> None:
        """Read plans for names and tags, the newest runs first, as many as a quarter of a second allows."""
        deadline = time.monotonic() + LOCAL_SECONDS / 4
        with self._lock:
            missing = [
                (row["created"] or 0.0, key)
                for key, (_, row) in self._rows.items()
                if key not in self._plans
            ]
        for _, reference in sorted(missing, reverse=True):
            if time.monotonic() > deadline:
                return
            try:
                plan = read_plan(self.client.get_run(reference))
            except CloudtrainError:
                plan = {}
            kept = {}
            if plan:
                job = plan.get("job", {})
                kept["job"] = {name: job.get(name) for name in ("name", "tags")}
            with self._lock:
                self._plans[reference] = kept
                if reference in self._rows:
                    self._store(self._statuses[reference])
