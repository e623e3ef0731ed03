"""The panel of a followed run under a fake clock: its text, estimates and costs."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.run_statuses import (
    FAILED,
    INTERRUPTED,
    PENDING,
    RESUMED,
    STOPPED,
    TRAINING,
    at,
    stages,
    steps,
)
from support.sizes import tries

from cloudtrain.console.panel import Panel
from cloudtrain.console.runs import status_rows
from cloudtrain.runs.progress import fold_events
from cloudtrain.runs.status import Status


def panel_lines(
    status: Status,
    width: int,
    *,
    now: float = 1400,
    cloud_error: str = "",
    ascii_only: bool = False,
) -> list[str]:
    """Return the panel's lines 5 seconds after the status was fetched."""
    panel = Panel(status, at(now - 5).timestamp(), cloud_error, clock=lambda: at(now).timestamp())
    console = Console(width=width, file=io.StringIO())
    return [
        line.plain.rstrip() for line in panel.lines(width, console=console, ascii_only=ascii_only)
    ]


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
spent        17.82 USD, 2 x ml.p4d.24xlarge, 50.50 USD per hour
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
             ml.p4d.24xlarge, 50.50 USD
             per hour
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
spent        at most 17.75 USD, 2 x ml.p4d.24xlarge spot, 50.50 USD per hour on
             demand
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
             USD per hour on demand
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
spent        17.82 USD, 2 x ml.p4d.24xlarge, 50.50 USD per hour
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
             ml.p4d.24xlarge, 50.50 USD
             per hour
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
    assert panel_lines(status, width, now=now) == text.splitlines()


def test_times_and_cost_advance_between_polls() -> None:
    before, after = panel_lines(TRAINING, 80, now=1400), panel_lines(TRAINING, 80, now=1410)
    panel = Panel(TRAINING, at(1395).timestamp(), clock=lambda: at(1410).timestamp())
    after = [
        line.plain.rstrip()
        for line in panel.lines(80, console=Console(width=80, file=io.StringIO()))
    ]
    assert before[1].endswith("Training 20m25s")
    assert after[1].endswith("Training 20m35s")
    assert "12m55s left" in before[2]
    assert "12m45s left" in after[2]
    assert after[4:] == [
        "checkpoint   step 600, 35s ago, 0.49 USD at risk",
        "spent        17.96 USD, 2 x ml.p4d.24xlarge, 50.50 USD per hour",
    ]


def test_unknown_total_steps_show_a_counter_without_bar() -> None:
    status = dataclasses.replace(
        TRAINING, progress=fold_events(steps(0, 610, began=175, total=None))
    )
    assert panel_lines(status, 80)[2] == "progress     step 610, 1 epoch"


def test_cloud_error_is_shown_with_the_age_of_the_status() -> None:
    assert panel_lines(PENDING, 80, cloud_error="could not describe the training job")[-2:] == [
        "cloud        no answer for 5s: could not describe the training job",
        "spent        0.00 USD",
    ]


def test_time_limit_before_the_end_is_shown() -> None:
    status = dataclasses.replace(TRAINING, ends_by=at(1400 + 600))
    assert (
        panel_lines(status, 80)[3]
        == "limit        time limit in 10m, 2m55s before training completes"
    )
    assert not any(
        "limit" in line for line in panel_lines(dataclasses.replace(TRAINING, ends_by=at(9000)), 80)
    )


def test_panel_without_utf8_is_ascii() -> None:
    assert all(
        line.isascii()
        for status, *_ in SHOWN.values()
        for line in panel_lines(status, 80, ascii_only=True)
    )


@settings(max_examples=tries(60), deadline=None)
@given(width=st.integers(1, 120), reason=st.text(max_size=300), steps_=st.integers(0, 10**9))
def test_no_line_is_wider_than_the_terminal(width: int, reason: str, steps_: int) -> None:
    from rich.cells import cell_len

    for status, *_ in SHOWN.values():
        progress = dataclasses.replace(status.progress, last_step=steps_)
        changed = dataclasses.replace(status, reason=reason, progress=progress)
        assert all(cell_len(line) <= width for line in panel_lines(changed, width))


def test_step_rate_is_recent_and_restarts_with_each_attempt() -> None:
    slow_then_fast = [
        *steps(0, 100, began=0, every=200),
        *steps(100, 400, began=2000, every=20)[1:],
    ]
    progress = fold_events(slow_then_fast)
    assert len(progress.marks) <= 61
    assert progress.seconds_left(at(2600).timestamp()) == pytest.approx(600 * 2, rel=0.1)
    again = fold_events([*slow_then_fast, *steps(390, 430, began=5000, every=40)])
    assert again.seconds_left(at(5160).timestamp()) == pytest.approx(570 * 4)
    assert (
        fold_events([*slow_then_fast, *steps(390, 400, began=5000)]).seconds_left(
            at(5020).timestamp()
        )
        is None
    )


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
    status = dataclasses.replace(
        TRAINING, cost_usd=None, usd_per_hour=None, instance_type="ml.p4de.24xlarge"
    )
    assert dict(status_rows(status))["spent"] == "2 x ml.p4de.24xlarge, price unknown"
    unknown = dataclasses.replace(status, instance_type=None)
    assert "spent" not in dict(status_rows(unknown))


def test_status_shows_the_same_values() -> None:
    rows = dict(status_rows(TRAINING, at(1400).timestamp()))
    assert rows["phases"] == "Starting 5s -> Pending 2m10s -> Downloading 40s -> Training 20m25s"
    assert rows["progress"] == "610/1,000 steps, 12m55s left (until 08:16 UTC)"
    assert rows["checkpoint"] == "step 600, 25s ago, 0.35 USD at risk"
    assert rows["checkpoint at"] == "s3://bucket/step-00000600"
    assert rows["spent"] == "17.75 USD, 2 x ml.p4d.24xlarge, 50.50 USD per hour"
    assert rows["state"] == "RUNNING"
    waiting = dict(status_rows(PENDING, at(1400).timestamp()))
    assert waiting["state"] == "QUEUED: Training job waiting for capacity"
    assert waiting["for"].endswith("gives up in 5h36m (cluster.max_pending)")
    content = TRAINING.to_json(at(1400).timestamp())
    assert (content["seconds_left"], content["usd_at_risk"], content["spot"]) == (775, 0.35, False)
    assert PENDING.to_json()["waiting"]["until"] == at(21600).isoformat()
