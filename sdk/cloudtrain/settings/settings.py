"""`Settings`: the account's role, bucket, region and network, and the source of each value.

Precedence: flag, environment, `cloudtrain.toml` beside the job, the user's profile file; for the region at last the
profile of AWS.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import SettingsError, UntrustedSettingsError, did_you_mean
from cloudtrain.settings.aws_profile import find_region
from cloudtrain.settings.slurm_sites import SLURM_TABLE, SlurmSite, check_sites, read_sites
from cloudtrain.support.atomic_write import read_bounded
from cloudtrain.support.aws_names import ROLE_ARN
from cloudtrain.support.config_folder import config_folder

if TYPE_CHECKING:
    from cloudtrain.settings.toml_file import TomlFile

SETTINGS_FILE = "cloudtrain.toml"
TRANSPORTS = ("estimator", "boto3")
_MAX_BYTES = 1_000_000
_SWITCH_VALUES = {"true": True, "1": True, "false": False, "0": False}
PROFILE_VARIABLE = "CLOUDTRAIN_PROFILE"
REPORT_VARIABLE = "CLOUDTRAIN_REPORT"
PROFILES = "profiles"
"""The table of a settings file that contains a table for each named profile."""

_ENVIRONMENT = {
    "role": ("CLOUDTRAIN_ROLE",),
    "bucket": ("CLOUDTRAIN_BUCKET",),
    "prefix": ("CLOUDTRAIN_PREFIX",),
    "region": ("CLOUDTRAIN_REGION", "AWS_REGION", "AWS_DEFAULT_REGION"),
    "subnets": ("CLOUDTRAIN_SUBNETS",),
    "security_groups": ("CLOUDTRAIN_SECURITY_GROUPS",),
    "kms_key": ("CLOUDTRAIN_KMS_KEY",),
    "transport": ("CLOUDTRAIN_TRANSPORT",),
    "report": (REPORT_VARIABLE,),
}
SETTINGS = tuple(_ENVIRONMENT)
LIST_SETTINGS = ("subnets", "security_groups")
SWITCHES = ("report",)
"""Settings that are on or off: true or false in a file, also 1 or 0 in a variable."""
REQUIRED_SETTINGS = ("role", "bucket", "region")
TRUST_SETTINGS = ("role", "bucket", "kms_key")
"""Settings that need the user's agreement when they come from a file beside the job.

They determine who acts for the job, where its code and results go, and who can read them.
"""


@dataclass(frozen=True)
class Settings:
    """The settings of an account.

    Attributes:
        role: ARN of the execution role.
        bucket: Name of the S3 bucket for code, checkpoints and models.
        prefix: Key prefix below which cloudtrain writes.
        region: AWS region.
        subnets: Subnet ids for the instances.
        security_groups: Security group ids for the instances.
        kms_key: KMS key for volumes and outputs, or None.
        transport: `estimator` (sagemaker.pytorch.PyTorch) or `boto3`; see `sender`.
        report: Whether each local run writes report.html when it ends.
        sources: Source of each value, by field name.
        beside_job: The values from a cloudtrain.toml beside the job.
        is_trusted: Whether the user has agreed to the values that need agreement.
        slurm: The Slurm sites, by name.
    """

    role: str | None = None
    bucket: str | None = None
    prefix: str = "cloudtrain"
    region: str | None = None
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    kms_key: str | None = None
    transport: str = "estimator"
    report: bool = False
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    beside_job: tuple[Origin, ...] = dataclasses.field(default=(), compare=False)
    is_trusted: bool = dataclasses.field(default=False, compare=False)
    slurm: Mapping[str, SlurmSite] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def account(self) -> str | None:
        """Account id in the role's ARN, because SageMaker accepts no role of another account; None without an ARN."""
        match = ROLE_ARN.fullmatch(self.role or "")
        return match[2] if match else None

    @property
    def bucket_owners(self) -> dict[str, str]:
        """The account that must own the bucket, by bucket name; empty when it is unknown or untrusted."""
        if not self.bucket or not self.account or self.untrusted:
            return {}
        return {self.bucket: self.account}

    @property
    def untrusted(self) -> tuple[Origin, ...]:
        """The values from beside the job that must not be used before the user agrees."""
        if self.is_trusted:
            return ()
        return tuple(each for each in self.beside_job if each.name in TRUST_SETTINGS)

    def require_trust(self) -> None:
        """Check that the user has agreed to the values from a file beside the job.

        Raises:
            UntrustedSettingsError: the user has not agreed.
        """
        untrusted = self.untrusted
        if untrusted:
            raise UntrustedSettingsError(
                untrusted[0].file, {each.name: each.text for each in untrusted}
            )

    @property
    def sender(self) -> str:
        """What sends a job: the transport; where no setting names one and version 2 of the SDK is missing, `boto3`."""
        is_default = self.transport == "estimator" and "transport" not in self.sources
        if is_default and not has_sdk():
            return "boto3"
        return self.transport

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the required settings that have no value."""
        return tuple(name for name in REQUIRED_SETTINGS if not getattr(self, name))

    def require(self) -> None:
        """Check that all settings have values that a submit to SageMaker needs.

        Raises:
            SettingsError: a value is missing. The message names the missing settings and how to give them.
        """
        if self.missing:
            names = ", ".join(self.missing)
            exports = "; ".join(f"export {_ENVIRONMENT[name][0]}=..." for name in self.missing)
            raise SettingsError(
                f"missing settings for SageMaker: {names}",
                f"store them once: cloudtrain configure; or {exports} (or write them to {SETTINGS_FILE}). "
                "To run on this machine instead, without an account: --local",
            )


def has_sdk() -> bool:
    """Return whether version 2 of the SageMaker SDK is installed. It is not imported."""
    # An import hook may refuse it.
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec("sagemaker")
        # Version 3 has no estimators. Its number would take a search through all installed packages, in each plan.
        return any(
            Path(each, "estimator.py").is_file()
            for each in (found and found.submodule_search_locations) or ()
        )
    return False


@dataclass(frozen=True)
class Origin:
    """A value of a setting and its source.

    Attributes:
        name: The setting.
        value: Its value.
        source: `flag`, the name of a variable, or the path of a file.
        line: 1-based line of the file, or None.
        profile: The profile in the file; None at the top level, and for other sources.
    """

    name: str
    value: str | tuple[str, ...]
    source: str
    line: int | None = None
    profile: str | None = None

    @property
    def file(self) -> str:
        """Absolute path of the file that contains the value."""
        return str(Path(self.source).resolve())

    @property
    def text(self) -> str:
        """The value as one line; the parts of a list are separated by commas."""
        if isinstance(self.value, str):
            return self.value
        return ", ".join(self.value)

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `plan --json`."""
        return {"name": self.name, "value": self.value, "file": self.file, "line": self.line}


