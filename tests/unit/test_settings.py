from pathlib import Path

import pytest

from cloudtrain.errors import SettingsError
from cloudtrain.settings.settings import load_settings, profile_file


def test_flags_come_before_environment_before_files(tmp_path: Path) -> None:
    environ = {
        "HOME": str(tmp_path),
        "CLOUDTRAIN_BUCKET": "from-environment",
        "AWS_REGION": "eu-west-1",
    }
    profile = profile_file(environ)
    profile.parent.mkdir(parents=True)
    profile.write_text("role = 'from-profile'\nbucket = 'from-profile'\nprefix = 'from-profile'\n")
    (tmp_path / "cloudtrain.toml").write_text("prefix = 'from-job'\nsubnets = ['subnet-1']\n")
    settings = load_settings(
        environ, job_directory=tmp_path, flags={"bucket": "from-flag", "role": None}
    )
    assert settings.bucket == "from-flag"
    assert settings.role == "from-profile"
    assert settings.prefix == "from-job"
    assert settings.region == "eu-west-1"
    assert settings.subnets == ("subnet-1",)
    assert settings.sources == {
        "bucket": "flag",
        "region": "AWS_REGION",
        "prefix": str(tmp_path / "cloudtrain.toml"),
        "subnets": str(tmp_path / "cloudtrain.toml"),
        "role": str(profile),
    }


def test_a_profile_is_chosen_by_name(tmp_path: Path) -> None:
    (tmp_path / "cloudtrain.toml").write_text("bucket = 'a'\n[profiles.big]\nbucket = 'b'\n")
    environ = {"HOME": str(tmp_path)}
    assert load_settings(environ, job_directory=tmp_path).bucket == "a"
    assert (
        load_settings({**environ, "CLOUDTRAIN_PROFILE": "big"}, job_directory=tmp_path).bucket
        == "b"
    )


def test_lists_are_separated_by_commas() -> None:
    settings = load_settings({"CLOUDTRAIN_SUBNETS": "subnet-1, subnet-2"})
    assert settings.subnets == ("subnet-1", "subnet-2")


def test_missing_settings_are_named_with_remedies() -> None:
    settings = load_settings({"CLOUDTRAIN_BUCKET": "b"})
    with pytest.raises(SettingsError) as caught:
        settings.require()
    assert "role, region" in caught.value.message
    assert "export CLOUDTRAIN_ROLE=..." in caught.value.hint
    assert "--local" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bukcet = 'x'", "unknown setting 'bukcet'"),
        ("bucket = 3", "bucket must be a string"),
        ("subnets = 'subnet-1'", "subnets must be a list"),
        ("bucket = ", "Invalid value"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "cloudtrain.toml").write_text(text)
    with pytest.raises(SettingsError, match=expected):
        load_settings({"HOME": str(tmp_path)}, job_directory=tmp_path)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"CLOUDTRAIN_TRANSPORT": "botto3"})
    assert 'did you mean "boto3"?' in caught.value.hint


@pytest.mark.parametrize(
    ("variable", "file", "expected"),
    [(None, "true", True), ("0", "true", False), ("true", "false", True)],
)
def test_the_report_is_a_switch(
    tmp_path: Path, variable: str | None, file: str, expected: bool
) -> None:
    (tmp_path / "cloudtrain.toml").write_text(f"report = {file}\n")
    environ = (
        {"HOME": str(tmp_path)}
        if variable is None
        else {"HOME": str(tmp_path), "CLOUDTRAIN_REPORT": variable}
    )
    assert load_settings(environ, job_directory=tmp_path).report is expected


def test_a_switch_is_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="'on' is neither true nor false"):
        load_settings({"CLOUDTRAIN_REPORT": "on"})
    (tmp_path / "cloudtrain.toml").write_text("report = 'always'\n")
    with pytest.raises(SettingsError, match=r"report must be true or false"):
        load_settings({"HOME": str(tmp_path)}, job_directory=tmp_path)


def test_a_profile_that_no_file_has_is_refused(tmp_path: Path) -> None:
    """Otherwise the settings of another account would be used."""
    (tmp_path / "cloudtrain.toml").write_text("bucket = 'a'\n[profiles.staging]\nbucket = 'b'\n")
    environ = {"HOME": str(tmp_path), "CLOUDTRAIN_PROFILE": "stagging"}
    with pytest.raises(SettingsError, match="there is no profile 'stagging'") as caught:
        load_settings(environ, job_directory=tmp_path)
    assert caught.value.hint == 'did you mean "staging"?'
    with pytest.raises(SettingsError, match="no profile 'stagging' in any settings file"):
        load_settings({"CLOUDTRAIN_PROFILE": "stagging"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("profiles = 3", "profiles must contain tables"),
        ("[profiles]\nbig = 3", "profiles must contain tables"),
        ("subnets = [1, 2]", "subnets must be a list of strings"),
        ("bucket = 3", "bucket must be a string"),
        ("[profiles.big]\nbuket = 'x'", "unknown setting 'buket'"),
    ],
)
def test_a_malformed_file_is_explained(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "cloudtrain.toml").write_text(text + "\n")
    with pytest.raises(SettingsError, match=expected) as caught:
        load_settings({"HOME": str(tmp_path)}, job_directory=tmp_path)
    assert caught.value.hint
