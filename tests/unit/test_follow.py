"""The output of a followed run under a fake clock, and the tolerance of cloud errors."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cloudtrain.aws.retry import OUTAGE_SECONDS, Backoff, OutagePolicy
from cloudtrain.console.follow import FOLLOW_OUTAGES, follow
from cloudtrain.console.follow_screen import StepThinner, is_live, line_segments
from cloudtrain.console.panel import Panel
from cloudtrain.console.runs import status_rows
from cloudtrain.errors import CloudError
from cloudtrain.runs.log_lines import LogFilter, LogLine
from cloudtrain.runs.progress import fold_events
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import (
    Phase,
    State,
    Status,
    Waiting,
)
from cloudtrain_runtime.contract import format_event

RUN = "digits-261121-074043-d30c68"
BEGAN = datetime(2026, 11, 21, 7, 40, 43, tzinfo=UTC)
FAST = OutagePolicy(0.01, 0.02, limit_seconds=0.3, unanswered_limit_seconds=0.3)


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def stages(*names_and_seconds: tuple[str, float | None], billed: str = "Downloading Training") -> tuple[Phase, ...]:
    """Return consecutive phases; one without seconds has not ended."""
    found, began = [], 0.0
    for name, seconds in names_and_seconds:
        ended = None if seconds is None else at(began + seconds)
        found.append(Phase(name, at(began), ended, f"{name} it is", is_billed=name in billed))
        began += seconds or 0.0
    return tuple(found)


def steps(
    first: int, last: int, *, began: float, every: float = 20.0, total: int | None = 1000
) -> list[dict[str, Any]]:
    """Return the events of steps that take two seconds each."""
    head = {"event": "started", "step": first, "total_steps": total, "world_size": 16, "device": "cuda"}
    numbers = range(first + 10, last + 1, 10)
    times = itertools.count(at(began).timestamp() + every, every)
    events = [
        {"event": "step", "step": step, "epoch": 1, "loss": 2.3139, "samples_per_second": 812.4, "time": time}
        for step, time in zip(numbers, times, strict=False)
    ]
    return [head, *events]


PENDING = Status(
    RUN,
    "sagemaker",
    State.QUEUED,
    "Training job waiting for capacity",
    created=at(0),
    cost_usd=0.0,
    instances=2,
    phases=stages(("Starting", 5), ("Pending", None)),
    waiting=Waiting(("ml.p4d.24xlarge", "ml.p4de.24xlarge"), 2, at(21600), "cluster.max_pending"),
)
CHECKPOINT = {"event": "checkpoint", "uri": "s3://bucket/step-00000600", "step": 600, "time": at(1375).timestamp()}
TRAINING = Status(
    RUN,
    "sagemaker",
    State.RUNNING,
    "Training image download completed. Training in progress.",
    created=at(0),
    started=at(135),
    billable_seconds=1265,
    cost_usd=17.75,
    instance_type="ml.p4d.24xlarge",
    instances=2,
    usd_per_hour=50.5,
    phases=stages(("Starting", 5), ("Pending", 130), ("Downloading", 40), ("Training", None)),
    progress=fold_events([*steps(0, 610, began=175), CHECKPOINT]),
)
INTERRUPTED = dataclasses.replace(
    TRAINING,
    state=State.INTERRUPTED,
    reason="Training job waiting for capacity",
    phases=stages(
        ("Starting", 5),
        ("Pending", 130),
        ("Downloading", 40),
        ("Training", 1225),
        ("Interrupted", 0),
        ("Pending", None),
    ),
    waiting=Waiting(("ml.p4d.24xlarge",), 2, at(36000), "cluster.spot.max_wait"),
    is_spot=True,
)
RESUMED = dataclasses.replace(
    TRAINING,
    phases=stages(("Training", 1400), ("Restarting", 0), ("Starting", 300), ("Downloading", 40), ("Training", None)),
    progress=fold_events([*steps(0, 610, began=0), CHECKPOINT, *steps(600, 660, began=1760)]),
)
STOPPED = dataclasses.replace(
    TRAINING,
    state=State.STOPPED,
    reason="MaxRuntimeExceeded: the run's time (21m) is over; raise it and resume from the last checkpoint",
    ended=at(1435),
    billable_seconds=1300,
    cost_usd=18.24,
    phases=stages(
        ("Pending", 135),
        ("Downloading", 40),
        ("Training", 1220),
        ("Stopping", 30),
        ("Uploading", 10),
        ("MaxRuntimeExceeded", 0),
    ),
)
FAILED = dataclasses.replace(
    STOPPED,
    state=State.FAILED,
    reason="AlgorithmError: rank 3: ValueError: no such column\nTraceback (most recent call last)",
    phases=stages(("Pending", 135), ("Downloading", 40), ("Training", 1260), ("Failed", 0)),
)


def drawn(
    status: Status, width: int, *, now: float = 1400, cloud_error: str = "", ascii_only: bool = False
) -> list[str]:
    """Return the panel's lines 5 seconds after the status was fetched."""
    panel = Panel(status, at(now - 5).timestamp(), cloud_error, clock=lambda: at(now).timestamp())
    console = Console(width=width, file=io.StringIO())
    return [line.plain.rstrip() for line in panel.lines(width, console=console, ascii_only=ascii_only)]


