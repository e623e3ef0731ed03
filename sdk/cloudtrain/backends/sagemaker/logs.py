"""A training job's log in CloudWatch: each line once, in each host's order, whatever AWS answers.

A stream is read by CloudWatch's own tokens, never by times: clocks step, and several lines have the same time. A token
moves when a page has arrived whole; what was cut, torn or refused is asked for again with the same token. Each host has
a stream of its own, and each attempt after a spot interruption begins new ones, `<job>/algo-1-<stamp>`.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from cloudtrain.aws.errors import aws_errors
from cloudtrain.aws.retry import (
    POLL_SECONDS,
    Backoff,
    OutagePolicy,
    OutageTolerance,
)
from cloudtrain.errors import UnreachableError
from cloudtrain.runs.log_lines import LogFilter, LogLine
from cloudtrain.runs.progress import Progress, fold_events
from cloudtrain_runtime.contract import parse_event, sort_hosts

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
"""Source: "Log Groups and Streams That Amazon SageMaker AI Logs", SageMaker developer guide, 2026."""

QUIET_SECONDS = 15.0
"""How long a stream must bring nothing new, once the job has ended: CloudWatch takes lines in seconds after they were
printed. SageMaker's own SDK waits for one poll, 10 s (`logs_for_job`)."""

_STREAMS_SECONDS = 10.0
_CALLS_PER_SECOND = 4.0
"""Most calls of one followed run for its streams: 64 hosts that all print are each asked every 16 s."""

_OVER_SECONDS = 300.0
"""Longest wait for streams that others of the same host have followed; when the job has ended they are read again."""

_MANY_EVENTS = 1000
"""A page with as many is read on at once; after a smaller one the next turn is soon enough."""

_PAGES_PER_COLLECTION = 16
"""Calls that fail leave rings of exceptions and half pages, which Python would let grow for long. Collecting takes some
hundredths of a second."""

_TORN_TRIES = 3
_PAGE = ("events", "nextForwardToken", "nextBackwardToken")
_STATUS_EVENTS = 1000
_STATUS_PAGES = 5
_KNOWN_FACTOR = 6.0
"""How long `progress` takes a list of streams for true, in shortest waits."""


@dataclass(frozen=True)
class JobNow:
    """What a tail must know of its job.

    Attributes:
        state: Anything that changes when the job goes on, such as its secondary status.
        has_ended: Whether there will be no more lines than those under way.
        ended_seconds_ago: By AWS's clock; 0 where it is not known.
    """

    state: str
    has_ended: bool
    ended_seconds_ago: float = 0.0


class JobLogs:
    """The logs of an account's jobs.

    Args:
        client: boto3 client of CloudWatch Logs.
        jobs: Returns the names of a run's training jobs, as far as they are known; mostly one, that of the run.
        scale: What all waits are multiplied by; 1 for AWS.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        client: Any,
        *,
        jobs: Callable[[str], tuple[str, ...]] = lambda run: (run,),
        scale: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._jobs = jobs
        self._scale = scale
        self._clock = clock
        self._known: dict[str, tuple[float, list[str]]] = {}

    def read(self, run: str, only: LogFilter, look: Callable[[], JobNow]) -> Iterator[LogLine]:
        """Yield what the log holds now, in the order of the times; memory holds one page of each stream.

        Args:
            run: Name of the job.
            only: Which lines.
            look: Returns what the job does now; only asked when there is no log, for it may raise.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        jobs = self._jobs(run)
        found = list_streams(self._client, jobs)
        if not found.names:
            look()
            found = list_streams(self._client, self._jobs(run)) if self._jobs(run) != jobs else found
        streams = _wanted(found, only, now=found.asked_at)
        lines = [self._lines(stream, only, until=found.asked_at) for stream in streams]
        return heapq.merge(*lines, key=_moment) if len(lines) > 1 else iter(lines[0] if lines else ())

    def _lines(self, stream: Stream, only: LogFilter, *, until: float | None) -> Iterator[LogLine]:
        """Yield a stream up to its end, or, where a job goes on, to what came in after `until`, by AWS's clock.

        Without that bound a host that prints faster than we read would never let us end.
        """
        while not stream.is_at_end:
            events = stream.take(self._client)
            yield from filter(only.wants, (stream.line(event) for event in events))
            taken_in = events[-1].get("ingestionTime") if events else None
            if until is not None and taken_in is not None and taken_in / 1000 > until + 1:
                return

    def follow(
        self, run: str, only: LogFilter, look: Callable[[], JobNow], on_trouble: Callable[[str], None] | None = None
    ) -> Iterator[LogLine]:
        """Yield lines as they come, until the job has ended and its streams are quiet.

        Args:
            run: Name of the job.
            only: Which lines.
            look: Returns what the job does now; may raise.
            on_trouble: Given a sentence for people when an outage begins, and one when it is over.

        Raises:
            CloudError: AWS refused, could not be reached at first, or not for an hour.
        """
        tail = _Tail(self._client, lambda: self._jobs(run), only, look, on_trouble, self._scale, self._clock)
        return tail.lines()

    def progress(self, run: str) -> Progress:
        """Return what the newest lines of the first host tell.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        streams = self._known_streams(run)
        if not streams:
            return Progress()
        parsed = (parse_event(event["message"]) for event in _newest(self._client, _newest_of_first_host(streams)))
        return fold_events(event for event in parsed if event is not None)

    def _known_streams(self, run: str) -> list[str]:
        """Return the streams' names; a list of some seconds ago saves a call of those that wait."""
        asked_at, names = self._known.get(run, (0.0, []))
        if not names or self._clock() - asked_at > POLL_SECONDS * _KNOWN_FACTOR * self._scale:
            names = list(list_streams(self._client, self._jobs(run)).names)
            self._known[run] = (self._clock(), names)
        return names


