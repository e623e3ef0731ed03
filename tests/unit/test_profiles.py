"""The profile file: valid and refused values, and edits that keep everything else."""

import json
import os
import stat
from pathlib import Path

import pytest
from support.jobs import Cli

import cloudtrain
from cloudtrain.errors import SettingsError, UserError
from cloudtrain.settings.profiles import change_profile, find_value_error
from cloudtrain.settings.settings import SETTINGS, load_settings, profile_file

ROLE = "arn:aws:iam::123456789012:role/training"
FULL = {
    "role": "arn:aws:iam::123456789012:role/teams/vision/training",
    "bucket": "team-bucket",
    "prefix": "team/cloudtrain",
    "region": "us-west-2",
    "subnets": ["subnet-0123456789abcdef0", "subnet-01234567"],
    "security_groups": ["sg-0123456789abcdef0"],
    "kms_key": "arn:aws:kms:us-west-2:123456789012:key/12345678-1234-1234-1234-123456789012",
    "transport": "boto3",
}
KEY_ID = "AKIA" + "Z7QW3ERT5YUI2OPA"
SECRET_KEY = "kR9v2LmQx8" + "Tz4WbN6yHc1JpD5sFgA3eUoXiV7t/+"


@pytest.fixture
def file() -> Path:
    return profile_file(os.environ)


@pytest.fixture
def written(file: Path) -> Path:
    file.parent.mkdir(parents=True)
    file.write_text(
        f"# ours\nrole = '{ROLE}'\nbucket = 'one'  # the team's\n\n[profiles.big]\nbucket = 'two'\n"
    )
    return file


def test_later_commands_use_the_stored_settings(file: Path) -> None:
    change = cloudtrain.setup.configure({**FULL, "report": True}, offline=True)
    assert [each.name for each in change.changes] == list(SETTINGS)
    settings = load_settings(os.environ)
    assert settings.report is True
    assert {name: getattr(settings, name) for name in FULL} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in FULL.items()
    }
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["config.toml"]
    assert cloudtrain.setup.configure(FULL, offline=True).changes == ()


