"""The last screen of a followed run: what, how good, where and what next, within the width of the terminal."""

from __future__ import annotations

import dataclasses
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.run_statuses import BEGAN, at

from cloudtrain.console.cells import cell_count
from cloudtrain.console.closing import Ending, SeenEvents, closing_lines, draw_bars
from cloudtrain.failure_rules import Explanation, explain_run
from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.runs.phases import describe_phases
from cloudtrain.runs.progress import fold_events
from cloudtrain.runs.results import describe_result, key_metrics
from cloudtrain.runs.status import State, Status, describe_state
from cloudtrain_runtime.contract import check_event, format_event, parse_event

RUN = "digits-261121-074043-d30c68"
NOW = at(60).timestamp()
COMMAND = re.compile(r"cloudtrain|^  model|^  checkpoint|^  folder")


@pytest.fixture(autouse=True)
def _everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.console.closing.is_installed", lambda _: True)


def events(*kinds: tuple[str, dict[str, Any]]) -> list[LogLine]:
    return [LogLine("algo-1", format_event(kind, fields)) for kind, fields in kinds]


def moment(seconds: float) -> float:
    return at(seconds).timestamp()


STARTED = (
    ("environment", {"host": "algo-1", "time": moment(9)}),
    (
        "started",
        {"step": 0, "total_steps": 240, "world_size": 4, "device": "cpu", "time": moment(13)},
    ),
)
SCORES = (0.85, 0.9, 0.95, 0.98, 0.97, 0.9926, 0.985, 0.9889)
EVALUATIONS = tuple(
    (
        "evaluation",
        {"split": "validation", "step": 20 * (index + 1), "loss": 1 - score, "accuracy": score},
    )
    for index, score in enumerate(SCORES)
)
SPLIT = {"data": 0.0002, "forward": 0.0038, "backward": 0.018, "checkpoint": 0.0015}
END = (
    ("step", {"step": 240, "epoch": 12, "loss": 0.0057, "split": SPLIT, "time": moment(21)}),
    ("evaluation", {"split": "test", "step": 240, "loss": 0.07, "accuracy": 265 / 270}),
    (
        "analysis",
        {
            "split": "test",
            "samples": 270,
            "confusion": [[150, 3], [2, 115]],
            "classes": [
                {"name": "7", "support": 153, "precision": 0.99, "recall": 0.98, "f1": 0.98},
                {"name": "8", "support": 117, "precision": 0.93, "recall": 0.98, "f1": 0.95},
            ],
        },
    ),
    ("checkpoint", {"step": 240, "uri": f"file://{Path.cwd()}/c/step-240", "time": moment(21)}),
    ("finished", {"step": 240, "seconds": 8.0, "time": moment(22)}),
)


def ending(
    state: State, kinds: tuple[tuple[str, dict[str, Any]], ...], reason: str = "", **fields: Any
) -> Ending:
    lines = events(*kinds)
    seen = SeenEvents()
    for line in lines:
        seen.add(parse_event(line.text))
    checked = [check_event({"event": kind, **values}) for kind, values in kinds]
    progress = fold_events([each for each in checked if each is not None])
    status = Status(
        RUN, "local", state, reason, created=BEGAN, started=BEGAN, ended=at(23), world_size=4,
        progress=progress, artifacts=fields.pop("artifacts", {}),
    )  # fmt: skip
    cause = None
    if state is State.FAILED:
        log = [LogLine("algo-1", text) for text in fields.pop("log", ())]
        cause = explain_run(status, log, {"code.task": "digits:Digits"})
    facts = {"code.task": "digits:Digits"}
    return Ending(status, seen, cause, "", facts, "job.yaml --instances 2")


def test_a_success_says_what_how_good_where_and_what_next() -> None:
    artifacts = {
        "model": f"{Path.cwd()}/.cloudtrain/runs/{RUN}/output/model.tar.gz",
        "model_folder": f"{Path.cwd()}/.cloudtrain/runs/{RUN}/model",
        "folder": f"{Path.cwd()}/.cloudtrain/runs/{RUN}",
    }
    done = ending(State.SUCCEEDED, (*STARTED, *EVALUATIONS, *END), artifacts=artifacts)
    assert closing_lines(done, 120, now=NOW) == [
        "✓ digits succeeded in 23s   starting 9s · loading 4s · training 9s · saving 1s",
        "  test/accuracy        0.9815   5 of 270 wrong; weakest: 8 (precision 0.93)",
        "  validation/accuracy  0.9889   ▁▃▆▇▇███  best 0.9926 at step 120",
        "  step                 23.5 ms  backward 77%, forward 16%, checkpoint 6%",
        f"  model                .cloudtrain/runs/{RUN}/model",
        "",
        "  look   cloudtrain dashboard --open",
        "  use    cloudtrain serve d30c68",
        "  price  cloudtrain plan job.yaml --instances 2",
    ]


