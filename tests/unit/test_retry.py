"""Backoff, outages and the retries of boto3 clients."""

from pathlib import Path

import pytest

from cloudtrain.aws.retry import (
    OUTAGE_SECONDS,
    Backoff,
    OutagePolicy,
    OutageTolerance,
    client_retries,
)
from cloudtrain.errors import UnreachableError

REPOSITORY = Path(__file__).resolve().parents[2]
ERROR = UnreachableError("could not read the log: connection refused")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def longest_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each wait its upper bound."""
    monkeypatch.setattr("cloudtrain.aws.retry.random.uniform", lambda _, high: high)


@pytest.mark.usefixtures("longest_jitter")
def test_backoff_grows_while_nothing_changes() -> None:
    backoff = Backoff(5.0)
    assert [backoff.next_seconds(changed=True) for _ in range(2)] == [5, 5]
    assert [backoff.next_seconds() for _ in range(4)] == [10, 20, 30, 30]
    assert backoff.next_seconds(changed=True) == 5


@pytest.mark.usefixtures("longest_jitter")
def test_backoff_follows_changed_limits() -> None:
    backoff = Backoff(5.0, 20.0)
    backoff.next_seconds(changed=True)
    backoff.first_seconds = 16.0
    assert [backoff.next_seconds() for _ in range(3)] == [16, 20, 20]
    backoff.first_seconds = 40.0
    assert [backoff.next_seconds() for _ in range(3)] == [40, 40, 40]
    assert [Backoff(0.5, 0.5).next_seconds() for _ in range(3)] == [0.5] * 3


def test_jitter_shortens_a_wait_by_at_most_a_fifth() -> None:
    waits = [Backoff(5.0).next_seconds() for _ in range(1000)]
    assert 4 <= min(waits) < 4.5 < max(waits) <= 5


@pytest.mark.usefixtures("longest_jitter")
def test_an_outage_is_reported_when_it_begins_and_ends() -> None:
    clock, messages = Clock(), list[str]()
    outages = OutageTolerance(messages.append, clock=clock)
    outages.succeeded()
    assert [outages.failed(ERROR) for _ in range(6)] == [5, 10, 20, 40, 60, 60]
    clock.now += 190
    assert outages.succeeded()
    assert not outages.succeeded()
    assert messages == [f"{ERROR.message} (retrying; the run continues)", "recovered after 3m10s"]
    assert outages.failed(ERROR) == 5


@pytest.mark.usefixtures("longest_jitter")
def test_an_outage_above_the_limit_raises_its_error() -> None:
    clock, messages = Clock(), list[str]()
    outages = OutageTolerance(messages.append, clock=clock)
    outages.succeeded()
    outages.failed(ERROR)
    clock.now += OUTAGE_SECONDS - 3
    assert outages.failed(ERROR) == pytest.approx(3), "the last retry comes at the limit"
    clock.now += 3
    with pytest.raises(UnreachableError):
        outages.failed(ERROR)
    assert len(messages) == 1


def test_a_first_call_that_fails_has_its_own_limit() -> None:
    clock, messages = Clock(), list[str]()
    with pytest.raises(UnreachableError):
        OutageTolerance(messages.append, clock=clock).failed(ERROR)
    assert messages == []
    outages = OutageTolerance(
        messages.append, OutagePolicy(unanswered_limit_seconds=600), clock=clock
    )
    outages.failed(ERROR)
    clock.now += 600
    with pytest.raises(UnreachableError):
        outages.failed(ERROR)


def test_several_failing_calls_are_one_outage() -> None:
    clock, messages = Clock(), list[str]()
    outages = OutageTolerance(messages.append, clock=clock)
    for call in ("job", "log"):
        outages.succeeded(call)
        outages.failed(ERROR, "job")
        clock.now += 10
    outages.failed(ERROR, "log")
    assert outages.succeeded("job")
    assert len(messages) == 1, "the log still fails"
    outages.succeeded("log")
    assert messages[1:] == ["recovered after 20s"]


def test_clients_retry_in_standard_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_MAX_ATTEMPTS", raising=False)
    assert client_retries() == {"mode": "standard", "total_max_attempts": 6}
    assert client_retries(3)["total_max_attempts"] == 3
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "9")
    assert client_retries(3)["total_max_attempts"] == 9


def test_every_client_config_uses_the_retry_policy() -> None:
    for package in ("sdk/cloudtrain", "entrypoints/cloudtrain_runtime"):
        for path in (REPOSITORY / package).rglob("*.py"):
            text = path.read_text()
            if "import Config\n" in text:
                assert text.count(" Config(") == text.count("retries=client_retries("), path