def test_a_new_profile_keeps_the_others(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = written.read_text()
    cloudtrain.setup.configure(
        {"bucket": "three", "region": "eu-west-1"}, profile="new", offline=True
    )
    assert (
        written.read_text() == before + '\n[profiles.new]\nbucket = "three"\nregion = "eu-west-1"\n'
    )
    monkeypatch.setenv("CLOUDTRAIN_PROFILE", "new")
    settings = cloudtrain.setup.find_settings()
    assert (settings.role, settings.bucket, settings.region) == (ROLE, "three", "eu-west-1")
    assert cloudtrain.setup.list_profiles() == {
        None: {"role": ROLE, "bucket": "one"},
        "big": {"bucket": "two"},
        "new": {"bucket": "three", "region": "eu-west-1"},
    }
    cloudtrain.setup.remove_profile("new")
    assert written.read_text() == before + "\n"
    with pytest.raises(SettingsError, match="there is no profile 'bog'") as caught:
        cloudtrain.setup.remove_profile("bog")
    assert caught.value.hint == 'did you mean "big"?'


def test_other_values_are_replaced_only_with_overwrite(written: Path) -> None:
    before = written.read_text()
    with pytest.raises(SettingsError, match="has other values of bucket; nothing was stored"):
        cloudtrain.setup.configure({"bucket": "three"}, offline=True)
    assert written.read_text() == before
    cloudtrain.setup.configure({"bucket": "three"}, overwrite=True, offline=True)
    assert written.read_text() == before.replace("'one'", '"three"')


def test_an_empty_value_removes_a_setting(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "alias/training"
    cloudtrain.setup.configure({"kms_key": key}, offline=True)
    cloudtrain.setup.configure({"kms_key": ""}, profile="big", offline=True)
    assert cloudtrain.setup.find_settings().kms_key == key
    monkeypatch.setenv("CLOUDTRAIN_PROFILE", "big")
    assert (
        cloudtrain.setup.find_settings().kms_key is None
    )  # an empty value in a profile hides the general one
    monkeypatch.delenv("CLOUDTRAIN_PROFILE")
    cloudtrain.setup.configure({"kms_key": ""}, overwrite=True, offline=True)
    assert "alias" not in written.read_text()


def test_all_errors_are_reported_and_nothing_is_stored(file: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        cloudtrain.setup.configure(
            {
                "role": "training",
                "bucket": "s3://mine/x",
                "region": "us-wst-2",
                "subnets": "subnet-01234567",
            },
            offline=True,
        )
    lines = caught.value.message.splitlines()
    assert lines[0] == "4 settings cannot be stored:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "role",
        "bucket",
        "region",
        "subnets",
    ]
    assert "give the name alone: mine" in lines[2]
    assert 'did you mean "us-west-2"?' in lines[3]
    assert "give security_groups, too, or neither" in lines[4]
    assert not file.exists()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("role", "arn:aws:iam::12345:role/x", "no ARN of a role"),
        ("role", "arn:aws:iam::123456789012:user/x", "no ARN of a role"),
        (
            "role",
            "arn:aws-cn:iam::123456789012:role/x",
            "a role of aws-cn does not work in us-west-2",
        ),
        ("bucket", "Mine", "lowercase letters"),
        ("bucket", "ab", "3 to 63"),
        ("bucket", "10.0.0.1", "no name that S3 gives"),
        ("bucket", "a..b", "no name that S3 gives"),
        ("bucket", "mine--x-s3", "no name that S3 gives"),
        ("prefix", "/x", "no prefix"),
        ("prefix", "x/../y", "no prefix"),
        ("prefix", "x*", "no prefix"),
        ("region", "moon-1", "there is no AWS region"),
        ("subnets", ("subnet-xyz",), "no id of a subnet: 'subnet-xyz'"),
        ("subnets", tuple(f"subnet-{n:08x}" for n in range(17)), "at most 16, got 17"),
        ("security_groups", ("subnet-01234567",), "no id of a security group"),
        ("security_groups", tuple(f"sg-{n:08x}" for n in range(6)), "at most 5, got 6"),
        (
            "kms_key",
            "arn:aws:kms:eu-west-1:123456789012:alias/x",
            "the key is in eu-west-1, but the region is us-west-2",
        ),
        ("kms_key", "key/12345678-1234-1234-1234-123456789012", "no KMS key"),
        ("kms_key", "mine", "no KMS key"),
        ("transport", "botto3", "unknown"),
        ("bucket", "b\u00fccket", "characters that are not allowed"),
        ("bucket", "buck\x1b[31m", "characters that are not allowed"),
    ],
)
def test_an_invalid_value_is_reported(name: str, value: str, expected: str) -> None:
    wrong = find_value_error(name, value, "us-west-2")
    assert wrong is not None
    assert expected in wrong[0]
    assert wrong[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("role", "arn:aws-us-gov:iam::123456789012:role/service-role/x"),
        ("region", "us-gov-west-1"),
        ("region", "eu-west-9"),  # newer than the installed botocore
        ("kms_key", "alias/mine"),
        ("kms_key", "12345678-1234-1234-1234-123456789012"),
        ("kms_key", "mrk-12345678123412341234123456789012"),
        ("prefix", "a/b.c"),
        *(
            (name, tuple(value) if isinstance(value, list) else value)
            for name, value in FULL.items()
        ),
    ],
)
def test_a_valid_value_is_accepted(name: str, value: str) -> None:
    region = "us-gov-west-1" if "gov" in value else "us-west-2"
    assert find_value_error(name, value, region) is None


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "secret",
    [KEY_ID, SECRET_KEY, "IQoJb3JpZ2luX2Vj" * 12, "hf_" + "aBcDeFgHiJ1234KLmnOPqrSTuvWXyz"],
)
def test_a_secret_is_neither_stored_nor_repeated(
    cli: Cli, file: Path, name: str, secret: str
) -> None:
    with pytest.raises(SettingsError, match="looks like a secret") as caught:
        cloudtrain.setup.configure({name: secret}, offline=True)
    assert secret not in str(caught.value)
    assert not file.exists()


def test_the_command_repeats_no_secret(cli: Cli, file: Path) -> None:
    for arguments in (
        ["--set", f"bucket={KEY_ID}"],
        ["--set", f"aws_secret_access_key={SECRET_KEY}"],
        ["--set", KEY_ID],
    ):
        done = cli("configure", *arguments, "--offline")
        assert done.code == 2
        assert KEY_ID not in done.out + done.err
        assert SECRET_KEY not in done.out + done.err
    assert not file.exists()


