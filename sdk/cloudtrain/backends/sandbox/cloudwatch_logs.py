"""Upload of a job's logs to CloudWatch Logs, and extraction of metrics from them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.log_lines import LineTail
from cloudtrain.backends.sandbox.training_job import Clock, TrainingJob
from cloudtrain_runtime.contract import parse_event

if TYPE_CHECKING:
    from types_boto3_logs import CloudWatchLogsClient

LOG_GROUP = "/aws/sagemaker/TrainingJobs"

_MOST_BYTES = 1 << 20
_MOST_LINES = 10_000
"""Most bytes and lines of one call (PutLogEvents, API reference); one line may have more bytes."""


class LogUploader:
    """Uploads new log lines of the hosts of one attempt.

    Attributes:
        last_step: The highest step of an event line, or -1.
    """

    def __init__(
        self,
        job: TrainingJob,
        folder: JobFolder,
        hosts: tuple[str, ...],
        logs: CloudWatchLogsClient,
        clock: Clock,
    ) -> None:
        self.last_step = -1
        self._job = job
        self._logs = logs
        self._clock = clock
        stamp = int(clock())
        self._tails = {f"{job.name}/{host}-{stamp}": LineTail(folder.log(host)) for host in hosts}
        self._created: set[str] = set()
        definitions = job.request["AlgorithmSpecification"].get("MetricDefinitions", ())
        self._metrics = [(each["Name"], re.compile(each["Regex"])) for each in definitions]

    def upload(self, *, final: bool = False) -> None:
        """Upload new lines; if `final`, also a last line without a newline."""
        for stream, tail in self._tails.items():
            batch = list[str]()
            size = 0
            # CloudWatch has no empty events.
            for line in filter(None, self._read(tail, final=final)):
                if batch and (size + len(line) > _MOST_BYTES or len(batch) == _MOST_LINES):
                    self._send(stream, batch)
                    batch = []
                    size = 0
                batch.append(line)
                size += len(line)
            if batch:
                self._send(stream, batch)

    def close(self) -> None:
        """Close the log files."""
        for tail in self._tails.values():
            tail.close()

    def _read(self, tail: LineTail, *, final: bool) -> Iterator[str]:
        now = self._clock()
        for content in tail.read(final=final):
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
                    # The captured text is no number.
                    continue

    def _send(self, stream: str, batch: list[str]) -> None:
        milliseconds = round(self._clock() * 1000)
        if stream not in self._created:
            with contextlib.suppress(self._logs.exceptions.ResourceAlreadyExistsException):
                self._logs.create_log_group(logGroupName=LOG_GROUP)
            with contextlib.suppress(self._logs.exceptions.ResourceAlreadyExistsException):
                self._logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)
            self._created.add(stream)
        self._logs.put_log_events(
            logGroupName=LOG_GROUP,
            logStreamName=stream,
            logEvents=[{"timestamp": milliseconds, "message": message} for message in batch],
        )
