"""S3, SageMaker and CloudWatch Logs in memory: what a request does to an account, and the response.

Only what submits, follows and sweeps call. `tests/simulation/test_services.py` sends the same calls to moto.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from botocore.awsrequest import AWSResponse

ACCOUNT = "123456789012"
REGION = "us-west-2"
FINAL = ("Completed", "Failed", "Stopped")


@dataclass(frozen=True)
class Request:
    """A request as an account sees it."""

    method: str
    service: str
    operation: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """A response."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def to_botocore(self, url: str) -> AWSResponse:
        """Return it as botocore's transport would."""
        headers = {"content-length": str(len(self.body)), **self.headers}
        return AWSResponse(url, self.status, _Headers(headers), _Raw(self.body))


class _Headers(dict[str, str]):
    """Headers by name in any case."""

    def __init__(self, given: Mapping[str, str]) -> None:
        super().__init__({name.lower(): value for name, value in given.items()})

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return super().__contains__(str(name).lower())


class _Raw(BytesIO):
    """A body as urllib3 gives it."""

    def stream(self, amount: int = 1 << 20, **_options: Any) -> Any:
        while part := self.read(amount):
            yield part

    def release_conn(self) -> None:
        """Do nothing."""


def read_request(sent: Any) -> Request:
    """Read a request that botocore sends."""
    url = urlsplit(sent.url)
    headers = _Headers({str(name): _text(value) for name, value in sent.headers.items()})
    query = {
        name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()
    }
    body = _body(sent.body, headers)
    host = url.hostname or ""
    target = headers.get("x-amz-target", "")
    if target:
        service, _, operation = target.partition(".")
        service = {"SageMaker": "sagemaker", "Logs_20140328": "logs"}.get(service, service)
        return Request(sent.method, service, operation, "", "", query, headers, body)
    bucket, _, key = unquote(url.path).lstrip("/").partition("/")
    if ".s3." in host:
        bucket, key = host.partition(".s3.")[0], unquote(url.path).lstrip("/")
    return Request(sent.method, "s3", sent.method, bucket, key, query, headers, body)


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _body(body: Any, headers: Mapping[str, str]) -> bytes:
    if body is None:
        return b""
    content: bytes = (
        body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else body.read()
    )
    if "aws-chunked" not in headers.get("content-encoding", ""):
        return content
    found, rest = b"", content
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size.partition(b";")[0], 16)
        if length == 0:
            break
        found, rest = found + rest[:length], rest[length + 2 :]
    return found


@dataclass
class StoredObject:
    """An object in S3."""

    body: bytes
    time: float
    checksum: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def etag(self) -> str:
        """Its ETag."""
        return f'"{hashlib.md5(self.body, usedforsecurity=False).hexdigest()}"'


@dataclass
class Job:
    """A training job. `schedule` has what it will be, each with its time."""

    request: dict[str, Any]
    created: float
    schedule: list[tuple[float, str, str]]


