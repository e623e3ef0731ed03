"""`Settings`: what the account provides, and where each value comes from.

Precedence: flag, environment, `cloudtrain.toml` beside the job, the user's profile file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import SettingsError, UntrustedSettingsError, did_you_mean
from cloudtrain.support.atomic_write import read_bounded

if TYPE_CHECKING:
    from cloudtrain.settings.toml_file import TomlFile

SETTINGS_FILE = "cloudtrain.toml"
TRANSPORTS = ("estimator", "boto3")
_MAX_BYTES = 1_000_000
PROFILE_VARIABLE = "CLOUDTRAIN_PROFILE"
PROFILES = "profiles"
"""The table of a settings file that holds a table for each named profile."""

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
SETTINGS = tuple(_ENVIRONMENT)
LIST_SETTINGS = ("subnets", "security_groups")
REQUIRED_SETTINGS = ("role", "bucket", "region")
TRUST_SETTINGS = ("role", "bucket", "kms_key")
"""Who acts for the job, where its code and results go, and who can read them. No settings file gives an endpoint."""
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
        beside_job: The values that come from a cloudtrain.toml beside the job.
        is_trusted: Whether the user has agreed to those of them that need it.
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
    beside_job: tuple[Origin, ...] = dataclasses.field(default=(), compare=False)
    is_trusted: bool = dataclasses.field(default=False, compare=False)

    @property
    def account(self) -> str | None:
        """Account id, read off the role: SageMaker takes no role of another account. None when it is no role's ARN."""
        match = _ROLE_ACCOUNT.match(self.role or "")
        return match[1] if match else None

    @property
    def bucket_owners(self) -> dict[str, str]:
        """The account that must own the bucket, by its name; nothing where it is not known, or not to be trusted."""
        return {self.bucket: self.account} if self.bucket and self.account and not self.untrusted else {}

    @property
    def untrusted(self) -> tuple[Origin, ...]:
        """The values from beside the job that must not be used against an account before the user agrees."""
        return () if self.is_trusted else tuple(each for each in self.beside_job if each.name in TRUST_SETTINGS)

    def require_trust(self) -> None:
        """Check that the user has agreed to what comes from a file beside the job.

        Raises:
            UntrustedSettingsError: they have not.
        """
        untrusted = self.untrusted
        if untrusted:
            raise UntrustedSettingsError(untrusted[0].file, {each.name: each.text for each in untrusted})

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the required settings that have no value."""
        return tuple(name for name in REQUIRED_SETTINGS if not getattr(self, name))

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
                f"store them once: cloudtrain configure; or {exports} (or write them to {SETTINGS_FILE}). "
                "To run on this machine instead, without an account: --local",
            )


@dataclass(frozen=True)
class Origin:
    """One place that gives a setting a value.

    Attributes:
        name: The setting.
        value: What it is given there.
        source: `flag`, the name of a variable, or the path of a file.
        line: 1-based line of the file, or None.
        profile: The table of the file that it stands in; None at the top level, and where it is no file.
    """

    name: str
    value: str | tuple[str, ...]
    source: str
    line: int | None = None
    profile: str | None = None

    @property
    def file(self) -> str:
        """Absolute path of the file that it stands in."""
        return str(Path(self.source).resolve())

    @property
    def text(self) -> str:
        """The value in one line, of a list its parts between commas."""
        return self.value if isinstance(self.value, str) else ", ".join(self.value)

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `plan --json`."""
        return {"name": self.name, "value": self.value, "file": self.file, "line": self.line}


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
    chosen: dict[str, Origin] = {}
    for origin in find_origins(environ, job_directory=job_directory, flags=flags):
        chosen.setdefault(origin.name, origin)
    values: dict[str, Any] = {name: origin.value for name, origin in chosen.items()}
    sources = {name: origin.source for name, origin in chosen.items()}
    if values.get("transport", "estimator") not in TRANSPORTS:
        hint = did_you_mean(str(values["transport"]), TRANSPORTS)
        raise SettingsError(f"transport from {sources['transport']}: {values['transport']!r} is unknown", hint)
    beside = None if job_directory is None else str(job_directory / SETTINGS_FILE)
    beside_job = tuple(origin for origin in chosen.values() if origin.source == beside)
    return Settings(**values, sources=sources, beside_job=beside_job)


