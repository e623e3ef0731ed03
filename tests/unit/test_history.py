"""The history of metrics: events to rows, restarts, and the table of `cloudtrain metrics`."""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from support.run_logs import LoggedRun, event_line

from cloudtrain import Run, UserError
from cloudtrain.console.metrics import print_history, thin_rows
from cloudtrain.runs.history import MetricHistory
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.runs.progress import Progress, fold_events
from cloudtrain.runs.status import State, Status

STARTED = {"event": "started", "step": 0}
EVENTS = [
    STARTED,
    {
        "event": "step",
        "step": 10,
        "time": 1.0,
        "loss": 2.0,
        "learning_rate": 0.1,
        "mfu": None,
        "split": {"data": 0.5},
    },
    {
        "event": "evaluation",
        "step": 10,
        "time": 2.0,
        "split": "validation",
        "loss": 2.5,
        "samples": 9,
        "epoch": 0,
    },
    {
        "event": "step",
        "step": 20,
        "time": 3.0,
        "loss": None,
        "metrics": {"lr": 0.2, "validation/accuracy": 0.9},
    },
    {"event": "finished", "step": 20, "samples_per_second": 5.0},
]


def history_of(events: Iterable[Mapping[str, Any]]) -> MetricHistory:
    return MetricHistory.of_lines(map(event_line, events))


def values(history: MetricHistory, name: str = "train/loss") -> list[tuple[int, float | None]]:
    return [(each.step, each.value) for each in history.metrics.get(name, ())]


def test_rows_have_all_values_of_a_step() -> None:
    first = {
        "train/loss": 2.0,
        "train/learning_rate": 0.1,
        "train/data_seconds": 0.5,
        "validation/loss": 2.5,
    }
    second = {"train/loss": None, "train/lr": 0.2, "validation/accuracy": 0.9}
    assert history_of(EVENTS).rows() == [
        {"step": 10, "time": 1.0, **first},
        {"step": 20, "time": 3.0, **second},
    ]


def test_other_lines_and_malformed_events_are_ignored() -> None:
    lines = [
        "epoch 1",
        'CLOUDTRAIN {"event": "step", "step": "x"}',
        "CLOUDTRAIN {",
        "CLOUDTRAIN {}",
    ]
    assert MetricHistory.of_lines(LogLine("algo-1", line, 0.0) for line in lines).rows() == []


def test_an_event_without_a_time_has_that_of_its_line() -> None:
    (row,) = MetricHistory.of_lines(
        [LogLine("algo-1", 'CLOUDTRAIN {"event": "step", "step": 1, "loss": 1}', 7.0)]
    ).rows()
    assert row["time"] == 7.0


def steps(*losses: tuple[int, float], kind: str = "loss") -> list[dict[str, Any]]:
    return [{"event": "step", "step": step, "time": 0.0, kind: loss} for step, loss in losses]


def test_steps_after_a_restart_replace_earlier_ones() -> None:
    first = [STARTED, *steps((10, 5.0), (20, 4.0), (30, 3.0))]
    again = {"event": "started", "step": 10, "resumed_from": "s3://bucket/checkpoints"}
    assert values(history_of([*first, again])) == [(10, 5.0)]
    assert values(history_of([*first, again, *steps((15, 4.5), (25, 3.5))])) == [
        (10, 5.0),
        (15, 4.5),
        (25, 3.5),
    ]
    assert values(history_of([*first, STARTED, *steps((5, 6.0))])) == [(5, 6.0)]


def test_a_script_restarts_without_an_event() -> None:
    rare = {"event": "step", "step": 30, "metrics": {"validation/accuracy": 0.5}}
    history = history_of(
        [*steps((10, 5.0), (22, 4.0), (30, 3.0)), rare, *steps((20, 4.5), (28, 3.2))]
    )
    assert values(history) == [(10, 5.0), (20, 4.5), (28, 3.2)]
    assert values(history, "validation/accuracy") == [(30, 0.5)]


ATTEMPT = {"event": "attempt", "host": "algo-1", "restarts": 0}


def test_only_the_start_of_an_attempt_is_a_restart() -> None:
    first = [ATTEMPT, *steps((10, 5.0), (20, 4.0), (30, 3.0)), *steps((30, 0.5), kind="lr")]
    again = steps((10, 2.5), (20, 2.0))
    fallen = history_of([*first, *again])
    assert values(fallen) == [(10, 2.5), (20, 2.0), (30, 3.0)]
    restarted = history_of([*first, ATTEMPT, *steps((20, 3.5), (10, 2.0))])
    assert values(restarted) == [(10, 2.0), (20, 3.5)]
    assert values(restarted, "train/lr") == []
    assert values(history_of([*first, ATTEMPT])) == values(history_of(first))  # no step so far


def test_steps_that_fall_in_an_attempt_are_a_warning() -> None:
    first, again = steps((10, 5.0), (20, 4.0)), steps((10, 2.5), (20, 2.0))
    for events, falls in (
        ([ATTEMPT, *first, *again], 1),
        ([ATTEMPT, *first, ATTEMPT, *again], 0),  # a restart
        ([*first, *again], 0),  # of an earlier version, which reports no restarts
    ):
        progress = fold_events(events)
        assert progress.falls == falls
        found = Status("r", "local", State.RUNNING, progress=progress).host_warnings()
        assert [("metrics.epoch" in text) for text in found] == [True] * falls
    one_by_one = Progress()
    for event in [ATTEMPT, *first, *again]:  # as a followed run is read
        one_by_one = fold_events([event], one_by_one)
    assert one_by_one.falls == 1