def test_configure_needs_no_terminal_if_values_are_given(cli: Cli, file: Path) -> None:
    sets = [part for name, value in FULL.items() for part in ("--set", f"{name}={_text(value)}")]
    done = cli("configure", *sets, "--offline", "--json")
    assert done.code == 0, done.err
    assert done.json["file"] == str(file)
    assert done.json["settings"] == FULL
    assert [change["before"] for change in done.json["changes"]] == [None] * 8
    assert cli("configure", "--bucket", "other-bucket", "--offline").code == 2
    again = cli("configure", "--bucket", "other-bucket", "--offline", "--yes")
    assert again.code == 0
    assert "~ bucket  team-bucket -> other-bucket" in again.err
    assert load_settings(os.environ).bucket == "other-bucket"


def test_configure_names_what_hides_a_stored_value(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "cloudtrain.toml").write_text("prefix = 'beside'\n")
    sets = ("--set", "prefix=mine", "--set", "bucket=my-bucket")
    done = cli(
        "configure", *sets, "--offline", environ={"CLOUDTRAIN_BUCKET": "other-bucket"}, cwd=tmp_path
    )
    assert done.out.splitlines()[1:4] == [
        "  CLOUDTRAIN_BUCKET hides bucket here: other-bucket",
        f"  {tmp_path}/cloudtrain.toml:1 hides prefix here: beside",
        "  still missing: role, region",
    ]


def _text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else ",".join(value)


def test_without_a_terminal_the_needed_options_are_named(cli: Cli) -> None:
    done = cli("configure")
    assert done.code == 2
    assert "--from-terraform infra/, or --set role=ARN --set bucket=NAME" in done.err
    done = cli("configure", "--set", "rol=x")
    assert (done.code, 'did you mean "role"?' in done.err) == (2, True)
    done = cli("configure", "--show", "--set", "role=x")
    assert done.code == 2


def test_show_names_the_source_of_each_value(cli: Cli, written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "cloudtrain.toml").write_text("\nprefix = 'beside'\nbucket = 'beside'\n")
    environ = {"AWS_REGION": "us-west-2"}
    job = folder / "job.yaml"
    done = cli(
        "configure",
        "--show",
        "--profile",
        "big",
        "--job",
        job,
        "--role",
        "arn:x",
        "--json",
        environ=environ,
    )
    found = {each.pop("name"): each for each in done.json["settings"]}
    above = {"source": str(written), "profile": None}
    assert done.json["profile"] == "big"
    assert done.json["missing"] == []
    assert found["role"]["source"] == "flag"
    assert found["role"]["hides"] == [{"value": ROLE, "line": 2, **above}]
    assert found["bucket"] == {
        "value": "beside",
        "source": str(folder / "cloudtrain.toml"),
        "line": 3,
        "profile": None,
        "hides": [
            {"value": "two", "source": str(written), "line": 6, "profile": "big"},
            {"value": "one", "line": 3, **above},
        ],
    }
    assert found["region"]["source"] == "AWS_REGION"
    default = {
        "value": "estimator",
        "source": "default",
        "line": None,
        "profile": None,
        "hides": [],
    }
    assert found["transport"] == default
    assert found["kms_key"]["value"] is None
    lines = cli(
        "configure", "--show", environ={"CLOUDTRAIN_PROFILE": "big"}, cwd=tmp_path
    ).out.splitlines()
    assert lines[1].split() == [
        "bucket",
        "two",
        "~/.config/cloudtrain/config.toml:6",
        "[profiles.big]",
    ]
    assert lines[2].split() == ["hides", "one", "~/.config/cloudtrain/config.toml:3"]
    assert lines[-1].startswith("missing: region; to store them: ")


def test_profiles_are_listed_and_chosen_by_a_flag(cli: Cli, written: Path) -> None:
    assert cli("configure", "--list", "--profile", "big", "--json").json == {
        "profiles": [
            {"profile": None, "settings": {"role": ROLE, "bucket": "one"}, "chosen": False},
            {"profile": "big", "settings": {"bucket": "two"}, "chosen": True},
        ]
    }
    for arguments in (
        ["--profile", "big", "configure", "--show"],
        ["configure", "--show", "--profile", "big"],
    ):
        assert "two" in cli(*arguments).out
    assert cli("configure", "--remove", "big").code == 0
    done = cli("configure", "--show", "--profile", "big")
    assert done.code == 2
    assert "there is no profile 'big'" in done.err


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("bucket = \n", ":1:10: "),
        ("[profiles.x]\nbukcet = 'b'\n", ":2: unknown setting 'bukcet'"),
        ("\nprofiles = 1\n", ":2: profiles must contain tables"),
        ("\n\nsubnets = 'x'\n", ":3: subnets must be a list"),
    ],
)
def test_a_broken_file_is_reported_by_line_and_unchanged(
    cli: Cli, file: Path, text: str, place: str
) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    for arguments in (["--set", "bucket=mine"], ["--show"], ["--list"], ["--remove", "x"]):
        done = cli("configure", *arguments, "--offline")
        assert done.code == 2
        assert f"{file}{place}" in done.err
        assert "Traceback" not in done.err
    assert file.read_text() == text


