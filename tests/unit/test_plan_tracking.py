"""Weights & Biases in a plan: variables, the id of a training, offline files, keys, and who logs a script."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support.plans import RUN, SCRIPT_JOB, PlanOf, local, refusal

from cloudtrain.planning.storage_layout import ResumeSource
from cloudtrain.runs.previous_run import checkpoints_of
from cloudtrain.runs.progress import fold_events
from cloudtrain.support.web_links import web_link
from cloudtrain_runtime.contract import RunConfig, TrackingConfig

KEY = "code.env.WANDB_API_KEY={secret: team/wandb}"
OFFLINE = "tracking.wandb.mode=offline"
BEFORE = "demo-261101-101500-aaaaaa"


def test_variables_name_the_run_for_a_script(plan_of: PlanOf) -> None:
    plan = plan_of("tracking.wandb={project: team, entity: us}", KEY, text=SCRIPT_JOB)
    assert plan.request["Environment"] == {
        "WANDB_MODE": "online",
        "WANDB_PROJECT": "team",
        "WANDB_ENTITY": "us",
        "WANDB_RUN_ID": RUN,
        "WANDB_NAME": RUN,
        "WANDB_RESUME": "allow",
        "WANDB_ERROR_REPORTING": "false",
    }
    assert plan.config.tracking is None, "a script without metrics logs by itself"
    assert any("the script logs by itself" in each for each in plan.decisions)


def test_values_of_the_job_win(plan_of: PlanOf) -> None:
    plan = plan_of(
        "tracking.wandb={}", "code.env={WANDB_RUN_ID: mine, WANDB_MODE: offline}", text=SCRIPT_JOB
    )
    environment = plan.request["Environment"]
    assert (environment["WANDB_RUN_ID"], environment["WANDB_MODE"]) == ("mine", "offline")
    assert environment["WANDB_PROJECT"] == "demo"


def test_a_script_with_metrics_is_logged(plan_of: PlanOf) -> None:
    plan = plan_of(OFFLINE, "metrics={loss: 'loss=([0-9.]+)'}", text=SCRIPT_JOB)
    tracking = plan.config.tracking
    assert tracking is not None
    assert tracking.wandb == "offline"


def test_offline_files_are_with_the_run(plan_of: PlanOf) -> None:
    folder = f"s3://bucket/cloudtrain/{RUN}"
    plan = plan_of(OFFLINE)
    assert plan.config.tracking == TrackingConfig(
        plan=f"{folder}/plan.json", wandb="offline", files=f"{folder}/wandb"
    )
    assert RunConfig.from_json(plan.config.to_json()) == plan.config
    isolated = plan_of(
        OFFLINE, "cluster={instance_type: ml.p4d.24xlarge, network: {isolation: true}}"
    ).config.tracking
    assert isolated is not None
    assert isolated.files == "file:///opt/ml/checkpoints/wandb"
    assert plan_of("tracking.wandb.mode=disabled").config.tracking is None


def resumed_from(plan_of: PlanOf, *changes: str) -> ResumeSource:
    """Return the checkpoints of a run of this job that has continued the training of another one."""
    plan = json.loads(plan_of(*changes).to_file())
    plan["request"]["Environment"]["WANDB_RUN_ID"] = BEFORE
    plan["config"]["tracking"]["files"] = "s3://bucket/first/wandb"
    return checkpoints_of(plan, RUN)


def test_a_resumed_training_keeps_its_id(plan_of: PlanOf) -> None:
    found = resumed_from(plan_of, OFFLINE)
    plan = plan_of(OFFLINE, resumed=found)
    assert plan.request["Environment"]["WANDB_RUN_ID"] == BEFORE
    assert plan.config.tracking is not None
    assert plan.config.tracking.files == "s3://bucket/first/wandb"
    other = plan_of(OFFLINE, resumed=dataclasses.replace(found, training={"entry": "other"}))
    assert other.request["Environment"]["WANDB_RUN_ID"] == RUN


def test_a_cluster_needs_a_key(plan_of: PlanOf) -> None:
    text = refusal(plan_of, "tracking.wandb={}")
    assert "no key of Weights & Biases" in text
    assert "WANDB_API_KEY: {secret: NAME}" in text
    assert plan_of("tracking.wandb={}", KEY).config.tracking is not None
    found = plan_of("tracking.wandb={}", **local()).decisions
    assert any("the login of this machine" in each for each in found)


def test_an_isolated_run_is_not_online(plan_of: PlanOf) -> None:
    isolated = "cluster={instance_type: ml.p4d.24xlarge, network: {isolation: true}}"
    found = plan_of("tracking.wandb={}", "code.env.WANDB_IDENTITY_TOKEN_FILE=/a", isolated).warnings
    assert any("does not reach Weights & Biases" in each for each in found)
    assert not any("Weights" in each for each in plan_of(OFFLINE, isolated).warnings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://wandb.ai/us/team/runs/a-1", True),
        ("http://127.0.0.1:5000/#/experiments/1/runs/2", True),
        ("javascript:alert(1)", False),
        ("https://user:word@wandb.ai/", False),
        ("https://wandb.ai/\x1b[31m", False),
        ("https://wandb.ai/ a", False),
        ("https://", False),
        ("https://[", False),
        (f"https://wandb.ai/{'a' * 500}", False),
    ],
)
def test_only_addresses_of_the_web_are_links(text: str, expected: bool) -> None:
    assert web_link(text) == (text if expected else "")


def test_links_and_warnings_are_those_of_each_tracker() -> None:
    url = "https://wandb.ai/us/team/runs/a-1"
    events = [
        {"event": "tracking", "tracker": "mlflow", "detail": "it does not answer"},
        {"event": "tracking", "tracker": "wandb", "wandb_run": "a-1", "url": url},
        {"event": "tracking", "tracker": "wandb", "url": "javascript:alert(1)"},
    ]
    progress = fold_events(events)
    assert progress.tracked == {"wandb": url}
    assert progress.untracked == {"mlflow": "it does not answer"}
