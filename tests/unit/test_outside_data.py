"""Malformed events and files of a run: no command ends with a traceback, and no other run is hidden."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli
from support.sizes import sample

import cloudtrain
from cloudtrain.backends.container.state_file import RecordedState, write_state
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.console.follow_screen import state_line
from cloudtrain.console.runs import explanation_rows, format_log_line, status_rows
from cloudtrain.errors import UserError
from cloudtrain.features.dashboard.model_cards import model_card
from cloudtrain.features.dashboard.run_record import RunRecord, run_document
from cloudtrain.runs.comparison import read_plan
from cloudtrain.runs.log_lines import LogFilter, LogLine
from cloudtrain.runs.previous_run import PreviousRun
from cloudtrain.runs.progress import fold_events
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State, Status
from cloudtrain_runtime.contract import check_event, format_event, parse_event
from cloudtrain_runtime.contract.events import EVENTS

RUN = "odd-261120-101500-1a2b3c"
GOOD = "good-261120-101400-1a2b3c"
NOW = 1_763_633_700.0

COMPLETE: dict[str, dict[str, Any]] = {
    "environment": {
        "host": "algo-1", "python": "3.12.11", "driver": "570.133.20", "cuda": "13.0", "gpus": ["NVIDIA L4"],
        "cuda_compat": "/usr/local/cuda/compat", "efa": ["rdmap0s6"], "efa_provider": "efa", "shm_bytes": 9,
        "disk_free_bytes": 9, "memory_bytes": 9, "packages": {"torch": "2.13.0"}, "warnings": ["x"],
    },
    "attempt": {"host": "algo-1", "restarts": 1},
    "started": {
        "run": RUN, "step": 0, "epoch": 0, "total_steps": 100, "world_size": 4, "hosts": 2, "device": "cpu",
        "backend": "gloo", "parameters": 10, "train_samples": 46, "global_batch": 12, "resumed_from": None,
        "continues": None, "restarts": 0,
    },
    "step": {
        "step": 12, "epoch": 1, "loss": 0.5, "samples_per_second": 9.5, "tokens_per_second": 1.0, "grad_norm": 0.1,
        "data_wait": 0.3, "mfu": 0.4, "memory_bytes": 12, "learning_rate": 0.1, "split": {"data": 0.1},
    },
    "evaluation": {"split": "test", "step": 12, "epoch": 1, "samples": 4, "loss": 0.5, "accuracy": 0.9},
    "best": {"step": 12, "metric": "loss", "value": 0.5},
    "skipped": {"step": 12, "loss": None, "grad_norm": None, "in_row": 1},
    "checkpoint": {"step": 12, "uri": "file:///c/step-00000012", "bytes": 9, "seconds": 0.1, "stall_seconds": 0.1},
    "checkpoint_missed": {"step": 12, "reason": "late", "detail": "x", "missed": 3, "alarm": True, "repeated": False},
    "checkpoint_damaged": {"step": 12, "uri": "file:///c/step-00000012", "detail": "x"},
    "straggler": {"step": 12, "rank": 1, "host": "algo-1", "ratio": 1.5, "part": "data", "is_over": False},
    "bandwidth": {
        "gbps": 9.5, "bytes": 9, "seconds": 0.1, "world_size": 4, "rated_gbps": 10, "warning": "slow"
    },
    "pipeline": {"links": [1, 2], "stage_seconds": [0.1, 0.2], "imbalance": 1.1},
    "tracking": {"detail": "3 values were not logged", "dropped": 3, "mlflow_run": "0a1b",
        "tracker": "mlflow", "wandb_run": "0a1b", "url": "https://a.b/c", "files": "s3://bucket/run/wandb",
    },
    "profile": {"uri": "file:///p", "first_step": 1, "last_step": 2},
    "failed": {
        "host": "algo-1", "rank": 1, "local_rank": 1, "exit_code": 1, "message": "rank 1 failed: ValueError: x",
        "secondary": False, "failed_at": NOW,
    },
    "hang": {"host": "algo-1", "step": 12, "seconds": 9.5, "ranks": [1], "stacks": "file:///s"},
    "outputs": {
        "host": "algo-1", "model_is_empty": True, "unkept_files": 2, "unkept_bytes": 9, "is_complete": True,
        "unkept": [{"path": "out/", "files": 2, "bytes": 9}],
    },
    "analysis": {
        "split": "test", "step": 12, "samples": 9, "confusion": [[9]],
        "classes": [{"name": "x", "support": 9, "precision": 1.0, "recall": None, "f1": 0.5}],
    },
    "fresh_start": {
        "checkpoint": "/opt/ml/checkpoints/checkpoint-40", "method": "train", "argument": "resume_from_checkpoint",
    },
    "patterns": {"unmatched": ["accuracy"]},
    "ranks": {
        "host": "algo-1", "seconds": 9.5, "ranks": 2, "joined": 0, "alone": 2, "unused": 2, "saved": False,
        "progressed": None,
    },
    "left": {"host": "algo-2", "ranks": [1], "step": 9},
    "leaving": {"rank": 1, "seconds": 15.0, "held_by": ["the thread 'uploader' (train.py:3)"]},
    "stopped": {"step": 12, "epoch": 1, "host": "algo-1", "signal": "SIGTERM"},
    "finished": {
        "step": 12, "epochs": 1, "seconds": 9.5, "samples_per_second": None, "best_step": 1, "skipped": 0,
        "start_step": 4,
    },
    "of-a-newer-version": {"step": 12, "anything": {"nested": [1, "x"]}},
}  # fmt: skip
"""One event of each kind with every field of its schema."""

ODD = (
    '"12"', '""', "null", "true", "-1", "-5", "0", "1.5", "1e999", "-1e999", "NaN", "Infinity", "1e308", "9" * 400,
    "18446744073709551616", "[]", "[[[]]]", "{}", '{"a": {"b": null}}', '"\\ud800"', '"\\u0000\\u001b[2J"',
    "[" * 30 + "]" * 30, json.dumps("x" * 10_000),
)  # fmt: skip
"""JSON texts that replace a value."""

LINES = (
    b"", b"{}", b"null", b"[]", b"12", b'"text"', b"{", b'{"event": "step"', b'{"event": "step", "step"}', b"\xff\x00",
    b'{"event": "step", "step": 13, "loss": "\xff"}', b'{"event": null}', b'{"event": {}}', b'{"event": ["step"]}',
    b'{"event": ""}', b'{"event": "step"}', b'{"event": "\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000,
    b'{"event": "failed", "message": "' + b"x" * 300_000 + b'"}', b'{"step": 1}', b"\x00" * 4096, b"NaN",
    b'{"event": "step", "step": 1' + b"0" * 5000 + b"}",
)  # fmt: skip
"""Lines that are malformed events, or none at all."""


def odd_events() -> Iterator[str]:
    """Yield each kind of event with each odd value in each field, and without each field."""
    for kind, fields in COMPLETE.items():
        content = {"event": kind, **fields, "time": NOW}
        for name, odd in itertools.product(content, ODD):
            marked = json.dumps({**content, name: "MARK"})
            yield marked.replace('"MARK"', odd)
        for name in fields:
            yield json.dumps({key: value for key, value in content.items() if key != name})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a CLOUDTRAIN_HOME with one run that has ended."""
    write_run(tmp_path / "runs-home", GOOD)
    return tmp_path / "runs-home"