class Account:
    """The content of an account, and what each operation does.

    Args:
        clock: Returns the time in seconds since the epoch.
        plan_job: Returns what a new job goes through: time, status and secondary status of each change.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        plan_job: Callable[[str], list[tuple[float, str, str]]] | None = None,
    ) -> None:
        self._clock = clock
        self._plan_job = plan_job or (
            lambda _: [
                (0, "InProgress", "Starting"),
                (60, "InProgress", "Training"),
                (120, "Completed", "Completed"),
            ]
        )
        self.buckets: dict[str, dict[str, StoredObject]] = {}
        self.jobs: dict[str, Job] = {}
        self.logs: dict[str, list[tuple[float, float, str]]] = {}
        """Lines of each stream: when one can be read, its timestamp, its text."""
        self.page_events = 10_000
        self.refuses_token: Callable[[], bool] = lambda: False
        """Whether a token has expired."""
        self.reasons: dict[str, str] = {}
        """Why a job fails, by its name."""
        self.metrics: dict[str, float] = {}
        """The last metrics of every job that has completed."""

    def create_job(self, given: dict[str, Any]) -> Any:
        """Create a training job, as a submit did before."""
        return self._CreateTrainingJob(given)

    def billed_seconds(self, name: str) -> int:
        """Return how long the instances of a job have been used."""
        reached = self._reached(self.jobs[name])
        begun = [moment for moment, _, secondary in reached if secondary == "Training"]
        return int(reached[-1][0] - begun[0]) if begun else 0

    def answer(self, request: Request) -> Answer:
        """Do what a request asks for, and return the response."""
        date = {"Date": formatdate(self._clock(), usegmt=True)}
        try:
            if request.service == "s3":
                found = self._s3(request)
            else:
                operation = getattr(self, f"_{request.operation}")
                found = Answer(
                    body=json.dumps(operation(json.loads(request.body or b"{}"))).encode()
                )
        except _RefusedError as refusal:
            found = refusal.answer(request)
        return Answer(found.status, found.body, {**date, **found.headers})

    # ---------------------------------------------------------------- S3

    def _s3(self, request: Request) -> Answer:
        if request.bucket not in self.buckets:
            if request.method == "PUT" and not request.key:
                self.buckets[request.bucket] = {}
                return Answer()
            raise _RefusedError("NoSuchBucket", 404)
        objects = self.buckets[request.bucket]
        if not request.key:
            return self._list(request, objects)
        handler = {"GET": self._get, "HEAD": self._get, "PUT": self._put, "DELETE": self._delete}[
            request.method
        ]
        return handler(request, objects)

    def _get(self, request: Request, objects: dict[str, StoredObject]) -> Answer:
        found = objects.get(request.key)
        if found is None:
            raise _RefusedError("NoSuchKey", 404)
        headers = {
            **found.metadata,
            "ETag": found.etag,
            "Last-Modified": formatdate(found.time, usegmt=True),
        }
        if found.checksum and request.headers.get("x-amz-checksum-mode"):
            headers["x-amz-checksum-sha256"] = found.checksum
        if request.method == "HEAD":
            return Answer(200, b"", {**headers, "Content-Length": str(len(found.body))})
        return Answer(200, found.body, headers)

    def _put(self, request: Request, objects: dict[str, StoredObject]) -> Answer:
        found, headers = objects.get(request.key), request.headers
        if headers.get("if-none-match") == "*" and found is not None:
            raise _RefusedError("PreconditionFailed", 412)
        expected = headers.get("if-match")
        if expected is not None and found is None:
            raise _RefusedError("NoSuchKey", 404)
        if (
            expected is not None
            and found is not None
            and expected.strip('"') != found.etag.strip('"')
        ):
            raise _RefusedError("PreconditionFailed", 412)
        metadata = {name: each for name, each in headers.items() if name.startswith("x-amz-meta-")}
        now = float(int(self._clock()))
        stored = StoredObject(request.body, now, _sha256(request.body), metadata)
        objects[request.key] = stored
        return Answer(200, b"", {"ETag": stored.etag, "x-amz-checksum-sha256": stored.checksum})

    def _delete(self, request: Request, objects: dict[str, StoredObject]) -> Answer:
        objects.pop(request.key, None)
        return Answer(204)

    def _list(self, request: Request, objects: dict[str, StoredObject]) -> Answer:
        prefix = request.query.get("prefix", "")
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(found.body)}</Size><ETag>{escape(found.etag)}</ETag>"
            f"<LastModified>{_iso(found.time)}</LastModified></Contents>"
            for key, found in sorted(objects.items())
            if key.startswith(prefix)
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        return Answer(200, text.encode(), {"Content-Type": "application/xml"})

    # ---------------------------------------------------------------- SageMaker

    def _CreateTrainingJob(self, given: dict[str, Any]) -> Any:  # noqa: N802 (AWS's names)
        name = given["TrainingJobName"]
        if name in self.jobs:
            raise _RefusedError("ResourceInUse", 400, f"Training job {name} already exists")
        now = self._clock()
        steps = [(now + seconds, *rest) for seconds, *rest in self._plan_job(name)]
        self.jobs[name] = Job(given, now, steps)  # type: ignore[arg-type]
        return {"TrainingJobArn": _arn(name)}

    def _DescribeTrainingJob(self, given: dict[str, Any]) -> Any:  # noqa: N802
        name = given["TrainingJobName"]
        job = self._job(name)
        reached = self._reached(job)
        begun = [moment for moment, _, secondary in reached if secondary == "Training"]
        last, status, secondary = reached[-1]
        answer = {
            **{key: value for key, value in job.request.items() if key != "Tags"},
            "TrainingJobArn": _arn(name),
            "TrainingJobStatus": status,
            "SecondaryStatus": secondary,
            "CreationTime": job.created,
            "LastModifiedTime": last,
            "SecondaryStatusTransitions": [
                {"Status": secondary, "StartTime": moment, "StatusMessage": ""}
                for moment, _, secondary in reached
            ],
        }
        if begun:
            answer["TrainingStartTime"] = begun[0]
        if status in FINAL:
            answer["TrainingEndTime"] = last
            answer["BillableTimeInSeconds"] = self.billed_seconds(name)
        if status == "Completed":
            answer["FinalMetricDataList"] = [
                {"MetricName": metric, "Value": value, "Timestamp": last}
                for metric, value in self.metrics.items()
            ]
        if status == "Failed":
            answer["FailureReason"] = self.reasons.get(name, "AlgorithmError: exit code 1")
        return answer

    def _StopTrainingJob(self, given: dict[str, Any]) -> Any:  # noqa: N802
        job = self._job(given["TrainingJobName"])
        now = self._clock()
        if self._reached(job)[-1][1] in FINAL:
            raise _RefusedError(
                "ValidationException",
                400,
                "The request was rejected because the training job is in status Completed.",
            )
        job.schedule = [
            *self._reached(job),
            (now, "Stopping", "Stopping"),
            (now + 30, "Stopped", "Stopped"),
        ]
        return {}

    def _ListTags(self, given: dict[str, Any]) -> Any:  # noqa: N802
        return {"Tags": self._job(given["ResourceArn"].rpartition("/")[2]).request.get("Tags", [])}

    def _job(self, name: str) -> Job:
        if name not in self.jobs:
            raise _RefusedError("ValidationException", 400, "Requested resource not found.")
        return self.jobs[name]

    def _reached(self, job: Job) -> list[tuple[float, str, str]]:
        now = self._clock()
        return [step for step in job.schedule if step[0] <= now] or job.schedule[:1]

    # ---------------------------------------------------------------- CloudWatch Logs

    def _DescribeLogStreams(self, given: dict[str, Any]) -> Any:  # noqa: N802
        prefix, now = given.get("logStreamNamePrefix", ""), self._clock()
        streams = [
            {
                "logStreamName": name,
                "creationTime": int(1000 * min(seen for seen, _, _ in lines)),
                "lastEventTimestamp": int(
                    1000 * max(made for seen, made, _ in lines if seen <= now)
                ),
                "lastIngestionTime": int(1000 * max(seen for seen, _, _ in lines if seen <= now)),
            }
            for name, lines in sorted(self.logs.items())
            if name.startswith(prefix) and any(seen <= now for seen, _, _ in lines)
        ]
        if not streams and not self.logs:
            raise _RefusedError(
                "ResourceNotFoundException", 400, "The specified log group does not exist."
            )
        return {"logStreams": streams}

    def _GetLogEvents(self, given: dict[str, Any]) -> Any:  # noqa: N802
        """Return a page after a token; the token of the end is the one that was given, as AWS documents."""
        now = self._clock()
        lines = [line for line in self.logs.get(given["logStreamName"], []) if line[0] <= now]
        first = given.get("startTime")
        if first is not None and "nextToken" not in given:
            lines = [line for line in lines if 1000 * line[1] >= first]
        token = re.fullmatch(r"f/(\d+)", given.get("nextToken", "f/0"))
        if token is None or ("nextToken" in given and self.refuses_token()):
            raise _RefusedError(
                "InvalidParameterException", 400, "The specified nextToken is invalid."
            )
        at, limit = int(token[1]), min(given.get("limit", 10_000), self.page_events)
        page = lines[at : at + limit]
        return {
            "events": [
                {"timestamp": int(1000 * made), "ingestionTime": int(1000 * seen), "message": text}
                for seen, made, text in page
            ],
            "nextForwardToken": f"f/{at + len(page)}",
            "nextBackwardToken": f"b/{at}",
        }


class _RefusedError(Exception):
    def __init__(self, code: str, status: int, message: str = "refused") -> None:
        super().__init__(code)
        self.code, self.status, self.message = code, status, message

    def answer(self, request: Request) -> Answer:
        if request.service != "s3":
            body = json.dumps({"__type": self.code, "message": self.message}).encode()
            return Answer(self.status, body, {"Content-Type": "application/x-amz-json-1.1"})
        if request.method == "HEAD":
            return Answer(self.status)
        text = f"<Error><Code>{self.code}</Code><Message>{self.message}</Message></Error>"
        return Answer(self.status, text.encode(), {"Content-Type": "application/xml"})


def error(code: str, status: int, request: Request) -> Answer:
    """Return the response of a request that fails before it does anything."""
    return _RefusedError(code, status).answer(request)


def _arn(name: str) -> str:
    return f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/{name}"


def _sha256(body: bytes) -> str:
    import base64

    return base64.b64encode(hashlib.sha256(body).digest()).decode()


def _iso(moment: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
