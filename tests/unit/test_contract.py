import json
import re

import pytest

from cloudtrain.planning.request import CONTAINER_ENTRYPOINT, metric_definitions
from cloudtrain_runtime.contract import (
    CheckpointConfig,
    EarlyStopping,
    RunConfig,
    TrainConfig,
    describe_exit,
    format_event,
    parse_event,
    sort_hosts,
)

CONFIG = RunConfig(
    run="digits-261120-101500-1a2b3c",
    task="digits:Digits",
    script=None,
    args={"layers": 4, "names": ["a", "b c"]},
    requirements=None,
    processes_per_instance=8,
    distribution="torch_distributed",
    max_restarts=3,
    train=TrainConfig(
        epochs=3,
        steps=None,
        batch_size=16,
        accumulate=4,
        precision="bf16",
        compile=False,
        clip_grad_norm=1.0,
        learning_rate=3e-4,
        seed=0,
        evaluate_every_steps=200,
        early_stopping=EarlyStopping("validation/loss", 5, 0.0, "min"),
    ),
    checkpoint=CheckpointConfig("s3://bucket/prefix", 600, None, 3, "auto"),
)


def test_run_json_round_trips() -> None:
    assert RunConfig.from_json(CONFIG.to_json()) == CONFIG


def test_run_json_of_another_version_is_refused() -> None:
    text = json.dumps({**json.loads(CONFIG.to_json()), "version": 99})
    with pytest.raises(
        ValueError, match="version 99, which a newer cloudtrain wrote; this one reads version 1"
    ):
        RunConfig.from_json(text)


def test_events_round_trip_between_other_text() -> None:
    line = format_event("step", {"step": 3, "loss": 2.5})
    assert line == 'CLOUDTRAIN {"event": "step", "step": 3, "loss": 2.5}'
    expected = {"event": "step", "step": 3, "loss": 2.5}
    assert parse_event(line) == expected
    assert parse_event(f"half a line of another process{line}") == expected
    assert parse_event(f"{line} and something after") == expected


@pytest.mark.parametrize(
    "line",
    [
        "",
        "CLOUDTRAIN",
        "CLOUDTRAIN {",
        'CLOUDTRAIN {"event": 3}',
        "CLOUDTRAIN [1]",
        'CLOUDTRAIN {"a": 1}',
    ],
)
def test_a_malformed_event_is_none(line: str) -> None:
    assert parse_event(line) is None


def test_hosts_are_sorted_as_text() -> None:
    assert sort_hosts(["algo-2", "algo-10", "algo-1"]) == ["algo-1", "algo-10", "algo-2"]


def test_exits_are_named() -> None:
    assert describe_exit(1) == "exit code 1"
    assert describe_exit(-9) == "SIGKILL"


def test_metric_definitions_match_event_lines() -> None:
    definitions = {d["Name"]: re.compile(d["Regex"]) for d in metric_definitions({})}
    assert len(definitions) <= 40
    assert all(len(d["Regex"]) <= 500 for d in metric_definitions({}))
    split = {"data": 0.5, "forward": 1.5, "backward": 2.5, "optimizer": 0.25, "checkpoint": 0.125}
    seen = {"data_wait": 0.1, "split": split, "mfu": 0.41, "memory_bytes": 12345, "grad_norm": 0.7}
    fields = {
        "step": 120,
        "epoch": 1,
        "loss": 2.31e-5,
        "samples_per_second": 812.4,
        "tokens_per_second": 9.5,
        **seen,
    }
    step = format_event("step", {**fields, "learning_rate": 1e-4, "time": 1.5})
    test = format_event(
        "evaluation", {"split": "test", "step": 9, "loss": 0.5, "accuracy": 0.97, "time": 1.5}
    )
    assert definitions["train/loss"].search(step)[1] == "2.31e-05"  # type: ignore[index]
    assert definitions["train/samples_per_second"].search(step)[1] == "812.4"  # type: ignore[index]
    for name, value in seen.items():
        if name != "split":
            assert definitions[f"train/{name}"].search(step)[1] == str(value)  # type: ignore[index]
    for part, seconds in split.items():
        assert definitions[f"train/{part}_seconds"].search(step)[1] == str(seconds)  # type: ignore[index]
    assert definitions["train/learning_rate"].search(step)[1] == "0.0001"  # type: ignore[index]
    assert definitions["test/accuracy"].search(test)[1] == "0.97"  # type: ignore[index]
    assert definitions["validation/loss"].search(test) is None
    assert definitions["train/loss"].search(test) is None


def test_the_entrypoint_is_within_awss_limits() -> None:
    assert all(len(part) <= 256 and "\n" not in part for part in CONTAINER_ENTRYPOINT)
