"""A shell script that hides the failure of its program: SUCCEEDED, with a warning in every command about the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

pytestmark = pytest.mark.processes

JOB = """\
name: hidden
code: {command: [bash, train.sh]}
cluster: {instance_type: ml.g5.xlarge, instances: 2}
limits: {runtime: 5m}
"""


def test_a_success_with_an_error_has_a_warning(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB, train_py="raise ValueError('no data')\n")
    (path.parent / "train.sh").write_text("python train.py | tee log\n")
    followed = cli("submit", path, "--local", "--follow")
    assert followed.code == 0
    assert "train.sh:1: a pipe has the exit code of tee" in followed.err
    expected = "the output ends with an error, and the exit code is 0: ValueError: no data"
    assert expected in followed.out
    assert "the model folder is empty" in followed.out
    status = cli("status", "latest", "--json").json
    assert status["state"] == "SUCCEEDED"
    assert [each for each in status["warnings"] if each.startswith(expected)]
    assert expected in cli("explain", "latest").out
