"""`Settings`: what the account provides, and where each value comes from.

Precedence: flag, environment, `cloudtrain.toml` beside the job, the user's profile file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.errors import SettingsError, did_you_mean

SETTINGS_FILE = "cloudtrain.toml"
TRANSPORTS = ("estimator", "boto3")

_ENVIRONMENT = {
    "role": ("CLOUDTRAIN_ROLE",),
    "bucket": ("CLOUDTRAIN_BUCKET",),
    "prefix": ("CLOUDTRAIN_PREFIX",),
    "region": ("CLOUDTRAIN_REGION", "AWS_REGION", "AWS_DEFAULT_REGION"),
    "subnets": ("CLOUDTRAIN_SUBNETS",),
    "security_groups": ("CLOUDTRAIN_SECURITY_GROUPS",),
    "kms_key": ("CLOUDTRAIN_KMS_KEY",),
    "transport": ("CLOUDTRAIN_TRANSPORT",),
}
_LISTS = ("subnets", "security_groups")
_REQUIRED = ("role", "bucket", "region")
_ROLE_ACCOUNT = re.compile(r"arn:aws[\w-]*:iam::(\d{12}):role/")


@dataclass(frozen=True)
class Settings:
    """What the account provides.

    Attributes:
        role: ARN of the execution role.
        bucket: Name of the S3 bucket for code, checkpoints and models.
        prefix: Key prefix below which cloudtrain writes.
        region: AWS region.
        kms_key: Key for volumes and outputs, or None.
        transport: `estimator` (sagemaker.pytorch.PyTorch) or `boto3`.
        sources: Where each value comes from, by field name.
    """

    role: str | None = None
    bucket: str | None = None
    prefix: str = "cloudtrain"
    region: str | None = None
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    kms_key: str | None = None
    transport: str = "estimator"
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def account(self) -> str | None:
        """Account id, read off the role: SageMaker takes no role of another account. None when it is no role's ARN."""
        match = _ROLE_ACCOUNT.match(self.role or "")
        return match[1] if match else None

    @property
    def bucket_owners(self) -> dict[str, str]:
        """The account that must own the bucket, by its name; nothing where it is not known."""
        return {self.bucket: self.account} if self.bucket and self.account else {}

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the required settings that have no value."""
        return tuple(name for name in _REQUIRED if not getattr(self, name))

    def require(self) -> None:
        """Check that everything is there that a submit to SageMaker needs.

        Raises:
            SettingsError: something is missing; the message says what and how to give it.
        """
        if self.missing:
            names = ", ".join(self.missing)
            exports = "; ".join(f"export {_ENVIRONMENT[name][0]}=..." for name in self.missing)
            raise SettingsError(
                f"submitting to SageMaker needs settings that are not there: {names}",
                f"{exports} (or write them to {SETTINGS_FILE} beside the job). "
                "To run on this machine instead, without an account: --local",
            )


def load_settings(
    environ: Mapping[str, str], *, job_directory: Path | None = None, flags: Mapping[str, Any] | None = None
) -> Settings:
    """Collect settings from flags, environment and files.

    Args:
        environ: The environment.
        job_directory: Folder whose cloudtrain.toml is read.
        flags: Values given on the command line; None means not given.

    Raises:
        SettingsError: a file or value is malformed.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def take(found: Mapping[str, Any], source: str) -> None:
        for name, value in found.items():
            if value is not None and value != "" and name not in values:
                values[name] = tuple(value) if name in _LISTS else value
                sources[name] = source

    take(flags or {}, "flag")
    for name, variables in _ENVIRONMENT.items():
        for variable in variables:
            if environ.get(variable):
                text = environ[variable]
                take({name: [part.strip() for part in text.split(",")] if name in _LISTS else text}, variable)
    files = [job_directory / SETTINGS_FILE] if job_directory is not None else []
    profile = environ.get("CLOUDTRAIN_PROFILE")
    tables = {path: _read_file(path) for path in (*files, profile_file(environ)) if path.is_file()}
    _check_profile(profile, tables)
    for path, (table, profiles) in tables.items():
        take({**table, **profiles.get(profile or "", {})}, str(path))
    if values.get("transport", "estimator") not in TRANSPORTS:
        hint = did_you_mean(str(values["transport"]), TRANSPORTS)
        raise SettingsError(f"transport from {sources['transport']}: {values['transport']!r} is unknown", hint)
    return Settings(**values, sources=sources)


def profile_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's profile file (it need not exist)."""
    base = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".config")
    return Path(base) / "cloudtrain" / "config.toml"


def prices_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the file that `cloudtrain prices --refresh` writes (it need not exist)."""
    return profile_file(environ).with_name("prices.json")


_Table = dict[str, Any]


def _check_profile(profile: str | None, tables: Mapping[Path, tuple[_Table, dict[str, _Table]]]) -> None:
    """Refuse a profile that no file has: its absence would mean another account."""
    if not profile or any(profile in profiles for _, profiles in tables.values()):
        return
    legal = sorted({name for _, profiles in tables.values() for name in profiles})
    where = ", ".join(map(str, tables)) or "no settings file"
    hint = did_you_mean(profile, legal) if legal else f"write a table [profiles.{profile}]"
    raise SettingsError(f"CLOUDTRAIN_PROFILE: there is no profile {profile!r} in {where}", hint)


def _read_file(path: Path) -> tuple[_Table, dict[str, _Table]]:
    """Return the settings of one TOML file: its top level, and the tables below `[profiles]`."""
    import tomllib

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {error}", "write TOML such as: bucket = 'my-bucket'") from None
    profiles = table.pop("profiles", {})
    if not isinstance(profiles, dict) or not all(isinstance(inner, dict) for inner in profiles.values()):
        raise SettingsError(f"{path}: profiles must hold tables", "write [profiles.NAME] and the settings below it")
    for settings in (table, *profiles.values()):
        _check_table(path, settings)
    return table, profiles


def _check_table(path: Path, table: _Table) -> None:
    for name, value in table.items():
        if name not in _ENVIRONMENT:
            raise SettingsError(f"{path}: unknown setting {name!r}", did_you_mean(name, sorted(_ENVIRONMENT)))
        is_list = name in _LISTS
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not (fits if is_list else isinstance(value, str)):
            expected, example = ("list of strings", "['one', 'two']") if is_list else ("string", "'text'")
            raise SettingsError(f"{path}: {name} must be a {expected}", f"write {name} = {example}")
