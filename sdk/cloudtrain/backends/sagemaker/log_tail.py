"""Following of a log: polls the job and its streams until the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cloudtrain.aws.retry import POLL_SECONDS, Backoff, OutagePolicy, OutageTolerance
from cloudtrain.backends.sagemaker.log_streams import LogStream, list_streams, seconds_between
from cloudtrain.errors import UnreachableError
from cloudtrain.runs.log_lines import LogFilter, LogLine

if TYPE_CHECKING:
    from types_boto3_logs import CloudWatchLogsClient

QUIET_SECONDS = 15.0
"""How long a stream must be without new lines after the job has ended: CloudWatch ingests lines seconds after they were
printed. SageMaker's SDK waits for one poll, 10 s (`logs_for_job`)."""

_STREAMS_SECONDS = 10.0
_CALLS_PER_SECOND = 4.0
"""Maximum rate of calls for the streams of one run. With 64 hosts that all print, each is read every 16 s."""

_REPLACED_STREAM_SECONDS = 300.0
"""Longest wait between reads of a stream that a newer one of the same host has replaced."""

_LARGE_PAGE_EVENTS = 1000
"""After a page of this size the next one is read at once; after a smaller one, in the next poll."""


@dataclass(frozen=True)
class JobSnapshot:
    """State of a followed job.

    Attributes:
        state: A value that changes with the job, for example its secondary status.
        has_ended: Whether the job has ended, so that no new lines are printed.
        ended_seconds_ago: Time since the end by AWS's clock; 0 if unknown.
    """

    state: str
    has_ended: bool
    ended_seconds_ago: float = 0.0


@dataclass
class _PollTimer:
    """When to poll something again, and when it changed last, in monotonic seconds.

    Attributes:
        backoff: Waits between polls.
        due: When to poll next.
        changed_at: When the last poll with something new took place.
        is_settled: Whether no more polls are needed.
    """

    backoff: Backoff
    due: float = 0.0
    changed_at: float = 0.0
    is_settled: bool = False


