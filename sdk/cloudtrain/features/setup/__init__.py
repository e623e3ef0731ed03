"""Set-up: a new job, the account's settings, this machine, and completion in a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.support.lazy_names import import_lazily, modules_by_name

if TYPE_CHECKING:  # for type checkers and editors; the same names as in `_NAMES`
    from cloudtrain.client.account import find_settings as find_settings
    from cloudtrain.client.account import trace_settings as trace_settings
    from cloudtrain.features.setup.account_settings import configure as configure
    from cloudtrain.features.setup.account_settings import find_candidates as find_candidates
    from cloudtrain.features.setup.account_settings import list_profiles as list_profiles
    from cloudtrain.features.setup.account_settings import read_terraform as read_terraform
    from cloudtrain.features.setup.account_settings import remove_profile as remove_profile
    from cloudtrain.preflight import Candidate as Candidate
    from cloudtrain.preflight import Candidates as Candidates
    from cloudtrain.settings.profiles import ProfileChange as ProfileChange
    from cloudtrain.settings.settings import Origin as Origin

_NAMES = {
    "client.account": "find_settings trace_settings",
    "features.setup.account_settings": "configure find_candidates list_profiles read_terraform remove_profile",
    "preflight": "Candidate Candidates",
    "settings.profiles": "ProfileChange",
    "settings.settings": "Origin",
}
"""The public names by the module that defines them."""

_MODULE_OF = modules_by_name(_NAMES)

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 (a list of strings, but no literal)
__getattr__ = import_lazily(__name__, _MODULE_OF)
