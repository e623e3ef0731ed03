"""The first and the last screen of a followed run on a real terminal of 80 columns, and in a pipe."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, Cli, Terminal, command

pytestmark = [pytest.mark.processes, pytest.mark.promise]

TASK = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task


class Points(Task):
    def model(self):
        return nn.Linear(2, 2)

    def datasets(self):
        points = torch.randn(160, 2, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(points, (points[:, 0] > 0).long())
        return {"train": data, "validation": data}

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        return {"accuracy": (model(batch[0]).argmax(1) == labels).float()}
"""
JOB = """\
name: points
code: {task: points:Points}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2}
train: {epochs: 2, batch_size: 4}
checkpoint: {every: 2 steps}
limits: {runtime: 1h}
"""
ERROR = "NameError: name 'labels' is not defined"


def on_terminal(*arguments: str | Path, cwd: Path) -> tuple[int, list[str]]:
    """Return the exit code of a command on a terminal of 80 columns, and its lines."""
    environment = {**os.environ, "TERM": "xterm-256color"}
    program = ["/usr/bin/env", "-C", str(cwd), str(command())]
    terminal = Terminal([*program, *map(str, arguments)], environment)
    code = terminal.end()
    return code, terminal.screen


def test_a_success_ends_with_what_how_good_where_and_what_next(tmp_path: Path) -> None:
    job = EXAMPLES / "digits" / "job.yaml"
    options = ("--set", "train.epochs=3")
    code, lines = on_terminal("submit", job, "--local", "--follow", *options, cwd=tmp_path)
    assert code == 0, lines
    first = re.fullmatch(r"(digits-\d{6}-\d{6}-(\w{6})) started on this machine", lines[0])
    assert first is not None, lines[0]
    run, handle = first.groups()
    assert lines[1].endswith(f"follow {handle}")
    assert not any("{" in line for line in lines), "an event is shown as JSON"
    end = next(index for index, line in enumerate(lines) if line.startswith("✓ digits succeeded"))
    last = lines[end:]
    assert re.search(r"   (starting|loading) \d+s · .*training \d+s", last[0]), last[0]
    assert re.fullmatch(r"  test/accuracy +0\.\d+ +\d+ of 270 wrong; weakest: .*", last[1]), last[1]
    assert last[2].startswith("  validation/accuracy  0.")
    assert last[3].startswith("  step ")
    assert re.fullmatch(rf"  model +.*runs/{run}/model", last[4]), last[4]
    assert len(last) <= 12
    # The dashboard and serving are offered where they are installed.
    assert re.search(
        rf"^  look   \S+ (dashboard --open|metrics {handle})$", "\n".join(last), re.MULTILINE
    )
    assert last[-1].endswith("plan " + " ".join([str(job), *options]))
    # What was drawn has the width of the terminal; paths and commands may be longer.
    assert all(len(line) <= 80 for line in last[:4])


def test_a_failure_of_four_ranks_is_told_once(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB, points_py=TASK)
    code, lines = on_terminal("submit", path, "--local", "--follow", cwd=path.parent)
    assert code == 4, lines
    end = next(index for index, line in enumerate(lines) if line.startswith("✗ points failed"))
    assert sum(ERROR in line for line in lines[:end]) == 1, "one traceback"
    last = "\n".join(lines[end:])
    assert last.count(ERROR) == 1
    assert "points.py:21  return {" in last
    assert "(all 4 ranks" in last
    assert re.search(r"kept +checkpoint of step \d+", last)
    assert re.search(
        r"fix points.py:21, then: \S*cloudtrain submit \S+ --local --continue \w{6}$",
        last,
        re.MULTILINE,
    )
    _, table = on_terminal("list", cwd=path.parent)
    assert table[0].split() == ["ID", "JOB", "STATE", "AGE", "TOOK", "RESULT"]
    assert ERROR in table[1]
    assert all(len(line) <= 80 for line in table)
    # A pipe gets one fact per line, and says the error in the traceback, the state and the explanation.
    run = cli("list", "--json").json["runs"][0]["run"]
    piped = cli("follow", run)
    assert (piped.out + piped.err).count(ERROR) <= 4
    assert re.search(
        rf"^next: fix points.py:21, then: .* --continue {run}$", piped.out, re.MULTILINE
    )
    assert re.search(r"^state +FAILED: ", piped.out, re.MULTILINE)
    assert re.search(r"^cause +an error in the job's code$", piped.out, re.MULTILINE)
