"""The table of titles: complete, and in the words of people."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import cloudtrain.features.dashboard
from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.job.spec import JobSpec
from cloudtrain.runs import titles
from cloudtrain.runs.ledger import Kind
from cloudtrain.runs.titles import (
    Unit,
    describe_metric_value,
    describe_value,
    metric_title,
    section_title,
    split_title,
    title_of_metric,
)
from cloudtrain_runtime.contract.events import EVENTS
from cloudtrain_runtime.contract.metric_values import SPEED_FIELDS, STEP_PARTS

COMMON_FIELDS = {"event", "time", "step", "epoch", "rank"}
NO_METRICS = {"split", "metrics", "total_steps", "host"}
STATIC = Path(cloudtrain.features.dashboard.__file__).parent / "static"


def fields_of(kind: str) -> set[str]:
    return {*EVENTS[kind].required, *EVENTS[kind].optional} - COMMON_FIELDS


def test_every_metric_has_a_title() -> None:
    reported = fields_of("step") - NO_METRICS
    parts = {f"{part}_seconds" for part in STEP_PARTS}
    assert reported | set(SPEED_FIELDS) | parts == set(titles.METRICS) - {"accuracy", "perplexity"}


def test_every_event_has_a_title() -> None:
    assert set(titles.EVENTS) == set(EVENTS)


def test_every_field_of_an_environment_has_a_title() -> None:
    assert set(titles.ENVIRONMENT) == fields_of("environment")


def test_every_class_of_failure_has_words() -> None:
    assert set(titles.FAILURES) == {str(each) for each in FailureClass}
    assert FailureClass.USER_CODE.words == "an error in the job's code"


def test_every_kind_of_time_has_a_title() -> None:
    assert {kind: title.text for kind, title in titles.TIMES.items()} == {
        str(kind): str(kind) for kind in Kind
    }


def test_every_section_of_a_job_has_a_title() -> None:
    assert set(titles.SETTINGS) == set(JobSpec.model_fields)


def test_no_title_is_the_name_of_a_field() -> None:
    metrics = [each.text for each in (*titles.METRICS.values(), *titles.ENVIRONMENT.values())]
    events = [text for each in titles.EVENTS.values() for text in (each.text, each.many)]
    texts = [*metrics, *events, *titles.FAILURES.values(), *titles.SETTINGS.values()]
    assert [text for text in texts if "_" in text or not text] == []


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("train/loss", "training loss"),
        ("validation/accuracy", "validation accuracy"),
        ("train/learning_rate", "learning rate"),
        ("train/my_score", "my score"),
        ("hold_out/my_score", "hold out my score"),
        ("loss", "training loss"),
    ],
)
def test_a_metric_is_named_in_words(name: str, title: str) -> None:
    assert metric_title(name) == title


def test_a_split_is_named_in_words() -> None:
    assert [split_title(name) for name in ("loss", "train/loss", "test/loss")] == [
        *("training", "training", "test")
    ]
    assert title_of_metric("a/b/my_score").text == "my score"
    assert section_title("cluster.instances") == "Cluster"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (25_276_510_208, Unit.BYTES, "25.3 GB"),
        (0.0249, Unit.SECONDS, "24.9 ms"),
        (0.41234, Unit.SHARE, "41.2%"),
        (2696.12, Unit.SAMPLES, "2,696 samples/s"),
        (0.00123456789, Unit.NONE, "0.001235"),
        (None, Unit.BYTES, "not finite"),
    ],
)
def test_a_value_has_its_unit(value: float | None, unit: Unit, text: str) -> None:
    assert describe_value(value, unit) == text


def test_a_metrics_value_has_the_unit_of_its_title() -> None:
    assert describe_metric_value("train/memory_bytes", 411_700_000) == "411.7 MB"


def test_scripts_of_the_page_share_no_name() -> None:
    """All scripts of a page share one scope: a second function of a name would replace the first one."""
    name = re.compile(r"^(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)
    found = Counter(each for path in STATIC.glob("*.js") for each in name.findall(path.read_text()))
    assert [each for each, times in found.items() if times > 1] == []