SHOWN: Mapping[tuple[str, int], tuple[Status, float, str]] = {
    ("pending", 80): (
        PENDING,
        1400,
        """\
── sagemaker:digits-261121-074043-d30c68 ───────────────────────────────────────
QUEUED       Starting 5s -> Pending 23m15s
waiting      Training job waiting for capacity
for          2 x ml.p4d.24xlarge or ml.p4de.24xlarge, gives up in 5h36m
             (cluster.max_pending)
spent        0.00 USD
""",
    ),
    ("pending", 40): (
        PENDING,
        1400,
        """\
── sagemaker:digits-261121-074043-d30c68
QUEUED       Starting 5s -> Pending
             23m15s
waiting      Training job waiting for
             capacity
for          2 x ml.p4d.24xlarge or
             ml.p4de.24xlarge, gives up
             in 5h36m
             (cluster.max_pending)
spent        0.00 USD
""",
    ),
    ("training", 80): (
        TRAINING,
        1400,
        """\
── sagemaker:digits-261121-074043-d30c68 ───────────────────────────────────────
RUNNING      Starting 5s -> Pending 2m10s -> Downloading 40s -> Training 20m25s
progress     ━━━━━━━━━─────  61%  610/1,000 steps, 12m55s left (until 08:16 UTC)
metrics      train/loss 2.314  812 samples/s
checkpoint   step 600, 25s ago, 0.35 USD at risk
spent        17.82 USD, 2 x ml.p4d.24xlarge, 50.50 USD/h
""",
    ),
    ("training", 40): (
        TRAINING,
        1400,
        """\
── sagemaker:digits-261121-074043-d30c68
RUNNING      Starting 5s -> Pending
             2m10s -> Downloading 40s ->
             Training 20m25s
progress     ━━━━━━━━━━━━━━━━───────────
             61%  610/1,000 steps,
             12m55s left (until 08:16
             UTC)
metrics      train/loss 2.314  812
             samples/s
checkpoint   step 600, 25s ago, 0.35 USD
             at risk
spent        17.82 USD, 2 x
             ml.p4d.24xlarge, 50.50
             USD/h
""",
    ),
    ("interrupted", 80): (
        INTERRUPTED,
        1500,
        """\
── sagemaker:digits-261121-074043-d30c68 ───────────────────────────────────────
INTERRUPTED  5s before -> Pending 2m10s -> Downloading 40s -> Training 20m25s ->
             Interrupted -> Pending 1m40s
waiting      Training job waiting for capacity
for          2 x ml.p4d.24xlarge, gives up in 9h35m (cluster.spot.max_wait)
progress     ━━━━━━━━━━━━━━━━━━━━━━━━────────────────  61%  610/1,000 steps
metrics      train/loss 2.314  812 samples/s
checkpoint   step 600, 2m5s ago
spent        at most 17.75 USD, 2 x ml.p4d.24xlarge spot, 50.50 USD/h on demand
""",
    ),
    ("interrupted", 40): (
        INTERRUPTED,
        1500,
        """\
── sagemaker:digits-261121-074043-d30c68
INTERRUPTED  5s before -> Pending 2m10s
             -> Downloading 40s ->
             Training 20m25s ->
             Interrupted -> Pending
             1m40s
waiting      Training job waiting for
             capacity
for          2 x ml.p4d.24xlarge, gives
             up in 9h35m
             (cluster.spot.max_wait)
progress     ━━━━━━━━━━━━━━━━───────────
             61%  610/1,000 steps
metrics      train/loss 2.314  812
             samples/s
checkpoint   step 600, 2m5s ago
spent        at most 17.75 USD, 2 x
             ml.p4d.24xlarge spot, 50.50
             USD/h on demand
""",
    ),
    ("resumed", 80): (
        RESUMED,
        1900,
        """\
── sagemaker:digits-261121-074043-d30c68 ───────────────────────────────────────
RUNNING      Training 23m20s -> Restarting -> Starting 5m -> Downloading 40s ->
             Training 2m40s
progress     ━━━━━━━━━━━──────  66%  660/1,000 steps, 11m left (until 08:23 UTC)
metrics      train/loss 2.314  812 samples/s
checkpoint   step 600, 8m45s ago, 2.81 USD at risk
spent        17.82 USD, 2 x ml.p4d.24xlarge, 50.50 USD/h
""",
    ),
    ("resumed", 40): (
        RESUMED,
        1900,
        """\
── sagemaker:digits-261121-074043-d30c68
RUNNING      Training 23m20s ->
             Restarting -> Starting 5m
             -> Downloading 40s ->
             Training 2m40s
progress     ━━━━━━━━━━━━━━━━━━─────────
             66%  660/1,000 steps, 11m
             left (until 08:23 UTC)
metrics      train/loss 2.314  812
             samples/s
checkpoint   step 600, 8m45s ago, 2.81
             USD at risk
spent        17.82 USD, 2 x
             ml.p4d.24xlarge, 50.50
             USD/h
""",
    ),
    ("stopped", 80): (
        STOPPED,
        1500,
        """\
── sagemaker:digits-261121-074043-d30c68 ───────────────────────────────────────
STOPPED      Pending 2m15s -> Downloading 40s -> Training 20m20s -> Stopping 30s
             -> Uploading 10s
reason       MaxRuntimeExceeded: the run's time (21m) is over; raise it and
             resume from the last checkpoint
progress     ━━━━━━━━━━━━━━━━━━━━━━━━────────────────  61%  610/1,000 steps
metrics      train/loss 2.314  812 samples/s
checkpoint   step 600, 1m before the end
spent        18.24 USD, 2 x ml.p4d.24xlarge, 21m40s billed
""",
    ),
    ("stopped", 40): (
        STOPPED,
        1500,
        """\
── sagemaker:digits-261121-074043-d30c68
STOPPED      Pending 2m15s ->
             Downloading 40s -> Training
             20m20s -> Stopping 30s ->
             Uploading 10s
reason       MaxRuntimeExceeded: the
             run's time (21m) is over;
             raise it and resume from
             the last checkpoint
progress     ━━━━━━━━━━━━━━━━───────────
             61%  610/1,000 steps
metrics      train/loss 2.314  812
             samples/s
checkpoint   step 600, 1m before the end
spent        18.24 USD, 2 x
             ml.p4d.24xlarge, 21m40s
             billed
""",
    ),
    ("failed", 80): (
        FAILED,
        1500,
        """\
── sagemaker:digits-261121-074043-d30c68 ───────────────────────────────────────
FAILED       Pending 2m15s -> Downloading 40s -> Training 21m
reason       AlgorithmError: rank 3: ValueError: no such column
progress     ━━━━━━━━━━━━━━━━━━━━━━━━────────────────  61%  610/1,000 steps
metrics      train/loss 2.314  812 samples/s
checkpoint   step 600, 1m before the end
spent        18.24 USD, 2 x ml.p4d.24xlarge, 21m40s billed
""",
    ),
    ("failed", 40): (
        FAILED,
        1500,
        """\
── sagemaker:digits-261121-074043-d30c68
FAILED       Pending 2m15s ->
             Downloading 40s -> Training
             21m
reason       AlgorithmError: rank 3:
             ValueError: no such column
progress     ━━━━━━━━━━━━━━━━───────────
             61%  610/1,000 steps
metrics      train/loss 2.314  812
             samples/s
checkpoint   step 600, 1m before the end
spent        18.24 USD, 2 x
             ml.p4d.24xlarge, 21m40s
             billed
""",
    ),
}


