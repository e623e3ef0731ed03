"""`SlurmSite`: a Slurm cluster as `[slurm.NAME]` of a settings file describes it; the job file stays portable."""

from __future__ import annotations

import dataclasses
import math
import os
import pwd
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import SettingsError, UntrustedSettingsError, UserError, did_you_mean
from cloudtrain.support.config_folder import config_folder
from cloudtrain.support.sbatch_options import parse_sbatch_option
from cloudtrain.support.units import format_duration, parse_duration
from cloudtrain_runtime.contract.strict_json import dump_json

if TYPE_CHECKING:
    from cloudtrain.settings.toml_file import TomlFile

SLURM_TABLE = "slurm"
"""The table of a settings file that contains a table for each Slurm site."""
SITE_VARIABLE = "CLOUDTRAIN_SITE"
"""Names the site of commands without --site."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_WORD = re.compile(r"[^\s=]+")
_EXAMPLE = "write [slurm.NAME] and below it folder = '/shared/cloudtrain'"


@dataclass(frozen=True)
class SlurmSite:
    """A Slurm cluster.

    Attributes:
        name: Name of the table, as in `--site NAME`.
        folder: Absolute path of a folder of one user that the login node and all nodes share; runs and code are kept there.
        partition: Partition, or None for the cluster's default.
        account: Account that the jobs are charged to, or None for the user's default.
        qos: Quality of service, or None for the default.
        gpus_per_node: GPUs of a node; 0 for nodes without GPUs.
        time_seconds: Longest time of one job in the partition, or None for no limit. A longer `limits.runtime` is
            a chain of attempts.
        setup: Lines of shell that prepare a node, such as `module load cuda`.
        python: Absolute path of the Python on the nodes, or None for the one that submits.
        sbatch: Further options of sbatch, such as `--constraint=a100`.
        usd_per_node_hour: Price of a node, or None where there is none.
        origin: `file:line` of the table.
        origins: `file:line` of each key that the table has.
        file: Absolute path of the file.
        is_beside_job: Whether the file is a cloudtrain.toml beside the job, which a cloned repository may contain.
        is_trusted: Whether its commands may be executed: it is the user's own, or the user has agreed to it.
    """

    name: str
    folder: Path
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus_per_node: int = 0
    time_seconds: int | None = None
    setup: tuple[str, ...] = ()
    python: str | None = None
    sbatch: tuple[str, ...] = ()
    usd_per_node_hour: float | None = None
    origin: str = ""
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    file: str = ""
    is_beside_job: bool = False
    is_trusted: bool = True

    @property
    def setting(self) -> str:
        """Name of its table."""
        return f"{SLURM_TABLE}.{self.name}"

    @property
    def text(self) -> str:
        """Its values as one line, to which the user agrees."""
        values = {
            name: getattr(self, _FIELDS.get(name, name))
            for name in _KEYS
            if getattr(self, _FIELDS.get(name, name)) not in (None, (), 0)
        }
        if self.time_seconds is not None:
            values["time"] = format_duration(self.time_seconds)
        return ", ".join(f"{name} = {_shown(value)}" for name, value in values.items())

    def origin_of(self, key: str) -> str:
        """Return `file:line` of a key, or else of the table."""
        return self.origins.get(key, self.origin)

    def require_trust(self) -> None:
        """Check that the user has agreed to a site from a file beside the job. Call it before each submit.

        Raises:
            UntrustedSettingsError: The user has not agreed.
        """
        if not self.is_trusted:
            own = config_folder(os.environ) / "config.toml"
            way = f"write the table to {own}, under another name"
            raise UntrustedSettingsError(self.file, {self.setting: self.text}, way)


def _shown(value: object) -> str:
    # In JSON no value can look like the beginning of another one.
    return dump_json(str(value) if isinstance(value, Path) else value)


def choose_site(sites: Mapping[str, SlurmSite], name: str | None = None) -> SlurmSite:
    """Return the site of a name; without a name the only one.

    Raises:
        UserError: There is no such site, or the name is missing and there are several.
    """
    if not sites:
        raise UserError("there is no Slurm site in the settings", f"{_EXAMPLE}, to cloudtrain.toml")
    if name is not None:
        if name not in sites:
            hint = did_you_mean(name, sorted(sites))
            raise UserError(f"there is no Slurm site {name!r} in the settings", hint)
        return sites[name]
    if len(sites) > 1:
        names = ", ".join(sorted(sites))
        raise UserError(
            f"the settings have several Slurm sites: {names}",
            f"choose one: --site NAME, or {SITE_VARIABLE}",
        )
    return next(iter(sites.values()))


def check_sites(tables: TomlFile) -> None:
    """Check the Slurm sites of a settings file.

    Raises:
        SettingsError: A table or a value is malformed. The message has the line.
    """
    read_sites(tables)


def read_sites(tables: TomlFile) -> dict[str, SlurmSite]:
    """Return the Slurm sites of a settings file, by name.

    Raises:
        SettingsError: A table or a value is malformed. The message has the line.
    """
    found = tables.values.get(SLURM_TABLE, {})
    if not isinstance(found, dict):
        raise SettingsError(
            f"{tables.location_of(SLURM_TABLE)}: slurm must contain tables", _EXAMPLE
        )
    sites = {}
    for name, values in found.items():
        location = tables.location_of(SLURM_TABLE, name)
        if not isinstance(values, dict):
            raise SettingsError(
                f"{location}: {name} is outside of a table of slurm",
                f"give the site a name: [slurm.main], and below it {name} = ...",
            )
        if not _NAME.fullmatch(name):
            raise SettingsError(
                f"{location}: {name!r} cannot be the name of a Slurm site",
                "use letters, digits, - and _",
            )
        sites[name] = _read_site(tables, name, values)
    return sites


def _read_site(tables: TomlFile, name: str, values: Mapping[str, Any]) -> SlurmSite:
    read: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, value in values.items():
        location = tables.location_of(SLURM_TABLE, name, key)
        if key not in _KEYS:
            raise SettingsError(
                f"{location}: unknown key {key!r} of a Slurm site", did_you_mean(key, list(_KEYS))
            )
        try:
            read[_FIELDS.get(key, key)] = _KEYS[key](value)
        except ValueError as error:
            message, _, hint = str(error).partition("; ")
            raise SettingsError(f"{location}: {key}: {message}", hint) from None
        origins[key] = location
    location = tables.location_of(SLURM_TABLE, name)
    if "folder" not in read:
        raise SettingsError(
            f"{location}: the Slurm site {name} has no folder",
            "give a folder that the login node and all nodes share: folder = '/shared/cloudtrain'",
        )
    path = str(Path(tables.file).resolve())
    return SlurmSite(name=name, **read, origin=location, origins=origins, file=path)


def _absolute(value: object) -> str:
    if not isinstance(value, str) or not value.startswith("/") or not value.isprintable():
        raise ValueError(f"expected an absolute path, got {value!r}; such as '/shared/cloudtrain'")
    return value


def _folder(value: object) -> Path:
    """Return a folder; `~` and `$USER` give each user of shared settings a folder of their own."""
    if isinstance(value, str):
        if "$USER" in value:
            value = value.replace("$USER", _user_name())
        if value.startswith("~/"):
            value = str(Path(value).expanduser())
    return Path(_absolute(value))


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise ValueError("$USER: this machine has no name for its user; write a name") from None


def _word(value: object) -> str:
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise ValueError(f"expected a name, got {value!r}; write it as sinfo prints it: 'gpu'")
    return value


def _gpus(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a number of GPUs, got {value!r}; such as 8, or 0 for none")
    return value


def _price(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:  # type: ignore[operator, arg-type]
        raise ValueError(f"expected a price in US dollars, got {value!r}; such as 12.5")
    return float(value)  # type: ignore[arg-type]


def _texts(value: object, example: str) -> tuple[str, ...]:
    is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if not is_list:
        raise ValueError(f"expected a list of strings, got {value!r}; such as {example}")
    return tuple(value)  # type: ignore[arg-type]


def _setup(value: object) -> tuple[str, ...]:
    lines = _texts(value, "['module load cuda']")
    if any("\0" in line for line in lines):
        raise ValueError("a line contains the character 0; remove it")
    return lines


def _options(value: object) -> tuple[str, ...]:
    options = _texts(value, "['--constraint=a100']")
    for each in options:
        parse_sbatch_option(each)
    return options


_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "folder": _folder,
    "partition": _word,
    "account": _word,
    "qos": _word,
    "gpus_per_node": _gpus,
    "time": parse_duration,
    "setup": _setup,
    "python": _absolute,
    "sbatch": _options,
    "usd_per_node_hour": _price,
}
"""The keys of a site, and what reads a value of each."""
_FIELDS = {"time": "time_seconds"}
"""Fields of `SlurmSite` whose names are not those of their keys."""
