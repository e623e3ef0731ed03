"""The user's profile file: validation of values, and edits that keep the rest of the file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cloudtrain.errors import SettingsError, UserError, did_you_mean
from cloudtrain.secrets.values import is_secret_name
from cloudtrain.settings.settings import (
    PROFILES,
    SETTINGS,
    expected_kind,
    parse_value,
    profiles_of,
    read_settings_file,
    top_level_of,
)
from cloudtrain.settings.toml_file import TomlFile
from cloudtrain.settings.values import SIGN_IN, Value, find_unpaired, find_value_error
from cloudtrain.support.atomic_write import write_atomically

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class SettingChange:
    """A change of one setting in a profile. A value is None where the profile does not have the setting."""

    name: str
    before: Value | None
    after: Value | None


@dataclass(frozen=True)
class ProfileChange:
    """The changes of a profile, before they are stored.

    Attributes:
        file: The profile file.
        profile: Name of the profile, or None for the top level.
        settings: The settings after the change; a named profile includes those of the top level.
        changes: The changes, in the order of the settings; empty when the file has all values already.
    """

    file: Path
    profile: str | None
    settings: Mapping[str, Value]
    changes: tuple[SettingChange, ...]
    _before: TomlFile
    _after: TomlFile

    @property
    def overwrites(self) -> tuple[SettingChange, ...]:
        """The changes that replace or remove a stored value."""
        return tuple(change for change in self.changes if change.before is not None)

    def write(self) -> None:
        """Write the file atomically, readable by its owner only.

        Raises:
            SettingsError: the file cannot be written. It is unchanged.
            UserError: the file has changed since it was read. It is unchanged.
        """
        _write(self.file, self._before, self._after)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `configure --json` prints."""
        return {
            "file": str(self.file),
            "profile": self.profile,
            "settings": dict(self.settings),
            "changes": [asdict(change) for change in self.changes],
        }


def change_profile(
    file: Path, profile: str | None, values: Mapping[str, str | bool | Sequence[str]]
) -> ProfileChange:
    """Return the change of a profile without writing it.

    Args:
        file: The profile file, which need not exist.
        profile: Name of the profile, or None for the top level.
        values: Settings by name; a list may be one text with commas, a switch a bool. An empty value removes it.

    Raises:
        SettingsError: the file or a value is malformed. The error lists every invalid value.
    """
    if profile is not None and not _NAME.fullmatch(profile):
        raise SettingsError(
            f"{profile!r} cannot be the name of a profile", "use letters, digits, - and _"
        )
    read = {name: _read(name, value) for name, value in values.items()}
    tables = _read_tables(file)
    above = top_level_of(tables)
    if profile is None:
        table: tuple[str, ...] = ()
        own = above
        inherited: dict[str, Any] = {}
    else:
        table = (PROFILES, profile)
        own = profiles_of(tables).get(profile, {})
        inherited = above
    wanted: dict[str, Value | None] = {}
    for name in SETTINGS:
        if name not in read:
            continue
        # An empty value removes the setting, unless it must hide a value of the top level.
        is_kept = read[name] or inherited.get(name)
        wanted[name] = read[name] if is_kept else None
    changes = tuple(
        SettingChange(name, _frozen(own.get(name)), value)
        for name, value in wanted.items()
        if _frozen(own.get(name)) != value
    )
    merged = {**inherited, **own, **wanted}
    settings = {name: _frozen(merged[name]) for name in SETTINGS if merged.get(name)}
    _refuse_wrong(read, settings)
    after = tables.with_values(table, {change.name: change.after for change in changes})
    return ProfileChange(file, profile, settings, changes, tables, after)


def remove_profile(file: Path, profile: str) -> None:
    """Remove a named profile from the profile file.

    Raises:
        SettingsError: there is no such profile, or the file is malformed or cannot be written.
    """
    tables = _read_tables(file)
    names = sorted(profiles_of(tables))
    if profile not in names:
        hint = "there are no named profiles"
        if names:
            hint = did_you_mean(profile, names)
        raise SettingsError(f"{file}: there is no profile {profile!r}", hint)
    _write(file, tables, tables.without((PROFILES, profile)))


def read_profiles(file: Path) -> dict[str | None, dict[str, Value]]:
    """Return the settings of each profile in the profile file, those of the top level under None.

    Raises:
        SettingsError: the file is malformed.
    """
    tables = _read_tables(file)
    above = top_level_of(tables)
    found: list[tuple[str | None, dict[str, Any]]] = []
    if above:
        found.append((None, above))
    found += profiles_of(tables).items()
    return {
        profile: {name: _frozen(value) for name, value in own.items()} for profile, own in found
    }


def parse_assignment(text: str) -> tuple[str, str]:
    """Return name and value of a `NAME=VALUE` text, as the `--set` option takes it.

    Raises:
        SettingsError: the text has another form, or there is no such setting. The message does not repeat the text,
            which may be a secret.
    """
    name, equals, value = text.partition("=")
    name = name.strip().lower().replace("-", "_")
    if not equals:
        raise SettingsError("--set takes NAME=VALUE", "for example --set bucket=my-bucket")
    _refuse_unknown(name)
    return name, value.strip()


def _read_tables(file: Path) -> TomlFile:
    if not file.is_file():
        return TomlFile("", str(file))
    return read_settings_file(file)


def _read(name: str, value: str | bool | Sequence[str]) -> Value:
    _refuse_unknown(name)
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, str):
        return parse_value(name, value)
    if expected := expected_kind(name, value):
        raise SettingsError(f"{name} must be {expected}, got {type(value).__name__}", "correct it")
    return tuple(value)


def _refuse_unknown(name: str) -> None:
    if name in SETTINGS:
        return
    if is_secret_name(name):
        raise SettingsError(f"{name!r} is no setting, and sounds like a secret", SIGN_IN)
    raise SettingsError(f"there is no setting {name!r}", did_you_mean(name, SETTINGS))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _refuse_wrong(given: Mapping[str, Value], settings: Mapping[str, Value]) -> None:
    """Refuse every invalid value and every invalid combination, in one error."""
    region = str(settings.get("region") or "") or None
    problems: list[tuple[str, str, str]] = []
    for name in SETTINGS:
        # A new region can make stored values invalid that depend on it.
        is_affected = name in given or ("region" in given and name in ("role", "kms_key"))
        value = settings.get(name)
        if is_affected and value and (found := find_value_error(name, value, region)):
            problems.append((name, *found))
    if unpaired := find_unpaired(settings.get("subnets"), settings.get("security_groups")):
        problems.append(unpaired)
    if problems:
        count = "a setting" if len(problems) == 1 else f"{len(problems)} settings"
        lines = "\n".join(f"  {name}: {message}; {hint}" for name, message, hint in problems)
        raise SettingsError(f"{count} cannot be stored:\n{lines}")


def _write(file: Path, before: TomlFile, after: TomlFile) -> None:
    # Replace the target of a link, not the link.
    target = file.resolve()
    try:
        current = target.read_bytes() if target.exists() else b""
        if current != before.text.encode():
            raise UserError(
                f"{file} has changed since it was read; nothing was written",
                "run the command again",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, after.text, private=True)
    except OSError as error:
        raise SettingsError(
            f"{file}: cannot be written: {error}",
            "set XDG_CONFIG_HOME to a folder that you can write",
        ) from None
