"""Signs of a failure in the last lines of a log, although the exit code is 0."""

from __future__ import annotations

import pytest

from cloudtrain.failure_rules.explanation import explain_run
from cloudtrain.runs.hidden_failure import find_hidden_failure
from cloudtrain.runs.progress import Progress
from cloudtrain.runs.status import State, Status
from cloudtrain_runtime.contract import format_event

ERROR = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    main()",
    "    ^^^^^^",
    "ValueError: no data",
]
STEP = format_event("step", {"step": 3})
CHAINED = [
    *ERROR,
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    *ERROR[:4],
    "my.package.TrainingError: stopped",
]
HIDDEN = {
    "at the end": (["epoch 1", *ERROR], "ValueError: no data"),
    "of a rank": ([f"[rank1]: {line}" for line in ERROR], "ValueError: no data"),
    "after a step": ([STEP, *ERROR, "done", format_event("ranks", {})], "ValueError: no data"),
    "the last of two": (CHAINED, "my.package.TrainingError: stopped"),
    "of a signal": (
        ["train.sh: line 2:  4711 Segmentation fault      python train.py"],
        "Segmentation fault",
    ),
}
SURVIVED = {
    "nothing": ["epoch 1", "done"],
    "before a step": [*ERROR, STEP],
    "before much output": [*ERROR, *["epoch"] * 21],
    "of a finished Task": [STEP, format_event("finished", {}), *ERROR],
    "in a finalizer": ["Exception ignored in: <function Pool.__del__ at 0x7f>", *ERROR],
    "of an interrupt": [*ERROR[:4], "KeyboardInterrupt"],
    "a word": ["Traceback (most recent call last) is printed for errors", "Killed 3 workers"],
}


@pytest.mark.parametrize("case", HIDDEN)
def test_an_error_at_the_end_is_found(case: str) -> None:
    lines, expected = HIDDEN[case]
    assert find_hidden_failure(lines) == expected


@pytest.mark.parametrize("case", SURVIVED)
def test_an_error_that_ended_nothing_is_not_named(case: str) -> None:
    assert find_hidden_failure(SURVIVED[case]) is None


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED])
def test_only_a_success_is_doubted(state: State) -> None:
    files = {"host": "algo-1", "model_is_empty": True, "unkept_files": 0}
    progress = Progress(hidden_failure="ValueError: no data", host_files={"algo-1": files})
    status = Status("demo-261120-101500-1a2b3c", "local", state, progress=progress)
    doubts = status.success_warnings()
    assert len(doubts) == (2 if state is State.SUCCEEDED else 0)
    assert {*doubts} <= {*status.host_warnings()}
    if doubts:
        found = explain_run(status, [])
        assert found.message == "the run has succeeded, with a warning"
        assert all(text in found.action for text in doubts)