def test_what_is_not_installed_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.console.closing.is_installed", lambda _: False)
    done = ending(State.SUCCEEDED, (*STARTED, *END), artifacts={"model": "/x/model.tar.gz"})
    lines = closing_lines(done, 120, now=NOW)
    assert "  look   cloudtrain metrics d30c68" in lines
    assert not any("serve" in line or "dashboard" in line for line in lines)


FAILURE = (
    "[rank1]: Traceback (most recent call last):",
    '[rank1]:   File "/opt/ml/code/spiral.py", line 34, in metrics',
    "[rank1]:     right = model(points).argmax(dim=1) == labels",
    "[rank1]:                                            ^^^^^^",
    "[rank1]: NameError: name 'labels' is not defined",
)
REASON = "rank 1 on algo-1 (local rank 1) failed: NameError: name 'labels' is not defined"


def test_a_failure_says_where_what_is_kept_and_how_to_go_on() -> None:
    kinds = (*STARTED, ("step", {"step": 10, "epoch": 1, "loss": 0.7, "time": moment(20)}))
    kinds += (("checkpoint", {"step": 5, "uri": "file:///c/step-5", "time": moment(19)}),)
    log = [text.replace("rank1", f"rank{rank}") for rank in (1, 0, 2, 3) for text in FAILURE]
    done = ending(State.FAILED, kinds, REASON, log=log)
    assert closing_lines(done, 120, now=NOW) == [
        "✗ digits failed after 23s, step 10 of 240   NameError: name 'labels' is not defined",
        "  spiral.py:34  right = model(points).argmax(dim=1) == labels  (all 4 ranks, after step 10)",
        "  kept          checkpoint of step 5",
        "",
        "  fix spiral.py:34, then: cloudtrain submit job.yaml --instances 2 --local --continue d30c68",
        "  read  cloudtrain logs d30c68",
    ]


def test_a_failure_outside_of_the_code_says_cause_and_advice() -> None:
    log = ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"]
    done = ending(State.FAILED, STARTED, "rank 0 failed", log=log)
    lines = closing_lines(done, 80, now=NOW)
    assert lines[0] == "✗ digits failed after 23s, step 0 of 240"
    assert "  cause       out of GPU memory" in lines
    assert any(line.startswith("  what to do  ") for line in lines)
    assert lines[-1] == "  read  cloudtrain logs d30c68"


def test_a_stopped_run_continues_from_its_checkpoint() -> None:
    kinds = (*STARTED, ("checkpoint", {"step": 5, "uri": "file:///c/step-5", "time": moment(19)}))
    lines = closing_lines(ending(State.STOPPED, kinds, "stopped by request"), 80, now=NOW)
    assert lines[0] == (
        "■ digits stopped after 23s, step 5 of 240   starting 9s · loading 4s · training 10s"
        if cell_count(lines[0]) > 50
        else "■ digits stopped after 23s, step 5 of 240"
    )
    assert "  kept    checkpoint of step 5" in lines
    assert "  continue  cloudtrain resume d30c68" in lines


@pytest.mark.parametrize("width", [50, 60, 80, 120, 200])
@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED, State.STOPPED, State.INTERRUPTED])
def test_no_line_is_wider_than_the_terminal(state: State, width: int) -> None:
    """Commands and paths are the exception: they are copied, and never cut."""
    artifacts = {"model": "s3://bucket/" + "x" * 200 + "/model.tar.gz"}
    kinds = (*STARTED, *EVALUATIONS, *END)
    kinds += (("tracking", {"detail": "word " * 60}),)
    done = ending(state, kinds, "long reason " * 40, artifacts=artifacts, log=FAILURE)
    lines = closing_lines(done, width, now=NOW)
    wide = [line for line in lines if cell_count(line) > width]
    assert all(COMMAND.search(line) for line in wide), wide


