"""Log streams in CloudWatch: list them and read their pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.clock import aws_time
from cloudtrain.aws.errors import aws_errors
from cloudtrain.errors import UnreachableError
from cloudtrain.runs.log_lines import LogLine
from cloudtrain_runtime.contract import sort_hosts
from cloudtrain_runtime.contract.aws_codes import code_of

if TYPE_CHECKING:
    from types_boto3_logs import CloudWatchLogsClient

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
"""Source: "Log Groups and Streams That Amazon SageMaker AI Logs", SageMaker developer guide, 2026."""

_INCOMPLETE_ATTEMPTS = 3
PAGE_FIELDS = ("events", "nextForwardToken", "nextBackwardToken")


@dataclass(frozen=True)
class LogStreams:
    """Names of a run's streams, in the order of the hosts.

    Attributes:
        listed_at: When AWS listed them, in seconds since the epoch by its own clock, or None if unknown.
        created_at: When the newest stream was created, by the same clock.
    """

    names: tuple[str, ...] = ()
    listed_at: float | None = None
    created_at: float | None = None


def list_streams(client: CloudWatchLogsClient, jobs: Sequence[str]) -> LogStreams:
    """Return the log streams of training jobs, job by job; none if there is no log group yet.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    names: list[str] = []
    listed_at: float | None = None
    created = 0
    for job in jobs:
        of_job: list[str] = []
        for page in _stream_pages(client, job):
            listed_at = listed_at or aws_time(page)
            of_job += (stream["logStreamName"] for stream in page["logStreams"])
            created = max(
                created, *(stream.get("creationTime", 0) for stream in page["logStreams"]), 0
            )
        names += sort_hosts(of_job)
    return LogStreams(tuple(names), listed_at, created / 1000 if created else None)


def _stream_pages(client: CloudWatchLogsClient, job: str) -> Iterator[Mapping[str, Any]]:
    arguments: dict[str, Any] = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{job}/"}
    while (page := call_logs(client.describe_log_streams, "logStreams", **arguments)) is not None:
        yield page
        if not page.get("nextToken"):
            return
        arguments["nextToken"] = page["nextToken"]


def seconds_between(now: float | None, then: float | None) -> float:
    """Return the seconds between two times of AWS's clock; 0 if one is unknown."""
    return 0.0 if now is None or then is None else max(0.0, now - then)


@dataclass
class LogStream:
    """A stream and the position up to which it has been read.

    Attributes:
        since: Seconds since the epoch from which lines are read, or None.
        is_at_end: Whether the last page was the end for now.
        newest_event_age_seconds: Time since the newest event of the last page was ingested, by AWS's clock.
    """

    name: str
    since: float | None = None
    is_at_end: bool = False
    newest_event_age_seconds: float = 0.0
    _token: str | None = None
    _events_read: int = 0
    _events_to_skip: int = 0

    @property
    def host(self) -> str:
        """The host that writes to it, for example `algo-1`."""
        return self.name.rpartition("/")[2].rpartition("-")[0]

    def line(self, event: Mapping[str, Any]) -> LogLine:
        """Return an event of the stream as a line."""
        return LogLine(self.host, event["message"], event["timestamp"] / 1000)

    def read_page(self, client: CloudWatchLogsClient) -> list[Mapping[str, Any]]:
        """Return the next page. It can be empty before the end. After the end, a later call can return more.

        Raises:
            CloudError: AWS refused or cannot be reached. The next call requests the same page.
        """
        page = self._get_page(client)
        # The stream is listed, and is not there yet or was deleted.
        if page is None:
            self.is_at_end = True
            return []
        events: list[Mapping[str, Any]] = page["events"]
        token = page["nextForwardToken"]
        self.is_at_end = token == self._token
        # Advance the token only now that the page is complete.
        self._token = token
        if events and "ingestionTime" in events[-1]:
            self.newest_event_age_seconds = seconds_between(
                aws_time(page), events[-1]["ingestionTime"] / 1000
            )
        again = min(self._events_to_skip, len(events))
        self._events_to_skip = 0 if self.is_at_end else self._events_to_skip - again
        self._events_read += len(events) - again
        return events[again:]

    def _get_page(self, client: CloudWatchLogsClient) -> Mapping[str, Any] | None:
        arguments: dict[str, Any] = {
            "logGroupName": LOG_GROUP,
            "logStreamName": self.name,
            "startFromHead": True,
        }
        if self.since is not None:
            arguments["startTime"] = max(0, int(self.since * 1000))
        if self._token is not None:
            try:
                return call_logs(
                    client.get_log_events, *PAGE_FIELDS, **arguments, nextToken=self._token
                )
            except _ExpiredTokenError:
                # Tokens expire after 24 hours, for example while a laptop sleeps. Start again and skip what was read.
                self._token = None
                self._events_to_skip = self._events_read
        return call_logs(client.get_log_events, *PAGE_FIELDS, **arguments)


class _ExpiredTokenError(Exception):
    """The token has expired."""


def call_logs(
    operation: Callable[..., Mapping[str, Any]], *required: str, **arguments: Any
) -> Mapping[str, Any] | None:
    """Call CloudWatch and return its response, or None if the group or stream does not exist.

    A truncated response is requested again. botocore raises ResponseParserError for some of these and returns a
    response without fields for others.

    Args:
        operation: Method of the client.
        required: Fields that every complete response has.
        arguments: Arguments of the operation.

    Raises:
        _ExpiredTokenError: the token has expired.
        CloudError: AWS refused or cannot be reached.
    """
    from botocore.exceptions import ClientError
    from botocore.parsers import ResponseParserError

    with aws_errors("read the log"):
        for _ in range(_INCOMPLETE_ATTEMPTS):
            try:
                answer = operation(**arguments)
            except ResponseParserError:
                continue
            except ClientError as error:
                code = code_of(error)
                if code == "ResourceNotFoundException":
                    return None
                if code == "InvalidParameterException" and "nextToken" in arguments:
                    raise _ExpiredTokenError from None
                raise
            if all(name in answer for name in required):
                return answer
    raise UnreachableError(
        "could not read the log: the responses are truncated", "check the network, or a proxy in it"
    )
