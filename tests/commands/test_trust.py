"""A role or bucket from a cloned repository is used only after the user has agreed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import (
    Cli,
    Terminal,
    command,
    until,
)

import cloudtrain
from cloudtrain.settings.trust import store_agreement

TOML = """\
role = "arn:aws:iam::210987654321:role/theirs"
bucket = "their-bucket"
region = "us-west-2"
"""
JOB = "name: cloned\ncode: {script: train.py}\ncluster: {instance_type: ml.p4d.24xlarge}\n"
RUN = "sagemaker:cloned-261120-101500-1a2b3c"
NO_CREDENTIALS = "no AWS credentials"


@pytest.fixture
def cloned(job: Callable[..., Path]) -> Path:
    path = job(JOB, train_py="")
    (path.parent / "cloudtrain.toml").write_text(TOML)
    return path


def answers() -> Path:
    return Path(os.environ["HOME"]) / ".config" / "cloudtrain" / "trusted.json"


def test_the_plan_names_settings_that_are_not_the_users(cli: Cli, cloned: Path) -> None:
    file = cloned.parent / "cloudtrain.toml"
    done = cli("plan", cloned)
    assert f"setting       bucket = their-bucket, from {file}:2\n" in done.out
    assert (
        f"warning: role and bucket: from {file}; submit asks for confirmation before it uses this (or --trust)\n"
        in done.err
    )
    shown = cli("plan", cloned, "--bucket", "my-bucket", "--json").json
    assert [(each["name"], each["line"]) for each in shown["settings_beside_job"]] == [
        ("role", 1),
        ("region", 3),
    ]
    assert shown["settings_beside_job"][0]["file"] == str(file)
    assert cli("plan", cloned, "--local", "--json").json["settings_beside_job"] == []
    assert not answers().exists()


def test_the_plan_names_the_source_of_each_setting(
    cli: Cli, cloned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cloned.parent / "cloudtrain.toml").unlink()
    profile = Path(os.environ["HOME"]) / ".config" / "cloudtrain" / "config.toml"
    profile.parent.mkdir(parents=True, exist_ok=True)
    profile.write_text('bucket = "my-bucket"\n')
    monkeypatch.setenv("CLOUDTRAIN_ROLE", "arn:aws:iam::123456789012:role/mine")
    shown = [
        line
        for line in cli("plan", cloned, "--region", "us-west-2").out.splitlines()
        if line[:7] == "setting"
    ]
    assert shown == [
        "setting       role = arn:aws:iam::123456789012:role/mine, from CLOUDTRAIN_ROLE",
        f"setting       bucket = my-bucket, from {profile}",
    ]
    assert "\nsetting" not in cli("plan", cloned, "--local").out


def test_a_plan_without_settings_is_never_sent(cli: Cli, cloned: Path) -> None:
    (cloned.parent / "cloudtrain.toml").unlink()
    request = cli("plan", cloned, "--request").json
    assert request["RoleArn"] == "<your role>"
    assert request["OutputDataConfig"]["S3OutputPath"] == "s3://<your bucket>/cloudtrain"
    assert "s3://<your bucket>/cloudtrain/" in cli("plan", cloned).out
    refused = cli("submit", cloned, "--skip-check")
    assert refused.code == 2
    assert "missing settings for SageMaker: role, bucket, region" in refused.err


def test_listing_runs_needs_no_consent(cloned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cloned.parent / "cloudtrain.toml").write_text(
        'bucket = "their-bucket"\n'
    )  # not complete either: there is no role
    monkeypatch.chdir(cloned.parent)
    assert list(cloudtrain.list_runs()) == []


def test_submit_needs_trust_where_there_is_no_terminal(cli: Cli, cloned: Path) -> None:
    file = cloned.parent / "cloudtrain.toml"
    for arguments in (["submit", cloned], ["check", cloned]):
        done = cli(*arguments)
        assert done.code == 2
        assert (
            f"error: {file} gives role = arn:aws:iam::210987654321:role/theirs, bucket = their-bucket"
            in done.err
        )
        assert "--trust" in done.err
        assert "CLOUDTRAIN_ROLE=" in done.err
    assert cli("submit", cloned, "--json").json["error"]["exit_code"] == 2
    assert not answers().exists()
    # After consent, the next error is about missing credentials.
    own = ("--role", "arn:aws:iam::123456789012:role/mine", "--bucket", "my-bucket")
    assert NO_CREDENTIALS in cli("submit", cloned, *own).err
    assert NO_CREDENTIALS in cli("submit", cloned, "--trust").err
    assert answers().stat().st_mode & 0o777 == 0o600


def test_the_answer_counts_for_one_file_and_its_values(cli: Cli, cloned: Path) -> None:
    file = cloned.parent / "cloudtrain.toml"
    assert NO_CREDENTIALS in cli("--trust", "submit", cloned).err
    assert cli("submit", cloned).code == 3
    file.write_text(TOML + "prefix = 'other'\n")
    assert cli("submit", cloned).code == 3
    file.write_text(TOML.replace("their-bucket", "another-bucket"))
    refused = cli("submit", cloned)
    assert refused.code == 2
    assert "another-bucket" in refused.err
    file.write_text(TOML)
    copy = cloned.parent.with_name("copy")
    shutil.copytree(cloned.parent, copy)
    assert cli("submit", copy / "job.yaml").code == 2
    answers().write_text("[")
    assert cli("submit", cloned).code == 2


def test_an_answer_that_cannot_be_stored_is_an_error(
    cli: Cli, cloned: Path, tmp_path: Path
) -> None:
    (tmp_path / "config" / "cloudtrain" / "trusted.json").mkdir(parents=True)
    done = cli("submit", cloned, "--trust", environ={"XDG_CONFIG_HOME": str(tmp_path / "config")})
    assert done.code == 2
    assert "trusted.json: the answer cannot be stored" in done.err
    assert "XDG_CONFIG_HOME" in done.err


def test_submit_asks_once_on_a_terminal(cli: Cli, cloned: Path) -> None:
    def submit(answer: bytes | None) -> Terminal:
        terminal = Terminal([str(command()), "submit", str(cloned)], dict(os.environ), columns=200)
        if answer is not None:
            until(lambda: terminal.shows("use them for this repository from now on? [y/N]"))
            terminal.press(answer)
        return terminal

    refused = submit(b"n\r")
    until(lambda: refused.shows("you have not agreed to use them"))
    assert refused.end() == 2
    for answer in (b"y\r", None):
        terminal = submit(answer)
        until(lambda shown=terminal: shown.shows(NO_CREDENTIALS))
        assert terminal.end() == 3
    assert list(json.loads(answers().read_text())) == [str(cloned.parent / "cloudtrain.toml")]


def test_other_commands_need_trust_for_the_account(
    cli: Cli, cloned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cloned.parent)
    for verb in ("resume", "status", "stop", "logs"):
        done = cli(verb, RUN)
        assert done.code == 2
        assert "their-bucket" in done.err
    listed = cli("list", "--json")
    assert listed.json == {"runs": []}
    assert "the account's runs are not shown: " in listed.err
    assert cli("list", "--sagemaker").code == 2
    assert NO_CREDENTIALS in cli("--trust", "list").err
    assert cli("status", RUN).code == 3


def test_the_sdk_refuses_untrusted_settings(cloned: Path) -> None:
    with pytest.raises(cloudtrain.errors.UntrustedSettingsError, match="their-bucket"):
        cloudtrain.submit(cloned)
    with pytest.raises(cloudtrain.errors.UntrustedSettingsError, match="trust=True"):
        cloudtrain.check(cloned)
    trusted = cloudtrain.setup.find_settings(cloned, trust=True)
    assert trusted.bucket_owners == {"their-bucket": "210987654321"}
    assert cloudtrain.plan(cloned, local=True).config.bucket_owners == {}
    with pytest.raises(cloudtrain.CloudError, match=NO_CREDENTIALS):
        cloudtrain.submit(cloned, settings=trusted)
    assert not answers().exists()
    store_agreement(
        os.environ,
        str(cloned.parent / "cloudtrain.toml"),
        {"role": trusted.role or "", "bucket": "their-bucket"},
    )
    with pytest.raises(cloudtrain.CloudError, match=NO_CREDENTIALS):
        cloudtrain.submit(cloned)
