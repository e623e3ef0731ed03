import dataclasses
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

import cloudtrain
from cloudtrain.console.runs import status_rows
from cloudtrain.console.status_fields import progress_row
from cloudtrain.errors import RunNotFoundError, UserError
from cloudtrain.job.job_fields import MAX_NAME_CHARACTERS
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.runs.progress import fold_events
from cloudtrain.runs.run import parse_reference
from cloudtrain.runs.status import State, Status
from cloudtrain.support.run_id import RUN_ID_CHARACTERS, is_run_id, make_run_id
from cloudtrain_runtime.contract import check_event

NOW = datetime(2026, 11, 20, 10, 15, 0, tzinfo=UTC)


def test_run_ids() -> None:
    assert make_run_id("digits", NOW, "1a2b3c") == "digits-261120-101500-1a2b3c"
    assert is_run_id("digits-261120-101500-1a2b3c")
    assert not is_run_id("digits")
    assert not is_run_id("digits-261120-101500-XYZXYZ")


def test_the_longest_name_gives_the_longest_legal_run_id() -> None:
    assert len(make_run_id("a" * MAX_NAME_CHARACTERS, NOW, "1a2b3c")) == RUN_ID_CHARACTERS


def test_references() -> None:
    assert parse_reference("digits-261120-101500-1a2b3c") == (None, "digits-261120-101500-1a2b3c")
    assert parse_reference("local:digits-261120-101500-1a2b3c") == (
        "local",
        "digits-261120-101500-1a2b3c",
    )
    assert parse_reference("sandbox:latest") == ("sandbox", "latest")
    for wrong in ("", "local:", ":x", "my run"):
        with pytest.raises(RunNotFoundError):
            parse_reference(wrong)


@pytest.mark.parametrize(
    "function", [cloudtrain.get_run, cloudtrain.status, cloudtrain.resume, cloudtrain.stop]
)
def test_neither_a_run_nor_an_id_is_an_error(function: Callable[[Any], object]) -> None:
    with pytest.raises(UserError, match="expected a run id or a Run, got int"):
        function(7)


def test_stopped_is_never_success() -> None:
    assert {state: state.exit_code for state in State} == {
        State.QUEUED: None,
        State.STARTING: None,
        State.RUNNING: None,
        State.STOPPING: None,
        State.INTERRUPTED: None,
        State.UNKNOWN: None,
        State.SUCCEEDED: 0,
        State.FAILED: 4,
        State.STOPPED: 5,
    }


EVENTS = [
    {"event": "started", "step": 0, "world_size": 4, "device": "cpu", "resumed_from": None},
    {"event": "step", "step": 10, "epoch": 0, "loss": 2.5, "samples_per_second": 100.0},
    {"event": "checkpoint", "uri": "file:///c/step-00000010", "step": 10, "time": 50.0},
    {
        "event": "evaluation",
        "split": "validation",
        "step": 10,
        "epoch": 0,
        "loss": 2.0,
        "samples": 9,
        "time": 1.0,
    },
    {"event": "something-newer", "step": 99},
    {"event": "step", "step": 20, "epoch": 1, "loss": None, "samples_per_second": 120.0},
    {"event": "evaluation", "split": "test", "step": 20, "epoch": 1, "loss": 1.5, "accuracy": 0.5},
    {"event": "finished", "step": 20, "epochs": 2, "samples_per_second": 110.0},
]


def test_progress_comes_from_events() -> None:
    progress = fold_events(EVENTS)
    assert progress.last_step == 20
    assert progress.last_epoch == 2
    assert progress.world_size == 4
    assert progress.checkpoint is not None
    assert progress.checkpoint.step == 10
    assert progress.metrics == {
        "train/loss": None,  # the last one is not finite
        "train/samples_per_second": 110.0,
        "validation/loss": 2.0,
        "test/loss": 1.5,
        "test/accuracy": 0.5,
    }


