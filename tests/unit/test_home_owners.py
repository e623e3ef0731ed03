"""A folder of local runs counts only if nobody else can put code into it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.jobs import Cli, Terminal, command, until

from cloudtrain.client.home import find_home, make_home
from cloudtrain.errors import UntrustedHomeError
from cloudtrain.runs import known_runs
from cloudtrain.runs.known_runs import record_run
from cloudtrain.support.home_folder import is_own, search_homes
from cloudtrain.support.home_folder import make_home as make_home_in
from cloudtrain.support.run_id import make_run_id

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


def test_the_plan_warns_of_a_named_folder_that_others_change(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    path = job("name: x\ncode: {script: t.py}\ncluster: {instance_type: ml.m5.large}\n", t_py="")
    shared = tmp_path / "shared"
    shared.mkdir()
    environ = {"CLOUDTRAIN_HOME": str(shared)}
    assert str(shared) not in cli("plan", path, "--local", environ=environ).err
    shared.chmod(0o777)
    done = cli("plan", path, "--local", environ=environ)
    assert done.code == 0
    assert f"other users can write to {shared}" in " ".join(done.err.split())


@needs_root
def test_a_recorded_folder_that_was_given_away_has_no_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cloudtrain.client.home import all_homes

    monkeypatch.delenv("CLOUDTRAIN_HOME", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "other" / ".cloudtrain"
    (home / "runs").mkdir(parents=True)
    record_run(os.environ, "local:x-261126-101500-1a2b3c", home)
    assert all_homes()[1:] == (home,)
    give_away(home)
    assert all_homes()[1:] == ()


RUN_OF_ANOTHER = "evil-681231-235959-1a2b3c"


@pytest.fixture
def cloned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a repository that contains a folder of local runs, with a run of a date that is still to come."""
    monkeypatch.delenv("CLOUDTRAIN_HOME", raising=False)
    home = tmp_path / "repository" / ".cloudtrain"
    (home / "runs" / RUN_OF_ANOTHER).mkdir(parents=True)
    monkeypatch.chdir(home.parent)
    return home


def test_a_folder_that_was_cloned_is_not_used(cli: Cli, cloned: Path) -> None:
    for arguments in (
        ["list"],
        ["evaluate", "latest"],
        ["sweep", "status", "latest"],
        ["sandbox", "--stop"],
    ):
        done = cli(*arguments)
        assert done.code == 2, (arguments, done)
        assert f"{cloned} was not made by cloudtrain here" in done.err
        assert "--trust" in done.err
    assert cli("doctor").code != 1
    assert cli("list", "--json").json["error"]["exit_code"] == 2
    named = cli("list", environ={"CLOUDTRAIN_HOME": str(cloned)})
    assert named.code == 0
    assert cli("list").code == 2, "to name a folder once is no agreement"


def test_the_agreement_counts_for_one_folder(cli: Cli, cloned: Path) -> None:
    assert cli("--trust", "list").code == 0
    assert cli("list").code == 0
    moved = cloned.parent.rename(cloned.parent.with_name("moved"))
    assert cli("list", cwd=moved).code == 0, "a folder keeps its id"
    again = cloned.parent / ".cloudtrain" / "runs" / RUN_OF_ANOTHER
    again.mkdir(parents=True)
    assert cli("list", cwd=cloned.parent).code == 2, "another folder of the same path"
    (cloned / ".home-id").write_text("0" * 32)
    assert cli("list", cwd=cloned.parent).code == 2


def test_an_id_that_came_with_a_folder_is_not_kept(cli: Cli, cloned: Path) -> None:
    """Whoever knows it could plant a second folder with the same id."""
    theirs = "0" * 32
    empty = cloned.parent.parent / "empty" / ".cloudtrain"
    empty.mkdir(parents=True)
    for home in (cloned, empty):
        (home / ".home-id").write_text(theirs)
    assert cli("--trust", "list").code == 0
    make_home_in(empty)
    assert len({(home / ".home-id").read_text() for home in (cloned, empty)} - {theirs}) == 2
    assert theirs not in (Path(os.environ["HOME"]) / ".config/cloudtrain/homes.jsonl").read_text()
    assert cli("list").code == 0


def test_a_terminal_is_asked_once_for_a_folder(cloned: Path) -> None:
    def list_runs() -> Terminal:
        return Terminal([str(command()), "list"], dict(os.environ), columns=200)

    refused = list_runs()
    until(lambda: refused.shows("use it from now on? [y/N]"))
    refused.press(b"n\r")
    assert refused.end() == 2
    agreed = list_runs()
    until(lambda: agreed.shows("use it from now on? [y/N]"))
    agreed.press(b"y\r")
    assert agreed.end() == 0
    assert list_runs().end() == 0
    assert cloned.name == ".cloudtrain"