@pytest.mark.parametrize(("name", "width"), SHOWN)
def test_panel_text(name: str, width: int) -> None:
    status, now, text = SHOWN[name, width]
    assert drawn(status, width, now=now) == text.splitlines()


def test_times_and_cost_advance_between_polls() -> None:
    before, after = drawn(TRAINING, 80, now=1400), drawn(TRAINING, 80, now=1410)
    panel = Panel(TRAINING, at(1395).timestamp(), clock=lambda: at(1410).timestamp())
    after = [line.plain.rstrip() for line in panel.lines(80, console=Console(width=80, file=io.StringIO()))]
    assert before[1].endswith("Training 20m25s")
    assert after[1].endswith("Training 20m35s")
    assert "12m55s left" in before[2]
    assert "12m45s left" in after[2]
    assert after[4:] == [
        "checkpoint   step 600, 35s ago, 0.49 USD at risk",
        "spent        17.96 USD, 2 x ml.p4d.24xlarge, 50.50 USD/h",
    ]


def test_unknown_total_steps_show_a_counter_without_bar() -> None:
    status = dataclasses.replace(TRAINING, progress=fold_events(steps(0, 610, began=175, total=None)))
    assert drawn(status, 80)[2] == "progress     step 610, 1 epochs"


def test_cloud_error_is_shown_with_the_age_of_the_status() -> None:
    assert drawn(PENDING, 80, cloud_error="could not describe the training job")[-2:] == [
        "cloud        no answer for 5s: could not describe the training job",
        "spent        0.00 USD",
    ]


