"""A server on loopback for CloudWatch Logs and DescribeTrainingJob, with fault injection.

moto keeps logs in memory, returns only full pages and never cuts connections. This server returns short, empty and late
pages, lets tokens expire, delays ingestion, enforces rate limits, and cuts connections.
Source: GetLogEvents and DescribeLogStreams, Amazon CloudWatch Logs API Reference, 2026.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_EVENTS = 10_000
MAX_BYTES = 1_048_576
EVENT_OVERHEAD = 26
_STREAMS_PER_PAGE = 50


@dataclass(frozen=True)
class Faults:
    """Probabilities of faults for each call.

    Attributes:
        throttle: ThrottlingException.
        errors: Status 500.
        resets: The call is executed, and the connection is cut before the response.
        torn: The body ends in the middle, and its Content-Length is that of the full body.
        cropped: The body ends in the middle, and its Content-Length is that of the shorter body.
        empty: A page without events and with a new token.
        short: A page with only a part of the events that would fit.
        after: Number of calls without faults at the start.
    """

    throttle: float = 0.0
    errors: float = 0.0
    resets: float = 0.0
    torn: float = 0.0
    cropped: float = 0.0
    empty: float = 0.0
    short: float = 0.0
    after: int = 4


EVERY_FAULT = Faults(
    throttle=0.04, errors=0.04, resets=0.04, torn=0.04, cropped=0.04, empty=0.1, short=0.2
)


@dataclass
class Written:
    """Events of one stream: a list, or `count` events that the function `made` generates from their index.

    An event is (timestamp, message, time from which it can be read). Times are in milliseconds, the last one by the
    server's clock.
    """

    created: int
    events: list[tuple[int, str, int]] = field(default_factory=list)
    made: Callable[[int], tuple[int, str, int]] | None = None
    count: int = 0

    def __len__(self) -> int:
        return len(self.events) if self.made is None else self.count

    def __getitem__(self, index: int) -> tuple[int, str, int]:
        return self.events[index] if self.made is None else self.made(index)


class RefusedError(Exception):
    """An error response of the service."""

    def __init__(self, code: str, message: str = "", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


class CloudWatch:
    """State and responses of the service. Thread-safe.

    Args:
        faults: Faults to inject; by default none.
        page_events: Maximum number of events in a page.
        limits: Maximum number of calls per second, by operation. Further calls are throttled.
        clock_ahead: Seconds that the service's clock is ahead of the machine's clock.
        seed: Seed of the random generator.
    """

    def __init__(
        self,
        faults: Faults | None = None,
        *,
        page_events: int = MAX_EVENTS,
        limits: Mapping[str, float] | None = None,
        clock_ahead: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.faults = faults or Faults()
        self.clock_ahead = clock_ahead
        self.down = False
        self.streams: dict[str, Written] = {}
        self.has_group = False
        self.jobs: dict[str, dict[str, Any]] = {}
        self.calls: Counter[str] = Counter()
        self.throttled: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self.times: dict[str, list[float]] = {}
        self.refused_at: dict[str, list[float]] = {}
        self.lock = threading.RLock()
        self._page_events = page_events
        self._recent: dict[str, deque[float]] = {}
        self._limits = dict(limits or {})
        self._generator = random.Random(seed)  # noqa: S311 (no secret)
        self._era = 0
        self._nonce = 0

    def now(self) -> float:
        """Seconds since the epoch by the service's clock."""
        return time.time() + self.clock_ahead

    def write(
        self, stream: str, lines: Sequence[str], *, at: float | None = None, delay: float = 0.0
    ) -> None:
        """Store lines as PutLogEvents does.

        Args:
            stream: Name of the stream.
            lines: Messages.
            at: Timestamp in seconds; by default the service's time.
            delay: Seconds until the lines can be read.
        """
        with self.lock:
            self.has_group = True
            now = int(self.now() * 1000)
            written = self.streams.setdefault(stream, Written(now))
            stamp = now if at is None else int(at * 1000)
            written.events += [(stamp, line, now + int(delay * 1000)) for line in lines]

    def generate(
        self, stream: str, count: int, event: Callable[[int], tuple[int, str, int]]
    ) -> None:
        """Create a stream of events that are generated when they are read."""
        with self.lock:
            self.has_group = True
            self.streams[stream] = Written(int(self.now() * 1000), made=event, count=count)

    def run(
        self, name: str, status: str = "InProgress", secondary: str = "Training", hosts: int = 1
    ) -> None:
        """Create a job, or change its status."""
        with self.lock:
            job = self.jobs.setdefault(name, {"CreationTime": self.now()})
            resources = {
                "InstanceType": "ml.g5.xlarge",
                "InstanceCount": hosts,
                "VolumeSizeInGB": 1,
            }
            job |= {
                "TrainingJobStatus": status,
                "SecondaryStatus": secondary,
                "ResourceConfig": resources,
            }
            job["LastModifiedTime"] = self.now()
            if status != "InProgress":
                job["TrainingEndTime"] = self.now()

    def expire_tokens(self) -> None:
        """Make all tokens invalid, as after 24 hours."""
        self._era += 1

    def answer(self, operation: str, document: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the response and the fault to inject into it, or an empty string.

        Raises:
            RefusedError: The response is an error.
        """
        with self.lock:
            self.calls[operation] += 1
            self.times.setdefault(operation, []).append(time.monotonic())
            self._enforce_limit(operation)
            fault = self._next_fault()
            if fault == "throttle":
                raise RefusedError("ThrottlingException", "Rate exceeded")
            if fault == "errors":
                raise RefusedError("InternalFailure", "", 500)
            answers = {
                "GetLogEvents": self._get_log_events,
                "DescribeLogStreams": self._describe_log_streams,
                "DescribeTrainingJob": self._describe_training_job,
            }
            return answers[operation](document), fault

    def _enforce_limit(self, operation: str) -> None:
        limit = self._limits.get(operation)
        if limit is None:
            return
        now, recent = time.monotonic(), self._recent.setdefault(operation, deque())
        while recent and recent[0] <= now - 1:
            recent.popleft()
        if len(recent) >= limit:
            self.throttled[operation] += 1
            self.refused_at.setdefault(operation, []).append(now)
            raise RefusedError("ThrottlingException", "Rate exceeded")
        recent.append(now)

    def _next_fault(self) -> str:
        if sum(self.calls.values()) <= self.faults.after:
            return ""
        drawn = self._generator.random()
        for name in ("throttle", "errors", "resets", "torn", "cropped"):
            drawn -= getattr(self.faults, name)
            if drawn < 0:
                self.injected[name] += 1
                return name
        return ""

    def _describe_training_job(self, document: Mapping[str, Any]) -> dict[str, Any]:
        job = self.jobs.get(document["TrainingJobName"])
        if job is None:
            raise RefusedError("ValidationException", "Requested resource not found.")
        return {"TrainingJobName": document["TrainingJobName"], **job}

    def _describe_log_streams(self, document: Mapping[str, Any]) -> dict[str, Any]:
        if not self.has_group:
            raise RefusedError(
                "ResourceNotFoundException", "The specified log group does not exist."
            )
        names = sorted(
            name for name in self.streams if name.startswith(document["logStreamNamePrefix"])
        )
        begin = int(document.get("nextToken", 0))
        page = names[begin : begin + _STREAMS_PER_PAGE]
        more = (
            {"nextToken": str(begin + _STREAMS_PER_PAGE)}
            if len(names) > begin + _STREAMS_PER_PAGE
            else {}
        )
        streams = [
            {"logStreamName": name, "creationTime": self.streams[name].created} for name in page
        ]
        return {"logStreams": streams, **more}

    def _get_log_events(self, document: Mapping[str, Any]) -> dict[str, Any]:
        written = self.streams.get(document["logStreamName"])
        if written is None:
            raise RefusedError(
                "ResourceNotFoundException", "The specified log stream does not exist."
            )
        if not document.get("startFromHead", False):
            return self._last_events(written, document)
        token = document.get("nextToken")
        begin = 0 if token is None else self._place(token)
        end = self._page_end(
            written, begin, min(self._page_events, document.get("limit", MAX_EVENTS))
        )
        if end > begin and self._generator.random() < self.faults.empty:
            self.injected["empty"] += 1
            return self._page([], self._token(begin), token)
        if end - begin > 1 and self._generator.random() < self.faults.short:
            self.injected["short"] += 1
            end = begin + self._generator.randrange(1, end - begin)
        since = document.get("startTime", 0)
        events = [written[i] for i in range(begin, end)]
        same = token if token is not None and end == begin else self._token(end)
        return self._page([event for event in events if event[0] >= since], same, token)

    def _last_events(self, written: Written, document: Mapping[str, Any]) -> dict[str, Any]:
        begin = max(0, len(written) - document.get("limit", MAX_EVENTS))
        return self._page(
            [written[i] for i in range(begin, len(written))], self._token(len(written)), None
        )

    def _page_end(self, written: Written, begin: int, most: int) -> int:
        """Return the end of a page: its limit of events or bytes, or the first event that cannot be read yet."""
        now, size, end = self.now() * 1000, 0, begin
        while end < min(len(written), begin + most):
            _, message, readable = written[end]
            size += len(message) + EVENT_OVERHEAD
            if readable > now or (size > MAX_BYTES and end > begin):
                break
            end += 1
        return end

    @staticmethod
    def _page(
        events: Sequence[tuple[int, str, int]], forward: str, backward: str | None
    ) -> dict[str, Any]:
        shown = [
            {"timestamp": at, "message": text, "ingestionTime": read} for at, text, read in events
        ]
        return {
            "events": shown,
            "nextForwardToken": forward,
            "nextBackwardToken": backward or "b/0",
        }

    def _token(self, place: int) -> str:
        """Return a new token for a place. The same place gets another token each time."""
        self._nonce += 1
        return f"f/{self._era}/{place}/{self._nonce}"

    def _place(self, token: str) -> int:
        _, era, place, _ = token.split("/")
        if int(era) != self._era:
            raise RefusedError("InvalidParameterException", "The specified nextToken is invalid.")
        return int(place)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    service: CloudWatch

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.service.down:
            self._cut()
            return
        operation = self.headers["X-Amz-Target"].rpartition(".")[2]
        try:
            content, fault = self.service.answer(operation, json.loads(body))
            status = 200
        except RefusedError as error:
            content, fault, status = {"__type": error.code, "message": str(error)}, "", error.status
        data = json.dumps(content).encode()
        if fault == "resets":
            self._cut()
            return
        sent = data[: len(data) // 2] if fault in ("torn", "cropped") else data
        self.send_response_only(status)
        self.send_header("Date", formatdate(self.service.now(), usegmt=True))
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(sent) if fault == "cropped" else len(data)))
        self.end_headers()
        self.wfile.write(sent)
        if fault == "torn":
            self._cut()

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *arguments: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *arguments: object) -> None:
        pass  # the client has closed the connection


@contextlib.contextmanager
def serve(service: CloudWatch) -> Iterator[str]:
    """Serve on a free port of loopback; yield the address."""
    handler = type("Handler", (_Handler,), {"service": service})
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def summary(service: CloudWatch) -> dict[str, Any]:
    """Return the counts of calls and faults, and the probabilities of faults."""
    return {
        "calls": dict(service.calls),
        "throttled": dict(service.throttled),
        "injected": dict(service.injected),
        "faults": dataclasses.asdict(service.faults),
    }