def write_run(home: Path, run: str, state: State = State.FAILED) -> Path:
    folder = home / "runs" / run
    (folder / "logs").mkdir(parents=True)
    write_state(folder, RecordedState(state, "exit code 1"))
    return folder


def show_everything(status: Status) -> None:
    """Format a status in every way that commands do."""
    json.dumps(status.to_json(NOW), allow_nan=False).encode()
    for row in status_rows(status, NOW):
        "".join(row).encode()
    state_line(status)


def test_every_kind_of_event_has_a_complete_example() -> None:
    assert COMPLETE.keys() - {"of-a-newer-version"} == EVENTS.keys()
    for kind, fields in COMPLETE.items():
        assert check_event({"event": kind, **fields, "time": NOW}) == {
            "event": kind,
            **fields,
            "time": NOW,
        }


@pytest.mark.parametrize("kind", COMPLETE)
def test_no_odd_field_of_an_event_breaks_a_reader(kind: str) -> None:
    started = {"event": "started", **COMPLETE["started"], "time": NOW - 60}
    lines = [line for line in odd_events() if f'"event": "{kind}"' in line]
    assert len(lines) > 40
    for line in lines:
        text = f"CLOUDTRAIN {line}"
        event = parse_event(text)
        format_log_line(LogLine("algo-1", text))
        LogFilter(rank=0).wants(LogLine("algo-1", text))
        if event is None:
            continue
        json.dumps(event, allow_nan=False).encode()
        for state in (State.RUNNING, State.FAILED):
            show_everything(
                Status(RUN, "local", state, progress=fold_events([started, event, event]))
            )


