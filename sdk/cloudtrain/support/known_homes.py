"""Which folders of local runs the user has made, or has agreed to use.

Code in such a folder is executed, and a cloned repository or a copied project can contain one. So each folder has a
random id, and the user's configuration lists the ids that count. A folder that is renamed or copied keeps its id.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.config_folder import config_folder
from cloudtrain.support.records import append_record, read_records
from cloudtrain.support.regular_files import open_regular
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

ID_FILE = ".home-id"
_OWN_NAMES = frozenset({ID_FILE, ".gitignore"})
_ID = lazy_pattern(r"[0-9a-f]{32}")
_ID_BYTES = 16
_READ_BYTES = 100


def known_homes_file() -> Path:
    """Return the file with the known ids, each with the path that its folder had; it need not exist."""
    return config_folder(os.environ) / "homes.jsonl"


def is_known_home(home: Path) -> bool:
    """Return whether the user's configuration lists a folder's id."""
    own = _read_id(home)
    return own is not None and own in {known for known, _ in _read_known()}


def is_unmarked_home(home: Path) -> bool:
    """Return whether a folder has no id, and no folder of its path has ever had one that was listed."""
    path = os.fspath(home.absolute())
    return not (home / ID_FILE).exists() and path not in {known for _, known in _read_known()}


def is_unused_home(home: Path) -> bool:
    """Return whether a folder contains nothing that could be used."""
    return not {path.name for path in home.iterdir()} - _OWN_NAMES


def remember_home(home: Path) -> None:
    """Give a folder a new id unless its id is known, and list id and path in the user's configuration.

    An id that came with a folder is never kept: whoever made it could put it into another folder, too. The new one is
    listed before the folder gets it: a folder that has one was listed, also while two processes do this.

    Raises:
        OSError: A file cannot be written.
    """
    own = _read_id(home)
    path = str(home.absolute())
    known = _read_known()
    if (own, path) in known:
        return
    is_known = own in {each for each, _ in known}
    listed = own if own is not None and is_known else secrets.token_hex(_ID_BYTES)
    append_record(known_homes_file(), {"id": listed, "path": path})
    if listed != own:
        write_atomically(home / ID_FILE, f"{listed}\n", private=True)


def _read_id(home: Path) -> str | None:
    try:
        # A link could lead to a known id.
        with open_regular(home / ID_FILE, follow_links=False) as file:
            text = file.read(_READ_BYTES).decode("ascii").strip()
    except (OSError, ValueError):
        return None
    return text if _ID.fullmatch(text) else None


def _read_known() -> list[tuple[str, str]]:
    """Return id and path of the listed folders; damaged lines are skipped."""
    found = []
    for content in read_records(known_homes_file()):
        with contextlib.suppress(KeyError):
            found.append((str(content["id"]), str(content["path"])))
    return found