def test_status_shows_the_parts_of_a_step() -> None:
    split = {"data": 0.03, "forward": 0.02, "backward": 0.04, "optimizer": 0.01, "checkpoint": 0}
    seen = {
        "tokens_per_second": 5e4,
        "data_wait": 0.3,
        "split": split,
        "mfu": 0.41,
        "memory_bytes": 2e9,
    }
    slow = {
        "event": "straggler",
        "rank": 5,
        "host": "algo-2",
        "ratio": 1.4,
        "part": "forward",
        "is_over": False,
    }
    network = {"event": "bandwidth", "gbps": 31.5, "warning": "EFA is not active?"}
    events = [*EVENTS[:2], network, {**EVENTS[5], **seen}, slow]
    status = Status("x", "local", State.RUNNING, progress=fold_events(events))
    metrics = status.to_json()["metrics"]
    assert metrics["train/data_seconds"] == 0.03
    assert metrics["train/checkpoint_seconds"] == 0
    assert metrics["train/data_wait"] == 0.3
    assert metrics["train/mfu"] == 0.41
    rows = dict(status_rows(status, 0.0))
    assert (
        rows["step"] == "100 ms: data 30%, forward 20%, backward 40%, optimizer 10%, checkpoint 0%"
    )
    assert rows["device"] == "50,000 tokens/s, MFU 41.0%, 2.0 GB of memory per rank at most"
    assert not any(name in rows for name in ("train/data_seconds", "train/mfu", "train/data_wait"))
    data, efa, rank = status.to_json()["warnings"]
    assert data.startswith("30% of each step waits for data")
    assert efa == "EFA is not active?"
    assert rank == "rank 5 on algo-2 takes 1.40 x the median of all ranks, mostly in forward"
    first = fold_events([*EVENTS[:2], {**EVENTS[5], **seen, "step": 1}])
    assert not Status("x", "local", State.RUNNING, progress=first).warnings()
    over = fold_events(
        [*events, {**slow, "is_over": True}, {**EVENTS[5], **seen, "data_wait": 0.1}]
    )
    assert Status("x", "local", State.RUNNING, progress=over).warnings() == ("EFA is not active?",)


def test_malformed_events_do_not_change_the_progress() -> None:
    strange = [
        {"event": name, "step": "x"}
        for name in ("started", "step", "checkpoint", "evaluation", "finished")
    ]
    checked = [
        event
        for each in ({"event": "checkpoint"}, *strange)
        if (event := check_event(each)) is not None
    ]
    assert {event["event"] for event in checked} == {"started", "evaluation", "finished"}
    assert fold_events([*EVENTS[:3], *checked]).checkpoint == fold_events(EVENTS[:3]).checkpoint


@pytest.mark.parametrize(
    "name",
    [
        *("started", "step", "evaluation", "checkpoint", "checkpoint_missed", "checkpoint_damaged"),
        *("failed", "stopped", "finished", "straggler", "bandwidth", "profile", "pipeline", "new"),
    ],
)
def test_malformed_and_unknown_events_are_printed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from cloudtrain.console.runs import print_logs
    from cloudtrain.runs.log_lines import LogLine

    text = f'CLOUDTRAIN {{"event": "{name}", "loss": "x"}}'
    assert print_logs(None, [LogLine("algo-1", text)], follow=False, raw=False) == 0  # type: ignore[arg-type]
    assert "algo-1  " in capsys.readouterr().out


def test_a_restart_clears_failures_and_moves_the_step_back() -> None:
    failed = {"event": "failed", "rank": 1, "message": "x"}
    again = {
        "event": "started",
        "step": 10,
        "world_size": 4,
        "resumed_from": "file:///c/step-00000010",
    }
    progress = fold_events([*EVENTS[:6], failed, again])
    assert progress.failures == ()
    assert (progress.first_step, progress.last_step) == (10, 10)


def test_status_json_has_the_promised_keys() -> None:
    status = Status(
        run="digits-261120-101500-1a2b3c",
        backend="local",
        state=State.FAILED,
        reason="rank 1 was killed",
        ended=datetime.fromtimestamp(80.0, tz=UTC),
        progress=fold_events(EVENTS),
    )
    content = status.to_json()
    promised = "run backend state reason exit_code started ended billable_seconds cost_usd last_step last_checkpoint metrics"
    assert set(promised.split()) <= set(content)
    assert content["exit_code"] == 4
    assert content["last_checkpoint"] == {
        "uri": "file:///c/step-00000010",
        "step": 10,
        "age_seconds": 30.0,
    }


MISSED = {
    "event": "checkpoint_missed",
    "step": 40,
    "reason": "failed",
    "detail": "AccessDenied",
    "missed": 3,
    "alarm": True,
}
DAMAGED = {
    "event": "checkpoint_damaged",
    "step": 10,
    "uri": "file:///c/step-00000010",
    "detail": "__0_0 has changed",
}


def running(*events: Mapping[str, Any]) -> Status:
    progress = fold_events([*EVENTS[:3], *events])
    return Status("digits-261120-101500-1a2b3c", "local", State.RUNNING, progress=progress)


