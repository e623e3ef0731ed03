"""What the page of a run says: settings, environment, checkpoints, levels of a log."""

from __future__ import annotations

from typing import Any

import pytest

from cloudtrain.features.dashboard.log_levels import LevelReader
from cloudtrain.features.dashboard.run_record import RunRecord
from cloudtrain.features.dashboard.run_words import (
    checkpoint_rows,
    environment_parts,
    host_rows,
    plan_rows,
    result_table,
    setting_groups,
)
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.runs.status import State, Status
from cloudtrain.runs.titles import Level
from cloudtrain_runtime.contract import format_event

STATUS = Status("demo-261120-101500-1a2b3c", "local", State.RUNNING)


def test_settings_are_grouped_and_written_as_by_people() -> None:
    settings = {
        "train.learning_rate": 0.00123456789,
        "limits.runtime": "3600s",
        "code.digest": "a" * 64,
        "train.compile": True,
        "global batch": 32,
        "train.epochs": 12,
    }
    groups = {each["title"]: each["rows"] for each in setting_groups(settings)}
    assert list(groups) == ["Code", "Training", "Limits"]
    assert groups["Code"] == [["code.digest", "a" * 12, "a" * 64]]
    assert groups["Limits"] == [["limits.runtime", "1h", "3600s"]]
    assert groups["Training"] == [
        ["global batch", "32", ""],
        ["train.compile", "true", ""],
        ["train.epochs", "12", ""],
        ["train.learning_rate", "0.001235", "0.00123456789"],
    ]


def test_only_a_container_has_an_image() -> None:
    plan = {"image": "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.14"}
    assert plan_rows(plan, "local") == []
    assert plan_rows(plan, "sagemaker") == [["Image", plan["image"], ""]]


def environment(host: str, **fields: Any) -> dict[str, Any]:
    return {
        "event": "environment",
        "host": host,
        "python": "3.11.7",
        "memory_bytes": 25_276_502_016,
        "gpus": ["NVIDIA H200", "NVIDIA H200"],
        **fields,
    }


def test_equal_hosts_are_shown_together() -> None:
    events = [
        environment("algo-1", disk_free_bytes=2_000_000_000),
        environment("algo-2", disk_free_bytes=1_000_000_000),
        environment("algo-3", python="3.12.1"),
    ]
    parts = environment_parts(STATUS, events)
    assert [part["title"] for part in parts] == ["algo-1, algo-2", "algo-3"]
    machine, software = parts[0]["groups"]
    assert machine["rows"] == [
        ["GPUs", "2 x NVIDIA H200", ""],
        ["Memory", "25.3 GB", "25,276,502,016 bytes"],
        ["Free disk", "1.0 GB", "Of the disk of /opt/ml, at the start."],
    ]
    assert software["rows"] == [["Python", "3.11.7", ""]]


def test_a_host_has_its_own_faults_only() -> None:
    events = [
        {"event": "failed", "host": "algo-2", "rank": 9, "exit_code": 1},
        {"event": "failed", "host": "algo-1", "rank": 0, "exit_code": 1, "secondary": True},
        {"event": "straggler", "host": "algo-3", "rank": 17, "is_over": True},
    ]
    assert host_rows(STATUS, events) == [
        {"host": "algo-2", "devices": "", "troubles": ["rank 9: failure"]}
    ]


def test_a_checkpoint_has_its_share_of_the_time_since_the_last() -> None:
    saved = {"event": "checkpoint", "uri": "s3://b/1", "bytes": 1e9, "seconds": 2.0}
    events = [
        {"event": "started", "time": 100.0},
        {**saved, "step": 1, "time": 110.0, "stall_seconds": 1.0},
        {**saved, "step": 2, "time": 114.0, "stall_seconds": 1.0},
        {"event": "checkpoint_missed", "step": 3, "time": 115.0, "reason": "no space"},
        {"event": "checkpoint_damaged", "step": 1, "uri": "s3://b/1", "detail": "ends early"},
    ]
    missed, second, first = checkpoint_rows(events)
    assert (first["share"], first["state"], first["detail"]) == ("10%", "damaged", "ends early")
    assert (second["share"], second["state"], second["is_bad"]) == ("25%", "complete", False)
    assert (missed["state"], missed["is_bad"], missed["detail"]) == ("missed", True, "no space")


def test_results_have_a_column_for_each_split() -> None:
    metrics = {
        "test/loss": 0.5,
        "train/loss": 0.25,
        "train/mfu": 0.4,
        "validation/loss": None,
        "test/top_5": 0.75,
    }
    assert result_table(metrics) == {
        "heads": ["metric", "training", "validation", "test"],
        "rows": [["Loss", "0.25", "not finite", "0.5"], ["Top 5", "", "", "0.75"]],
    }


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("ValueError: broken", Level.ERROR),
        ("error: no such file", Level.ERROR),
        ("2026-11-20 10:15:00 ERROR loader: gone", Level.ERROR),
        ("E1130 16:15:52.123456 12 torch/run.py:1] failed", Level.ERROR),
        ("rank 1 on algo-1 (local rank 1) failed: ValueError: broken", Level.ERROR),
        ("WARNING: slow", Level.WARNING),
        ("[WARNING] slow", Level.WARNING),
        ("/opt/x.py:3: FutureWarning: old", Level.WARNING),
        ("step 3 loss=0.5 error_rate=0.1", Level.PLAIN),
        ("no errors, no warnings", Level.PLAIN),
        ("mean squared error 0.25", Level.PLAIN),
    ],
)
def test_a_line_has_a_level(text: str, level: Level) -> None:
    assert LevelReader().level("algo-1", 0, text) is level


def test_a_traceback_is_an_error_until_its_exception() -> None:
    reader = LevelReader()
    lines = ["Traceback (most recent call last):", '  File "a.py", line 1', "    f()", "Oops: x"]
    assert {reader.level("algo-1", 0, text) for text in lines[:2]} == {Level.ERROR}
    # Another rank's lines come between.
    assert reader.level("algo-1", 1, "epoch 2") is Level.PLAIN
    assert {reader.level("algo-1", 0, text) for text in lines[2:]} == {Level.ERROR}
    assert reader.level("algo-1", 0, "epoch 3") is Level.PLAIN


def record_of(*texts: str) -> RunRecord:
    record = RunRecord()
    for text in texts:
        record.add(LogLine("algo-1", text))
    return record


def test_an_event_of_a_record_has_words() -> None:
    line = format_event("hang", {"host": "algo-1", "seconds": 90.0})
    (event,) = record_of(line).events_after(0)
    assert (event["text"], event["title"], event["lane"]) == (
        "no progress for 1m30s",
        "hang",
        "hangs",
    )
    assert (event["level"], event["is_logged"]) == ("error", True)


def test_a_line_of_a_record_has_no_escapes_and_its_level() -> None:
    (line,) = record_of("[rank1]: 10%\r\x1b[31mWARNING: slow\x1b[0m").lines_after(0)
    assert (line["text"], line["level"], line["number"]) == ("WARNING: slow", "warning", 1)


def test_patterns_are_proposed_where_a_log_has_numbers() -> None:
    printed = [f"step {step} loss={1 / step:.3f}" for step in range(1, 4)]
    assert record_of(*printed).metrics_hint().startswith("metrics: {step: ")
    assert record_of("hello").metrics_hint() == ""
    reported = format_event("step", {"step": 1, "loss": 1.0})
    assert record_of(*printed, reported).metrics_hint() == ""
