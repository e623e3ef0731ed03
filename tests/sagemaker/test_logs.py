"""Reading and following logs: each line once and in order, against a server with CloudWatch's faults."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.cloudwatch_server import (
    EVERY_FAULT,
    CloudWatch,
    Faults,
    serve,
)
from support.jobs import Cli

from cloudtrain.backends.sagemaker.backend import SageMakerBackend
from cloudtrain.backends.sagemaker.log_tail import JobSnapshot
from cloudtrain.backends.sagemaker.logs import JobLogs
from cloudtrain.errors import CloudError, RunNotFoundError, UnreachableError
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract import format_event

RUN = "digits-261120-101500-1a2b3c"
SCALE = 0.002
"""Factor of all waits: 10 ms instead of 5 s."""

Service = Callable[..., tuple[CloudWatch, Any]]

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")


@pytest.fixture
def serving(account: None) -> Iterator[Service]:
    """Return a function that serves a CloudWatch and returns it with a client that does not retry."""
    import boto3
    from botocore.config import Config

    servers: list[Any] = []

    def start(*arguments: Any, **options: Any) -> tuple[CloudWatch, Any]:
        service = CloudWatch(*arguments, **options)
        server = serve(service)
        endpoint = server.__enter__()
        servers.append(server)
        config = Config(retries={"total_max_attempts": 1}, read_timeout=5)
        return service, boto3.client("logs", endpoint_url=endpoint, config=config)

    yield start
    for server in servers:
        server.__exit__(None, None, None)


def stream(host: str, attempt: int = 1) -> str:
    return f"{RUN}/{host}-{1770000000 + attempt}"


def numbered(host: str, begin: int, end: int) -> list[str]:
    return [f"{host} line {i}" for i in range(begin, end)]


def by_host(lines: list[LogLine]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in lines:
        found.setdefault(line.host, []).append(line.text)
    return found


def ended() -> JobSnapshot:
    return JobSnapshot("Completed", has_ended=True, ended_seconds_ago=3600)


class Job:
    """State of a job that a test changes while a log is followed."""

    def __init__(self) -> None:
        self.now = JobSnapshot("Training", has_ended=False)

    def __call__(self) -> JobSnapshot:
        return self.now

    def end(self) -> None:
        self.now = JobSnapshot("Completed", has_ended=True)


def tail(
    client: Any, job: Callable[[], JobSnapshot], *, only: LogFilter = ALL_LINES, **options: Any
) -> list[LogLine]:
    return list(JobLogs(client, scale=SCALE).follow(RUN, only, job, **options))


def test_tail_yields_each_line_once_through_all_faults(serving: Service) -> None:
    service, client = serving(EVERY_FAULT, page_events=100, seed=1)
    counts = {"algo-1": 20_000, "algo-2": 20_000, "algo-10": 10_000}
    job = Job()
    messages: list[str] = []

    def write(host: str, late: float) -> None:
        time.sleep(late)
        for begin in range(0, counts[host], 500):
            # The writer's clock steps back in the middle. Each batch becomes readable after a delay.
            at = time.time() - (3600 if begin > counts[host] // 2 else 0)
            service.write(stream(host), numbered(host, begin, begin + 500), at=at, delay=0.005)
            time.sleep(0.01)

    writers = [
        threading.Thread(target=write, args=(host, late))
        for host, late in zip(counts, (0.0, 0.2, 0.4), strict=True)
    ]

    def end() -> None:
        for writer in writers:
            writer.join()
        job.end()

    threads = [*writers, threading.Thread(target=end)]
    for thread in threads:
        thread.start()
    found = by_host(tail(client, job, on_trouble=messages.append))
    for thread in threads:
        thread.join()
    assert found == {host: numbered(host, 0, count) for host, count in counts.items()}
    assert all(
        service.injected[kind]
        for kind in ("throttle", "errors", "resets", "torn", "cropped", "empty", "short")
    )
    assert messages[0].startswith("could not read the log")
    assert messages[1].startswith("recovered after ")


def test_late_lines_are_waited_for_after_the_end(serving: Service) -> None:
    service, client = serving()
    service.write(stream("algo-1"), ["first"])
    service.write(stream("algo-1"), ["the reason of the failure"], delay=0.02)
    found = tail(client, lambda: JobSnapshot("Failed", has_ended=True))
    assert [line.text for line in found] == ["first", "the reason of the failure"]


def test_a_job_that_ended_long_ago_is_not_waited_for(serving: Service) -> None:
    """Following waits 15 s after the end for late lines. By AWS's clock, which differs from ours, they are over."""
    service, client = serving(clock_ahead=86400.0)
    service.streams = {}
    service.write(stream("algo-1"), numbered("algo-1", 0, 5))
    for written in service.streams.values():
        written.created -= 3_600_000
        written.events = [(at, text, read - 3_600_000) for at, text, read in written.events]
    assert len(list(JobLogs(client).follow(RUN, ALL_LINES, ended))) == 5
    assert service.calls["GetLogEvents"] == 2, "a wait of 15 s would read the log again"


