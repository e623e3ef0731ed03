"""A folder of local runs counts only if nobody else can put code into it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

from cloudtrain.client.home import find_home
from cloudtrain.runs.known_runs import record_run
from cloudtrain.support.home_folder import search_homes

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")


def give_away(folder: Path) -> None:
    os.lchown(folder, NOBODY, NOBODY)


@pytest.mark.parametrize("how", ["writable", pytest.param("given", marks=needs_root)])
def test_a_foreign_folder_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.delenv("CLOUDTRAIN_HOME", raising=False)
    own, foreign = tmp_path / ".cloudtrain", tmp_path / "shared" / ".cloudtrain"
    here = tmp_path / "shared" / "project"
    for folder in (own, foreign, here):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    assert find_home() == foreign
    foreign.chmod(0o777) if how == "writable" else give_away(foreign)
    assert find_home() == own
    assert search_homes(here) == (own, (foreign,))
    own.rmdir()
    assert find_home() == here / ".cloudtrain"


@needs_root
def test_a_link_of_another_user_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLOUDTRAIN_HOME", raising=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / ".cloudtrain").symlink_to("mine")
    monkeypatch.chdir(tmp_path / "here")
    assert find_home() == tmp_path / ".cloudtrain"
    give_away(tmp_path / ".cloudtrain")
    assert find_home() == tmp_path / "here" / ".cloudtrain"


def test_the_plan_names_a_foreign_folder(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    path = job("name: x\ncode: {script: t.py}\ncluster: {instance_type: ml.m5.large}\n", t_py="")
    foreign = path.parent.parent / ".cloudtrain"
    foreign.mkdir()
    foreign.chmod(0o777)
    environ = {"CLOUDTRAIN_HOME": ""}
    done = cli("plan", path, "--local", cwd=path.parent, environ=environ)
    assert done.code == 0, done.err
    text = " ".join((done.out + done.err).split())
    assert f"{foreign} belongs to" in text
    assert f"{path.parent}/.cloudtrain is" in text
    foreign.chmod(0o755)
    assert "belongs to" not in cli("plan", path, "--local", cwd=path.parent, environ=environ).out


@needs_root
def test_a_recorded_folder_that_was_given_away_has_no_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cloudtrain.client.home import other_homes

    monkeypatch.delenv("CLOUDTRAIN_HOME", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    home = tmp_path / "other" / ".cloudtrain"
    (home / "runs").mkdir(parents=True)
    record_run(os.environ, "local:x-261126-101500-1a2b3c", home)
    assert other_homes() == (home,)
    give_away(home)
    assert other_homes() == ()