def test_time_limit_before_the_end_is_shown() -> None:
    status = dataclasses.replace(TRAINING, ends_by=at(1400 + 600))
    assert drawn(status, 80)[3] == "limit        time limit in 10m, 2m55s before training completes"
    assert not any("limit" in line for line in drawn(dataclasses.replace(TRAINING, ends_by=at(9000)), 80))


def test_panel_without_utf8_is_ascii() -> None:
    assert all(line.isascii() for status, *_ in SHOWN.values() for line in drawn(status, 80, ascii_only=True))


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 120), reason=st.text(max_size=300), steps_=st.integers(0, 10**9))
def test_no_line_is_wider_than_the_terminal(width: int, reason: str, steps_: int) -> None:
    from rich.cells import cell_len

    for status, *_ in SHOWN.values():
        progress = dataclasses.replace(status.progress, last_step=steps_)
        changed = dataclasses.replace(status, reason=reason, progress=progress)
        assert all(cell_len(line) <= width for line in drawn(changed, width))


def test_step_rate_is_recent_and_restarts_with_each_attempt() -> None:
    slow_then_fast = [*steps(0, 100, began=0, every=200), *steps(100, 400, began=2000, every=20)[1:]]
    progress = fold_events(slow_then_fast)
    assert len(progress.marks) <= 61
    assert progress.seconds_left(at(2600).timestamp()) == pytest.approx(600 * 2, rel=0.1)
    again = fold_events([*slow_then_fast, *steps(390, 430, began=5000, every=40)])
    assert again.seconds_left(at(5160).timestamp()) == pytest.approx(570 * 4)
    assert fold_events([*slow_then_fast, *steps(390, 400, began=5000)]).seconds_left(at(5020).timestamp()) is None


