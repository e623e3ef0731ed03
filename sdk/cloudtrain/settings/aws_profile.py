"""The profile of AWS's own configuration files: its values, and where each is written.

The files are read without botocore, whose import takes longer than a plan.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.support.atomic_write import read_bounded
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

if TYPE_CHECKING:
    from configparser import RawConfigParser

_MAX_BYTES = 1_000_000
_SECTION = lazy_pattern(r"\[(?P<name>.+)\]")
_KEY = lazy_pattern(r"(?P<key>[^\s=:#;\[][^=:]*?)\s*[=:]")
_DEFAULT = "default"


@dataclass(frozen=True)
class AwsValue:
    """A value of a profile.

    Attributes:
        text: The value.
        file: The file that has it.
        line: Its 1-based line there, or None.
    """

    text: str
    file: Path
    line: int | None

    @property
    def place(self) -> str:
        """File and line."""
        if self.line is None:
            return str(self.file)
        return f"{self.file}:{self.line}"


Profiles = Mapping[str, Mapping[str, AwsValue]]


def profile_name(environ: Mapping[str, str]) -> str:
    """Return the name of the profile that AWS's SDK uses."""
    # In the order of botocore.
    return environ.get("AWS_DEFAULT_PROFILE") or environ.get("AWS_PROFILE") or _DEFAULT


def aws_files(environ: Mapping[str, str]) -> tuple[Path, Path]:
    """Return the paths of AWS's configuration file and of its credentials file; they need not exist."""
    home = Path(environ.get("HOME") or "~").expanduser()
    return (
        Path(environ.get("AWS_CONFIG_FILE") or home / ".aws" / "config").expanduser(),
        Path(
            environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials"
        ).expanduser(),
    )


def read_profiles(environ: Mapping[str, str]) -> Profiles:
    """Return the values of all profiles. Files that cannot be read have none: the AWS SDK reports their mistakes."""
    config, credentials = aws_files(environ)
    profiles: dict[str, dict[str, AwsValue]] = {}
    # A value of the credentials file has precedence, as in botocore.
    for path, is_config in ((config, True), (credentials, False)):
        for section, values in _read_sections(path):
            name = _profile_of(section) if is_config else section
            if name is not None:
                profiles.setdefault(name, {}).update(values)
    return profiles


def find_region(environ: Mapping[str, str]) -> AwsValue | None:
    """Return the region of the profile that AWS's SDK uses, or None."""
    return read_profiles(environ).get(profile_name(environ), {}).get("region")


def find_profile_with(profiles: Profiles, name: str, keys: tuple[str, ...]) -> str:
    """Return the profile that has one of these keys: the named one, or the source of its role; else the named one."""
    seen: list[str] = []
    current: str | None = name
    while current is not None and current not in seen:
        values = profiles.get(current, {})
        if any(key in values for key in keys):
            return current
        seen.append(current)
        source = values.get("source_profile")
        current = None if source is None else source.text
    return name


def find_mistake(path: Path) -> str:
    """Return the line of a file that AWS's SDK cannot parse, as `PATH:LINE: what`; the path alone if it is not found."""
    try:
        text = _read_text(path)
        line, what = _find_wrong_line(text)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        what = "not UTF-8 text"
    except OSError as error:
        return f"{path}: {error.strerror}"
    if line is None:
        return str(path)
    return f"{path}:{line}: {what}"


def _find_wrong_line(text: str) -> tuple[int | None, str]:
    import configparser

    try:
        parsed = _parse(text)
    except configparser.MissingSectionHeaderError as error:
        return error.lineno, "a value before the first [section]"
    except configparser.DuplicateSectionError as error:
        return error.lineno, f"[{error.section}] is there twice"
    except configparser.DuplicateOptionError as error:
        return error.lineno, f"{error.option} is there twice in [{error.section}]"
    except configparser.ParsingError as error:
        return error.errors[0][0], "neither [section] nor key = value"
    for section in parsed.sections():
        for key, value in parsed.items(section):
            # An indented block is a table of its own.
            block = value.splitlines() if value.startswith("\n") else []
            if any(line.strip() and "=" not in line for line in block):
                number = _lines(text).get((section, key))
                return number, f"the block below {key} has a line without key = value"
    return None, ""


def _read_sections(path: Path) -> Iterator[tuple[str, dict[str, AwsValue]]]:
    if not path.is_file():
        return
    # Most commands need no profile, and this import takes milliseconds.
    import configparser

    try:
        text = _read_text(path)
        parsed = _parse(text)
    except (OSError, UnicodeDecodeError, configparser.Error):
        return
    lines = _lines(text)
    for section in parsed.sections():
        values = {
            key: AwsValue(value, path, lines.get((section, key)))
            for key, value in parsed.items(section)
        }
        yield section, values


def _read_text(path: Path) -> str:
    return read_bounded(path, _MAX_BYTES).decode("utf-8")


def _parse(text: str) -> RawConfigParser:
    """Parse a file as botocore does."""
    from configparser import RawConfigParser

    parser = RawConfigParser()
    parser.read_string(text)
    return parser


def _lines(text: str) -> dict[tuple[str, str], int]:
    """Return the 1-based line of each key, by section and key."""
    found: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _SECTION.match(line):
            section = header["name"]
        elif key := _KEY.match(line):
            found.setdefault((section, key["key"].lower()), number)
    return found


def _profile_of(section: str) -> str | None:
    """Return the profile that a section of the configuration file describes, or None."""
    if section == _DEFAULT:
        return _DEFAULT
    try:
        words = shlex.split(section)
    except ValueError:
        return None
    if len(words) != len(("profile", "NAME")) or words[0] != "profile":
        return None
    return words[1]