def test_a_trainer_that_begins_over_a_checkpoint_is_a_warning() -> None:
    event = {
        "event": "fresh_start",
        "checkpoint": "/opt/ml/checkpoints/checkpoint-40",
        "method": "train",
        "argument": "resume_from_checkpoint",
    }
    (warning,) = running(event).host_warnings()
    assert warning == (
        "the trainer begins at step 0, although /opt/ml/checkpoints/checkpoint-40 is there: "
        "pass resume_from_checkpoint to its train"
    )
    assert running(event, {"event": "attempt", "host": "algo-1"}).host_warnings() == ()


LONE_RANKS = {
    "event": "ranks",
    "host": "algo-1",
    "ranks": 2,
    "joined": 0,
    "alone": 2,
    "saved": False,
    "progressed": False,
}


@pytest.mark.parametrize(
    ("state", "seconds", "warnings"),
    [
        (State.STOPPED, 15.0, 0),
        (State.INTERRUPTED, 15.0, 0),
        (State.STOPPING, 15.0, 0),
        (State.STOPPED, 3600.0, 3),
        (State.RUNNING, 15.0, 3),
        (State.SUCCEEDED, 15.0, 3),
    ],
)
def test_a_script_that_was_stopped_early_is_not_judged(
    state: State, seconds: float, warnings: int
) -> None:
    progress = fold_events([{**LONE_RANKS, "seconds": seconds}])
    found = Status("r", "local", state, progress=progress).host_warnings()
    assert len(found) == warnings, found


def test_a_script_without_progress_learns_the_easy_ways_first() -> None:
    progress = fold_events([{**LONE_RANKS, "alone": 0, "saved": True, "seconds": 15.0}])
    (warning,) = Status("r", "local", State.SUCCEEDED, progress=progress).host_warnings()
    assert warning.startswith("a hang would not be noticed: the script reports no progress.")
    ways = [warning.index(way) for way in ("runtime.report(", "metrics:", "checkpoint.save")]
    assert ways == sorted(ways)


def test_a_script_that_trained_until_it_was_stopped_is_judged() -> None:
    step = {"event": "step", "step": 3, "time": 100.0}
    ranks = {**LONE_RANKS, "seconds": 15.0, "progressed": None}
    progress = fold_events([step, ranks])
    copies, unsaved = Status("r", "local", State.STOPPED, progress=progress).host_warnings()
    assert "2 independent copies" in copies
    assert "saved nothing by cloudtrain_runtime.checkpoint" in unsaved


def test_missed_checkpoints_raise_an_alarm_when_reported() -> None:
    assert running().alarms(110.0) == ()
    assert running({**MISSED, "missed": 2, "alarm": False}).alarms(110.0) == ()
    (alarm,) = running(MISSED).alarms(110.0)
    assert (
        alarm
        == "no checkpoint for 3 intervals (last: step 10, 1m ago): it could not be written: AccessDenied"
    )
    assert running(MISSED).to_json(110.0)["alarms"] == [alarm]
    never = Status("x", "local", State.RUNNING, progress=fold_events([MISSED]))
    assert "(none so far)" in never.alarms(110.0)[0]


def test_an_intact_checkpoint_ends_the_alarm() -> None:
    intact = {"event": "checkpoint", "uri": "file:///c/step-00000050", "step": 50, "time": 100.0}
    assert running(MISSED, DAMAGED, intact).alarms(110.0) == ()


def test_a_damaged_checkpoint_is_not_the_last_one() -> None:
    newer = {"event": "checkpoint", "uri": "file:///c/step-00000020", "step": 20, "time": 60.0}
    found = {**DAMAGED, "step": 20, "uri": newer["uri"]}
    status = running(newer, found, found)
    assert status.progress.checkpoint is not None
    assert status.progress.checkpoint.step == 10
    assert status.alarms() == (
        "the checkpoint of step 20 is damaged and was set aside (file:///c/step-00000020): __0_0 has changed",
    )
    assert running(newer, found, DAMAGED).progress.checkpoint is None


def test_alarms_are_shown() -> None:
    from rich.console import Console

    from cloudtrain.console.panel import Panel
    from cloudtrain.console.runs import status_rows

    status = running(MISSED)
    assert ("alarm", status.alarms(110.0)[0]) in status_rows(status, 110.0)
    lines = list(Panel(status, 110.0, clock=lambda: 110.0).lines(120, console=Console(width=120)))
    (line,) = [line for line in lines if line.plain.startswith("alarm")]
    assert "no checkpoint for 3 intervals" in line.plain
    assert "bold red" in {str(span.style) for span in line.spans}