def test_time_left_grows_while_no_step_completes() -> None:
    progress = fold_events(steps(0, 610, began=175))
    left = [progress.seconds_left(at(1395 + idle).timestamp()) for idle in (0, 20, 600, 6000)]
    assert left[0] == pytest.approx(780)
    assert left[1] == pytest.approx(760)
    assert left[2] is not None
    assert left[3] is not None
    assert left[3] > left[2] > 780
    assert fold_events(steps(0, 1000, began=0)).seconds_left(at(99999).timestamp()) == 0


def test_an_ended_attempt_gives_no_estimate() -> None:
    restarted = dataclasses.replace(
        TRAINING, phases=stages(("Training", 1400), ("Interrupted", 60), ("Training", None))
    )
    assert TRAINING.seconds_left(at(1400).timestamp()) is not None
    assert restarted.seconds_left(at(1500).timestamp()) is None


def test_nothing_is_at_risk_while_no_instance_runs() -> None:
    assert TRAINING.usd_at_risk(at(1475).timestamp()) == pytest.approx(50.5 * 100 / 3600, abs=0.01)
    assert INTERRUPTED.usd_at_risk(at(1500).timestamp()) == 0
    # Work before the restart is lost already; only the cost since then is at risk.
    assert RESUMED.usd_at_risk(at(1900).timestamp()) == pytest.approx(50.5 * 200 / 3600, abs=0.01)


def test_instances_without_price_are_still_shown() -> None:
    status = dataclasses.replace(TRAINING, cost_usd=None, usd_per_hour=None, instance_type="ml.p4de.24xlarge")
    assert dict(status_rows(status))["spent"] == "2 x ml.p4de.24xlarge, price unknown"
    unknown = dataclasses.replace(status, instance_type=None)
    assert "spent" not in dict(status_rows(unknown))


def test_status_shows_the_same_values() -> None:
    rows = dict(status_rows(TRAINING, at(1400).timestamp()))
    assert rows["phases"] == "Starting 5s -> Pending 2m10s -> Downloading 40s -> Training 20m25s"
    assert rows["progress"] == "610/1,000 steps, 12m55s left (until 08:16 UTC)"
    assert rows["checkpoint"] == "step 600, 25s ago, 0.35 USD at risk"
    assert rows[""] == "s3://bucket/step-00000600"
    assert rows["spent"] == "17.75 USD, 2 x ml.p4d.24xlarge, 50.50 USD/h"
    assert rows["state"] == "RUNNING"
    waiting = dict(status_rows(PENDING, at(1400).timestamp()))
    assert waiting["state"] == "QUEUED: Training job waiting for capacity"
    assert waiting["for"].endswith("gives up in 5h36m (cluster.max_pending)")
    content = TRAINING.to_json(at(1400).timestamp())
    assert (content["seconds_left"], content["usd_at_risk"], content["spot"]) == (775, 0.35, False)
    assert PENDING.to_json()["waiting"]["until"] == at(21600).isoformat()


class FakeCloud:
    """A backend with scripted answers: a status to return, or an error to raise. The last one repeats."""

    name = "sagemaker"

    def __init__(self, *answers: Status | Exception, lines: Callable[[], Iterator[LogLine]] | None = None) -> None:
        self.answers = list(answers)
        self.lines = lines or (lambda: iter(()))
        self.asked = threading.Semaphore(0)

    def status(self, run: str) -> Status:  # noqa: ARG002
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.asked.release()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def poll_backoff(self) -> Backoff:
        return Backoff(0.01)

    def logs(self, run: str, *, follow: bool = False, only: LogFilter, **_: object) -> Iterator[LogLine]:  # noqa: ARG002
        return filter(only.wants, self.lines())

    def facts(self, run: str) -> Mapping[str, str]:  # noqa: ARG002
        return {}

    def stop(self, run: str) -> None:
        raise NotImplementedError


