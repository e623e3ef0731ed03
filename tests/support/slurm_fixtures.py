"""Fixtures with a real Slurm on this machine, and with a site of cloudtrain on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.backends.slurm.checks import check_nodes, was_seen
from cloudtrain.backends.slurm.commands import Slurm
from cloudtrain.settings.slurm_sites import SlurmSite
from cloudtrain.support.checks import Result
from cloudtrain.support.config_folder import config_folder
from support.slurm_cluster import Cluster, cluster, require_slurm


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm()
    with cluster(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def slurm(_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster of four nodes without jobs, which this process and its child processes use."""
    monkeypatch.setenv("SLURM_CONF", _cluster.environ["SLURM_CONF"])
    yield _cluster
    _cluster.restore()


@pytest.fixture(scope="session")
def _accounting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm(accounting=True)
    with cluster(tmp_path_factory.mktemp("accounting"), nodes=2, accounting=True) as slurm:
        yield slurm


@pytest.fixture
def accounting(_accounting: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster of two nodes with accounts, QOS and sacct."""
    monkeypatch.setenv("SLURM_CONF", _accounting.environ["SLURM_CONF"])
    yield _accounting
    _accounting.restore()


def settings_file() -> Path:
    """Return the user's own settings file."""
    return config_folder(os.environ) / "config.toml"


@pytest.fixture
def slurm_site(slurm: Cluster) -> Iterator[Path]:
    """The shared folder of a site `test`, which is in the user's settings. Nodes have passed the check of it today.

    Otherwise a submit asks free nodes, which a test that has filled the cluster has not.
    """
    folder = slurm.folder / "cloudtrain"
    site = SlurmSite("test", folder, origin="config.toml:1")
    assert all(each.result is not Result.FAIL for each in check_nodes(site, None, Slurm()))
    assert was_seen(site)
    settings = settings_file()
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(f'[slurm.test]\nfolder = "{folder}"\n')
    yield folder
    settings.unlink()
