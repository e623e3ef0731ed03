"""Logs of training jobs in CloudWatch: each line once, in the order of each host.

Streams are read by CloudWatch's tokens, not by times: clocks are adjusted, and several lines can have the same time. A
token advances only after a complete page; an incomplete or failed page is requested again with the same token. Each
host has its own stream. Each attempt after a spot interruption begins new streams, `<job>/algo-1-<stamp>`.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.retry import POLL_SECONDS
from cloudtrain.backends.sagemaker.log_streams import (
    LOG_GROUP,
    PAGE_FIELDS,
    LogStream,
    call_logs,
    list_streams,
)
from cloudtrain.backends.sagemaker.log_tail import JobSnapshot, LogTail
from cloudtrain.runs.log_end import add_log_end
from cloudtrain.runs.log_lines import LogFilter, LogLine
from cloudtrain.runs.progress import Progress, fold_events
from cloudtrain_runtime.contract import parse_event

if TYPE_CHECKING:
    from types_boto3_logs import CloudWatchLogsClient

_STATUS_EVENTS = 1000
_STATUS_PAGES = 5
_CACHE_FACTOR = 6.0
"""How long `progress` uses a list of streams, as a multiple of the shortest wait."""


class JobLogs:
    """The logs of an account's jobs.

    Args:
        client: boto3 client of CloudWatch Logs.
        jobs: Returns the known names of a run's training jobs; usually one, the run's own id.
        scale: Factor of all waits; 1 for AWS.
    """

    def __init__(
        self,
        client: CloudWatchLogsClient,
        *,
        jobs: Callable[[str], tuple[str, ...]] = lambda run: (run,),
        scale: float = 1.0,
    ) -> None:
        self._client = client
        self._jobs = jobs
        self._scale = scale
        self._stream_names: dict[str, tuple[float, list[str]]] = {}

    def read(
        self, run: str, only: LogFilter, get_job: Callable[[], JobSnapshot]
    ) -> Iterator[LogLine]:
        """Yield the present lines of the log, ordered by time. Memory holds one page of each stream.

        `get_job` returns the job's present state. It is called if there is no log, and may raise.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        jobs = self._jobs(run)
        found = list_streams(self._client, jobs)
        if not found.names:
            get_job()
            # get_job() may have found the names of the run's training jobs.
            if self._jobs(run) != jobs:
                found = list_streams(self._client, self._jobs(run))
        since = only.begins(time.time() if found.listed_at is None else found.listed_at)
        streams = [LogStream(name, since) for name in found.names]
        wanted = [stream for stream in streams if only.host in (None, stream.host)]
        lines = [self._lines(stream, only, until=found.listed_at) for stream in wanted]
        return heapq.merge(*lines, key=lambda line: line.time or 0.0)

    def _lines(
        self, stream: LogStream, only: LogFilter, *, until: float | None
    ) -> Iterator[LogLine]:
        """Yield the lines of a stream up to its end, or up to events ingested after `until`, by AWS's clock.

        Without this bound, the stream of a running host that prints faster than we read would never end.
        """
        while not stream.is_at_end:
            events = stream.read_page(self._client)
            yield from filter(only.wants, (stream.line(event) for event in events))
            ingested = events[-1].get("ingestionTime") if events else None
            if until is not None and ingested is not None and ingested / 1000 > until + 1:
                return

    def follow(
        self,
        run: str,
        only: LogFilter,
        get_job: Callable[[], JobSnapshot],
        on_trouble: Callable[[str], None] | None = None,
    ) -> Iterator[LogLine]:
        """Yield lines as they arrive, until the job has ended and its streams are quiet (see `LogTail`).

        Raises:
            CloudError: AWS refused a request, or could not be reached at first or for an hour.
        """
        tail = LogTail(
            client=self._client,
            job_names=lambda: self._jobs(run),
            only=only,
            get_job=get_job,
            on_trouble=on_trouble,
            scale=self._scale,
        )
        return tail.lines()

    def progress(self, run: str) -> Progress:
        """Return the progress that the newest lines of the first host report.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        streams = self._cached_streams(run)
        if not streams:
            return Progress()
        # A replacement instance begins a new stream, and each attempt of a queued run is a separate job.
        newest_job = streams[-1].partition("/")[0]
        first = next(
            stream for stream in streams if stream.startswith(f"{newest_job}/")
        ).rpartition("-")[0]
        newest = [stream for stream in streams if stream.rpartition("-")[0] == first][-1]
        messages = [event["message"] for event in _newest_events(self._client, newest)]
        parsed = map(parse_event, messages)
        progress = fold_events(event for event in parsed if event is not None)
        return add_log_end(progress, messages)

    def _cached_streams(self, run: str) -> list[str]:
        """Return the names of the streams. They are cached for some seconds, which saves calls of waiting commands."""
        listed_at, names = self._stream_names.get(run, (0.0, []))
        if not names or time.monotonic() - listed_at > POLL_SECONDS * _CACHE_FACTOR * self._scale:
            names = list(list_streams(self._client, self._jobs(run)).names)
            self._stream_names[run] = (time.monotonic(), names)
        return names


def _newest_events(client: CloudWatchLogsClient, stream: str) -> list[Mapping[str, Any]]:
    """Return the last events of a stream, in order. Pages can be short or empty, so several are read backwards."""
    events: list[Mapping[str, Any]] = []
    token: str | None = None
    for _ in range(_STATUS_PAGES):
        page = call_logs(
            client.get_log_events,
            *PAGE_FIELDS,
            logGroupName=LOG_GROUP,
            logStreamName=stream,
            startFromHead=False,
            limit=_STATUS_EVENTS - len(events),
            **({} if token is None else {"nextToken": token}),
        )
        if page is None:
            break
        events = [*page["events"], *events]
        if events or page["nextBackwardToken"] == token:
            break
        token = page["nextBackwardToken"]
    return events
