"""Trials of a SageMaker tuning job: hyperparameters change the configuration that all trials share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain_runtime.contract import (
    CheckpointConfig,
    MlTree,
    RunConfig,
    SearchedValue,
    TrainConfig,
)
from cloudtrain_runtime.contract.trial import TrialError, apply_trial, uri_of_trial

TRIAL = "digits-001-0a1b2c3d"
SHARED = RunConfig(
    run="digits",
    task="mine:Mine",
    script=None,
    args={"layers": 2},
    requirements=None,
    processes_per_instance=1,
    distribution="torch_distributed",
    max_restarts=0,
    train=TrainConfig(3, None, 32, 1, "fp32", False, None, 1e-3, 0, None, None),
    checkpoint=CheckpointConfig("s3://bucket/cloudtrain/digits/checkpoints", 60.0, None, 2, "auto"),
    training={"entry": {"task": "mine:Mine"}, "args": {"layers": 2}, "train": {"seed": 1}},
    searched={
        "train.learning_rate": SearchedValue("float", 1e-3),
        "train.batch_size": SearchedValue("int", 32),
        "train.compile": SearchedValue("bool", False),
        "code.args.layers": SearchedValue("int"),
    },
)
GIVEN = {
    "sagemaker_program": '"cloudtrain_worker.py"',
    "_tuning_objective_metric": "validation/loss",
    "train.learning_rate": "0.0123",
    "train.batch_size": '"32"',
    "train.compile": '"True"',
    "code.args.layers": "4",
}


def test_a_trial_has_its_values_id_and_checkpoints() -> None:
    found = apply_trial(SHARED, GIVEN, TRIAL)
    assert found.train is not None
    assert (found.train.learning_rate, found.train.batch_size, found.train.compile) == (
        0.0123,
        32,
        True,
    )
    assert (found.run, found.args, found.searched) == (TRIAL, {"layers": 4}, {})
    assert found.checkpoint.uri == f"s3://bucket/cloudtrain/{TRIAL}/checkpoints"


def test_the_identity_of_a_trial_is_that_of_an_equal_run() -> None:
    """A batch size of 32 is the default, which an identity omits."""
    assert apply_trial(SHARED, GIVEN, TRIAL).training == {
        "entry": {"task": "mine:Mine"},
        "args": {"layers": 4},
        "train": {"seed": 1, "learning_rate": 0.0123, "compile": True},
    }


def test_a_script_gets_searched_values_as_arguments() -> None:
    searched = {
        "code.args.lr": SearchedValue("float"),
        "code.args.optimizer": SearchedValue("text"),
    }
    shared = replace(SHARED, searched=searched, training={})
    script = replace(shared, task=None, script="train.py", args=["--x", "1"], train=None)
    found = apply_trial(script, {"code.args.lr": "0.01", "code.args.optimizer": '"adam"'}, TRIAL)
    assert found.args == ["--x", "1", "--lr", "0.01", "--optimizer", "adam"]


def test_a_shared_checkpoint_folder_is_divided_between_trials() -> None:
    assert uri_of_trial("s3://bucket/mine", "digits", TRIAL) == f"s3://bucket/mine/{TRIAL}"
    assert uri_of_trial("", "digits", TRIAL) == ""


def test_run_json_of_a_tuning_job_can_be_read_back() -> None:
    assert RunConfig.from_json(SHARED.to_json()) == SHARED
    assert "searched" not in replace(SHARED, searched={}).to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train.learning_rate": "fast"},
            "hyperparameter train.learning_rate: expected a number, got 'fast'",
        ),
        ({"train.learning_rate": "nan"}, "expected a number, got 'nan'"),
        (
            {"train.batch_size": "3.5"},
            "hyperparameter train.batch_size: expected an integer, got '3.5'",
        ),
        ({"train.compile": '"yes"'}, "expected true or false"),
        (
            {"train.seed": "1"},
            "hyperparameter train.seed: this job does not search it; its tuning job must search",
        ),
        ({"code.args.layers": None}, "hyperparameter code.args.layers is missing"),
    ],
)
def test_values_that_do_not_fit_the_job_are_refused(changes: dict[str, Any], message: str) -> None:
    given = {name: text for name, text in {**GIVEN, **changes}.items() if text is not None}
    with pytest.raises(TrialError) as caught:
        apply_trial(SHARED, given, TRIAL)
    assert message in str(caught.value)


@pytest.mark.processes
def test_a_wrong_value_becomes_the_failure_reason(tmp_path: Path) -> None:
    """The worker runs as AWS's toolkit starts it: by torchrun, without cloudtrain's launcher."""
    tree = MlTree(tmp_path)
    for folder in (tree.config, tree.code, tree.run_config.parent):
        folder.mkdir(parents=True)
    tree.run_config.write_text(SHARED.to_json())
    (tree.config / "hyperparameters.json").write_text(
        json.dumps({**GIVEN, "train.learning_rate": "fast"})
    )
    environ = {
        **os.environ,
        "CLOUDTRAIN_ML_ROOT": str(tmp_path),
        "TRAINING_JOB_NAME": TRIAL,
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    command = [sys.executable, "-m", "cloudtrain_runtime.worker", "--train.learning_rate", "fast"]
    done = subprocess.run(
        command, cwd=tree.code, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert (
        "hyperparameter train.learning_rate: expected a number, got 'fast'"
        in tree.failure.read_text()
    )
    assert '"event": "failed"' in done.stdout