# ---------------------------------------------------------------- streams


@dataclass(frozen=True)
class Streams:
    """The names of a run's streams, in the hosts' order.

    Attributes:
        asked_at: When AWS listed them, in seconds since the epoch by its own clock, or None where it does not tell.
        created_at: When the newest was created, by the same clock.
    """

    names: tuple[str, ...] = ()
    asked_at: float | None = None
    created_at: float | None = None


def list_streams(client: Any, jobs: Sequence[str]) -> Streams:
    """Return the log streams of training jobs, one job's after the other's; none when there is no log group yet.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    found = [_streams_of(client, job) for job in jobs]
    return Streams(
        tuple(name for streams in found for name in streams.names),
        next((streams.asked_at for streams in found if streams.asked_at is not None), None),
        max((streams.created_at for streams in found if streams.created_at is not None), default=None),
    )


def _streams_of(client: Any, job: str) -> Streams:
    streams: list[Mapping[str, Any]] = []
    asked_at: float | None = None
    token: dict[str, str] = {}
    while True:
        page = _call(
            client.describe_log_streams,
            "logStreams",
            logGroupName=LOG_GROUP,
            logStreamNamePrefix=f"{job}/",
            **token,
        )
        if page is None:
            return Streams()
        asked_at = asked_at or aws_time(page)
        streams += page["logStreams"]
        if not page.get("nextToken"):
            break
        token = {"nextToken": page["nextToken"]}
    names = sort_hosts([stream["logStreamName"] for stream in streams])
    created = max((stream.get("creationTime", 0) for stream in streams), default=0)
    return Streams(tuple(names), asked_at, created / 1000 if created else None)


def _ago(now: float | None, then: float | None) -> float:
    """Return the seconds between two times of AWS's clock; 0 where one is not known."""
    return 0.0 if now is None or then is None else max(0.0, now - then)


