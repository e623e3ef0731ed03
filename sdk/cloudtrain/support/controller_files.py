"""Names of the files in the folder of a controller, which other processes read, too."""

from __future__ import annotations

from typing import Final

LOCK_FILE: Final = "lock"
"""Locked by the process of the controller as long as it lives."""

STOP_FILE: Final = "stop"
"""The request to end what it controls."""

PAUSE_FILE: Final = "pause"
"""Why it starts nothing at present."""
