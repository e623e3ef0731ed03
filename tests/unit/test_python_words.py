"""Errors that Python prints name functions and arguments; the command line prints commands and options."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, Cli

import cloudtrain
from cloudtrain import Check, CloudtrainError, UserError
from cloudtrain.errors import UntrustedSettingsError
from cloudtrain.preflight.base import failed
from cloudtrain.support.python_words import hint_in_python, in_python

JOB = EXAMPLES / "digits" / "job.yaml"
RUN = "digits-261120-101500-1a2b3c"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see: cloudtrain list; or else", "see: cloudtrain.list_runs(); or else"),
        ("to stop it: cloudtrain stop x-1", 'to stop it: cloudtrain.stop("x-1")'),
        ("all: cloudtrain check JOB; or --skip-check", "all: cloudtrain.check(job); or skip_check=True"),
        ("cloudtrain checkpoints local:x", 'cloudtrain.checkpoint_folder("local:x").list()'),
        ("try it here: cloudtrain submit JOB --local.", "try it here: cloudtrain.submit(job, local=True)."),
        (
            "cloudtrain submit --local JOB --set checkpoint.resume=RUN",
            'cloudtrain.submit(job.with_values({"checkpoint.resume": run.id}), local=True)',
        ),
        ("leave it out: --set checkpoint.uri=null", 'leave it out: with_values({"checkpoint.uri": None})'),
        ("use --set cluster.instances=2, or wait", 'use with_values({"cluster.instances": 2}), or wait'),
        ("without an account: --local", "without an account: local=True"),
        ("use --instances 3, or --wait-for-capacity", "use instances=3, or wait_for_capacity=SECONDS"),
        (
            "only the command has it: cloudtrain prices --refresh",
            "only the command has it: cloudtrain prices --refresh",
        ),
        ("aws s3 mb s3://x --region us-west-2", "aws s3 mb s3://x --region us-west-2"),
        ("cloudtrain checkpoints verify x", "cloudtrain checkpoints verify x"),
    ],
)
def test_hints_name_functions_and_arguments(text: str, expected: str) -> None:
    assert hint_in_python(text) == expected


def test_text_of_a_job_is_not_changed() -> None:
    assert in_python("false can mean --local False or --new") == "false can mean --local False or --new"


def test_python_and_the_command_line_name_their_own(cli: Cli) -> None:
    with pytest.raises(CloudtrainError) as error:
        cloudtrain.status(f"local:{RUN}")
    assert str(error.value).endswith("\n  see: cloudtrain.list_runs()")
    assert error.value.hint == "see: cloudtrain list"
    done = cli("status", f"local:{RUN}", "--json")
    assert done.err.endswith("\n  see: cloudtrain list\n")
    assert done.json["error"]["hint"] == "see: cloudtrain list"


def test_a_wrong_argument_is_named_as_it_was_given(cli: Cli) -> None:
    with pytest.raises(UserError) as error:
        cloudtrain.validate(JOB, ["train.epoch=2"], instances=0)
    assert "instances=0  cluster.instances: expected at least 1, got 0" in str(error.value)
    assert 'override train.epoch=2  train.epoch: unknown field; did you mean "epochs"?' in str(error.value)
    done = cli("validate", JOB, "--set", "train.epoch=2")
    assert "--set train.epoch=2  train.epoch: unknown field" in done.err


def test_trust_is_an_argument_in_python() -> None:
    error = UntrustedSettingsError("/job/cloudtrain.toml", {"bucket": "b"})
    assert "to agree, once for these values: cloudtrain.find_settings(job, trust=True); " in str(error)
    assert "cloudtrain --trust COMMAND" in error.to_text()


def test_a_shown_check_has_the_fix_for_python() -> None:
    check: Check = failed("storage", "too large", "--set cluster.volume=300GB (in the job file: cluster.volume: 300GB)")
    assert '  fix  with_values({"cluster.volume": "300GB"}) (in the job file: ' in repr(check)
    assert check.to_json()["fix"].startswith("--set cluster.volume=300GB")


def test_an_error_beside_a_job_names_the_argument(job: Callable[..., Path]) -> None:
    path = job("name: demo\ncode: {script: train.py}\ncluster: {instance_type: ml.m5.large}\n", train_py="")
    with pytest.raises(UserError) as error:
        cloudtrain.submit(path)
    assert "without an account: local=True" in str(error.value)
