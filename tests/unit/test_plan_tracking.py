"""Weights & Biases in a plan: variables, the id of a training, offline files, keys, and who logs a script."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support.plans import CODE, RUN, SCRIPT_JOB, SETTINGS, PlanOf, local, refusal

from cloudtrain.backends.local.target import LocalTarget
from cloudtrain.features.rehearsal.engine import rehearsed_spec
from cloudtrain.features.rehearsal.shape import Shape
from cloudtrain.job.spec import JobSpec
from cloudtrain.job.static_analysis.conventions import read_conventions
from cloudtrain.planning.placement import Machine
from cloudtrain.planning.storage_layout import ResumeSource
from cloudtrain.planning.tracking import decide_tracking
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
    isolated = "cluster={instance_type: ml.p4d.24xlarge, network: {isolation: true}}"
    there = plan_of(OFFLINE, isolated).config.tracking
    assert there is not None
    assert there.files == "file:///opt/ml/checkpoints/wandb"
    assert plan_of("tracking.wandb.mode=disabled").config.tracking is None
    here = plan_of(OFFLINE, isolated, **local()).config.tracking
    assert here is not None
    assert here.files.endswith(f"/{RUN}/wandb")


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


def test_a_local_run_needs_a_package_and_a_login(plan_of: PlanOf) -> None:
    found = plan_of("tracking.wandb={}", **local()).decisions
    assert any("the login of this machine" in each for each in found)
    text = refusal(plan_of, "tracking.wandb={}", **on_machine(has_wandb_login=False))
    assert "wandb login, or code.env: {WANDB_API_KEY: {secret: NAME}}" in text
    lacks = on_machine(missing=frozenset({"wandb", "mlflow"}))
    text = refusal(plan_of, OFFLINE, "tracking.mlflow=https://a.b", **lacks)
    assert "tracking.wandb: this machine lacks the package wandb" in text
    assert "tracking.mlflow: this machine lacks the package mlflow" in text
    assert plan_of(OFFLINE, text=SCRIPT_JOB, **lacks).config.tracking is None


def on_machine(**facts: Any) -> dict[str, Any]:
    """Return the arguments that plan a run on a machine without GPUs."""
    machine = Machine(gpus=0, **facts)
    return {"target": LocalTarget(SETTINGS, Path("/somewhere/.cloudtrain"), machine)}


METRICS = "metrics={loss: 'loss=([0-9.]+)'}"


@pytest.mark.parametrize(
    "change", ["code.args=[--report_to, wandb]", "code={command: [python, train.py]}"]
)
def test_two_never_log_to_one_run(plan_of: PlanOf, change: str) -> None:
    plan = plan_of(OFFLINE, METRICS, change, text=SCRIPT_JOB)
    assert plan.config.tracking is None
    assert any("the script logs by itself" in each for each in plan.decisions)


@pytest.mark.parametrize(
    "code",
    [
        "def start():\n    import wandb\n",
        'arguments = dict(report_to="wandb")\n',
        "from lightning.pytorch.loggers import WandbLogger\n",
    ],
    ids=["import", "name", "logger"],
)
def test_code_with_a_sign_of_a_tracker_logs_by_itself(tmp_path: Path, job: Any, code: str) -> None:
    (tmp_path / "own.py").write_text(code)
    conventions = read_conventions(tmp_path, "own.py")
    assert conventions.trackers == {"wandb"}
    spec = JobSpec.from_yaml(job(SCRIPT_JOB, train_py=code), (OFFLINE, METRICS))
    assert decide_tracking(spec, dataclasses.replace(CODE, conventions=conventions)) is None
    assert decide_tracking(spec, CODE) == TrackingConfig(wandb="offline")


def test_a_rehearsal_is_in_no_tracker(job: Any) -> None:
    spec = JobSpec.from_yaml(job(SCRIPT_JOB, train_py=""), ("code.env={WANDB_MODE: online}",))
    rehearsed = rehearsed_spec(spec, Shape(hosts=1, ranks=1), 10)
    assert rehearsed.code.env == {"WANDB_MODE": "disabled"}


def test_an_earlier_runtime_reads_what_mlflow_needs(plan_of: PlanOf) -> None:
    plan = plan_of("tracking.mlflow=https://a.b")
    assert json.loads(plan.config.to_json())["tracking"].keys() == {"mlflow", "plan"}


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
