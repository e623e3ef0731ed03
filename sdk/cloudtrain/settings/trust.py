"""The user's agreement to account settings and Slurm sites in a `cloudtrain.toml` beside a job.

A cloned repository may contain such a file.

The agreement is stored in the user's configuration folder: the file's absolute path, the setting's name and the digest
of its value. A changed value needs a new agreement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from cloudtrain.errors import SettingsError
from cloudtrain.settings.settings import Settings, profile_file
from cloudtrain.settings.slurm_sites import SlurmSite
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain_runtime.contract.strict_json import dump_json, load_json


def trust_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the file with the user's agreements, which need not exist."""
    return profile_file(environ).with_name("trusted.json")


def has_agreed(environ: Mapping[str, str], settings: Settings) -> bool:
    """Return whether the user has agreed to every value that `settings` take from a file beside the job."""
    known = _read(trust_file(environ))
    untrusted = settings.untrusted
    return all(known.get(each.file, {}).get(each.name) == _digest(each.text) for each in untrusted)


def has_agreed_to_site(environ: Mapping[str, str], site: SlurmSite) -> bool:
    """Return whether the user has agreed to a Slurm site from a file beside the job."""
    agreed = _read(trust_file(environ)).get(site.file, {})
    return agreed.get(site.setting) == _digest(site.text)


def store_agreement(environ: Mapping[str, str], file: str, values: Mapping[str, str]) -> Path:
    """Store the user's agreement to these values, by setting, of one settings file; return where it is stored.

    Raises:
        SettingsError: the answer cannot be stored.
    """
    path = trust_file(environ)
    known = _read(path)
    known[file] = {
        **known.get(file, {}),
        **{name: _digest(value) for name, value in values.items()},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, dump_json(known, indent=1, sort_keys=True) + "\n", private=True)
    except OSError as error:
        raise SettingsError(
            f"{path}: the answer cannot be stored: {error.strerror}",
            "set XDG_CONFIG_HOME to a folder that you can write, or give the values by flags or CLOUDTRAIN_* variables",
        ) from None
    return path


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def _read(path: Path) -> dict[str, dict[str, str]]:
    """Return the stored agreements; none if the file is missing or damaged, so that the user is asked again."""
    try:
        content = load_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {file: names for file, names in content.items() if isinstance(names, dict)}