def test_a_report_of_a_script_is_shown_as_text() -> None:
    from cloudtrain.console.runs import format_log_line

    event = {
        "event": "step",
        "step": 31,
        "total_steps": 160,
        "loss": 0.5,
        "metrics": {"accuracy": 0.25},
        "time": 1.0,
    }
    assert format_log_line(LogLine("algo-1", "CLOUDTRAIN " + json.dumps(event))) == (
        "step 31/160  loss 0.5000  accuracy 0.2500"
    )
    bare = {"event": "step", "step": 7, "time": 1.0}
    assert format_log_line(LogLine("algo-1", "CLOUDTRAIN " + json.dumps(bare))) == "step 7"


def test_checkpoint_events_are_printed_as_sentences() -> None:
    from cloudtrain.console.runs import format_log_line

    def shown(event: Mapping[str, Any]) -> str | None:
        return format_log_line(LogLine("algo-1", "CLOUDTRAIN " + json.dumps(event)))

    place = {"uri": "file:///c/step-00000010", "time": 50.0}
    saved = {"event": "checkpoint", **place, "step": 10, "bytes": 5e6, "seconds": 2.0}
    assert shown(saved) == "checkpoint of step 10: 5.0 MB in 2.00 s"
    assert str(shown({**saved, "stall_seconds": 0.0124})).endswith(
        "2.00 s, training waited 0.012 s"
    )
    assert (
        shown(MISSED)
        == "ALARM, 3 in a row: no checkpoint of step 40, failed: AccessDenied; the run continues"
    )
    assert shown({**MISSED, "repeated": True}) is None
    assert "step 10 is damaged and set aside, at file:///c/step-00000010" in str(shown(DAMAGED))


def test_the_stages_of_a_pipeline_are_printed() -> None:
    from cloudtrain.console.runs import format_log_line

    event = {
        "event": "pipeline",
        "links": [3, 4],
        "stage_seconds": [0.00155, 0.00154],
        "imbalance": 1.0032,
    }
    shown = format_log_line(LogLine("algo-1", "CLOUDTRAIN " + json.dumps(event)))
    assert (
        shown
        == "pipeline: modules by stage 3 (1.55 ms), 4 (1.54 ms); the slowest takes 1.00 x the mean"
    )


def test_the_first_step_may_wait_for_data() -> None:
    from cloudtrain.console.runs import format_log_line

    def shown(step: int) -> str:
        event = {
            "event": "step",
            "step": step,
            "epoch": 0,
            "loss": 1.0,
            "samples_per_second": 9.0,
            "data_wait": 0.7,
        }
        return format_log_line(LogLine("algo-1", "CLOUDTRAIN " + json.dumps(event)))

    assert "data" not in shown(1)
    assert "70% of the step waits for data" in shown(10)


def test_a_task_whose_work_is_done_is_leaving() -> None:
    done = {"event": "finished", "step": 20, "time": 100.0, "epochs": 1, "seconds": 9.0}
    assert running().describe_rest(145.0) != "leaving for 45s"
    assert running(done).describe_rest(145.0) == "leaving for 45s"
    assert progress_row(running(done), 145.0) == ("progress", "step 20, 1 epoch, leaving for 45s")
    ended = dataclasses.replace(running(done), state=State.SUCCEEDED)
    assert ended.describe_rest(145.0) == ""
    again = {"event": "started", "step": 20, "total_steps": 40, "world_size": 2}
    assert running(done, again).describe_rest(145.0) == ""


@pytest.mark.parametrize(
    ("ranks", "steps", "expected"),
    [
        (1, 1, "on 1 rank (cpu, gloo), 1 step"),
        (2, 1200, "on 2 ranks (cpu, gloo), 1,200 steps"),
        (2, None, "on 2 ranks (cpu, gloo)"),
    ],
)
def test_a_start_has_its_numbers_with_their_nouns(
    ranks: int, steps: int | None, expected: str
) -> None:
    from cloudtrain.console.runs import format_log_line

    event = {
        "event": "started",
        "step": 0,
        "parameters": 10,
        "world_size": ranks,
        "device": "cpu",
        "backend": "gloo",
        "total_steps": steps,
        "resumed_from": None,
    }
    line = LogLine("algo-1", f"CLOUDTRAIN {json.dumps(event)}")
    assert format_log_line(line) == f"training 10 parameters {expected}"
