"""The runs that the dashboard shows, kept current by threads that read with the client."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudtrain.client.client import Client
from cloudtrain.client.observer import Observer
from cloudtrain.errors import CloudtrainError, SettingsError
from cloudtrain.features.dashboard.run_record import RunRecord, known_facts, ledger_part, run_row
from cloudtrain.features.dashboard.sparklines import Sparklines
from cloudtrain.runs.comparison import read_plan
from cloudtrain.runs.run import Run
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter
from cloudtrain.runs.status import Status
from cloudtrain.support.backend_facts import BACKENDS
from cloudtrain.support.features import find_offer

LOCAL_SECONDS = 1.0
"""Pause between two lists of this machine's runs. Only those since the oldest active run are read again."""

BILLED_SECONDS = 20.0
"""Pause between two lists of an account's runs, whose calls AWS limits."""

_ALL_AGAIN_SECONDS = 60.0
"""Shortest pause between two lists of all runs, which finds deleted ones."""

_ALL_AGAIN_FACTOR = 100.0
"""The pause is at least this many times what the last such list took, so that very many runs cost 1 % of a core."""

_IDLE_SECONDS = 5.0
"""Time after the last question of a page until lists are no longer read."""

_ABANDONED_SECONDS = 60.0
"""Time after the last question about a run until its log is no longer followed."""

_READ_SECONDS = LOCAL_SECONDS / 4
"""Longest time for the plans, and for the logs, that are read between two lists."""

_OVERLAP = timedelta(seconds=5)

_AT_END_SECONDS = 0.015
"""Time for which a line is waited for at the end of a log; lines that are there come faster."""

_BATCH_SECONDS = 0.25
"""Time in which new lines of a run in progress gather, to be read together."""


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
            ready = time.monotonic()
            for line in self.run.logs(follow=True):
                is_at_end = time.monotonic() - ready > _AT_END_SECONDS
                self.record.add(line)
                if is_at_end:
                    # A page is sent one message a second; until then a new line a time would be read with much effort.
                    time.sleep(_BATCH_SECONDS)
                ready = time.monotonic()
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
        self._sparklines = Sparklines()
        self._ended_sweeps: dict[str, dict[str, Any]] = {}
        self.unreachable: dict[str, str] = {}
        self._versions = itertools.count(1)
        self._followed: dict[str, FollowedRun] = {}
        self._listed: dict[str, float] = {}
        self._next_all: dict[str, float] = {}
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

    def sweeps(self) -> list[dict[str, Any]]:
        """Return the newest sweeps of this machine as rows of the list. One that has ended is read once."""
        list_sweeps, summarize = find_offer("sweep_list"), find_offer("sweep_row")
        if list_sweeps is None or summarize is None:
            return []
        found = []
        for name in list_sweeps():
            try:
                row = self._ended_sweeps.get(name) or summarize(name)
            except CloudtrainError:
                # It was deleted meanwhile, or its account cannot be reached.
                continue
            if row["is_final"]:
                self._ended_sweeps[name] = row
            found.append(row)
        return found

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
            self._read_sparklines()
            time.sleep(LOCAL_SECONDS / 4)

    def _list(self, name: str) -> None:
        """Read the runs of a backend that may have changed, and now and then all of them."""
        began = time.monotonic()
        is_full = began >= self._next_all.get(name, float("-inf"))
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
        took = time.monotonic() - began
        if name not in self._next_all:
            # The first screen then has names, tags and sweeps from the start, and nothing moves later.
            self._read_plans_of(
                [status.reference for status in found], time.monotonic() + _READ_SECONDS
            )
        with self._lock:
            for status in found:
                self._store(status)
            if is_full and name not in self.unreachable:
                self._drop_missing(name, {status.reference for status in found})
        self._listed[name] = time.monotonic()
        if is_full:
            pause = max(_ALL_AGAIN_SECONDS, _ALL_AGAIN_FACTOR * took)
            self._next_all[name] = self._listed[name] + pause

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
        self._sparklines.note(status)
        curve = self._sparklines.curve(status.reference)
        row = run_row(status, self._plans.get(status.reference), curve)
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
            self._sparklines.forget(key)
            self._deleted[key] = next(self._versions)

    def _newest_without(self, is_known: Callable[[str], bool]) -> list[str]:
        """Return the references of the runs of which something is not known yet, the newest first."""
        with self._lock:
            missing = [
                (row["created"] or 0.0, key)
                for key, (_, row) in self._rows.items()
                if not is_known(key)
            ]
        return [key for _, key in sorted(missing, reverse=True)]

    def _read_plans(self) -> None:
        """Read plans for names and tags, the newest runs first, as many as a quarter of a second allows."""
        missing = self._newest_without(self._plans.__contains__)
        self._read_plans_of(missing, time.monotonic() + _READ_SECONDS)

    def _read_plans_of(self, references: Iterable[str], deadline: float) -> None:
        for reference in references:
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
            self._keep(reference, plan=kept)

    def _read_sparklines(self) -> None:
        """Read logs for sparklines, the newest runs first, as many as a quarter of a second allows."""
        deadline = time.monotonic() + _READ_SECONDS
        missing = self._newest_without(self._sparklines.is_complete)
        # A new run must not make the reading of a long log begin again.
        missing.sort(key=lambda each: each != self._sparklines.reading)
        for reference in missing:
            try:
                run = self.client.get_run(reference)
            except CloudtrainError:
                # It was deleted meanwhile, which the next list of all runs shows.
                continue
            if not self._sparklines.read(run, reference, deadline):
                return
            self._keep(reference)
            if time.monotonic() > deadline:
                return

    def _keep(self, reference: str, *, plan: Mapping[str, Any] | None = None) -> None:
        """Make the row of a run anew, after its plan or its sparkline was read."""
        with self._lock:
            if plan is not None:
                self._plans[reference] = plan
            if reference in self._rows:
                self._store(self._statuses[reference])
