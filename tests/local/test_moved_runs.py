"""Runs whose project folder was renamed or copied keep their checkpoints."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("move", [shutil.move, shutil.copytree])
def test_a_moved_home_has_its_checkpoints(
    cli: Cli, small: Callable[..., Path], tmp_path: Path, move: Callable[[str, str], object]
) -> None:
    before, now = tmp_path / "old home", tmp_path / "new home"
    done = cli(
        *("submit", small(), "--local", "--follow", "--json"),
        environ={"CLOUDTRAIN_HOME": str(before)},
    )
    assert done.code == 0, done.err
    run = done.json["run"]
    move(str(before), str(now))
    environ = {"CLOUDTRAIN_HOME": str(now)}
    listed = cli("checkpoints", run, "--json", environ=environ).json
    assert listed["checkpoints"]
    assert all("new%20home" in each["uri"] for each in listed["checkpoints"])
    model = cli("status", run, "--json", environ=environ).json["artifacts"]["model"]
    assert Path(model).is_relative_to(now)
    resumed = cli("resume", run, "--set", "train.epochs=4", "--json", environ=environ)
    assert resumed.code == 0, resumed.err
    ended = cli("follow", resumed.json["run"], "--json", environ=environ)
    assert ended.code == 0, ended.err
    log = cli("logs", resumed.json["run"], "--raw", environ=environ).out
    assert f"new%20home/runs/{run}/checkpoints" in log
    assert "old%20home" not in log