def aws_time(answer: Mapping[str, Any]) -> float | None:
    """Return when AWS wrote an answer, in seconds since the epoch by its own clock, or None."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


@dataclass
class Stream:
    """One stream and how far it has been read.

    Attributes:
        since: Seconds since the epoch from which on lines are wanted, or None.
        is_at_end: Whether the last answer told that there is no more for now.
        news_seconds_ago: How long ago, by AWS's clock, the newest event of the last page had come in.
    """

    name: str
    since: float | None = None
    is_at_end: bool = False
    news_seconds_ago: float = 0.0
    _token: str | None = None
    _taken: int = 0
    _to_skip: int = 0
    _pages: int = 0

    @property
    def host(self) -> str:
        """The host that writes to it, such as `algo-1`."""
        return self.name.rpartition("/")[2].rpartition("-")[0]

    def line(self, event: Mapping[str, Any]) -> LogLine:
        """Return one of its events as a line."""
        return LogLine(self.host, event["message"], event["timestamp"] / 1000)

    def take(self, client: Any) -> list[Mapping[str, Any]]:
        """Return the next page. It may be empty before the end; after the end a later call may bring more.

        Raises:
            CloudError: AWS refused or cannot be reached; the next call asks for the same page.
        """
        page = self._page(client)
        if page is None:  # listed, and not there yet or not any more
            self.is_at_end = True
            return []
        events: list[Mapping[str, Any]] = page["events"]
        token = page["nextForwardToken"]
        self.is_at_end = token == self._token
        # The page is here: only now the token moves.
        self._token = token
        if events and "ingestionTime" in events[-1]:
            self.news_seconds_ago = _ago(aws_time(page), events[-1]["ingestionTime"] / 1000)
        again = min(self._to_skip, len(events))
        self._to_skip = 0 if self.is_at_end else self._to_skip - again
        self._taken += len(events) - again
        self._pages += 1
        if self._pages % _PAGES_PER_COLLECTION == 0:
            gc.collect()
        return events[again:]

    def _page(self, client: Any) -> Mapping[str, Any] | None:
        arguments: dict[str, Any] = {"logGroupName": LOG_GROUP, "logStreamName": self.name, "startFromHead": True}
        if self.since is not None:
            arguments["startTime"] = max(0, int(self.since * 1000))
        if self._token is not None:
            try:
                return _call(client.get_log_events, *_PAGE, **arguments, nextToken=self._token)
            except _TokenRefusedError:
                # Tokens end after 24 hours; a machine that slept has such ones. What was taken is counted, and skipped.
                self._token, self._to_skip = None, self._taken
        return _call(client.get_log_events, *_PAGE, **arguments)


class _TokenRefusedError(Exception):
    """CloudWatch does not know a token any more."""


def _call(operation: Callable[..., Mapping[str, Any]], *whole: str, **arguments: Any) -> Mapping[str, Any] | None:
    """Return CloudWatch's answer, or None where group or stream is not there.

    An answer that ends in the middle, though HTTP says that it is complete, is asked for again. botocore raises
    ResponseParserError for some of these; of JSON that cannot be read it makes an answer without fields.

    Args:
        operation: Method of the client.
        whole: Fields that every whole answer has.
        arguments: The operation's.

    Raises:
        _TokenRefusedError: the token is not known any more.
        CloudError: AWS refused or cannot be reached.
    """
    from botocore.exceptions import ClientError
    from botocore.parsers import ResponseParserError

    with aws_errors("read the log"):
        for _ in range(_TORN_TRIES):
            try:
                answer = operation(**arguments)
            except ResponseParserError:
                continue
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if code == "ResourceNotFoundException":
                    return None
                if code == "InvalidParameterException" and "nextToken" in arguments:
                    raise _TokenRefusedError from None
                raise
            if all(name in answer for name in whole):
                return answer
    raise UnreachableError("could not read the log: answers end in the middle", "check the network, or a proxy in it")


def _wanted(found: Streams, only: LogFilter, *, now: float | None) -> list[Stream]:
    since = only.begins(time.time() if now is None else now)
    streams = [Stream(name, since) for name in found.names]
    return [stream for stream in streams if only.host is None or stream.host == only.host]


def _moment(line: LogLine) -> float:
    return line.time or 0.0


# ---------------------------------------------------------------- following


@dataclass
class _Turn:
    """When something is asked for again, and when it brought something new the last time (monotonic seconds)."""

    backoff: Backoff
    due: float = 0.0
    news_at: float = 0.0
    is_settled: bool = False


@dataclass
class _Tail:
    """One followed run. Each of job, list of streams and streams has its own turn, so that none waits for another."""

    client: Any
    jobs: Callable[[], tuple[str, ...]]
    only: LogFilter
    look: Callable[[], JobNow]
    on_trouble: Callable[[str], None] | None
    scale: float
    clock: Callable[[], float]
    streams: dict[str, tuple[Stream, _Turn]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.job: JobNow | None = None
        self.ended_at: float | None = None
        self.since: float | None = None
        self.has_since = False
        self.job_turn = _Turn(self._backoff(POLL_SECONDS))
        self.list_turn = _Turn(self._backoff(_STREAMS_SECONDS))
        policy = OutagePolicy(OutagePolicy.first_seconds * self.scale, OutagePolicy.longest_seconds * self.scale)
        self.outages = OutageTolerance(self.on_trouble, policy, clock=self.clock)

    def lines(self) -> Iterator[LogLine]:
        """Yield until the end."""
        while True:
            if self.ended_at is None and self._is_due(self.job_turn):
                self._look()
            if not self.list_turn.is_settled and self._is_due(self.list_turn):
                self._list()
            for stream, turn in list(self.streams.values()):
                if not turn.is_settled and self._is_due(turn):
                    yield from self._read(stream, turn)
            turns = [self.list_turn, *(turn for _, turn in self.streams.values())]
            if all(turn.is_settled for turn in turns):
                return
            open_turns = [turn for turn in turns if not turn.is_settled]
            if self.ended_at is None:
                open_turns.append(self.job_turn)
            time.sleep(max(0.0, min(turn.due for turn in open_turns) - self.clock()))

    def _is_due(self, turn: _Turn) -> bool:
        return turn.due <= self.clock()

    def _look(self) -> None:
        try:
            job = self.look()
        except UnreachableError as error:
            self.job_turn.due = self.clock() + self.outages.failed(error, "job")
            return
        self._succeeded("job")
        changed = self.job is None or job.state != self.job.state
        self.job = job
        if changed:
            self.list_turn.due = 0.0  # new attempts begin new streams
        if job.has_ended:
            self._end(job)
        self.job_turn.due = self.clock() + self.job_turn.backoff.next_seconds(changed=changed)

    def _succeeded(self, what: str = "") -> None:
        """Take note of an answer. The first after an outage brings forward what waits long for its next try."""
        if self.outages.succeeded(what):
            for turn in (self.job_turn, self.list_turn, *(turn for _, turn in self.streams.values())):
                turn.due = min(turn.due, self.clock() + turn.backoff.next_seconds(changed=True))

    def _end(self, job: JobNow) -> None:
        """From now on everything is asked for quickly, until it has been quiet."""
        self.ended_at = self.clock() - job.ended_seconds_ago
        for turn in (self.list_turn, *(turn for _, turn in self.streams.values())):
            turn.due = 0.0

    def _list(self) -> None:
        try:
            found = list_streams(self.client, self.jobs())
        except UnreachableError as error:
            self.list_turn.due = self.clock() + self.outages.failed(error)
            return
        self._succeeded()
        if not self.has_since and found.names:
            self.has_since = True
            self.since = self.only.begins(time.time() if found.asked_at is None else found.asked_at)
        wanted = [Stream(name, self.since) for name in found.names]
        new = [s for s in wanted if s.name not in self.streams and self.only.host in (None, s.host)]
        for stream in new:
            self.streams[stream.name] = (stream, _Turn(self._backoff(POLL_SECONDS)))
        if new:
            self.list_turn.news_at = self.clock() - _ago(found.asked_at, found.created_at)
            self._set_backoffs()
        self._answered(self.list_turn, has_news=bool(new))

    def _set_backoffs(self) -> None:
        """Ask more slowly the more streams there are, and seldom for those of attempts that are over."""
        newest = {stream.host: name for name, (stream, _) in sorted(self.streams.items())}
        for name, (stream, turn) in self.streams.items():
            turn.backoff.first_seconds = max(POLL_SECONDS, len(newest) / _CALLS_PER_SECOND) * self.scale
            if name != newest[stream.host]:
                turn.backoff.longest_seconds = _OVER_SECONDS * self.scale

    def _read(self, stream: Stream, turn: _Turn) -> Iterator[LogLine]:
        """Yield what is new in a stream."""
        has_news = False
        while True:
            try:
                events = stream.take(self.client)
            except UnreachableError as error:
                turn.due = self.clock() + self.outages.failed(error)
                return
            self._succeeded()
            if events:
                has_news = True
                turn.news_at = self.clock() - stream.news_seconds_ago
            yield from filter(self.only.wants, (stream.line(event) for event in events))
            more = not events or len(events) >= _MANY_EVENTS or self.ended_at is not None
            if stream.is_at_end or not more:
                break
        self._answered(turn, has_news=has_news)

    def _answered(self, turn: _Turn, *, has_news: bool) -> None:
        """Take note of an answer, and decide when the next is asked for, if at all."""
        now = self.clock()
        if self.ended_at is None:
            turn.due = now + turn.backoff.next_seconds(changed=has_news)
            return
        quiet_at = max(self.ended_at, turn.news_at) + QUIET_SECONDS * self.scale
        turn.is_settled = now >= quiet_at
        # Once more when it must have been quiet, and with the usual waits until then.
        turn.due = min(now + turn.backoff.next_seconds(changed=True), max(quiet_at, now))

    def _backoff(self, first_seconds: float) -> Backoff:
        return Backoff(first_seconds * self.scale)


# ---------------------------------------------------------------- the newest lines


def _newest(client: Any, stream: str) -> list[Mapping[str, Any]]:
    """Return the last events of a stream, in order. Pages may be short or empty, so several are read backwards."""
    events: list[Mapping[str, Any]] = []
    token: str | None = None
    for _ in range(_STATUS_PAGES):
        page = _call(
            client.get_log_events,
            *_PAGE,
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


def _newest_of_first_host(streams: list[str]) -> str:
    """Return the stream that the first host writes to now: instances that replace others begin streams of their own."""
    newest = streams[-1].partition("/")[0]  # a queue's attempts are jobs of their own
    first = next(stream for stream in streams if stream.startswith(f"{newest}/")).rpartition("-")[0]
    return [stream for stream in streams if stream.rpartition("-")[0] == first][-1]