def test_a_former_name_of_an_event_is_read() -> None:
    event = parse_event('CLOUDTRAIN {"event": "surroundings", "host": "algo-1", "driver": "570"}')
    assert event == {"event": "environment", "host": "algo-1", "driver": "570"}
    progress = fold_events([event])
    assert progress.host_environments == {"algo-1": event}


def test_wrong_types_drop_the_field_or_the_event() -> None:
    assert check_event({"event": "step", "step": "12"}) is None
    assert check_event({"event": "step", "step": 12, "loss": "x", "epoch": 1.5, "new": [1]}) == {
        "event": "step",
        "step": 12,
        "new": [1],
    }
    assert parse_event('CLOUDTRAIN {"event": "step", "step": 12, "loss": NaN}') == {
        "event": "step",
        "step": 12,
        "loss": None,
    }
    assert check_event({"event": "evaluation", "split": "test", "loss": 1.0, "note": "x"}) == {
        "event": "evaluation",
        "split": "test",
        "loss": 1.0,
    }


def test_no_line_of_the_events_breaks_a_command(home: Path, cli: Cli) -> None:
    folder = write_run(home, RUN)
    good = json.dumps({"event": "step", **COMPLETE["step"], "time": NOW}).encode()
    odd = [line.encode() for line in odd_events()]
    (folder / "events.jsonl").write_bytes(b"\n".join([*LINES, *odd[::3], good, good[:30]]))
    log = [b"CLOUDTRAIN " + line for line in (*LINES, *odd[::3], good)]
    (folder / "logs" / "algo-1.log").write_bytes(b"\n".join([*log, b"ValueError: x"]))
    status = cli("status", RUN, "--json")
    assert status.code == 0, status.err
    assert status.json["last_step"] == 12
    assert status.json["metrics"]["train/loss"] == 0.5
    for command in (
        ["list"],
        ["status", RUN],
        ["logs", RUN],
        ["follow", RUN],
        ["explain", RUN],
        ["explain", GOOD],
    ):
        done = cli(*command)
        assert "Traceback (most recent" not in done.err, done.err
        assert done.code == (4 if command[0] == "follow" else 0), done.err
    assert GOOD in cli("list").out


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"",
            b"{",
            b"{}",
            b"null",
            b"[]",
            b"\xff",
            b"[" * 100_000,
            b'{"state": "DONE"}',
            b'{"state": 3}',
        ),
        *(b'{"state": null}', b'{"state": ["FAILED"]}', b'{"reason": "x"}', None),
    ],
)
def test_an_unreadable_state_is_listed_with_its_reason(home: Path, content: bytes | None) -> None:
    folder = write_run(home, RUN)
    (folder / "state.json").unlink()
    if content is None:
        os.utime(folder, (1, 1))
    else:
        (folder / "state.json").write_bytes(content)
    odd, good = cloudtrain.list_runs()
    assert (good.run, good.state) == (GOOD, State.FAILED)
    assert odd.state is State.UNKNOWN
    assert "state.json" in odd.reason
    with pytest.raises(UserError, match=r"state\.json"):
        LocalBackend(home).status(RUN)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["reason", "started", "ended", "supervisor", "artifacts", "other"])
