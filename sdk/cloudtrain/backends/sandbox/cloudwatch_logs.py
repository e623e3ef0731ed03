"""Upload of a job's logs to CloudWatch Logs, and extraction of metrics from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cloudtrain.backends.container import JobFolder
from cloudtrain.backends.container.log_lines import LineTail
from cloudtrain.backends.sandbox.training_job import Clock, TrainingJob
from cloudtrain_runtime.contract import parse_event

LOG_GROUP = "/aws/sagemaker/TrainingJobs"

# Source: PutLogEvents, API reference: a batch has at most 1,048,576 bytes and 10,000 events, 26 bytes are added to
# each event, and an event has at most 256 KB.
_EVENT_OVERHEAD = 26
_MAX_EVENT_BYTES = 256 * 1024 - _EVENT_OVERHEAD
_MAX_BATCH_BYTES = 1_048_576
_MAX_BATCH_EVENTS = 10_000


class LogUploader:
    """Uploads new log lines of the hosts of one attempt.

    Attributes:
        last_step: The highest step of an event line, or -1.
    """

    def __init__(self, job: TrainingJob, folder: JobFolder, hosts: tuple[str, ...], logs: Any, clock: Clock) -> None:
        self.last_step = -1
        self._job = job
        self._logs = logs
        self._clock = clock
        stamp = int(clock())
        self._hosts = [_HostLog(folder.log(host), f"{job.name}/{host}-{stamp}") for host in hosts]
        definitions = job.request["AlgorithmSpecification"].get("MetricDefinitions", ())
        self._metrics = [(each["Name"], re.compile(each["Regex"])) for each in definitions]

    def upload(self, *, final: bool = False) -> None:
        """Upload new lines; if `final`, also a last line without a newline."""
        for host in self._hosts:
            for batch in split_into_batches(self._read(host, final=final)):
                self._send(host, batch)

    def close(self) -> None:
        """Close the log files."""
        for host in self._hosts:
            host.tail.close()

    def _read(self, host: _HostLog, *, final: bool) -> Iterator[str]:
        now = self._clock()
        for content in host.tail.read(final=final):
            line = content.decode("utf-8", "replace").rstrip("\r")
            self._parse(line, now)
            yield line

    def _parse(self, line: str, now: float) -> None:
        """Record the step and the metrics of a line."""
        event = parse_event(line)
        if event is not None and event["event"] == "step":
            self.last_step = max(self.last_step, event["step"])
        for name, pattern in self._metrics:
            match = pattern.search(line)
            if match is not None:
                try:
                    self._job.metrics[name] = (float(match[1]), now)
                except (ValueError, TypeError):
                    continue  # the captured text is no number

    def _send(self, host: _HostLog, batch: list[str]) -> None:
        milliseconds = round(self._clock() * 1000)
        if not host.has_stream:
            create_stream(self._logs, host.stream)
            host.has_stream = True
        self._logs.put_log_events(
            logGroupName=LOG_GROUP,
            logStreamName=host.stream,
            logEvents=[{"timestamp": milliseconds, "message": message} for message in batch],
        )


class _HostLog:
    """The log file of a host and its log stream."""

    def __init__(self, path: Path, stream: str) -> None:
        self.stream = stream
        self.has_stream = False
        self.tail = LineTail(path, splits=True)  # a long line is uploaded in parts


def create_stream(logs: Any, stream: str) -> None:
    """Create a log stream, and the log group of training jobs if it does not exist."""
    for create, arguments in (
        (logs.create_log_group, {"logGroupName": LOG_GROUP}),
        (logs.create_log_stream, {"logGroupName": LOG_GROUP, "logStreamName": stream}),
    ):
        try:
            create(**arguments)
        except logs.exceptions.ResourceAlreadyExistsException:
            continue


def split_into_batches(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the messages of PutLogEvents calls within CloudWatch's limits: long lines are split, empty ones skipped."""
    batch: list[str] = []
    size = 0
    for message in (part for line in lines for part in _parts(line)):
        more = len(message.encode()) + _EVENT_OVERHEAD
        if batch and (size + more > _MAX_BATCH_BYTES or len(batch) == _MAX_BATCH_EVENTS):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += more
    if batch:
        yield batch


def _parts(line: str) -> Iterator[str]:
    data = line.encode()
    while len(data) > _MAX_EVENT_BYTES:
        cut = _MAX_EVENT_BYTES
        while data[cut] & 0xC0 == 0x80:  # noqa: PLR2004 (a continuation byte of a UTF-8 character)
            cut -= 1
        yield data[:cut].decode()
        data = data[cut:]
    if data:
        yield data.decode()