def load_settings(
    environ: Mapping[str, str],
    *,
    job_directory: Path | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Return the settings from flags, environment and files.

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
        raise SettingsError(
            f"transport from {sources['transport']}: {values['transport']!r} is unknown", hint
        )
    for name in values.keys() & SWITCHES:
        if values[name] not in _SWITCH_VALUES:
            raise SettingsError(
                f"{name} from {sources[name]}: {values[name]!r} is neither true nor false",
                "give true",
            )
        values[name] = _SWITCH_VALUES[values[name]]
    beside = None if job_directory is None else str(job_directory / SETTINGS_FILE)
    beside_job = tuple(origin for origin in chosen.values() if origin.source == beside)
    sites = find_sites(environ, job_directory=job_directory)
    return Settings(**values, sources=sources, beside_job=beside_job, slurm=sites)


def find_sites(
    environ: Mapping[str, str], *, job_directory: Path | None = None
) -> dict[str, SlurmSite]:
    """Return the Slurm sites by name. One from a file beside the job is not trusted.

    Of two sites with one name that of the file beside the job is used, with nothing of the other.

    Raises:
        SettingsError: a file is malformed.
    """
    profile = profile_file(environ)
    sites: dict[str, SlurmSite] = {}
    for path in _files_of(environ, job_directory):
        for name, site in read_sites(read_settings_file(path)).items():
            own = path == profile
            marked = dataclasses.replace(site, is_beside_job=not own, is_trusted=own)
            sites.setdefault(name, marked)
    return sites


def find_origins(
    environ: Mapping[str, str],
    *,
    job_directory: Path | None = None,
    flags: Mapping[str, Any] | None = None,
) -> list[Origin]:
    """Return every value of every setting, with its source. The first value of a setting has precedence.

    See `load_settings` for the arguments.

    Raises:
        SettingsError: a file is malformed.
    """
    found = [
        _origin(name, value, "flag")
        for name, value in (flags or {}).items()
        if value not in (None, "")
    ]
    found += [
        _origin(name, parse_value(name, environ[variable]), variable)
        for name, variables in _ENVIRONMENT.items()
        for variable in variables
        if environ.get(variable)
    ]
    profile = environ.get(PROFILE_VARIABLE) or None
    files = {path: read_settings_file(path) for path in _files_of(environ, job_directory)}
    _check_profile(profile, {path: profiles_of(tables) for path, tables in files.items()})
    for path, tables in files.items():
        found += _origins_in(path, tables, profile)
    if (region := find_region(environ)) is not None:
        found.append(Origin("region", region.text, str(region.file), region.line))
    return found


def _files_of(environ: Mapping[str, str], job_directory: Path | None) -> list[Path]:
    """Return the settings files that exist. One beside the job has precedence."""
    paths = [profile_file(environ)]
    if job_directory is not None:
        paths.insert(0, job_directory / SETTINGS_FILE)
    return [path for path in paths if path.is_file()]


def parse_value(name: str, text: str) -> str | tuple[str, ...]:
    """Return the value of a setting from a text; the parts of a list are separated by commas."""
    if name not in LIST_SETTINGS:
        return text
    return tuple(part for each in text.split(",") if (part := each.strip()))


def profile_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's profile file (it need not exist)."""
    return config_folder(environ) / "config.toml"


def prices_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the file that `cloudtrain prices --refresh` writes (it need not exist)."""
    return profile_file(environ).with_name("prices.json")


def read_settings_file(path: Path) -> TomlFile:
    """Read a settings file and check that it contains only settings, profiles and Slurm sites.

    Raises:
        SettingsError: the file cannot be read or contains something else. The message has the line.
    """
    from cloudtrain.settings.toml_file import TomlFile

    try:
        # Read as bytes to keep the line endings.
        raw = read_bounded(path, _MAX_BYTES)
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{path}: {error}", "write TOML such as: bucket = 'my-bucket'"
        ) from None
    if len(raw) > _MAX_BYTES:
        raise SettingsError(
            f"{path}: more than {_MAX_BYTES} bytes", "write TOML such as: bucket = 'my-bucket'"
        )
    tables = TomlFile(text, str(path))
    profiles = tables.values.get(PROFILES, {})
    has_tables = isinstance(profiles, dict) and all(
        isinstance(inner, dict) for inner in profiles.values()
    )
    if not has_tables:
        location = tables.location_of(PROFILES)
        raise SettingsError(
            f"{location}: profiles must contain tables",
            "write [profiles.NAME] and the settings below it",
        )
    check_sites(tables)
    _check_table(tables, (), top_level_of(tables))
    for name, settings in profiles.items():
        _check_table(tables, (PROFILES, name), settings)
    return tables


def profiles_of(tables: TomlFile) -> dict[str, dict[str, Any]]:
    """Return the settings of a file's named profiles."""
    profiles: dict[str, dict[str, Any]] = tables.values.get(PROFILES, {})
    return profiles


def top_level_of(tables: TomlFile) -> dict[str, Any]:
    """Return the settings at the top level of a file."""
    return {
        name: value for name, value in tables.values.items() if name not in (PROFILES, SLURM_TABLE)
    }


def _origin(
    name: str, value: Any, source: str, line: int | None = None, profile: str | None = None
) -> Origin:
    if isinstance(value, bool):
        value = str(value).lower()
    if name in LIST_SETTINGS:
        value = tuple(value)
    return Origin(name=name, value=value, source=source, line=line, profile=profile)


def _origins_in(path: Path, tables: TomlFile, profile: str | None) -> list[Origin]:
    """Return the values of a file: those of the profile, then those of the top level."""
    own = profiles_of(tables).get(profile, {}) if profile is not None else {}
    above = top_level_of(tables)
    found = [
        _origin(name, value, str(path), tables.line_of(PROFILES, str(profile), name), profile)
        for name, value in own.items()
        if value != ""
    ]
    # An empty text in a profile hides the value of the top level.
    return found + [
        _origin(name, value, str(path), tables.line_of(name))
        for name, value in above.items()
        if value != "" and own.get(name) != ""
    ]


def _check_profile(profile: str | None, profiles: Mapping[Path, Mapping[str, Any]]) -> None:
    """Reject a profile that no file has, because the run would use another account."""
    if profile is None or any(profile in inner for inner in profiles.values()):
        return
    legal = sorted({name for inner in profiles.values() for name in inner})
    where = ", ".join(map(str, profiles)) or "any settings file"
    hint = f"make it: cloudtrain configure --profile {profile}"
    if legal:
        hint = did_you_mean(profile, legal)
    raise SettingsError(f"{PROFILE_VARIABLE}: there is no profile {profile!r} in {where}", hint)


def _check_table(tables: TomlFile, table: tuple[str, ...], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        location = tables.location_of(*table, name)
        if name not in _ENVIRONMENT:
            legal = sorted(_ENVIRONMENT) if table else sorted([*_ENVIRONMENT, SLURM_TABLE])
            raise SettingsError(f"{location}: unknown setting {name!r}", did_you_mean(name, legal))
        if expected := expected_kind(name, value):
            hint = f"write {name} = {_example_of(name)}"
            raise SettingsError(f"{location}: {name} must be {expected}", hint)


def _example_of(name: str) -> str:
    """Return a value in TOML that a setting can have."""
    if name in LIST_SETTINGS:
        return "['one', 'two']"
    if name in SWITCHES:
        return "true"
    return "'text'"


def expected_kind(name: str, value: object) -> str:
    """Return what the value of a setting must be, such as a list of strings; an empty text if it is that."""
    if name in SWITCHES:
        is_switch = isinstance(value, bool) or str(value) in _SWITCH_VALUES
        return "" if is_switch else "true or false"
    if name not in LIST_SETTINGS:
        return "" if isinstance(value, str) else "a string"
    is_list = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    return "" if is_list else "a list of strings"
