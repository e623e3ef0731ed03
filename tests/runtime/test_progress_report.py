"""`report`: what a script's calls print, on which ranks, and that values are neither lost nor repeated."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.hosts import SCRIPT_RUN

from cloudtrain.runs.progress import fold_events
from cloudtrain_runtime.contract import MlTree, parse_event

HEAD = "import os, sys, time\nfrom cloudtrain_runtime import report\n"


def events_of(
    folder: Path, script: str, *, rank: int = 0, is_run: bool = True
) -> list[dict[str, object]]:
    """Run a script as a rank; return the events that it prints."""
    tree = MlTree(folder)
    if is_run:
        tree.run_config.parent.mkdir(parents=True, exist_ok=True)
        tree.run_config.write_text(replace(SCRIPT_RUN).to_json())
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script],
        env={**os.environ, "CLOUDTRAIN_ML_ROOT": str(folder), "RANK": str(rank)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [event for line in done.stdout.splitlines() if (event := parse_event(line)) is not None]


def test_the_last_value_of_each_metric_is_printed(tmp_path: Path) -> None:
    script = """
for step in range(1, 2001):
    report(step, total=2000, loss=1 / step)
    if step % 500 == 0:
        report(step, **{"validation/accuracy": step / 2000})
"""
    events = events_of(tmp_path, script)
    assert events[-1]["step"] == 2000
    assert [event["step"] for event in events] == sorted(
        {int(str(event["step"])) for event in events}
    )
    progress = fold_events(events)
    assert (progress.last_step, progress.total_steps) == (2000, 2000)
    assert progress.metrics == {"train/loss": 0.0005, "validation/accuracy": 1.0}


def test_a_rare_metric_keeps_its_step(tmp_path: Path) -> None:
    script = """
report(500, loss=0.5, **{"validation/loss": 0.25})
for step in range(501, 600):
    report(step, loss=0.5)
"""
    events = events_of(tmp_path, script)
    found = [(event["step"], event["metrics"]) for event in events if "metrics" in event]
    assert found == [(500, {"validation/loss": 0.25})]


def test_no_value_of_a_fast_loop_is_lost(tmp_path: Path) -> None:
    script = """
report(1, rare=1.0)
for step in range(1, 100_001):
    report(step, loss=float(step))
"""
    progress = fold_events(events_of(tmp_path, script))
    assert progress.last_step == 100_000
    assert progress.metrics == {"train/loss": 100_000.0, "train/rare": 1.0}


def test_progress_without_metrics_is_printed(tmp_path: Path) -> None:
    events = events_of(tmp_path, "report(3, 10)")
    assert [(event["step"], event["total_steps"]) for event in events] == [(3, 10)]


@pytest.mark.parametrize(("rank", "is_run"), [(1, True), (0, False)])
def test_other_ranks_and_other_programs_print_nothing(
    tmp_path: Path, rank: int, is_run: bool
) -> None:
    assert (
        events_of(tmp_path, "report(1, loss=1.0)\ntime.sleep(0.3)", rank=rank, is_run=is_run) == []
    )


def test_a_tensor_is_recorded_without_its_graph(tmp_path: Path) -> None:
    script = """
import torch, weakref
class Activation: ...
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = kept
        return x * 2
kept = Activation()
graph = weakref.ref(kept)
weights = torch.ones(3, requires_grad=True)
loss = Double.apply(weights).sum()
report(1, loss=loss, other=torch.tensor([4]), count=5)
del loss, kept
assert graph() is None
"""
    (event,) = events_of(tmp_path, script)
    assert (event["loss"], event["metrics"]) == (6.0, {"other": 4.0, "count": 5.0})


def test_values_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    script = """
import numpy, torch
for value in ("0.5", None, torch.ones(2), numpy.ones(2), [1.0]):
    try:
        report(1, loss=value)
    except TypeError as error:
        print(error)
    else:
        raise AssertionError(value)
report(2, loss=numpy.float32(0.5))
"""
    (event,) = events_of(tmp_path, script)
    assert event["loss"] == 0.5


def test_steps_that_are_no_counts_are_refused(tmp_path: Path) -> None:
    script = """
import numpy
for arguments in ((4.0,), ("4",), (-1,), (1, "x"), (1, -2), (1, 2.5)):
    try:
        report(*arguments, loss=1.0)
    except (TypeError, ValueError) as error:
        assert str(error).startswith(("report: step must", "report: total must")), error
    else:
        raise AssertionError(arguments)
try:
    report(1, loss=10**400)
except ValueError as error:
    assert "too large" in str(error)
report(numpy.int64(3), total=numpy.int32(9), loss=2)
"""
    (event,) = events_of(tmp_path, script)
    assert (event["step"], event["total_steps"], event["loss"]) == (3, 9, 2.0)


def test_a_value_that_is_not_finite_is_null(tmp_path: Path) -> None:
    events = events_of(tmp_path, "report(1, loss=float('nan'), other=float('inf'))")
    assert fold_events(events).metrics == {"train/loss": None, "train/other": None}


def test_forked_children_do_not_repeat_values(tmp_path: Path) -> None:
    script = """
report(1, loss=1.0)
child = os.fork()
if child == 0:
    report(2, loss=2.0)
    sys.exit()
os.waitpid(child, 0)
"""
    assert [event["step"] for event in events_of(tmp_path, script)] == [1]


def test_lines_are_whole_beside_other_output(tmp_path: Path) -> None:
    script = """
for step in range(1, 400):
    report(step, loss=1.0)
    print("progress", step, end="\\r")
    time.sleep(0.001)
"""
    assert events_of(tmp_path, script)[-1]["step"] == 399


def test_event_lines_are_json(tmp_path: Path) -> None:
    (event,) = events_of(tmp_path, "report(1, total=None, loss=True)")
    assert json.loads(json.dumps(event))["loss"] == 1.0