def test_the_users_own_folders_need_no_agreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLOUDTRAIN_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    home = make_home()
    (home / "runs" / RUN_OF_ANOTHER).mkdir(parents=True)
    assert find_home() == home
    earlier = tmp_path / "earlier" / ".cloudtrain"  # made by a version without ids
    (earlier / "runs").mkdir(parents=True)
    monkeypatch.chdir(earlier.parent)
    with pytest.raises(UntrustedHomeError):
        find_home()
    record_run(os.environ, "local:x-261126-101500-1a2b3c", earlier)
    assert find_home() == earlier
    make_home()
    assert (earlier / ".home-id").is_file()


def test_an_agreement_that_cannot_be_stored_is_an_error_too(
    cli: Cli, cloned: Path, tmp_path: Path
) -> None:
    (tmp_path / "config" / "cloudtrain" / "homes.jsonl").mkdir(parents=True)
    done = cli("--trust", "list", environ={"XDG_CONFIG_HOME": str(tmp_path / "config")})
    assert done.code == 2
    assert "homes.jsonl: the answer cannot be stored" in done.err
    assert f"CLOUDTRAIN_HOME={cloned}" in done.err


def test_latest_is_what_this_machine_wrote_last(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for run in (RUN_OF_ANOTHER, "mine-261126-101500-1a2b3c"):
        (runs / run).mkdir(parents=True)
    os.utime(runs / RUN_OF_ANOTHER, (4e9, 4e9))
    planted = f"local:{RUN_OF_ANOTHER}"
    assert known_runs.known_runs(os.environ, [tmp_path])[0] == planted
    now = datetime.now(UTC) + timedelta(seconds=2)
    mine = make_run_id("mine", now, "1a2b3c")
    time.sleep(2)
    (runs / mine).mkdir()
    assert known_runs.known_runs(os.environ, [tmp_path])[:2] == [f"local:{mine}", planted]


def test_a_group_of_others_counts_as_others(tmp_path: Path) -> None:
    home = tmp_path / ".cloudtrain"
    home.mkdir()
    home.chmod(0o775)
    assert is_own(home), "the group of one user"
    if os.geteuid() == 0:
        os.chown(home, -1, 4)  # a group of the system
        home.chmod(0o775)
        assert not is_own(home)


def test_a_foreign_folder_here_is_an_error(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sandbox could be another user's server."""
    monkeypatch.delenv("CLOUDTRAIN_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".cloudtrain").mkdir()
    (tmp_path / ".cloudtrain").chmod(0o777)
    for arguments in (["list"], ["sandbox", "--stop"], ["status", "latest"]):
        done = cli(*arguments)
        assert done.code == 2
        assert "can be changed by other users" in done.err
        assert "CLOUDTRAIN_HOME" in done.err


def test_a_link_to_a_known_id_is_no_id(
    tmp_path: Path, cloned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine" / ".cloudtrain"
    make_home_in(mine)
    (cloned / ".home-id").symlink_to("../../mine/.cloudtrain/.home-id")
    with pytest.raises(UntrustedHomeError):
        find_home()
    monkeypatch.chdir(mine.parent)
    assert find_home() == mine


def test_a_folder_in_the_place_of_a_renamed_one_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLOUDTRAIN_HOME", raising=False)
    first, second = tmp_path / "a" / ".cloudtrain", tmp_path / "b" / ".cloudtrain"
    make_home_in(first)
    first.parent.rename(second.parent)
    make_home_in(second)
    record_run(os.environ, "local:x-261126-101500-1a2b3c", second)
    shutil.rmtree(second.parent)
    (second / "runs" / RUN_OF_ANOTHER).mkdir(parents=True)
    monkeypatch.chdir(second.parent)
    with pytest.raises(UntrustedHomeError):
        find_home()


def test_a_folder_in_which_git_tracks_files_is_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git pulls files that it ignores without a word."""
    monkeypatch.delenv("CLOUDTRAIN_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    home = make_home()
    assert find_home() == home
    (home / "runs").mkdir()
    (home / "runs" / "planted").touch()
    subprocess.run(["git", "add", "-f", ".cloudtrain/runs"], check=True)
    done = cli("list")
    assert done.code == 2
    assert f"git tracks files in {home}" in done.err
    subprocess.run(["git", "rm", "-rq", "--cached", str(home)], check=True)
    assert cli("list").code == 0


def test_a_linked_run_is_as_new_as_the_link(tmp_path: Path) -> None:
    """The folder of all runs, to which it leads, changes with each submit."""
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / RUN_OF_ANOTHER).symlink_to(".")
    mine = make_run_id("mine", datetime.now(UTC) + timedelta(seconds=2), "1a2b3c")
    time.sleep(2)
    (runs / mine).mkdir()
    assert known_runs.known_runs(os.environ, [tmp_path])[0] == f"local:{mine}"