DONE = dataclasses.replace(STOPPED, state=State.SUCCEEDED, reason="Training job completed")
THROTTLED = CloudError("could not describe the training job: AWS says ThrottlingException: Rate exceeded", "wait")


def test_a_short_outage_is_reported_once_and_survived(capsys: pytest.CaptureFixture[str]) -> None:
    cloud = FakeCloud(PENDING, THROTTLED, THROTTLED, TRAINING, DONE)
    outages = dataclasses.replace(FAST, limit_seconds=60)
    assert follow(Run(RUN, cloud), as_json=True, outages=outages) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["state"] == "SUCCEEDED"
    assert err.count("ThrottlingException") == 1
    assert "(retrying; the run continues)\n" in err
    assert "recovered after " in err


def test_a_long_outage_ends_with_how_to_attach_again() -> None:
    with pytest.raises(CloudError) as raised:
        follow(Run(RUN, FakeCloud(PENDING, THROTTLED)), as_json=True, outages=FAST)
    assert raised.value.exit_code == 3
    assert f"follow sagemaker:{RUN}" in raised.value.hint
    assert raised.value.hint.startswith("wait\n")


def test_an_outage_after_a_success_is_tolerated_longer() -> None:
    assert FOLLOW_OUTAGES.limit_seconds == OUTAGE_SECONDS == 3600, "as documented for every followed run"
    outages = OutagePolicy(0.01, 0.02, limit_seconds=60, unanswered_limit_seconds=0)
    assert follow(Run(RUN, FakeCloud(PENDING, THROTTLED, THROTTLED, DONE)), as_json=True, outages=outages) == 0
    with pytest.raises(CloudError):
        follow(Run(RUN, FakeCloud(THROTTLED, THROTTLED, DONE)), as_json=True, outages=outages)


def test_an_error_that_is_not_of_the_cloud_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        follow(Run(RUN, FakeCloud(ZeroDivisionError("a bug"))), as_json=True, outages=FAST)

    def broken() -> Iterator[LogLine]:
        yield LogLine("algo-1", "a line")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        follow(Run(RUN, FakeCloud(PENDING, lines=broken)), as_json=True, outages=FAST)


def test_a_log_read_again_repeats_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    begun = itertools.count()

    def lines() -> Iterator[LogLine]:
        attempt = next(begun)
        for host, number in itertools.product(("algo-1", "algo-2"), range(6)):
            if attempt == 0 and (host, number) == ("algo-2", 2):
                raise CloudError("could not read the log: reset")
            yield LogLine(host, f"line {number}")

    outages = dataclasses.replace(FAST, limit_seconds=60, unanswered_limit_seconds=60)
    assert follow(Run(RUN, FakeCloud(DONE, lines=lines)), as_json=True, outages=outages) == 0
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("algo-")]
    assert shown == [f"{host}  line {number}" for host in ("algo-1", "algo-2") for number in range(6)]


def test_the_status_is_followed_without_a_readable_log(capsys: pytest.CaptureFixture[str]) -> None:
    ended = threading.Event()

    def lines() -> Iterator[LogLine]:
        if ended.wait(0.01):
            yield from ()
        raise CloudError("could not read the log: AccessDeniedException")

    class SlowCloud(FakeCloud):
        def status(self, run: str) -> Status:
            ended.wait(1)  # longer than the limit for the log
            return super().status(run)

    cloud = SlowCloud(TRAINING, DONE, lines=lines)
    outages = dataclasses.replace(FAST, limit_seconds=0.1, unanswered_limit_seconds=0.1)
    assert follow(Run(RUN, cloud), as_json=True, outages=outages) == 0
    err = capsys.readouterr().err
    assert err.count("could not read the log: AccessDeniedException (retrying; the run continues)") == 1
    assert "stopped reading the log: could not read the log: AccessDeniedException" in err