def find_origins(
    environ: Mapping[str, str], *, job_directory: Path | None = None, flags: Mapping[str, Any] | None = None
) -> list[Origin]:
    """Return every place that gives a setting a value; of one setting's places the first counts.

    Args:
        environ: The environment.
        job_directory: Folder whose cloudtrain.toml is read.
        flags: Values given on the command line; None means not given.

    Raises:
        SettingsError: a file is malformed.
    """
    found = [_origin(name, value, "flag") for name, value in (flags or {}).items() if value not in (None, "")]
    found += [
        _origin(name, parse_value(name, environ[variable]), variable)
        for name, variables in _ENVIRONMENT.items()
        for variable in variables
        if environ.get(variable)
    ]
    profile = environ.get(PROFILE_VARIABLE) or None
    files = {path: read_settings_file(path) for path in settings_files(environ, job_directory) if path.is_file()}
    _check_profile(profile, {path: profiles_of(tables) for path, tables in files.items()})
    for path, tables in files.items():
        found += _origins_in(path, tables, profile)
    return found


def settings_files(environ: Mapping[str, str], job_directory: Path | None = None) -> list[Path]:
    """Return the files that settings are read from, the first first; they need not exist."""
    beside = [job_directory / SETTINGS_FILE] if job_directory is not None else []
    return [*beside, profile_file(environ)]


def parse_value(name: str, text: str) -> str | tuple[str, ...]:
    """Return a setting's value that was given as one text; of a list the parts between commas."""
    return tuple(part for each in text.split(",") if (part := each.strip())) if name in LIST_SETTINGS else text


def profile_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's profile file (it need not exist)."""
    base = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".config")
    return Path(base) / "cloudtrain" / "config.toml"


def prices_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the file that `cloudtrain prices --refresh` writes (it need not exist)."""
    return profile_file(environ).with_name("prices.json")


def read_settings_file(path: Path) -> TomlFile:
    """Read a settings file and check that it holds nothing but settings and profiles.

    Raises:
        SettingsError: it cannot be read or holds something else; the message says in which line.
    """
    from cloudtrain.settings.toml_file import TomlFile

    try:
        # In bytes, so that the ends of its lines stay what they are.
        raw = read_bounded(path, _MAX_BYTES)
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}", "write TOML such as: bucket = 'my-bucket'") from None
    if len(raw) > _MAX_BYTES:
        raise SettingsError(f"{path}: more than {_MAX_BYTES} bytes", "write TOML such as: bucket = 'my-bucket'")
    tables = TomlFile(text, str(path))
    profiles = tables.values.get(PROFILES, {})
    if not isinstance(profiles, dict) or not all(isinstance(inner, dict) for inner in profiles.values()):
        place = tables.place_of(PROFILES)
        raise SettingsError(f"{place}: profiles must hold tables", "write [profiles.NAME] and the settings below it")
    _check_table(tables, (), {name: value for name, value in tables.values.items() if name != PROFILES})
    for name, settings in profiles.items():
        _check_table(tables, (PROFILES, name), settings)
    return tables


def profiles_of(tables: TomlFile) -> dict[str, dict[str, Any]]:
    """Return the settings of a file's named profiles."""
    profiles: dict[str, dict[str, Any]] = tables.values.get(PROFILES, {})
    return profiles


def _origin(name: str, value: Any, source: str, line: int | None = None, profile: str | None = None) -> Origin:
    return Origin(name, tuple(value) if name in LIST_SETTINGS else value, source, line, profile)


def _origins_in(path: Path, tables: TomlFile, profile: str | None) -> list[Origin]:
    """Return what a file gives: the profile's values, then those of its top level."""
    own = profiles_of(tables).get(profile, {}) if profile is not None else {}
    above = {name: value for name, value in tables.values.items() if name != PROFILES}
    found = [
        _origin(name, value, str(path), tables.line_of(PROFILES, str(profile), name), profile)
        for name, value in own.items()
        if value != ""
    ]
    # An empty text in a profile takes the top level's value away.
    return found + [
        _origin(name, value, str(path), tables.line_of(name))
        for name, value in above.items()
        if value != "" and own.get(name) != ""
    ]


def _check_profile(profile: str | None, profiles: Mapping[Path, Mapping[str, Any]]) -> None:
    """Refuse a profile that no file has: its absence would mean another account."""
    if profile is None or any(profile in inner for inner in profiles.values()):
        return
    legal = sorted({name for inner in profiles.values() for name in inner})
    where = ", ".join(map(str, profiles)) or "no settings file"
    hint = did_you_mean(profile, legal) if legal else f"make it: cloudtrain configure --profile {profile}"
    raise SettingsError(f"{PROFILE_VARIABLE}: there is no profile {profile!r} in {where}", hint)


def _check_table(tables: TomlFile, table: tuple[str, ...], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        place = tables.place_of(*table, name)
        if name not in _ENVIRONMENT:
            raise SettingsError(f"{place}: unknown setting {name!r}", did_you_mean(name, sorted(_ENVIRONMENT)))
        is_list = name in LIST_SETTINGS
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not (fits if is_list else isinstance(value, str)):
            expected, example = ("list of strings", "['one', 'two']") if is_list else ("string", "'text'")
            raise SettingsError(f"{place}: {name} must be a {expected}", f"write {name} = {example}")
