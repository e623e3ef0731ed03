"""AWS is asked no faster than it allows, by all processes of a machine together, and less when it says so."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cloudwatch import CloudWatch, serve

from cloudtrain.backends.sagemaker.pace import BackoffPace, Budget, Limit, pace_client
from cloudtrain.errors import UnreachableError
from cloudtrain.patience import OUTAGE_SECONDS, Patience

LIMIT = Limit(10.0, 2)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["here", "shared"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "budget" if request.param == "shared" else None


def test_calls_queue_up_at_the_limit(path: Path | None) -> None:
    budget = Budget(LIMIT, path, clock=Clock())
    assert [round(budget.take(), 3) for _ in range(5)] == [0, 0, 0.1, 0.2, 0.3]


def test_time_that_passes_gives_places_back_but_never_more_than_at_once(path: Path | None) -> None:
    clock = Clock()
    budget = Budget(LIMIT, path, clock=clock)
    for _ in range(4):
        budget.take()
    clock.now += 100
    assert [round(budget.take(), 3) for _ in range(3)] == [0, 0, 0.1]


def test_a_clock_that_begins_anew_holds_nobody_up(path: Path | None) -> None:
    clock = Clock()
    clock.now = 1e6
    Budget(LIMIT, path, clock=clock).take()
    clock.now = 5.0
    assert Budget(LIMIT, path, clock=clock).take() == 0


def test_a_refusal_halves_the_rate_once_and_answers_bring_it_back(path: Path | None) -> None:
    clock = Clock()
    budget = Budget(LIMIT, path, clock=clock)
    for _ in range(5):
        budget.answered(throttled=True)  # calls that were under way together
    assert budget.share() == 0.5
    budget.take()
    budget.take()
    assert budget.take() == pytest.approx(0.2)
    for _ in range(9):
        clock.now += 2
        budget.answered(throttled=True)
    assert budget.share() == 1 / 16
    for _ in range(200):
        budget.answered(throttled=False)
    assert budget.share() == 1.0


def test_a_damaged_file_is_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "budget"
    for content in (b"x", b"\xff" * 24, os.urandom(100)):
        path.write_bytes(content)
        assert Budget(LIMIT, path).take() == 0


def test_processes_share_a_budget(tmp_path: Path) -> None:
    """40 calls at 20 a second take 2 s, however many processes make them."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom cloudtrain.backends.sagemaker.pace import Budget, Limit\n"
        "budget = Budget(Limit(20.0, 1), Path(sys.argv[1]))\nprint(flush=True)\nsys.stdin.readline()\n"
        "for _ in range(10):\n    time.sleep(budget.take())\n    print(time.monotonic())"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "budget")]
    children = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    times = sorted(float(each) for child in children for each in child.communicate("go\n")[0].split())
    assert len(times) == 40
    assert times[-1] - times[0] >= 39 / 20 - 0.1


def test_a_client_waits_for_its_place_and_its_retries_do_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    service = CloudWatch(limits={"GetLogEvents": 10, "DescribeLogStreams": 0})
    service.write("run/algo-1-1", ["a"])
    with serve(service) as endpoint:
        client: Any = boto3.client("logs", endpoint_url=endpoint, region_name="us-west-2")
        budgets = pace_client(client)
        arguments = {"logGroupName": "g", "logStreamName": "run/algo-1-1", "startFromHead": True}
        threads = [
            threading.Thread(target=lambda: [client.get_log_events(**arguments) for _ in range(5)]) for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert service.calls["GetLogEvents"] == 25
        assert not service.throttled["GetLogEvents"]
        assert budgets["GetLogEvents"].share() == 1
        with pytest.raises(client.exceptions.ClientError, match="Rate exceeded"):
            client.describe_log_streams(logGroupName="g", logStreamNamePrefix="run/")
        assert budgets["DescribeLogStreams"].share() < 1
    assert (tmp_path / f"cloudtrain-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"cloudtrain-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    client: Any = boto3.client("logs", endpoint_url="http://127.0.0.1:9", region_name="us-west-2")
    assert pace_client(client)["GetLogEvents"].take() == 0
    assert list(folder.iterdir()) == []


def test_waits_grow_while_nothing_changes() -> None:
    share = 1.0
    pace = BackoffPace(5.0, share=lambda: share, dice=lambda: 0.5)
    assert [pace.next_seconds(changed=True) for _ in range(2)] == [5, 5]
    waits = [pace.next_seconds(changed=False) for _ in range(7)]
    assert waits[:3] == [7.5, 11.25, 16.875]
    assert waits[-1] == 30
    assert pace.next_seconds(changed=True) == 5
    share = 0.25
    assert pace.next_seconds(changed=True) == 20
    assert BackoffPace(5.0, dice=lambda: 0.0).next_seconds(changed=True) == 4
    assert BackoffPace(5.0, dice=lambda: 1.0).next_seconds(changed=True) == pytest.approx(6)


def test_patience_ends_after_an_hour_and_tells_twice() -> None:
    clock, told = Clock(), list[str]()
    error = UnreachableError("could not read the log: nobody answers")
    patience = Patience(told.append, clock=clock, dice=lambda: 1.0)
    with pytest.raises(UnreachableError):
        patience.failed(error)
    patience.worked()
    assert [patience.failed(error) for _ in range(6)] == [5, 10, 20, 40, 60, 60]
    clock.now += 190
    patience.worked()
    assert told == [
        "could not read the log: nobody answers; trying again, the run goes on meanwhile",
        "there are answers again, after 3m10s",
    ]
    patience.failed(error)
    clock.now += OUTAGE_SECONDS + 1
    with pytest.raises(UnreachableError):
        patience.failed(error)
