"""What a resume does with each field of a job: the table is complete, documented, and what `resume` says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from support.plans import RUN, SCRIPT_JOB, PlanOf, local

from cloudtrain.job.fields import Section
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.resumed_fields import CHANGE_PREFIX, RESUMED_FIELDS, Effect
from cloudtrain.planning.storage_layout import ResumeSource

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "resume.md"
CHANGES: dict[str, Any] = {
    "epochs": 9,
    "batch_size": 7,
    "accumulate": 3,
    "precision": "bf16",
    "compile": True,
    "clip_grad_norm": 2.0,
    "learning_rate": 1e-5,
    "schedule": "cosine",
    "warmup": "7 steps",
    "activation_checkpointing": True,
    "deterministic": True,
    "skip_nonfinite": 2,
    "export": "best",
    "export_nonfinite": True,
    "workers": 1,
    "drop_last": True,
    "init_from": "s3://bucket/model.pt",
    "seed": 4,
    "evaluate.every": "8 steps",
    "early_stopping.metric": "validation/error",
    "early_stopping.patience": 3,
    "early_stopping.min_delta": 0.5,
    "early_stopping.mode": "max",
    "profile.at": 3,
    "profile.steps": 2,
    "parallel.data": "fsdp",
    "parallel.tensor": 2,
    "parallel.pipeline": 2,
    "parallel.schedule": "gpipe",
    "parallel.shard": 2,
    "parallel.reshard": False,
    "parallel.offload": True,
    "parallel.static_graph": True,
    "parallel.find_unused": True,
    "parallel.compress": "bf16",
    "parallel.bucket": "30MB",
}
NEEDED = {
    "profile.steps": ["train.profile.at=2"],
    "parallel.schedule": ["train.parallel.pipeline=2"],
    **{
        f"parallel.{name}": ["train.parallel.data=fsdp"] for name in ("shard", "reshard", "offload")
    },
}


def fields_of(section: type[Section], path: str = "") -> list[str]:
    """Return the fields of a section, with those of the sections below it in their place."""
    found = []
    for name, field in section.model_fields.items():
        at = f"{path}{name}"
        kinds = [field.annotation, *get_args(field.annotation)]
        below = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        is_named = at in RESUMED_FIELDS
        found += fields_of(below[0], f"{at}.") if below and not is_named else [at]
    return found


def test_each_field_has_an_entry() -> None:
    assert sorted(fields_of(JobSpec)) == sorted(RESUMED_FIELDS)


def test_each_change_of_train_is_named(plan_of: PlanOf) -> None:
    paths = [path for path in RESUMED_FIELDS if path.startswith("train.")]
    assert {f"train.{name}" for name in CHANGES} == {*paths} - {"train.steps"}
    before = plan_of(**local(8)).job_document
    for name, value in CHANGES.items():
        source = ResumeSource("/saved", "file:///saved", RUN, job=before)
        given = [*NEEDED.get(name, []), f"train.{name}={value}"]
        plan = plan_of(f"checkpoint.resume={RUN}", *given, resumed=source, **local(8))
        counts = RESUMED_FIELDS[f"train.{name}"][0] is Effect.CHECKPOINT
        texts = plan.warnings if counts else plan.decisions
        start = "" if counts else CHANGE_PREFIX
        assert any(text.startswith(f"{start}train.{name} was ") for text in texts), name


def test_nothing_is_said_where_nothing_changes(plan_of: PlanOf) -> None:
    before = plan_of().job_document
    source = ResumeSource("s3://b/x", "s3://b/x", RUN, job=before)
    plan = plan_of(f"checkpoint.resume={RUN}", "train.seed=0", "limits.retries=2", resumed=source)
    assert not [text for text in plan.decisions if text.startswith(CHANGE_PREFIX)]
    assert plan.warnings == plan_of().warnings


def test_arguments_of_a_script_may_not_count(plan_of: PlanOf) -> None:
    source = ResumeSource("s3://b/x", "s3://b/x", RUN, job=plan_of(text=SCRIPT_JOB).job_document)
    given = [f"checkpoint.resume={RUN}", "code.args={lr: 0.1}"]
    plan = plan_of(*given, text=SCRIPT_JOB, resumed=source)
    (text,) = [each for each in plan.warnings if each.startswith("code.args was")]
    assert "train.py gets the new ones, but what it loads from its checkpoint counts" in text


@pytest.mark.parametrize(("length", "end"), [(60, "']"), (61, "'...")])
def test_long_values_are_cut_off(plan_of: PlanOf, length: int, end: str) -> None:
    value = "x" * (length - len("['']"))
    before = plan_of(f"code.args=[{value}]", text=SCRIPT_JOB).job_document
    source = ResumeSource("s3://b/x", "s3://b/x", RUN, job=before)
    plan = plan_of(f"checkpoint.resume={RUN}", "code.args=[y]", text=SCRIPT_JOB, resumed=source)
    (text,) = (each for each in plan.warnings if each.startswith("code.args was"))
    assert f"code.args was ['{value}{end} and is" in text


@pytest.mark.parametrize("effect", Effect)
def test_the_table_is_documented(effect: Effect) -> None:
    rows = re.findall(rf"(?m)^\| (.+) \| {effect} \| (.+) \|$", PAGE.read_text())
    documented = {name: text for names, text in rows for name in re.findall(r"`(.+?)`", names)}
    expected = {name: text for name, (each, text) in RESUMED_FIELDS.items() if each is effect}
    assert documented == expected