def test_streams_of_later_attempts_are_found(serving: Service) -> None:
    service, client = serving(page_events=2)
    job = Job()
    lines = JobLogs(client, scale=SCALE).follow(RUN, ALL_LINES, job)
    service.write(stream("algo-1"), ["a1"])
    assert next(lines).text == "a1"
    before = service.calls["DescribeLogStreams"]
    job.now = JobSnapshot("Interrupted", has_ended=False)
    service.write(stream("algo-1", 2), ["a2"])
    assert next(lines).text == "a2"
    assert service.calls["DescribeLogStreams"] == before + 1
    service.write(stream("algo-1"), ["last words of the first attempt"])
    job.end()
    assert [line.text for line in lines] == ["last words of the first attempt"]


def test_a_log_group_created_later_is_waited_for(serving: Service) -> None:
    service, client = serving()
    job = Job()

    def write() -> None:
        time.sleep(0.1)
        service.write(stream("algo-1"), ["here"])
        job.end()

    threading.Thread(target=write).start()
    assert [line.text for line in tail(client, job)] == ["here"]


@pytest.mark.promise
@pytest.mark.parametrize("only", [ALL_LINES, LogFilter(since=timedelta(minutes=10))])
def test_expired_tokens_lose_and_repeat_no_line(serving: Service, only: LogFilter) -> None:
    service, client = serving(Faults(empty=0.2, short=0.3, after=0), page_events=50)
    service.write(stream("algo-1"), numbered("old", 0, 20), at=time.time() - 3600)
    service.write(stream("algo-1"), numbered("algo-1", 0, 400))
    job = Job()
    lines = JobLogs(client, scale=SCALE).follow(RUN, only, job)
    old = [] if only.since else numbered("old", 0, 20)
    seen = [line.text for line in itertools.islice(lines, len(old) + 333)]
    service.expire_tokens()
    service.write(stream("algo-1"), numbered("algo-1", 400, 500))
    job.end()
    assert seen + [line.text for line in lines] == old + numbered("algo-1", 0, 500)


def test_a_host_whose_clock_steps_back_keeps_its_order(serving: Service) -> None:
    service, client = serving(page_events=3)
    now = time.time()
    for i, at in enumerate((now, now - 7200, now + 7200, now)):
        service.write(stream("algo-1"), numbered("algo-1", 4 * i, 4 * i + 4), at=at)
    assert [line.text for line in tail(client, ended)] == numbered("algo-1", 0, 16)
    assert [line.text for line in JobLogs(client).read(RUN, ALL_LINES, ended)] == numbered(
        "algo-1", 0, 16
    )


def test_an_outage_while_following_is_reported_once(serving: Service) -> None:
    service, client = serving()
    service.write(stream("algo-1"), ["before"])
    messages: list[str] = []
    job = Job()
    lines = JobLogs(client, scale=SCALE).follow(RUN, ALL_LINES, job, messages.append)
    assert next(lines).text == "before"
    service.down = True

    def recover() -> None:
        time.sleep(0.5)
        service.write(stream("algo-1"), ["after"])
        service.down = False
        job.end()

    threading.Thread(target=recover).start()
    assert [line.text for line in lines] == ["after"]
    assert len(messages) == 2, messages
    assert "retrying" in messages[0]


