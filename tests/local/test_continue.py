"""A run that begins with the checkpoint of another one, and with other code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli, command

pytestmark = [pytest.mark.processes, pytest.mark.promise]


def test_fixed_code_continues_where_the_old_code_has_failed(
    cli: Cli, small: Callable[..., Path]
) -> None:
    path = small(fail_at=5)
    failed = cli("submit", path, "--local", "--follow", "--json")
    run = failed.json["run"]
    source = path.with_name("small.py")
    lines = source.read_text().splitlines()
    (place,) = [number for number, line in enumerate(lines, start=1) if "raise ValueError" in line]
    advice = f"next: fix small.py:{place}, then: {command()} submit {path} --local --continue {run}"
    assert advice in failed.err, failed.err

    found = cli("explain", run, "--json").json
    assert found["place"] == f"small.py:{place}"
    again = f"cloudtrain submit JOB --local --continue {run}"
    assert (
        found["action"]
        == f"Fix small.py:{place}. Then begin with its checkpoint, by checkpoint.resume: {again}"
    )

    source.write_text("\n".join(line.replace("raise ValueError", "str") for line in lines))
    done = cli("submit", path, "--local", "--continue", run[-6:], "--follow", "--json")
    assert done.code == 0, done.err
    assert "resumed from step 4" in done.err
    assert done.json["last_step"] == 36


def test_an_unknown_run_is_refused(cli: Cli, small: Callable[..., Path]) -> None:
    refused = cli("submit", small(), "--local", "--continue", "ffffff")
    assert refused.code == 2
    assert "ffffff" in refused.err
    assert not cli("list", "--json").json["runs"]


SCRIPT_JOB = """\
name: script
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, instances: 1, processes_per_instance: 1}
checkpoint: {every: 2 steps}
"""
SCRIPT = """
import os
import torch
from cloudtrain_runtime import checkpoint

model = torch.nn.Linear(3, 1)
start = checkpoint.load(model=model)
if "BROKEN" in os.environ:
    raise ValueError("broken on purpose")
for step in range(start.step + 1, 5):
    checkpoint.save(step, model=model)
"""


@pytest.mark.parametrize("kind", ["task", "script"])
def test_a_resumed_run_without_a_save_is_not_resumed(
    cli: Cli, small: Callable[..., Path], job: Callable[..., Path], kind: str
) -> None:
    if kind == "task":
        path, broken, sound = small(fail_at=5), "code.args.fail_at=4", "code.args.fail_at=null"
    else:
        path = job(SCRIPT_JOB, train_py=SCRIPT)
        broken, sound = "code.env.BROKEN=1", "code.env={}"
    run = cli("submit", path, "--local", "--follow", "--json").json["run"]
    failed = cli("resume", run, "--set", broken, "--follow", "--json")
    assert failed.code == 4, failed.err
    # The script has succeeded before it was broken.
    warning = f"warning: {run} has failed with: ValueError"
    assert failed.err.count(warning) == (1 if kind == "task" else 0), failed.err
    assert ("resume runs the same code again" in failed.err) == (kind == "task")
    again = failed.json["run"]
    assert f"submit JOB --local --continue {run}" in failed.err
    assert f"--continue {run}" in cli("explain", again).out

    refused = cli("resume", again, "--set", sound)
    assert refused.code == 2, refused.err
    command = f"resume {again} --set checkpoint.resume={run}"
    assert f"it began from {run}; to begin there again: cloudtrain {command}" in refused.err
    continued = cli("submit", path, "--local", "--continue", again)
    assert continued.code == 2
    assert f"there is no complete checkpoint of {again}" in continued.err
    done = cli(*command.split(), "--set", sound, "--follow", "--json")
    assert done.code == 0, done.err


OWN_FORM = """
import os, pathlib
saved = pathlib.Path("/opt/ml/checkpoints/step-00000001/state.txt")
if saved.exists():
    print("continued from", saved.read_text())
else:
    saved.parent.mkdir(parents=True)
    saved.write_text("1")
    raise ValueError("broken on purpose")
"""


def test_folders_of_a_script_may_be_named_like_the_runtime_s(
    cli: Cli, job: Callable[..., Path]
) -> None:
    path = job(SCRIPT_JOB, train_py=OWN_FORM)
    run = cli("submit", path, "--local", "--follow", "--json").json["run"]
    resumed = cli("resume", run, "--follow", "--json")
    assert resumed.code == 0, resumed.err
    assert "continued from 1" in cli("logs", resumed.json["run"]).out
