"""The folder of the user's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def config_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the user's configuration, which need not exist."""
    base = environ.get("XDG_CONFIG_HOME") or str(
        Path(environ.get("HOME", "~")).expanduser() / ".config"
    )
    return Path(base) / "cloudtrain"