def test_a_run_without_any_event_has_a_last_screen() -> None:
    status = Status(RUN, "sagemaker", State.FAILED, "ResourceLimitExceeded")
    cause = explain_run(status, [], {})
    lines = closing_lines(Ending(status, SeenEvents(), cause, "", {}, None), 80, now=NOW)
    assert lines[0].startswith("✗ digits failed")
    unread = Ending(status, SeenEvents(), None, "AWS does not answer", {}, None)
    assert "  not explained  AWS does not answer" in closing_lines(unread, 80, now=NOW)


def test_the_curve_of_a_restarted_run_has_each_step_once() -> None:
    seen = SeenEvents()
    for line in events(*EVALUATIONS[:4], *EVALUATIONS[2:]):
        seen.add(parse_event(line.text))
    assert [step for step, _ in seen.curves["validation/accuracy"]] == list(range(20, 161, 20))


def test_the_curve_of_a_long_run_is_thinned() -> None:
    seen = SeenEvents()
    for step in range(10_000):
        for line in events(("evaluation", {"split": "test", "step": step, "loss": 1.0})):
            seen.add(parse_event(line.text))
    assert len(seen.curves["test/loss"]) <= 2001
    assert seen.curves["test/loss"][-1][0] == 9999


def test_bars_begin_and_end_with_the_first_and_the_last_value() -> None:
    assert draw_bars([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert draw_bars([5, 5, 5]) == "▁▁▁"
    assert draw_bars([*range(100)]) == "▁▂▃▄▅▆▇█"
    assert draw_bars([1, 0]) == "█▁"


def test_the_key_metrics_are_those_of_the_evaluated_splits() -> None:
    names = ["train/loss", "validation/loss", "validation/accuracy", "test/loss", "train/mfu"]
    assert key_metrics(names) == ("test/loss", "validation/accuracy")
    assert key_metrics(["train/loss", "train/grad_norm"]) == ("train/loss",)
    assert key_metrics(["train/reward"]) == ("train/reward",)
    assert key_metrics([]) == ()


RESULTS = {
    "rank 3 on algo-2 (local rank 1) failed: NameError: name 'x' is not defined": "NameError: name 'x' is not defined",
    "AlgorithmError: rank 3 on algo-2 (local rank 1) failed: ValueError: no": "ValueError: no",
    "rank 1 on algo-1 (local rank 1) was killed by SIGKILL": "was killed by SIGKILL",
    "error: job.yaml is gone": "job.yaml is gone",
    "CapacityError: there is none": "CapacityError: there is none",
    "": "",
}


@pytest.mark.parametrize("reason", RESULTS)
def test_the_result_of_a_failure_is_its_error_without_the_place(reason: str) -> None:
    status = Status(RUN, "local", State.FAILED, reason)
    assert describe_result(status, NOW) == RESULTS[reason]


def test_the_phases_of_a_run_come_from_its_backend_or_its_events() -> None:
    done = ending(State.SUCCEEDED, (*STARTED, *END)).status
    assert describe_phases(done, NOW) == "starting 9s -> loading 4s -> training 9s -> saving 1s"
    script = ending(
        State.SUCCEEDED, (STARTED[0], ("attempt", {"host": "algo-1", "time": moment(10)}))
    ).status
    assert describe_phases(script, NOW) == "starting 9s -> running 14s"
    silent = Status(RUN, "local", State.RUNNING, started=BEGAN)
    assert describe_phases(silent, moment(5)) == "starting 5s"
    assert describe_phases(Status(RUN, "local", State.QUEUED), NOW) == ""
    odd = Status(RUN, "local", State.FAILED, started=at(10), ended=BEGAN + timedelta(seconds=1))
    assert describe_phases(odd, NOW) == ""


FIRST_WORDS = {
    State.QUEUED: "- digits queued",
    State.STARTING: "- digits starting",
    State.RUNNING: "- digits running",
    State.STOPPING: "- digits stopping",
    State.SUCCEEDED: "✓ digits succeeded in 23s",
    State.FAILED: "✗ digits failed after 23s",
    State.STOPPED: "■ digits stopped after 23s",
    State.INTERRUPTED: "! digits interrupted after 23s",
    State.UNKNOWN: "- digits unknown",
}


@pytest.mark.parametrize("state", State)
def test_each_state_has_its_words(state: State) -> None:
    done = ending(state, (), "why it is so")
    lines = closing_lines(done, 120, now=NOW)
    assert lines[0].startswith(FIRST_WORDS[state])
    assert describe_state(done.status) == f"{state}: why it is so"
    text = "\n".join(lines)
    assert ("why it is so" in text) == (state is not State.SUCCEEDED)


CAUSES = {
    FailureClass.USER_CODE: "an error in the job's code",
    FailureClass.OUT_OF_MEMORY: "out of GPU memory",
    FailureClass.HOST_MEMORY: "out of host memory",
    FailureClass.KILLED: "a process was killed from outside",
    FailureClass.NCCL: "a network error between ranks",
    FailureClass.HANG: "a rank did not join a collective",
    FailureClass.DATA: "an error in the data",
    FailureClass.S3_ACCESS: "no access to S3",
    FailureClass.IMAGE_PULL: "a fault of the container image",
    FailureClass.CAPACITY: "no capacity for this instance type",
    FailureClass.QUOTA: "the account's quota is too small",
    FailureClass.IAM: "a permission is missing",
    FailureClass.SPOT: "AWS took the spot capacity away, or had none",
    FailureClass.TIME_LIMIT: "the time limit was reached",
    FailureClass.DEPENDENCY_INSTALL: "a Python package is missing or broken",
    FailureClass.DISK_FULL: "the disk is full",
    FailureClass.CHECKPOINT: "a checkpoint cannot be used",
    FailureClass.SERVICE: "a fault of SageMaker or its hardware",
    FailureClass.MACHINE: "this machine ended the run's supervisor",
}


@pytest.mark.parametrize("failure", FailureClass)
def test_each_class_of_failure_has_its_words(failure: FailureClass) -> None:
    done = ending(State.FAILED, STARTED, "the error")
    cause = Explanation(RUN, State.FAILED, failure, "the error", "Do this.")
    lines = closing_lines(dataclasses.replace(done, cause=cause), 120, now=NOW)
    shown = [line for line in lines if line.startswith("  cause ")]
    expected = [f"  cause       {CAUSES[failure]}"] if failure in CAUSES else []
    assert shown == expected, "a cause that is not known is not named"
    assert "  what to do  Do this." in lines
    again = any("submit job.yaml" in line for line in lines)
    assert again == failure.is_in_the_job, "only a mistake in the job is submitted anew"


def test_the_source_line_is_that_of_the_last_frame() -> None:
    log = (
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/opt/ml/code/train.py", line 5, in load',
        "[rank0]:     raise ValueError(text)",
        "[rank0]: ValueError: bad config:",
        "[rank0]:     expected: 3",
        "[rank0]:     got: 4",
    )
    lines = closing_lines(ending(State.FAILED, STARTED, "rank 0 failed", log=log), 120, now=NOW)
    assert "  train.py:5  raise ValueError(text)" in "\n".join(lines)


def test_a_lower_loss_is_better_whatever_it_is_called() -> None:
    kinds = tuple(
        ("evaluation", {"split": "validation", "step": step, "f1_loss": value, "loss": value})
        for step, value in ((10, 0.1), (20, 0.9), (30, 0.5))
    )
    lines = closing_lines(ending(State.SUCCEEDED, (*STARTED, *kinds)), 120, now=NOW)
    assert "validation/loss  0.5  ▁█▅  best 0.1 at step 10" in "\n".join(lines)


def test_the_best_value_of_a_long_curve_is_kept() -> None:
    kinds = [
        ("evaluation", {"split": "test", "step": step, "accuracy": 0.99 if step == 1 else 0.5})
        for step in range(5000)
    ]
    lines = closing_lines(ending(State.SUCCEEDED, (*STARTED, *kinds)), 120, now=NOW)
    assert "best 0.99 at step 1" in "\n".join(lines)


def test_huge_values_have_bars() -> None:
    assert draw_bars([-1e308, 1e308, 0.0]) == "▁█▅"
    assert draw_bars([0.0, 0.0]) == "▁▁"


def test_a_screen_has_at_most_twelve_lines() -> None:
    detail = ("tracking", {"detail": "word " * 60})
    hosts = [("environment", {"host": f"algo-{n}", "warnings": [f"{n} is slow"]}) for n in (1, 2)]
    artifacts = {"model": "/x/model.tar.gz", "folder": "/x"}
    done = ending(
        State.SUCCEEDED, (*STARTED, *EVALUATIONS, *END, detail, *hosts), artifacts=artifacts
    )
    lines = closing_lines(done, 80, now=NOW)
    assert len(lines) <= 12
    assert "  read   cloudtrain status d30c68" in lines