def test_an_unreadable_job_does_not_delay_its_log(serving: Service) -> None:
    service, client = serving()
    snapshots = iter([JobSnapshot("Training", has_ended=False)])

    def describe() -> JobSnapshot:
        for snapshot in snapshots:
            return snapshot
        raise UnreachableError("could not describe the training job: no response")

    lines = JobLogs(client, scale=SCALE).follow(RUN, ALL_LINES, describe)
    for i in range(5):
        service.write(stream("algo-1"), [f"line {i}"])
        assert next(lines).text == f"line {i}"


def test_a_service_that_never_answered_is_an_error_at_once(serving: Service) -> None:
    service, client = serving()
    service.down = True
    retries: list[str] = []
    with pytest.raises(UnreachableError, match="could not read the log"):
        tail(client, Job(), on_trouble=retries.append)
    with pytest.raises(CloudError):
        JobLogs(client).read(RUN, ALL_LINES, ended)
    assert retries == []


def test_a_denied_job_ends_following(serving: Service) -> None:
    service, client = serving(limits={"GetLogEvents": 0})
    service.write(stream("algo-1"), ["a"])

    def refuse() -> JobSnapshot:
        raise CloudError("could not describe the training job: AWS says AccessDeniedException")

    with pytest.raises(CloudError, match="AccessDenied"):
        tail(client, refuse)


def test_hosts_are_merged_in_the_order_of_time(serving: Service) -> None:
    service, client = serving(Faults(empty=0.2, short=0.3, after=0), page_events=7)
    now = time.time()
    for i in range(300):
        host = ("algo-1", "algo-2", "algo-3")[i % 3]
        service.write(stream(host), [f"{i}"], at=now + i)
    found = list(JobLogs(client).read(RUN, ALL_LINES, ended))
    assert [line.text for line in found] == [str(i) for i in range(300)]
    assert found[0].time == pytest.approx(now, abs=0.001)
    only = LogFilter(host="algo-2", since=datetime.fromtimestamp(now + 150.5, UTC))
    assert [line.text for line in JobLogs(client).read(RUN, only, ended)] == [
        str(i) for i in range(151, 300) if i % 3 == 1
    ]


def test_reading_a_log_that_grows_all_the_time_ends(serving: Service) -> None:
    """The host prints faster than we read, so there is always another page."""
    service, client = serving(page_events=500)
    now = int(time.time() * 1000)
    service.generate(
        stream("algo-1"),
        10**9,
        lambda i: (now + i, str(i), now if i < 1000 else int(time.time() * 1000)),
    )
    found = list(itertools.islice(JobLogs(client).read(RUN, ALL_LINES, ended), 400_000))
    assert 1000 <= len(found) < 400_000
    assert [line.text for line in found] == [str(i) for i in range(len(found))]


def test_since_is_relative_to_the_clock_of_aws(serving: Service) -> None:
    service, client = serving(clock_ahead=5 * 3600.0)
    service.write(stream("algo-1"), ["old"], at=service.now() - 900)
    service.write(stream("algo-1"), ["new"], at=service.now() - 300)
    only = LogFilter(since=timedelta(minutes=10))
    assert [line.text for line in JobLogs(client).read(RUN, only, ended)] == ["new"]
    assert [line.text for line in tail(client, ended, only=only)] == ["new"]


def test_hosts_on_several_pages_of_streams_are_read(serving: Service) -> None:
    service, client = serving()
    for i in range(1, 121):
        service.write(stream(f"algo-{i}"), [f"host {i}"])
    found = by_host(list(JobLogs(client).read(RUN, ALL_LINES, ended)))
    assert found == {f"algo-{i}": [f"host {i}"] for i in range(1, 121)}


@pytest.fixture
def cloudwatch(account: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudWatch]:
    """Serve a CloudWatch that commands find by AWS_ENDPOINT_URL, with the jobs that the test adds."""
    service = CloudWatch()
    with serve(service) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield service


def test_the_backend_follows_to_the_end_of_the_job(cloudwatch: CloudWatch) -> None:
    cloudwatch.run(RUN)
    cloudwatch.write(stream("algo-1"), ["a"])
    backend = SageMakerBackend(Settings(region="us-west-2"), poll_seconds=0.02)
    lines = backend.logs(RUN, follow=True)
    assert next(lines).text == "a"
    cloudwatch.write(stream("algo-1"), ["b"])
    cloudwatch.run(RUN, "Completed", "Completed")
    assert [line.text for line in lines] == ["b"]