def test_a_file_that_another_program_changed_is_unchanged(written: Path) -> None:
    change = change_profile(written, None, {"region": "us-west-2"})
    written.write_text("prefix = 'mine'\n")
    with pytest.raises(UserError, match="has changed since it was read"):
        change.write()
    assert written.read_text() == "prefix = 'mine'\n"


def test_a_symbolic_link_is_kept(file: Path, tmp_path: Path) -> None:
    dotfiles = tmp_path / "dotfiles.toml"
    dotfiles.write_text("bucket = 'one'\n")
    file.parent.mkdir(parents=True)
    file.symlink_to(dotfiles)
    cloudtrain.setup.configure({"region": "us-west-2"}, offline=True)
    assert file.is_symlink()
    assert dotfiles.read_text() == "bucket = 'one'\nregion = \"us-west-2\"\n"


def test_an_unwritable_file_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "taken"))
    with pytest.raises(SettingsError, match="cannot be written"):
        cloudtrain.setup.configure({"bucket": "mine"}, offline=True)


@pytest.mark.parametrize("name", ["", "a.b", "a b", "x]", "\u00e9"])
def test_a_profile_has_a_plain_name(name: str) -> None:
    with pytest.raises(SettingsError, match="cannot be the name of a profile"):
        cloudtrain.setup.configure({"bucket": "mine"}, profile=name, offline=True)


def terraform_outputs(**other: object) -> dict[str, object]:
    return {
        name: {"sensitive": False, "type": "string", "value": value}
        for name, value in {**FULL, **other}.items()
    }


def test_terraform_outputs_become_settings(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "outputs.json"
    path.write_text(
        json.dumps(
            {
                **terraform_outputs(),
                "budget": {"sensitive": True, "type": "string", "value": "not ours"},
            }
        )
    )
    done = cli(
        "configure",
        "--from-terraform",
        path,
        "--set",
        "prefix=mine",
        "--profile",
        "infra",
        "--offline",
        "--json",
    )
    assert done.json["settings"] == {**FULL, "prefix": "mine"}
    path.write_text(
        json.dumps(FULL)
    )  # as terraform output -json NAME prints the outputs of a module
    assert cloudtrain.setup.read_terraform(path)["subnets"] == tuple(FULL["subnets"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not what terraform output -json prints"),
        ("[]", "expected one JSON object, got list"),
        ("{}", "it has none: was it applied?"),
        ('{"vpc": {"value": "x"}}', "no output is a setting; it has vpc"),
        (
            json.dumps(terraform_outputs(subnets="subnet-1")),
            "subnets must be a list of strings, got str",
        ),
        (json.dumps({"role": {"sensitive": True, "value": ROLE}}), "role is marked as sensitive"),
        (json.dumps(terraform_outputs(bucket=SECRET_KEY)), "bucket: looks like a secret"),
    ],
)
def test_unusable_terraform_outputs_are_refused(
    cli: Cli, tmp_path: Path, file: Path, text: str, expected: str
) -> None:
    (tmp_path / "outputs.json").write_text(text)
    done = cli("configure", "--from-terraform", tmp_path / "outputs.json", "--offline")
    assert done.code == 2
    assert expected in done.err
    assert "Traceback" not in done.err
    assert SECRET_KEY not in done.err
    assert not file.exists()


def test_a_folder_without_outputs_is_reported(cli: Cli, tmp_path: Path) -> None:
    done = cli("configure", "--from-terraform", tmp_path / "nowhere")
    assert (done.code, "cannot be read" in done.err) == (2, True)
    empty = cli("configure", "--from-terraform", tmp_path, environ={"PATH": "/nowhere"})
    assert (empty.code, "there is no terraform on PATH" in empty.err) == (2, True)
