"""Checks of a Slurm cluster, on a real one."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.jobs import Cli
from support.slurm_cluster import Cluster

from cloudtrain.backends.slurm.checks import (
    check_cluster,
    check_nodes,
    check_options,
    start_checks,
    was_seen,
)
from cloudtrain.backends.slurm.commands import Slurm
from cloudtrain.errors import UserError
from cloudtrain.planning.batch_job import BatchJob, BatchOption
from cloudtrain.settings.slurm_sites import SlurmSite
from cloudtrain.support.checks import Check, Result

JOB = BatchJob("main", (BatchOption("--nodes", "2", "cluster.instances"),), "#!/bin/bash\ntrue\n")


@pytest.fixture
def site(slurm: Cluster, tmp_path: Path) -> SlurmSite:
    return SlurmSite("main", tmp_path / "shared folder", origin="cloudtrain.toml:1")


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {each.name: each for each in checks}


def test_a_site_that_works(site: SlurmSite) -> None:
    found = by_name(check_cluster(site))
    assert {name: each.result for name, each in found.items()} == {
        "Slurm": Result.PASS,
        "partition": Result.PASS,
        "account": Result.PASS,
        "shared folder": Result.PASS,
    }
    assert found["partition"].detail == "main: 4 nodes, no time limit"
    # pytest's folder is in /tmp, and no node has seen it.
    assert ", of which each node usually has its own" in found["shared folder"].warning


def test_wrong_names_are_found(site: SlurmSite) -> None:
    found = by_name(check_cluster(dataclasses.replace(site, partition="mian")))
    assert found["partition"].result is Result.FAIL
    assert found["partition"].fix == 'did you mean "main"?'


def test_accounts_and_qualities_are_found(accounting: Cluster, tmp_path: Path) -> None:
    site = SlurmSite("main", tmp_path, account="reserch", qos="urgnt", origin="cloudtrain.toml:1")
    found = by_name(check_cluster(site))
    assert found["account"].fix == 'did you mean "research"?'
    assert found["qos"].fix == 'did you mean "urgent"?'
    right = by_name(check_cluster(dataclasses.replace(site, account=None, qos=None)))
    assert right["account"].result is Result.PASS


def test_two_nodes_prove_the_shared_folder(site: SlurmSite) -> None:
    with_setup = dataclasses.replace(site, setup=("export FROM_SETUP=1", "set -- other"))
    found = by_name(check_nodes(with_setup, JOB, Slurm()))
    assert {name: each.result for name, each in found.items()} == {
        "nodes": Result.PASS,
        "clock": Result.PASS,
        "environment": Result.PASS,
    }, found
    assert was_seen(with_setup)
    # Another setup or Python may fail there.
    assert not was_seen(site)
    (seen,) = site.folder.iterdir()
    assert seen.name.startswith("seen-by-nodes-")
    assert by_name(check_cluster(with_setup))["shared folder"].warning == ""
    (again,) = check_nodes(with_setup, JOB, Slurm())
    assert re.fullmatch(r"n\d, n\d have used .* today", again.detail)


def test_a_python_without_cloudtrain_is_found(site: SlurmSite) -> None:
    found = by_name(check_nodes(dataclasses.replace(site, python="/bin/false"), JOB, Slurm()))
    assert found["environment"].result is Result.FAIL
    assert not was_seen(site)


def test_a_folder_that_nodes_do_not_share_is_found(site: SlurmSite, tmp_path: Path) -> None:
    # A path that leads to a folder in this process alone.
    opened = os.open(tmp_path, os.O_RDONLY)
    try:
        alone = dataclasses.replace(site, folder=Path(f"/proc/self/fd/{opened}"))
        (found,) = check_nodes(alone, JOB, Slurm())
        assert found.result is Result.FAIL
        assert "does not share" in found.detail
        assert not was_seen(alone)
    finally:
        os.close(opened)


def test_busy_nodes_give_no_answer(
    slurm: Cluster, site: SlurmSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloudtrain.backends.slurm.node_ping._WAIT_SECONDS", 1)
    job = slurm.submit("exec sleep 600", "--nodes=4", "--exclusive")
    slurm.wait_for(job, "RUNNING")
    (found,) = check_nodes(site, JOB, Slurm())
    # pytest's folder is in /tmp: nothing else speaks for it.
    assert found.result is Result.FAIL
    assert "no nodes were free" in found.detail
    monkeypatch.setattr("cloudtrain.backends.slurm.checks._NODES_OWN", ())
    (found,) = check_nodes(site, JOB, Slurm())
    assert found.result is Result.UNKNOWN


def test_options_are_checked_without_a_submit(site: SlurmSite) -> None:
    assert "expects the start at" in check_options(JOB, Slurm()).detail
    wrong = BatchJob("main", (BatchOption("--partition", "mian", "slurm.partition"),), JOB.script)
    for call in (lambda: check_options(wrong, Slurm()), lambda: start_checks(site, wrong)):
        with pytest.raises(UserError, match=r"slurm.partition: --partition=mian: "):
            call()


def test_the_first_submit_asks_nodes_and_later_ones_do_not(site: SlurmSite) -> None:
    names = ["Slurm", "partition", "account", "shared folder", "options", "nodes"]
    assert [each.name for each in start_checks(site, JOB)()] == [*names, "clock", "environment"]
    assert [each.name for each in start_checks(site, JOB)()] == names
    assert start_checks(site, JOB, skip=True)() == ()


def test_a_folder_that_cannot_be_made_is_an_error(site: SlurmSite, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="there is no folder"):
        start_checks(dataclasses.replace(site, folder=tmp_path / "file" / "x"), JOB)


def test_a_machine_without_slurm_is_found(tmp_path: Path) -> None:
    site = SlurmSite("main", tmp_path, origin="cloudtrain.toml:1")
    found = by_name(check_cluster(site, Slurm({"PATH": str(tmp_path)})))
    assert found["Slurm"].result is Result.FAIL
    assert "not a login node" in found["Slurm"].detail


def test_doctor_has_a_row_for_each_check_of_a_site(
    slurm: Cluster, cli: Cli, tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    settings = f"[slurm.lab]\nfolder = '{tmp_path}/shared'\npartition = 'mian'\n"
    (folder / "cloudtrain.toml").write_text(settings)
    done = cli("doctor", "--json", cwd=folder)
    rows = {each["name"]: each for each in done.json["checks"] if each["name"].startswith("slurm.")}
    names = ["slurm.lab", "slurm.lab partition", "slurm.lab account", "slurm.lab shared folder"]
    assert list(rows) == names
    partition = rows["slurm.lab partition"]
    # Local runs need no cluster, so nothing fails.
    assert (partition["result"], partition["fix"]) == ("note", 'did you mean "main"?')
    assert "cloudtrain.toml:3: Slurm has no partition mian" in partition["detail"]
    assert done.code == 0
