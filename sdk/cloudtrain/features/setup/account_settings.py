"""Storing the account's settings: profiles, their sources, and candidates from the account."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import SettingsError
from cloudtrain.settings.settings import PROFILE_VARIABLE, Settings, load_settings, profile_file

if TYPE_CHECKING:
    from cloudtrain.preflight import Candidates
    from cloudtrain.settings.profiles import ProfileChange
    from cloudtrain.support.checks import Check


def configure(
    values: Mapping[str, str | bool | Sequence[str]],
    *,
    profile: str | None = None,
    overwrite: bool = False,
    offline: bool = False,
    on_checks: Callable[[tuple[Check, ...]], None] | None = None,
    confirm: Callable[[ProfileChange], None] | None = None,
) -> ProfileChange:
    """Store settings in the user's profile file, for every later command.

    Args:
        values: Values by setting name, as `read_terraform` returns them. An empty value removes the setting.
        profile: Name of the profile, which CLOUDTRAIN_PROFILE selects; by default the top level, which always applies.
        overwrite: Replace stored settings that have another value.
        offline: Do not check the values against the account.
        on_checks: Called with the checks of the account when none has failed; some may be unknown.
        confirm: Called with the change before it is written. It raises to abort, and replaces `overwrite`.

    Returns:
        The change. An empty change was not written.

    Raises:
        SettingsError: A value or the file is malformed, or stored values would be replaced; nothing was written.
        CloudError: A check of the account has failed; nothing was written.
    """
    from cloudtrain.client.submission import raise_failed
    from cloudtrain.settings.profiles import change_profile

    change = change_profile(profile_file(os.environ), profile, values)
    checks = () if offline else _check_account(change)
    raise_failed(checks, "nothing was stored; to store it anyway: --offline")
    if on_checks is not None:
        on_checks(checks)
    if confirm is not None:
        confirm(change)
    elif change.overwrites and not overwrite:
        names = ", ".join(each.name for each in change.overwrites)
        raise SettingsError(
            f"{change.file} has other values of {names}; nothing was stored", "pass overwrite=True"
        )
    if change.changes:
        change.write()
    return change


def default_region() -> str | None:
    """Return the region that applies without a profile of cloudtrain."""
    # The profile that the variable names may not exist yet.
    environ = {name: value for name, value in os.environ.items() if name != PROFILE_VARIABLE}
    return load_settings(environ).region


def read_terraform(source: str | Path) -> dict[str, str | tuple[str, ...]]:
    """Return the settings in Terraform's outputs.

    Args:
        source: The folder of an applied configuration, such as `infra/`, a file with the output of
            `terraform output -json`, or `-` for standard input.

    Raises:
        UserError: The source does not exist, or Terraform cannot be run.
        SettingsError: The outputs are not settings.
    """
    from cloudtrain.features.setup.terraform_outputs import read_outputs

    return read_outputs(source)


def find_candidates(region: str) -> dict[str, Candidates]:
    """Return the account's roles and buckets, suitable ones first, each unsuitable one with the reason.

    Args:
        region: The region of the jobs.

    Returns:
        Candidates for the settings `role` and `bucket`, by setting name.

    Raises:
        CloudError: There are no credentials.
    """
    from cloudtrain.preflight.account import find_buckets, find_roles, open_account

    account = open_account(Settings(region=region))
    return {"role": find_roles(account), "bucket": find_buckets(account)}


def list_profiles() -> dict[str | None, dict[str, str | tuple[str, ...]]]:
    """Return the settings of each profile in the user's profile file; those of the top level under None.

    Raises:
        SettingsError: The file is malformed.
    """
    from cloudtrain.settings.profiles import read_profiles

    return read_profiles(profile_file(os.environ))


def remove_profile(name: str) -> None:
    """Remove a named profile from the user's profile file.

    Raises:
        SettingsError: There is no profile of this name, or the file is malformed or cannot be written.
    """
    from cloudtrain.settings import profiles

    profiles.remove_profile(profile_file(os.environ), name)


def _check_account(change: ProfileChange) -> tuple[Check, ...]:
    """Check the settings that a profile would have against the account; unknown without credentials."""
    from cloudtrain.preflight.account import check_settings

    known: dict[str, Any] = {"region": default_region(), **change.settings}
    return check_settings(Settings(**known))