def test_status_reads_progress_and_lists_streams_once(cloudwatch: CloudWatch) -> None:
    cloudwatch.run(RUN)
    cloudwatch.write(stream("algo-1"), [format_event("step", {"step": 7, "loss": 0.5, "epoch": 0})])
    backend = SageMakerBackend(Settings(region="us-west-2"))
    assert [backend.status(RUN).progress.last_step for _ in range(3)] == [7, 7, 7]
    assert cloudwatch.calls["DescribeLogStreams"] == 1


def test_a_success_that_ends_with_an_error_has_a_warning(cloudwatch: CloudWatch) -> None:
    error = ["Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: no data"]
    cloudwatch.write(stream("algo-1"), [*error, format_event("ranks", {"host": "algo-1"})])
    for end, count in (("Failed", 0), ("Completed", 1)):
        cloudwatch.run(RUN, end, end)
        status = SageMakerBackend(Settings(region="us-west-2")).status(RUN)
        assert (
            len([each for each in status.host_warnings() if "ValueError: no data" in each]) == count
        )


def test_a_run_without_a_log_is_empty_and_a_missing_run_fails(cloudwatch: CloudWatch) -> None:
    cloudwatch.run(RUN)
    backend = SageMakerBackend(Settings(region="us-west-2"))
    assert list(backend.logs(RUN)) == []
    with pytest.raises(RunNotFoundError):
        backend.logs("digits-261120-101500-ffffff")


def test_json_is_one_object_and_filters_hold(cli: Cli, cloudwatch: CloudWatch) -> None:
    cloudwatch.run(RUN, "Completed", "Completed", hosts=2)
    now = time.time()
    cloudwatch.write(
        stream("algo-1"),
        ["[rank0]: hello", format_event("step", {"step": 1}), "[rank1]: hello"],
        at=now,
    )
    cloudwatch.write(stream("algo-2"), ["[rank2]: hello", "[rank3]: bye"], at=now + 1)
    content = cli("logs", RUN, "--json").json
    assert content["run"] == RUN
    assert [line["text"] for line in content["lines"]][-2:] == ["[rank2]: hello", "[rank3]: bye"]
    assert content["lines"][0].keys() == {"host", "text", "time"}

    def texts(*options: str) -> list[str]:
        return [line["text"] for line in cli("logs", RUN, "--json", *options).json["lines"]]

    assert texts("--host", "algo-2") == ["[rank2]: hello", "[rank3]: bye"]
    assert texts("--grep", "hel+o$", "--host", "algo-1") == ["[rank0]: hello", "[rank1]: hello"]
    assert texts("--rank", "0") == ["[rank0]: hello", format_event("step", {"step": 1})]
    assert texts("--since", "2999-01-01") == []
    assert len(texts("--since", "1h")) == 5


def test_json_is_one_object_if_aws_fails_in_the_middle(cli: Cli, cloudwatch: CloudWatch) -> None:
    cloudwatch.run(RUN, "Completed", "Completed")
    cloudwatch.generate(stream("algo-1"), 50_000, lambda i: (1_770_000_000_000 + i, f"line {i}", 0))
    cloudwatch.faults = Faults(errors=1.0, after=3)
    done = cli("logs", RUN, "--json")
    assert done.code == 3
    content = json.loads(done.out)
    assert len(content["lines"]) > 1000
    assert content["error"]["exit_code"] == 3
    assert "could not read the log" in done.err


def test_an_empty_log_as_json(cli: Cli, cloudwatch: CloudWatch) -> None:
    cloudwatch.run(RUN)
    assert cli("logs", RUN, "--json").json == {"run": RUN, "lines": []}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--grep", "a(b"), "missing ), unterminated subpattern at character 2"),
        (("--since", "yesterday"), "expected a duration such as 10m or a time"),
        (("--rank", "-1"), "-1 is not in the range"),
    ],
)
def test_invalid_options_are_exit_code_2(cli: Cli, options: tuple[str, str], message: str) -> None:
    done = cli("logs", RUN, *options)
    assert done.code == 2
    assert message in done.err