@dataclass
class LogTail:
    """The log of a run that is being followed.

    The job, the list of its streams and each stream have separate timers, so that none delays another.

    Args:
        client: boto3 client of CloudWatch Logs.
        job_names: Returns the names of the run's training jobs.
        only: Which lines.
        get_job: Returns the job's present state; may raise.
        on_trouble: Called with a message when an outage begins, and when it ends.
        scale: Factor of all waits.
    """

    client: CloudWatchLogsClient
    job_names: Callable[[], tuple[str, ...]]
    only: LogFilter
    get_job: Callable[[], JobSnapshot]
    on_trouble: Callable[[str], None] | None
    scale: float
    streams: dict[str, tuple[LogStream, _PollTimer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.job: JobSnapshot | None = None
        self.ended_at: float | None = None
        self.since: float | None = None
        self.has_since = False
        self.job_timer = _PollTimer(Backoff(POLL_SECONDS * self.scale))
        self.list_timer = _PollTimer(Backoff(_STREAMS_SECONDS * self.scale))
        policy = OutagePolicy(
            OutagePolicy.first_seconds * self.scale, OutagePolicy.longest_seconds * self.scale
        )
        self.outages = OutageTolerance(self.on_trouble, policy)

    def lines(self) -> Iterator[LogLine]:
        """Yield lines until the job has ended and its streams are quiet."""
        while True:
            if self.ended_at is None and self._is_due(self.job_timer):
                self._poll_job()
            if self._is_due(self.list_timer):
                self._list()
            for stream, timer in list(self.streams.values()):
                if self._is_due(timer):
                    yield from self._read(stream, timer)
            open_timers = [timer for timer in self._log_timers() if not timer.is_settled]
            if not open_timers:
                return
            if self.ended_at is None:
                open_timers.append(self.job_timer)
            time.sleep(max(0.0, min(timer.due for timer in open_timers) - time.monotonic()))

    def _is_due(self, timer: _PollTimer) -> bool:
        return not timer.is_settled and timer.due <= time.monotonic()

    def _log_timers(self) -> list[_PollTimer]:
        return [self.list_timer, *(timer for _, timer in self.streams.values())]

    def _poll_job(self) -> None:
        try:
            job = self.get_job()
        except UnreachableError as error:
            self.job_timer.due = time.monotonic() + self.outages.failed(error, "job")
            return
        self._record_success("job")
        changed = self.job is None or job.state != self.job.state
        self.job = job
        if changed:
            # A new attempt begins new streams.
            self.list_timer.due = 0.0
        if job.has_ended:
            # Poll everything at once, and quickly until it is quiet.
            self.ended_at = time.monotonic() - job.ended_seconds_ago
            for timer in self._log_timers():
                timer.due = 0.0
        self.job_timer.due = time.monotonic() + self.job_timer.backoff.next_seconds(changed=changed)

    def _record_success(self, what: str = "") -> None:
        """Record a successful call. The first one after an outage shortens the waits of the other polls."""
        if self.outages.succeeded(what):
            for timer in (self.job_timer, *self._log_timers()):
                timer.due = min(
                    timer.due, time.monotonic() + timer.backoff.next_seconds(changed=True)
                )

    def _list(self) -> None:
        asked = time.monotonic()
        try:
            found = list_streams(self.client, self.job_names())
        except UnreachableError as error:
            self.list_timer.due = time.monotonic() + self.outages.failed(error)
            return
        self._record_success()
        if not self.has_since and found.names:
            self.has_since = True
            self.since = self.only.begins(
                time.time() if found.listed_at is None else found.listed_at
            )
        wanted = [LogStream(name, self.since) for name in found.names]
        new = [s for s in wanted if s.name not in self.streams and self.only.host in (None, s.host)]
        for stream in new:
            self.streams[stream.name] = (stream, _PollTimer(Backoff(POLL_SECONDS * self.scale)))
        if new:
            self.list_timer.changed_at = time.monotonic() - seconds_between(
                found.listed_at, found.created_at
            )
            self._set_backoffs()
        self._schedule(self.list_timer, asked, has_changed=bool(new))

    def _set_backoffs(self) -> None:
        """Poll less often the more streams there are, and rarely for streams of earlier attempts."""
        newest = {stream.host: name for name, (stream, _) in sorted(self.streams.items())}
        for name, (stream, timer) in self.streams.items():
            timer.backoff.first_seconds = (
                max(POLL_SECONDS, len(newest) / _CALLS_PER_SECOND) * self.scale
            )
            if name != newest[stream.host]:
                timer.backoff.longest_seconds = _REPLACED_STREAM_SECONDS * self.scale

    def _read(self, stream: LogStream, timer: _PollTimer) -> Iterator[LogLine]:
        """Yield the new lines of a stream."""
        has_changed = False
        while True:
            asked = time.monotonic()
            try:
                events = stream.read_page(self.client)
            except UnreachableError as error:
                timer.due = time.monotonic() + self.outages.failed(error)
                return
            self._record_success()
            if events:
                has_changed = True
                timer.changed_at = time.monotonic() - stream.newest_event_age_seconds
            yield from filter(self.only.wants, (stream.line(event) for event in events))
            more = not events or len(events) >= _LARGE_PAGE_EVENTS or self.ended_at is not None
            if stream.is_at_end or not more:
                break
        self._schedule(timer, asked, has_changed=has_changed)

    def _schedule(self, timer: _PollTimer, asked: float, *, has_changed: bool) -> None:
        """Decide when to poll next, if at all, after a poll that was sent at a time."""
        now = time.monotonic()
        if self.ended_at is None:
            timer.due = now + timer.backoff.next_seconds(changed=has_changed)
            return
        quiet_at = max(self.ended_at, timer.changed_at) + QUIET_SECONDS * self.scale
        # Not when the response came: it may be older than a line that was written before.
        timer.is_settled = asked >= quiet_at
        # Poll with the usual waits until it must have been quiet, and once more then.
        timer.due = min(now + timer.backoff.next_seconds(changed=True), max(quiet_at, now))