def test_no_odd_field_of_a_state_breaks_a_command(home: Path, name: str, odd: str) -> None:
    folder = write_run(home, RUN)
    content = {
        "state": "FAILED",
        "reason": "x",
        "started": None,
        "ended": "2026-11-20T10:15:00",
        name: "MARK",
    }
    (folder / "state.json").write_text(json.dumps(content).replace('"MARK"', odd))
    status = LocalBackend(home).status(RUN)
    assert status.state is State.FAILED
    show_everything(status)
    assert len(list(cloudtrain.list_runs())) == 2


def _replace_each(content: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested JSON."""
    items = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for name, value in items:
        yield (name,)
        yield from ((name, *rest) for rest in _replace_each(value))


def _with(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(content) if isinstance(content, dict) else list(content)
    copy[path[0]] = _with(content[path[0]], path[1:], value)
    return copy


PLAN = {
    "run": RUN,
    "job": {
        "name": "odd",
        "code": {"directory": ".", "script": "train.py"},
        "cluster": {"instance_type": "ml.p4d.24xlarge"},
        "data": {"train": {"uri": "s3://b/d"}},
        "checkpoint": {"uri": "s3://b/c"},
    },
    "request": {
        "TrainingJobName": RUN,
        "RoleArn": "arn:aws:iam::123456789012:role/r",
        "ResourceConfig": {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 1, "VolumeSizeInGB": 30},
        "StoppingCondition": {"MaxRuntimeInSeconds": 600},
        "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
        "InputDataConfig": [
            {"ChannelName": "train", "DataSource": {"S3DataSource": {"S3Uri": "s3://b/d", "S3DataType": "S3Prefix"}}}
        ],
        "OutputDataConfig": {"S3OutputPath": "s3://b/p"},
        "AlgorithmSpecification": {"TrainingImage": "image"},
        "Tags": [{"Key": "team", "Value": "vision"}],
    },
    "bundle": {"digest": "0" * 64, "bytes": 9, "files": 1},
    "cluster": {"world_size": 4},
    "checkpoint": {"uri": "s3://b/c"},
    "config": {
        "script": "train.py", "task": None, "hang_seconds": 600.0, "checkpoint": {"uri": "s3://b/c/steps"},
        "train": {"epochs": 1}, "local_rank_option": None, "evaluation": None,
    },
    "source": {"commit": "0a1b", "branch": "main", "dirty": False, "diff": None},
    "batch": {"global": 8},
    "command": {"text": "train.py", "entry": "train.py"},
    "warnings": ["x"],
    "decisions": ["x"],
}  # fmt: skip
STRANGE = (None, True, -1, 1.5, 10**400, "x", "\ud800", [], [None], {}, {"a": 1})


def test_no_odd_plan_or_request_breaks_a_command(home: Path) -> None:
    folder = write_run(home, RUN)
    (folder / "config").mkdir()
    backend = LocalBackend(home)
    for path, value in sample(itertools.product([(), *_replace_each(PLAN)], STRANGE)):
        plan = _with(PLAN, path, value)
        (folder / "plan.json").write_text(json.dumps(plan))
        if not path or path[0] in ("request", "config"):
            part = plan if isinstance(plan, dict) else {"request": plan, "config": plan}
            (folder / "request.json").write_text(json.dumps(part.get("request")))
            (folder / "config" / "run.json").write_text(json.dumps(part.get("config")))
        show_everything(backend.status(RUN))
        backend.facts(RUN)
        explanation_rows(cloudtrain.explain(RUN), RUN)
        run = Run(RUN, backend)
        json.dumps(run_document(run, RunRecord(), run.status(), read_plan(run))).encode()
        model_card(run)
        with contextlib.suppress(UserError):
            previous = PreviousRun(backend.plan_of(RUN))
            previous.settings(cloudtrain.Settings())
            previous.job()
    assert len(list(cloudtrain.list_runs(cloudtrain.RunFilter(tags={"team": "vision"})))) <= 1


def test_events_are_valid_json_whatever_they_hold() -> None:
    event = parse_event(format_event("evaluation", {"loss": float("nan"), "other": [float("inf")]}))
    assert event == {"event": "evaluation", "loss": None}
