"""Output of `configure`: sources of settings, stored profiles, and candidates of the account."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.console import (
    command_name,
    print_checks,
    print_columns,
    print_message,
)
from cloudtrain.errors import SettingsError

if TYPE_CHECKING:
    from cloudtrain.preflight import Candidates
    from cloudtrain.settings.profiles import ProfileChange
    from cloudtrain.settings.settings import Origin, Settings
    from cloudtrain.support.checks import Check

_MAX_UNSUITABLE = 10
_DEFAULT = "default"


def trace_to_json(
    origins: Sequence[Origin], settings: Settings, profile: str | None
) -> dict[str, Any]:
    """Return each setting with its effective value, the values that this one hides, and the missing settings."""
    from cloudtrain.settings.settings import SETTINGS

    def one(name: str) -> dict[str, Any]:
        fields = ("value", "source", "line", "profile")
        places = [
            {field: getattr(each, field) for field in fields}
            for each in origins
            if each.name == name
        ]
        default = getattr(settings, name) or None
        unset = {
            "value": default,
            "source": _DEFAULT if default else None,
            "line": None,
            "profile": None,
        }
        return {"name": name, **(places[0] if places else unset), "hides": places[1:]}

    return {
        "profile": profile,
        "settings": list(map(one, SETTINGS)),
        "missing": list(settings.missing),
    }


def print_trace(origins: Sequence[Origin], settings: Settings, profile: str | None) -> None:
    """Print each setting with its source, and below it the values that it hides."""
    from cloudtrain.settings.settings import SETTINGS

    rows: list[tuple[str, str, str]] = []
    for name in SETTINGS:
        places = [each for each in origins if each.name == name]
        default = getattr(settings, name)
        if not places:
            rows.append((name, _shown(default), _DEFAULT if default else ""))
        for index, each in enumerate(places):
            value = _shown(each.value)
            rows.append(
                (name, value, _place(each)) if index == 0 else ("", f"hides {value}", _place(each))
            )
    print_columns(rows)
    if profile is not None:
        print(f"profile: {profile}")
    if settings.missing:
        print(f"missing: {', '.join(settings.missing)}; to store them: {command_name()} configure")


def _place(origin: Origin) -> str:
    if origin.source == "flag":
        return f"--{origin.name}"
    if origin.line is None:
        return origin.source
    return f"{_file(Path(origin.source))}:{origin.line}" + (
        f" [profiles.{origin.profile}]" if origin.profile else ""
    )


def _shown(value: Any) -> str:
    if not value:
        return "none"
    return value if isinstance(value, str) else ", ".join(value)


def print_profiles(profiles: Mapping[str | None, Mapping[str, Any]], chosen: str | None) -> None:
    """Print the stored profiles; an asterisk marks the selected one."""
    if not profiles:
        print(f"no settings are stored; to store them: {command_name()} configure")
        return
    rows = [
        (
            "*" if name == chosen else "",
            name or "(without a name)",
            *(str(settings.get(each, "")) for each in ("region", "bucket", "role")),
        )
        for name, settings in profiles.items()
    ]
    print_columns([("", "profile", "region", "bucket", "role"), *rows])


def print_unknown_checks(checks: Sequence[Check]) -> None:
    """Print which checks of the account gave no result."""
    for check in checks:
        if check.result == "unknown":
            print_message(f"could not check {check.name}: {check.detail}")


def print_changes(change: ProfileChange) -> None:
    """Print the changes of a profile."""
    print_message(_where(change))
    rows = []
    for each in change.changes:
        if each.before is None:
            mark = "+"
            value = _shown(each.after)
        elif each.after is None:
            mark = "-"
            value = _shown(each.before)
        else:
            mark = "~"
            value = f"{_shown(each.before)} -> {_shown(each.after)}"
        rows.append((f"  {mark} {each.name}", value))
    print_columns(rows, write=print_message)


def print_stored(change: ProfileChange) -> None:
    """Print what was stored, which values hide it here, and the next command."""
    print(
        f"stored in {_where(change)}"
        if change.changes
        else f"{_where(change)} has these values already"
    )
    with contextlib.suppress(SettingsError):  # the next command reports a malformed cloudtrain.toml
        _print_hidden(change)
    if change.profile is not None:
        print(
            f"to use it: export CLOUDTRAIN_PROFILE={change.profile}, or --profile {change.profile}"
        )
    print(f"next: {command_name()} check JOB, then {command_name()} submit JOB")


def _print_hidden(change: ProfileChange) -> None:
    """Print values that take precedence over the stored ones here, and settings that are still missing."""
    from cloudtrain.settings.settings import PROFILE_VARIABLE, REQUIRED_SETTINGS, find_origins

    environ = {name: value for name, value in os.environ.items() if name != PROFILE_VARIABLE}
    elsewhere = [
        each
        for each in find_origins(environ, job_directory=Path.cwd())
        if each.source != str(change.file)
    ]
    for each in elsewhere:
        if each.name in change.settings and each.value != change.settings[each.name]:
            print(f"  {_place(each)} hides {each.name} here: {_shown(each.value)}")
    known = {*change.settings, *(each.name for each in elsewhere)}
    missing = [name for name in REQUIRED_SETTINGS if name not in known]
    if missing:
        print(f"  still missing: {', '.join(missing)}")


def _where(change: ProfileChange) -> str:
    return _file(change.file) + (f" [profiles.{change.profile}]" if change.profile else "")


def _file(path: Path) -> str:
    """Return a path with `~` for the home directory."""
    home = Path(os.environ.get("HOME", "~")).expanduser()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def print_candidates(what: str, found: Candidates) -> None:
    """Print suitable candidates with numbers, unsuitable ones with reasons, and what could not be listed."""
    fitting = found.fitting
    unsuitable = [each for each in found.found if not each.fits]
    shown = [*fitting, *unsuitable[:_MAX_UNSUITABLE]]
    width = max((len(each.value) for each in shown), default=0)
    rows = [
        (f"  {index}" if index <= len(fitting) else "  -", f"{each.value:<{width}}  {each.detail}")
        for index, each in enumerate(shown, start=1)
    ]
    if rows:
        print_message(f"{what}s of the account ({len(fitting)} of {len(found.found)} suitable):")
        print_columns(rows, write=print_message)
    if len(unsuitable) > _MAX_UNSUITABLE:
        print_message(f"  and {len(unsuitable) - _MAX_UNSUITABLE} more that are unsuitable")
    if found.unanswered:
        print_message(
            f"{what}s: {found.unanswered}; {found.fix}"
            if found.fix
            else f"{what}s: {found.unanswered}"
        )
    elif not fitting:
        print_message(
            f"the account has no suitable {what}; to create one: terraform -chdir=infra apply"
        )


def print_machine_checks(checks: Sequence[Check], *, is_ready: bool) -> None:
    """Print the checks of this machine, each followed by its fix, and whether local runs are possible."""
    rows = [
        (each.result, each.name, each.detail, [f"fix: {each.fix}"] if each.fix else [])
        for each in checks
    ]
    print_checks(rows, {"pass": "32", "note": "33", "fail": "1;31"})
    print(
        "local runs are possible"
        if is_ready
        else "local runs are not possible: see the failed checks"
    )
