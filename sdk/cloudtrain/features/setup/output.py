"""Output of `configure`: sources of settings, stored profiles, and candidates of the account."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.console import (
    DIM,
    coloured,
    column_lines,
    command_name,
    print_checks,
    print_columns,
    print_message,
    print_row,
    print_text,
)
from cloudtrain.console.cells import cell_count
from cloudtrain.console.facts import print_sentence
from cloudtrain.console.tables import GAP, Cell, Column, print_table
from cloudtrain.console.terminal import is_terminal, terminal_width
from cloudtrain.errors import SettingsError
from cloudtrain.support.shown_places import shown_place

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
    _print_settings(rows)
    if profile is not None:
        print(f"profile: {profile}")
    if settings.missing:
        print(f"missing: {', '.join(settings.missing)}; to store them: {command_name()} configure")


def _print_settings(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print names, values and sources; a source that a terminal's line has no room for comes below its value."""
    width = terminal_width()
    lines = column_lines(rows)
    if width is None or max(map(cell_count, lines)) <= width:
        print_columns(rows)
        return
    indent = max(len(name) for name, _, _ in rows) + GAP
    for name, value, source in rows:
        print(f"{name:<{indent}}{value}")
        if source and source != _DEFAULT:
            print(coloured(f"{'':<{indent}}{source}", DIM))


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
            str(settings.get("region", "")),
            str(settings.get("bucket", "")),
            _role_cell(str(settings.get("role", ""))),
        )
        for name, settings in profiles.items()
    ]
    print_table(_PROFILE_COLUMNS, rows)


_PROFILE_COLUMNS = (
    Column("", title="", least=0, keep="pipe"),
    Column("profile", least=12),
    Column("region", keep="pipe"),
    Column("bucket", least=16, keep="pipe"),
    Column("role", least=12, keep="pipe"),
)


def _role_cell(arn: str) -> Cell:
    """Return a role as its ARN in a pipe, and as its name on a terminal."""
    return Cell(arn, shown=arn.rpartition(":role/")[2])


def print_unknown_checks(checks: Sequence[Check]) -> None:
    """Print which checks of the account gave no result."""
    for check in checks:
        if check.result == "unknown":
            print_sentence(f"could not check {check.name}: {check.detail}", print_message)


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
    print_columns(rows, write=print_row)


def print_stored(change: ProfileChange) -> None:
    """Print what was stored, which values hide it here, and the next command."""
    if change.changes:
        print(f"stored in {_where(change)}")
    elif change.settings:
        print(f"{_where(change)} has these values already")
    else:
        print("nothing was stored")
    missing: list[str] = []
    with contextlib.suppress(SettingsError):  # the next command reports a malformed cloudtrain.toml
        missing = _print_hidden(change)
    if change.profile is not None:
        print(
            f"to use it: export CLOUDTRAIN_PROFILE={change.profile}, or --profile {change.profile}"
        )
    if not missing:
        print(f"next: {command_name()} check JOB, then {command_name()} submit JOB")
        return
    print("  without them: validate, plan, and runs with --local or --sandbox")
    print("  what only SageMaker needs: check, and submit without these options")
    print(f"next: {command_name()} plan JOB --local")


def _print_hidden(change: ProfileChange) -> list[str]:
    """Print values that take precedence over the stored ones here; print and return the settings that are missing."""
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
    return missing


def _where(change: ProfileChange) -> str:
    return _file(change.file) + (f" [profiles.{change.profile}]" if change.profile else "")


def _file(path: Path) -> str:
    """Return a path with `~` for the home directory."""
    home = Path(os.environ.get("HOME", "~")).expanduser()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


_HELP = {
    "role": (
        "an ARN such as arn:aws:iam::123456789012:role/NAME, which SageMaker may use",
        "from the IAM console, `aws iam list-roles`, or the output `role` of infra/",
    ),
    "bucket": (
        "the name of an S3 bucket in this region, for code, checkpoints and models",
        "from the S3 console, `aws s3 ls`, or the output `bucket` of infra/",
    ),
}
"""What a setting looks like and where it comes from, for those who have none at hand."""


def print_help_for(name: str) -> None:
    """Print what a value of a setting looks like and where it comes from."""
    for line in _HELP[name]:
        print_message(f"  {line}")


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
        print_columns(rows, write=print_row)
    if len(unsuitable) > _MAX_UNSUITABLE:
        print_message(f"  and {len(unsuitable) - _MAX_UNSUITABLE} more that are unsuitable")
    if found.unanswered:
        fix = f"; {found.fix}" if found.fix else ""
        print_sentence(f"{what}s: {found.unanswered}{fix}", print_message)
    elif not fitting:
        print_message(
            f"the account has no suitable {what}; to create one: terraform -chdir=infra apply"
        )


def print_machine_checks(checks: Sequence[Check], *, is_ready: bool) -> None:
    """Print the checks of this machine, each followed by its fix, and whether local runs are possible."""
    rows = []
    for each, following in itertools.zip_longest(checks, checks[1:]):
        # Of several checks with the same fix, the last one names it.
        is_repeated = following is not None and following.fix == each.fix
        notes = [f"fix: {each.fix}"] if each.fix and not is_repeated else []
        rows.append((each.result, each.name, each.detail, notes))
    print_checks(rows, {"pass": "32", "note": "33", "fail": "1;31"}, wraps=True)
    print(
        "local runs are possible"
        if is_ready
        else "local runs are not possible: see the failed checks"
    )


def print_new_job(folder: Path, files: Sequence[str], *, needs_install: bool) -> None:
    """Print the files of a new job and the next three commands. In a pipe each file has a line.

    Args:
        folder: The folder as it was typed.
        files: Names of the files.
        needs_install: Whether this machine lacks a package of the job.
    """
    if is_terminal():
        place = "" if folder == Path() else f" in {shown_place(str(folder))}/"
        print_sentence(f"created{place}: {', '.join(files)}")
        print_message("")
    else:
        for name in files:
            print_text(str(folder / name))
    job = shlex.quote(shown_place(str(folder / "job.yaml")))
    install = " --install" if needs_install else ""
    called = command_name()
    steps = (
        ("check the file", f"{called} validate {job}"),
        ("show the plan", f"{called} plan {job} --local"),
        ("run it here", f"{called} submit {job} --local{install} --follow"),
    )
    width = max(len(words) for words, _ in steps)
    for words, command in steps:
        print_message(f"{words:<{width}}  {command}")