def test_an_evaluation_of_earlier_weights_drops_nothing() -> None:
    evaluations = [
        {"event": "evaluation", "split": "validation", "step": step, "loss": 1.0}
        for step in (10, 20, 30)
    ]
    best = {"event": "evaluation", "split": "validation", "step": 20, "loss": 0.5}
    assert values(history_of([*evaluations, best]), "validation/loss") == [
        (10, 1.0),
        (20, 0.5),
        (30, 1.0),
    ]


def test_names_select_one_split_or_all() -> None:
    history = history_of(EVENTS)
    assert history.select(["loss"]) == ("train/loss", "validation/loss")
    assert history.select(["validation/loss", "loss"]) == ("validation/loss", "train/loss")
    assert "train/data_seconds" not in history.select([])
    assert history.select(["data_seconds"]) == ("train/data_seconds",)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lose", 'did you mean "loss"?'),
        ("train/los", 'did you mean "train/loss"?'),
        ("x", "this run has reported train/"),
    ],
)
def test_an_unknown_metric_gets_the_nearest_one(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"no metric '{name}'") as error:
        history_of(EVENTS).select([name])
    assert error.value.hint.startswith(hint)
    with pytest.raises(UserError) as error:
        history_of([]).select(["loss"])
    assert error.value.hint == "this run has reported no metrics so far"


def test_history_is_a_frame_with_pandas() -> None:
    pytest.importorskip("pandas")
    frame = Run("x", LoggedRun(EVENTS)).history()
    assert list(frame.columns[:4]) == ["step", "time", "train/loss", "train/learning_rate"]
    assert frame["step"].tolist() == [10, 20]
    assert frame["train/loss"][0] == 2.0
    assert math.isnan(frame["train/loss"][1])
    assert set(map(str, frame.dtypes[1:])) == {"float64"}
    assert list(Run("x", LoggedRun([])).history().columns) == ["step", "time"]


def test_history_is_a_list_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # makes its import fail
    assert Run("x", LoggedRun(EVENTS)).history() == history_of(EVENTS).rows()


def test_gaps_are_filled_with_the_newest_value() -> None:
    history = MetricHistory()
    for step, loss in ((1, 3.0), (2, None), (3, 1.0)):
        history.add({"event": "step", "step": step, "loss": loss})
        if step == 1:
            history.add({"event": "evaluation", "split": "validation", "step": 1, "loss": 2.5})
    history.add({"event": "evaluation", "split": "test", "step": 3, "loss": 2.0})
    filled = history.rows(fill=True)
    assert [row["validation/loss"] for row in filled] == [2.5, 2.5, 2.5]
    assert [row["train/loss"] for row in filled] == [3.0, None, 1.0], "not finite stays"
    assert [row.get("test/loss") for row in filled] == [None, None, 2.0]
    assert "validation/loss" not in history.rows()[2]


def test_thinning_keeps_both_ends_and_rare_metrics() -> None:
    rows = [{"step": step, "time": 0.0, "train/loss": 1.0} for step in range(1000)]
    rows[500] = {"step": 500, "time": 0.0, "validation/loss": 1.0}
    thinned = thin_rows(rows, 10)
    assert len(thinned) == 10
    assert [thinned[0]["step"], thinned[-1]["step"]] == [0, 999]
    assert 500 in [row["step"] for row in thinned]
    assert [row["step"] for row in thinned] == sorted(row["step"] for row in thinned)
    assert thin_rows(rows[:10], 10) == rows[:10]
    assert [row["step"] for row in thin_rows(rows, 2)] == [0, 999]


def test_the_table_has_a_column_per_metric(capsys: pytest.CaptureFixture[str]) -> None:
    history = history_of(EVENTS)
    print_history(history.only(history.select(["loss", "accuracy"])), show_all=False)
    assert capsys.readouterr().out.splitlines() == [
        "step  train/loss  validation/loss  validation/accuracy",
        "10    2           2.5",
        "20    not finite                   0.9",
    ]


def test_a_terminal_gets_what_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [*EVENTS[:3], *steps(*((step, 1.0) for step in range(11, 200)))]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("LINES", "12")
    monkeypatch.setenv("COLUMNS", "40")
    print_history(history_of(events), show_all=False)
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 9
    assert shown.out.startswith("STEP  train/loss  validation/loss\n  10 ")
    notes = "8 of 190 steps, without train/data_seconds, train/learning_rate; all: --all"
    assert shown.err.split() == notes.split()
    print_history(history_of(events), show_all=True)
    assert len(capsys.readouterr().out.splitlines()) == 191
    print_history(history_of([]), show_all=False)
    assert capsys.readouterr().err.startswith("the run has reported no metrics\n")


def test_a_terminal_shows_evaluations_before_the_learning_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloudtrain.console.metrics.is_terminal", lambda: True)
    monkeypatch.setattr("cloudtrain.console.tables.terminal_width", lambda: 80)
    step = {"event": "step", "step": 10, "loss": 2.0, "learning_rate": 0.1, "grad_norm": 1.0}
    measured = {"validation/loss": 0.5, "validation/accuracy": 0.9}
    history = history_of([STARTED, {**step, "metrics": measured}])
    print_history(history, show_all=False)
    shown = capsys.readouterr()
    expected = ["STEP", "train/loss", "validation/loss", "validation/accuracy", "train/grad_norm"]
    assert shown.out.split()[:5] == expected
    assert shown.err == "without train/learning_rate; all: --all\n"


def test_the_json_is_strict_and_has_each_point() -> None:
    content = json.loads(json.dumps(history_of(EVENTS).to_json("x")))
    assert content["run"] == "x"
    assert content["metrics"]["train/loss"] == [
        {"step": 10, "time": 1.0, "value": 2.0},
        {"step": 20, "time": 3.0, "value": None},
    ]