def test_a_slow_log_does_not_delay_the_status() -> None:
    release = threading.Event()

    def lines() -> Iterator[LogLine]:
        yield LogLine("algo-1", "first")
        release.wait(30)

    cloud = FakeCloud(*[TRAINING] * 3, DONE, lines=lines)
    ends: list[int] = []
    thread = threading.Thread(target=lambda: ends.append(follow(Run(RUN, cloud), as_json=True, outages=FAST)))
    thread.start()
    for _ in range(4):
        assert cloud.asked.acquire(timeout=10)
    assert ends == []  # `follow` waits for the last lines
    release.set()
    thread.join(10)
    assert ends == [0]


def test_a_known_checkpoint_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    without_checkpoint = dataclasses.replace(DONE, progress=dataclasses.replace(DONE.progress, checkpoint=None))
    follow(Run(RUN, FakeCloud(TRAINING, without_checkpoint)), as_json=True, outages=FAST)
    assert json.loads(capsys.readouterr().out)["last_checkpoint"]["step"] == 600
    empty = dataclasses.replace(DONE, progress=fold_events([]))
    follow(Run(RUN, FakeCloud(TRAINING, empty)), as_json=True, outages=FAST)
    assert json.loads(capsys.readouterr().out)["last_step"] == 610


def test_the_result_is_exit_code_and_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    for status, code in ((STOPPED, 5), (FAILED, 4), (DONE, 0)):
        assert follow(Run(RUN, FakeCloud(status)), as_json=True, outages=FAST) == code
        out, err = capsys.readouterr()
        assert (json.loads(out)["exit_code"], json.loads(out)["reason"]) == (code, status.reason)
        assert "next: " in err
        assert ("user_code" in err or "why " in err) == (code == 4)


def test_ctrl_c_exits_at_once_with_the_latest_status(capsys: pytest.CaptureFixture[str]) -> None:
    import signal

    def lines() -> Iterator[LogLine]:
        yield LogLine("algo-1", "first")
        for _ in range(2):  # the second call means that the first answer was handled
            assert cloud.asked.acquire(timeout=10)
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait(30)

    cloud = FakeCloud(TRAINING, lines=lines)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert follow(Run(RUN, cloud), as_json=True, outages=FAST) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capsys.readouterr()
    assert json.loads(out)["state"] == "RUNNING"
    assert f"sagemaker:{RUN} continues. To attach again: cloudtrain follow sagemaker:{RUN}" in err.replace("pytest", "")


def test_one_step_line_per_ten_seconds_is_shown() -> None:
    events = [event for event in steps(0, 200, began=0, every=3) if event["event"] == "step"]
    lines = [LogLine("algo-1", format_event("step", event)) for event in events]
    thinner = StepThinner(10)
    assert [index for index, line in enumerate(lines) if thinner.wants(line)] == [0, 4, 8, 12, 16]
    assert thinner.wants(LogLine("algo-1", format_event("evaluation", {"split": "test", "time": 1.0})))
    assert all(map(StepThinner(0).wants, lines))


def test_lines_cannot_move_the_cursor() -> None:
    def shown(line: str) -> str:
        return "".join(segment.text for segment in line_segments(line, Console(file=io.StringIO())))

    assert shown("10%|#\r20%|##\r30%|###") == "30%|###\n"
    assert shown("\x1b[31mred\x1b[0m \x1b[2J\x1b[H\x1b[3Aup") == "red up\n"
    assert shown("bell\x07 back\x08 null\x00 tab\tend\r") == "bell back null tab\tend\n"


@pytest.mark.parametrize("name", ["CI", "JPY_PARENT_PID"])
def test_the_panel_needs_an_interactive_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("CI", raising=False)
    assert is_live(Console(file=Terminal()))
    assert not is_live(Console(file=io.StringIO(), force_terminal=True))
    monkeypatch.setenv(name, "1")
    assert not is_live(Console(file=Terminal()))
    monkeypatch.delenv(name)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_live(Console(file=Terminal()))
