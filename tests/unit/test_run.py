from datetime import UTC, datetime

import pytest

from cloudtrain.errors import RunNotFoundError
from cloudtrain.run import (
    RUN_ID_CHARACTERS,
    State,
    Status,
    fold_events,
    is_run_id,
    make_run_id,
    parse_reference,
)
from cloudtrain.spec import NAME_CHARACTERS

NOW = datetime(2026, 11, 20, 10, 15, 0, tzinfo=UTC)


def test_run_ids() -> None:
    assert make_run_id("digits", NOW, "1a2b3c") == "digits-261120-101500-1a2b3c"
    assert is_run_id("digits-261120-101500-1a2b3c")
    assert not is_run_id("digits")
    assert not is_run_id("digits-261120-101500-XYZXYZ")


def test_the_longest_name_gives_the_longest_legal_run_id() -> None:
    assert len(make_run_id("a" * NAME_CHARACTERS, NOW, "1a2b3c")) == RUN_ID_CHARACTERS


def test_references() -> None:
    assert parse_reference("digits-261120-101500-1a2b3c") == (None, "digits-261120-101500-1a2b3c")
    assert parse_reference("local:digits-261120-101500-1a2b3c") == ("local", "digits-261120-101500-1a2b3c")
    for wrong in ("digits", "cloud:digits-261120-101500-1a2b3c", "", "local:", ":x"):
        with pytest.raises(RunNotFoundError):
            parse_reference(wrong)


def test_stopped_is_never_success() -> None:
    assert {state: state.exit_code for state in State} == {
        State.QUEUED: None,
        State.STARTING: None,
        State.RUNNING: None,
        State.STOPPING: None,
        State.INTERRUPTED: None,
        State.SUCCEEDED: 0,
        State.FAILED: 4,
        State.STOPPED: 5,
    }


EVENTS = [
    {"event": "started", "step": 0, "world_size": 4, "device": "cpu", "resumed_from": None},
    {"event": "step", "step": 10, "epoch": 0, "loss": 2.5, "samples_per_second": 100.0},
    {"event": "checkpoint", "uri": "file:///c/step-00000010", "step": 10, "time": 50.0},
    {"event": "evaluation", "split": "validation", "step": 10, "epoch": 0, "loss": 2.0, "samples": 9, "time": 1.0},
    {"event": "something-newer", "step": 99},
    {"event": "step", "step": 20, "epoch": 1, "loss": None, "samples_per_second": 120.0},
    {"event": "evaluation", "split": "test", "step": 20, "epoch": 1, "loss": 1.5, "accuracy": 0.5},
    {"event": "finished", "step": 20, "epochs": 2, "samples_per_second": 110.0},
]


def test_events_tell_the_progress() -> None:
    progress = fold_events(EVENTS)
    assert progress.last_step == 20
    assert progress.last_epoch == 2
    assert progress.world_size == 4
    assert progress.checkpoint is not None
    assert progress.checkpoint.step == 10
    assert progress.metrics == {
        "train/loss": 2.5,  # the last that was finite
        "train/samples_per_second": 110.0,
        "validation/loss": 2.0,
        "test/loss": 1.5,
        "test/accuracy": 0.5,
    }


def test_an_event_that_is_not_ours_tells_nothing() -> None:
    strange = [{"event": name, "step": "x"} for name in ("started", "step", "checkpoint", "evaluation", "finished")]
    assert fold_events([*EVENTS, {"event": "checkpoint"}]) == fold_events(EVENTS)
    assert fold_events([*EVENTS[:3], *strange]).checkpoint == fold_events(EVENTS[:3]).checkpoint


@pytest.mark.parametrize(
    "name", ["started", "step", "evaluation", "checkpoint", "failed", "stopped", "finished", "new"]
)
def test_an_event_that_is_not_ours_is_shown_as_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from cloudtrain.console.logs import print_logs
    from cloudtrain.run import LogLine

    text = f'CLOUDTRAIN {{"event": "{name}", "loss": "x"}}'
    assert print_logs(None, [LogLine("algo-1", text)], follow=False, raw=False) == 0  # type: ignore[arg-type]
    assert "algo-1  " in capsys.readouterr().out


def test_a_restart_clears_failures_and_moves_the_step_back() -> None:
    failed = {"event": "failed", "rank": 1, "message": "x"}
    again = {"event": "started", "step": 10, "world_size": 4, "resumed_from": "file:///c/step-00000010"}
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
    promised = (
        "run backend state reason exit_code started ended billable_seconds cost_usd last_step last_checkpoint metrics"
    )
    assert set(promised.split()) <= set(content)
    assert content["exit_code"] == 4
    assert content["last_checkpoint"] == {"uri": "file:///c/step-00000010", "step": 10, "age_seconds": 30.0}
